"""Runner ``generate_batch``: Transformers' continuous batching, for text-only checkpoints.

``generate_batch()`` silently ignores images, so they are refused here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec import structs
from transformers import ContinuousBatchingConfig

from panscan.core import Request, Result, SettingError, Stamps, UnsupportedError, from_perf_counter, now
from panscan.model.checkpoint import Loaded
from panscan.model.inputs import Prepared
from panscan.model.observation import ForcedTokens, Observation
from panscan.runners.generate import GenerateRunner, finished, generation_config, one_sampling
from panscan.settings import NO_IMAGES, Settings

_BLOCK = 256  # tokens, Transformers' default


class GenerateBatchRunner(GenerateRunner):
    """Gemma 3 through ``model.generate_batch()``. Token times are those that Transformers records."""

    def __init__(self, loaded: Loaded, settings: Settings) -> None:
        super().__init__(loaded, settings)
        if loaded.reader.reads_images:
            raise UnsupportedError(
                "runner generate_batch: only text-only checkpoints are supported, because it ignores images"
            )

    @torch.no_grad()
    def run(self, batch: Sequence[Request]) -> list[Result]:
        """Answer all requests in one ``generate_batch()`` call, with a cache of just the necessary size."""
        if any(request.images for request in batch):
            raise SettingError(NO_IMAGES)
        sampling = one_sampling(batch, "generate_batch", "stop", "stop_token_ids")
        stamps = Stamps(accepted=now())
        prompts = [self.loaded.reader.prompts.write(request, []) for request in batch]
        stamps.preprocessed = now()
        # By default, Transformers would allocate all free memory in each call.
        lengths = [len(prompt.ids) + sampling.max_new_tokens for prompt in prompts]
        blocks = sum(-(-length // _BLOCK) + 1 for length in lengths)
        outputs = self.loaded.model.generate_batch(
            inputs=[prompt.ids for prompt in prompts],
            generation_config=generation_config(sampling, self.loaded, "dynamic"),
            continuous_batching_config=ContinuousBatchingConfig(
                block_size=_BLOCK,
                num_blocks=2 * blocks,  # local and global layers have separate blocks
                max_batch_tokens=max(_BLOCK, sum(lengths)),
                seed=sampling.seed,
            ),
            record_timestamps=True,
            progress_bar=False,
        )
        stamps.end = now()
        # Outputs are in the order of their completion; their ids end with their index in the batch.
        ordered = sorted(outputs.values(), key=lambda output: int(output.request_id.rsplit("_", 1)[-1]))
        return [
            finished(
                Prepared(request, [], prompt, None),
                output.generated_tokens,
                structs.replace(stamps, scheduled=from_perf_counter(output.lifespan[0])),
                [from_perf_counter(time) for time in output.timestamps],
                self.loaded,
            )
            for request, prompt, output in zip(batch, prompts, ordered, strict=True)
        ]

    def observe(self, batch: Sequence[Request], forced: Sequence[ForcedTokens]) -> list[Observation]:
        """Raise an error, because ``generate_batch()`` does not expose its logits.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError("generate_batch() does not expose its logits")
