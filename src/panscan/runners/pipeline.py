"""Runner ``pipeline``: ``pipeline("image-text-to-text")`` as in its documentation, for comparison.

The pipeline preprocesses with the checkpoint's processor and answers one chat per call. If torchvision is installed,
the processor uses it to resize images, so pixels differ by a level or two from those of runner ``generate`` on the CPU
(Pillow). Token times are measured; the time of the vision tower is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteriaList, pipeline

from panscan.core import Request, Result, SettingError, Stamps, UnsupportedError, now
from panscan.model.checkpoint import Loaded
from panscan.model.inputs import Prepared, plan_images, read_images
from panscan.model.observation import ForcedTokens, Observation
from panscan.model.prompt import conversation
from panscan.runners.base import check_interpreted, processor_rounding
from panscan.runners.clock import DeviceClock, TokenClock
from panscan.runners.generate import GenerateRunner, finished, generation_config, one_sampling
from panscan.runners.observe import ObservationRecorder, observation_config
from panscan.settings import Settings


class PipelineRunner(GenerateRunner):
    """Gemma 3 through Transformers' ``image-text-to-text`` pipeline: one chat per call."""

    def __init__(self, loaded: Loaded, settings: Settings) -> None:
        super().__init__(loaded, settings)
        if not loaded.reader.reads_images:
            raise UnsupportedError("runner pipeline: image-text-to-text needs a checkpoint that reads images")
        # Without a device, the pipeline would move the model to the first GPU.
        placed = getattr(loaded.model, "hf_device_map", None)
        chosen = {} if placed else {"device": loaded.device}
        self._pipe = pipeline("image-text-to-text", model=loaded.model, processor=loaded.reader.processor, **chosen)

    @torch.no_grad()
    def run(self, batch: Sequence[Request]) -> list[Result]:
        """Answer each request in a separate call."""
        return [self._one(request) for request in batch]

    def pixels(self, settings: Settings) -> str:
        """Return the rounding of the processor: ``device`` if it uses torchvision, else ``cpu``."""
        return processor_rounding(self.loaded.reader)

    @torch.no_grad()
    def observe(self, batch: Sequence[Request], forced: Sequence[ForcedTokens]) -> list[Observation]:
        """Return next-token distributions along forced tokens, each request in a separate call."""
        observations = []
        for request, forced_tokens in zip(batch, forced, strict=True):
            with ObservationRecorder(self.loaded, [forced_tokens], [0]) as recorder:
                self._call(read_images(request), observation_config(self.loaded, self.settings), recorder.arguments())
                observations += recorder.observations()
        return observations

    def _call(self, read: Request, config: GenerationConfig, arguments: dict[str, Any]) -> dict[str, Any]:
        """Call the pipeline and return its answer.

        Raises:
            SettingError: the prompt is raw, or contains a special token that the pipeline would interpret.
        """
        check_interpreted(read, self.loaded.reader, "pipeline", "the pipeline")
        with self._rendered(read):
            [answer] = self._pipe(
                _chat(read),
                return_tensors=True,
                generate_kwargs={"generation_config": config, **arguments},
                processor_kwargs=read.pan_and_scan.processor_kwargs(),
            )
        output: dict[str, Any] = answer
        return output

    @contextmanager
    def _rendered(self, request: Request) -> Iterator[None]:
        """Let the pipeline write the text that panscan renders, because Transformers renders without limits."""
        processor, text = self.loaded.reader.processor, self.loaded.reader.prompts.render(request)
        literal = text.encode("unicode_escape").decode("ascii").replace("'", "\\'")
        template, processor.chat_template = processor.chat_template, f"{{{{ '{literal}' }}}}"
        try:
            yield
        finally:
            processor.chat_template = template

    def _one(self, request: Request) -> Result:
        sampling = one_sampling([request], "pipeline", "stop", "stop_token_ids")
        stamps = Stamps(accepted=now())
        read = read_images(request)
        stamps.loaded = now()
        clock = DeviceClock(self.loaded)
        tokens = TokenClock(clock)
        if sampling.seed is not None:
            torch.manual_seed(sampling.seed)
        config = generation_config(sampling, self.loaded, self.settings.cache, self.settings.prefill_chunk_size)
        answer = self._call(read, config, {"stopping_criteria": StoppingCriteriaList([tokens])})
        times = clock.read()
        stamps.end = now()
        # Only for the counts, so not timed: the pipeline has planned and written its own.
        plans = plan_images(read, [image.size for image in read.images])
        prompt = self.loaded.reader.prompts.write(read, [plan.crops for plan in plans])
        # Depending on its version, the pipeline returns the answer's ids with or without the prompt's.
        row = answer["generated_token_ids"].tolist()[-len(tokens.marks) :]
        steps = [times[mark] for mark in tokens.marks]
        return finished(Prepared(request, plans, prompt, None), row, stamps, steps, self.loaded)


def _chat(read: Request) -> list[dict[str, Any]]:
    """Return the conversation with its images inserted.

    Raises:
        SettingError: the numbers of image parts and images differ.
    """
    turns = conversation(read)
    parts = [part for turn in turns for part in turn["content"] if part["type"] == "image"]
    if len(parts) != len(read.images):
        raise SettingError(
            f"the prompt has {len(parts)} image placeholder(s), but {len(read.images)} image(s) were given"
        )
    for part, image in zip(parts, read.images, strict=True):
        part["image"] = image
    return turns
