"""What no program gets below at W1 on a machine of two ceilings: an extension of :mod:`panscan.analysis.floors` to
runners that mix prefill and decode. Pure: no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from panscan.model.shapes import Shape

__all__ = ["Floors", "ratios"]


@dataclass(frozen=True, slots=True)
class Floors:
    """Floors of requests that are all of one size.

    Args:
        shape: of the model.
        flops_per_s: of a large product, measured.
        bytes_per_s: of a large copy, read and written counted, measured.
        width: bytes of a weight, a key and a value.
        views: of a request.
        prompt_tokens: of a request.
        output_tokens: of a request.
    """

    shape: Shape
    flops_per_s: float
    bytes_per_s: float
    width: int
    views: int
    prompt_tokens: int
    output_tokens: int

    @property
    def vision_ms(self) -> float:
        """The tower and projector over one view, in a batch of so many that reading the weights costs nothing."""
        return 1e3 * self.shape.vision_flops(1) / self.flops_per_s

    @property
    def prefill_ms(self) -> float:
        """The decoder over one prompt."""
        return 1e3 * self.shape.prefill_flops(self.prompt_tokens) / self.flops_per_s

    @property
    def ttft_ms(self) -> float:
        """All views and the prompt of one request."""
        return self.views * self.vision_ms + self.prefill_ms

    def step_ms(self, batch: int) -> float:
        """The mean decode step of ``batch`` requests that began together."""
        contexts = range(self.prompt_tokens + 1, self.prompt_tokens + max(2, self.output_tokens))
        return sum(self._step_ms(context, batch) for context in contexts) / len(contexts)

    def e2e_ms(self, batch: int = 1) -> float:
        """From the first view to the last token of ``batch`` requests that prefill one after the other."""
        return batch * self.ttft_ms + (self.output_tokens - 1) * self.step_ms(batch)

    def requests_per_s(self, batch: int) -> float:
        """Of ``batch`` requests that decode apart from prefill, all together."""
        return 1e3 * batch / self.e2e_ms(batch)

    def requests_per_s_riding(self, batch: int) -> float:
        """The same with every decoded token in a pass that reads the weights anyway: only keys and values are read.

        A pass is bound by arithmetic, so this holds where there is always a prompt to prefill.
        """
        contexts = range(self.prompt_tokens + 1, self.prompt_tokens + self.output_tokens)
        read = sum(self.shape.kv_bytes(context, self.width) for context in contexts) / self.bytes_per_s
        computed = sum(self.shape.decode_flops(context) for context in contexts) / self.flops_per_s
        return batch / (batch * (self.ttft_ms / 1e3 + max(read, computed)))

    def as_dict(self, batch: int, steps_of: tuple[int, ...]) -> dict[str, float]:
        """All floors by the names of what is measured, for ``batch`` requests at once and steps of these batches."""
        return {
            "requests_per_s": self.requests_per_s(batch),
            "requests_per_s_riding": self.requests_per_s_riding(batch),
            "ttft_ms": self.ttft_ms,
            "e2e_ms": self.e2e_ms(),
            "vision_ms_per_view": self.vision_ms,
            **{f"step_ms_{size}": self.step_ms(size) for size in steps_of},
        }

    def _step_ms(self, context: int, batch: int) -> float:
        read = self.shape.decode_bytes(context, batch, self.width, self.width) / self.bytes_per_s
        return 1e3 * max(read, batch * self.shape.decode_flops(context) / self.flops_per_s)


def ratios(measured: Mapping[str, float | None], floors: Mapping[str, float]) -> dict[str, float]:
    """How many times its floor each figure is; for throughput the floor over the figure. Never below 1 but by noise."""
    found = {}
    for name, floor in floors.items():
        value = measured.get(name.removesuffix("_riding"))
        if value:
            found[name] = floor / value if name.startswith("requests_per_s") else value / floor
    return found
