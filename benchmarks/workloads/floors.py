"""What no program gets below at W1 on a machine of two ceilings: the floors of :class:`panscan.plan.cost.Roofline` for
requests that are all of one size. Pure: no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from panscan.plan.cost import RequestCounts, Roofline


@dataclass(frozen=True, slots=True)
class Floors:
    """Floors of requests that are all of one size.

    Args:
        roofline: the model under the ceilings of the machine.
        request: counts of a request.
    """

    roofline: Roofline
    request: RequestCounts

    @property
    def vision_ms(self) -> float:
        """Tower and projector over one view, in a batch so large that reading the weights costs nothing."""
        return self._computed_ms(RequestCounts(1, 0, 1))

    @property
    def prefill_ms(self) -> float:
        """The decoder over one prompt."""
        return self._computed_ms(replace(self.request, views=0, output_tokens=1))

    @property
    def ttft_ms(self) -> float:
        """All views and the prompt of one request."""
        return self._computed_ms(replace(self.request, output_tokens=1))

    def step_ms(self, batch: int) -> float:
        """The mean decode step of ``batch`` requests that began together."""
        request = replace(self.request, output_tokens=max(2, self.request.output_tokens))
        return 1e3 * self.roofline.decode_seconds([request] * batch) / request.steps

    def e2e_ms(self, batch: int = 1) -> float:
        """From the first view to the last token of ``batch`` requests that prefill one after the other."""
        return batch * self.ttft_ms + self.request.steps * self.step_ms(batch)

    def requests_per_s(self, batch: int) -> float:
        """Of ``batch`` requests that decode apart from prefill, all together."""
        return 1e3 * batch / self.e2e_ms(batch)

    def requests_per_s_riding(self, batch: int) -> float:
        """The same with every decoded token in a pass that reads the weights anyway: only keys and values are read.

        A pass is bound by arithmetic, so this holds where there is always a prompt to prefill.
        """
        riding = replace(self.roofline, weight_bytes=0)
        return 1e3 / (self.ttft_ms + 1e3 * riding.decode_seconds([self.request]))

    def as_dict(self, batch: int, steps_of: tuple[int, ...]) -> dict[str, float]:
        """Return all floors by the names of the figures, for ``batch`` requests at once and steps of these batches."""
        return {
            "requests_per_s": self.requests_per_s(batch),
            "requests_per_s_riding": self.requests_per_s_riding(batch),
            "ttft_ms": self.ttft_ms,
            "e2e_ms": self.e2e_ms(),
            "vision_ms_per_view": self.vision_ms,
            **{f"step_ms_{size}": self.step_ms(size) for size in steps_of},
        }

    def _computed_ms(self, request: RequestCounts) -> float:
        return 1e3 * self.roofline.request_flops(request) / self.roofline.flops_per_s


def ratios(measured: Mapping[str, float | None], floors: Mapping[str, float]) -> dict[str, float]:
    """Return each figure over its floor; for throughput, the floor over the figure. At least 1, apart from noise."""
    multiples = {}
    for name, floor in floors.items():
        value = measured.get(name.removesuffix("_riding"))
        if value:
            multiples[name] = floor / value if name.startswith("requests_per_s") else value / floor
    return multiples
