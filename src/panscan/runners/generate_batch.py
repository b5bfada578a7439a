"""Runner ``generate_batch``: Transformers' continuous batching, for text-only checkpoints and prompts without images.

With images it would answer without looking at them and without an error, so images are refused here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from panscan.core import Request, Result, SettingError, Stamps, UnsupportedError, now
from panscan.model.load import Loaded
from panscan.model.machine import synchronize
from panscan.runners.generate import GenerateRunner, finished, generation_config
from panscan.runners.inputs import Prepared
from panscan.runners.settings import Settings

__all__ = ["GenerateBatchRunner"]


class GenerateBatchRunner(GenerateRunner):
    """Gemma 3 through ``model.generate_batch()``. Only a request's start and end can be seen from outside."""

    def __init__(self, loaded: Loaded, settings: Settings) -> None:
        super().__init__(loaded, settings)
        if loaded.reader.reads_images:
            raise UnsupportedError(
                "runner generate_batch would answer without looking at the image: text-only checkpoints only"
            )

    @torch.no_grad()
    def run(self, batch: Sequence[Request]) -> list[Result]:
        """One ``generate_batch()`` call over all requests of the batch."""
        if any(request.images for request in batch):
            raise SettingError("runner generate_batch takes prompts without images")
        stamps = Stamps(accepted=now(), loaded=now())
        prompts = [self.loaded.reader.prompts.write(request, []) for request in batch]
        stamps.preprocessed = now()
        outputs = self.loaded.model.generate_batch(
            inputs=[prompt.ids for prompt in prompts],
            generation_config=generation_config(batch[0].sampling, self.loaded, "dynamic"),
            progress_bar=False,
        )
        synchronize(self.loaded.device)
        stamps.end = now()
        # Answers come in the order in which they finished; their ids end in their place in the batch.
        ordered = sorted(outputs.values(), key=lambda output: int(output.request_id.rsplit("_", 1)[-1]))
        return [
            finished(Prepared(request, [], prompt, None), output.generated_tokens, stamps, [], self.loaded)
            for request, prompt, output in zip(batch, prompts, ordered, strict=True)
        ]
