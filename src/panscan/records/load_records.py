"""Records of load runs, which measure an endpoint: their settings, levels, probe and search."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Struct

from panscan.records.fields import ARRIVALS, TIMES, Count, LimitedTime, Number, Percent, Seed, check_seed, one_of


class LoadRunSettings(Struct, kw_only=True, frozen=True):
    """The settings of a load run.

    Args:
        endpoint: URL of the endpoint.
        server: server software that the endpoint reports; None if unknown.
        model: name of the model at the endpoint.
        goodput: limits in milliseconds by name of :data:`LIMITED_TIMES`; empty if none were given.
        attainment: the share of requests that must meet them.
        arrival: one of :data:`ARRIVALS`.
        scenario: name of the scenario; None without one.
        image_reuse: the share of requests whose image was sent before; None if images were not prepared for it.
        num_prompts: requests per level.
        num_warmups: requests before the first level.
        seed: seed of arrivals and content.
        metric_percentiles: percentiles to show.
        percentile_metrics: the times to show them of, of :data:`TIMES`.
        ignore_eos: whether answers had to reach their full length.
        min_tokens: shortest answers that were asked for.
        max_tokens: longest answers that were asked for.
        image_salt: number of the first variant of an image.
        mm_processor_kwargs: what requests asked of the endpoint's processor.
    """

    endpoint: str
    server: str | None
    model: str
    goodput: dict[LimitedTime, Number]
    attainment: Number
    arrival: Annotated[str, one_of(ARRIVALS)]
    scenario: str | None
    image_reuse: Number | None
    num_prompts: Count
    num_warmups: Count
    seed: Seed
    metric_percentiles: list[Percent]
    percentile_metrics: list[Annotated[str, one_of(TIMES)]]
    ignore_eos: bool
    min_tokens: Count | None = None
    max_tokens: Count | None = None
    image_salt: Count | None = None
    mm_processor_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_seed(self.seed)


class LevelSettings(Struct, frozen=True):
    """The settings of a load level: requests per second (None: unlimited, or closed loop), the most in flight, and how
    much arrivals vary (1: as a Poisson process)."""

    request_rate: Number | None = None
    max_concurrency: Count | None = None
    burstiness: Number | None = None


class ProbeRecord(Struct, tag_field="type", tag="probe", kw_only=True):
    """How an endpoint counts tokens; None where it does not say. ``warnings`` are reasons to doubt the figures."""

    model: str | None
    text_prompt_tokens: Count | None
    image_prompt_tokens: Count | None
    expected_image_tokens: Count | None
    warnings: list[str]
    notes: list[str] = []


class SearchLevel(Struct, frozen=True):
    """A level of a search: its rate, the share of requests within the limits, and whether it proves nothing."""

    rate: Number | None = None
    attainment: Number | None = None
    overloaded: bool = False
    limited: bool = False


class SearchRecord(Struct, tag_field="type", tag="search", kw_only=True):
    """The highest rate (requests per second) that meets the goodput; None if no rate does."""

    rate: Number | None
    attainment: Number | None
    note: str
    levels: list[SearchLevel]
