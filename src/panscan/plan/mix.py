"""The requests that a plan is made for: how many views, prompt tokens and output tokens they have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random

import numpy as np

from panscan.core import PanAndScan, SettingError
from panscan.core.option import Range, integers, shorten
from panscan.core.sampling import TOKENS
from panscan.engine.scheduling.batch import PromptLayout, Span
from panscan.images.views import PUBLISHED_COST, PromptCost, plan_views
from panscan.model.shapes import Shape

VIEWS = integers(0, 1_000)
_SHARE = Range(gt=0, le=1_000_000)
_MOST_ENTRIES = 100
_TEMPLATE_TOKENS = 14  # of the chat template and the words before the first image: the same in every request
_SOFT, _TEXT = 2, 3  # stand-ins for token ids; only their equality matters


@dataclass(frozen=True, slots=True)
class PageShare:
    """Pages with the same number of views, and their share of the requests (relative to the other shares)."""

    views: int
    share: float


@dataclass(frozen=True, slots=True, eq=False)
class RequestSketch:
    """What the scheduler has to know of a request.

    Args:
        ids: prompt tokens; stand-ins will do, as only their equality matters.
        layout: image spans of the prompt.
        output_tokens: length of the answer.
        max_new_tokens: the request's limit, which the answer may stay below; None: ``output_tokens``.
    """

    ids: Sequence[int]
    layout: PromptLayout
    output_tokens: int
    max_new_tokens: int | None = None

    @property
    def views(self) -> int:
        """Number of image spans."""
        return len(self.layout.spans)


@dataclass(frozen=True, slots=True)
class WorkloadMix:
    """Requests with one page each.

    Args:
        pages: view counts with shares; 0 views is a prompt without an image.
        text_tokens: prompt tokens of a request besides those of its image: question and chat template.
        output_tokens: shortest and longest answer in tokens; lengths in between are equally frequent.
        cost: prompt tokens of an image.
        image_reuse: share of requests about a page that was asked about before.
    """

    pages: tuple[PageShare, ...]
    text_tokens: int
    output_tokens: tuple[int, int]
    cost: PromptCost = PUBLISHED_COST
    image_reuse: float = 0.0

    def prompt_tokens(self, views: int) -> int:
        """Return the prompt tokens of a request whose page has this many views."""
        return self.text_tokens + (self.cost.of(views - 1) if views else 0)

    @property
    def mean_views(self) -> float:
        """The mean number of views per request."""
        return self._mean([page.views for page in self.pages])

    @property
    def mean_prompt_tokens(self) -> float:
        """The mean number of prompt tokens per request."""
        return self._mean([self.prompt_tokens(page.views) for page in self.pages])

    @property
    def mean_output_tokens(self) -> float:
        """The mean number of output tokens per request."""
        return sum(self.output_tokens) / 2

    @property
    def most_tokens(self) -> int:
        """The tokens of the longest request, prompt and output."""
        return max(self.prompt_tokens(page.views) for page in self.pages) + self.output_tokens[1]

    def requests(self, count: int, seed: int = 0) -> list[RequestSketch]:
        """Return ``count`` requests: a pure function of the arguments."""
        random = Random(seed)
        shares = list(accumulate(page.share for page in self.pages))
        asked: list[tuple[int, int]] = []  # (page number, views)
        sketches = []
        for number in range(count):
            if asked and random.random() < self.image_reuse:
                page, views = random.choice(asked)
            else:
                page, views = number, random.choices(self.pages, cum_weights=shares)[0].views
                asked.append((page, views))
            sketches.append(self.sketch(page, number, views, random.randint(*self.output_tokens)))
        return sketches

    def sketch(self, page: int, question: int, views: int, output_tokens: int) -> RequestSketch:
        """Return one request.

        Args:
            page: number of the page; requests with the same page share its views.
            question: number of the question; only requests with the same one have the same text behind the page.
            views: views of the page.
            output_tokens: length of the answer.
        """
        total, image = self.prompt_tokens(views), self.cost.image_tokens
        text = total - views * image
        head = min(_TEMPLATE_TOKENS, text)
        between = min(self.cost.per_crop, (text - head) // (views + 1))
        ids, spans = [_TEXT] * head, []
        for view in range(views):
            spans.append(Span(len(ids), len(ids) + image, b"%d/%d" % (page, view)))
            ids += [_SOFT] * image + [_TEXT] * between
        ids += [_TEXT + 1 + question] * (total - len(ids))
        return RequestSketch(ids, PromptLayout(spans), output_tokens)

    def _mean(self, values: Sequence[float]) -> float:
        return float(np.average(values, weights=[page.share for page in self.pages]))


def mix_of_views(text: str, shape: Shape, *, text_tokens: int, output_tokens: tuple[int, int]) -> WorkloadMix:
    """Return the mix of a ``--view-mix`` value: ``4``, or view counts with shares such as ``1:20,3:50,5:30``.

    Raises:
        SettingError: not such a list, a view count given twice, or views for a model that reads text only.
    """
    option, pages = "--view-mix", list[PageShare]()
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > _MOST_ENTRIES:
        raise SettingError(f"{option}: expected at most {_MOST_ENTRIES} entries, got {len(parts):,}")
    for part in parts:
        views, colon, share = part.partition(":")
        if not views or (colon and not share):
            raise SettingError(f"{option}: expected views:share pairs such as 1:20,3:50, got {shorten(text)}")
        page_share = PageShare(int(VIEWS.parse(option, views)), _SHARE.parse(option, share) if colon else 1.0)
        if any(page.views == page_share.views for page in pages):
            raise SettingError(f"{option}: {page_share.views} views are given twice: add up their shares")
        pages.append(page_share)
    return _mix_for(WorkloadMix(tuple(pages), text_tokens, output_tokens), shape, option)


def mix_of_sizes(
    sizes: Iterable[tuple[int, int]],
    shape: Shape,
    settings: PanAndScan,
    *,
    text_tokens: int,
    output_tokens: tuple[int, int],
) -> WorkloadMix:
    """Return the mix of pages of these sizes, in pixels (width, height), one page per request.

    Raises:
        SettingError: there is no page, a page cannot be split, or the model reads text only.
    """
    counts = Counter(len(plan_views(width, height, settings).views) for width, height in sizes)
    if not counts:
        raise SettingError("--images: no readable page; give a file, directory or glob with images")
    pages = tuple(PageShare(views, count) for views, count in sorted(counts.items()))
    return _mix_for(WorkloadMix(pages, text_tokens, output_tokens), shape, "--images")


def parse_output_tokens(text: str) -> tuple[int, int]:
    """Return the shortest and the longest answer of an ``--max-new-tokens`` value: ``256``, or a range ``16-256``.

    Raises:
        SettingError: neither a number nor an ascending range.
    """
    option, allowed = "--max-new-tokens", TOKENS
    least, dash, most = text.partition("-")
    if dash and not (least and most):
        raise SettingError(f"{option}: expected a number such as 256 or a range such as 16-256, got {shorten(text)}")
    low = int(allowed.parse(option, least))
    high = int(allowed.parse(option, most)) if dash else low
    if high < low:
        raise SettingError(f"{option}: {text} is descending; write {high}-{low}")
    return low, high


def _mix_for(mix: WorkloadMix, shape: Shape, option: str) -> WorkloadMix:
    """Return the mix with the model's tokens per view."""
    most = max(page.views for page in mix.pages)
    if shape.vision is None and most:
        raise SettingError(f"{option}: --model {shape.name} reads text only; use --view-mix 0")
    mix = replace(mix, cost=replace(mix.cost, image_tokens=shape.image_tokens))
    if mix.most_tokens > shape.text.max_positions:
        raise SettingError(
            f"{option}: a request of {most} views and {mix.output_tokens[1]:,} output tokens has {mix.most_tokens:,}"
            f" tokens; the context of {shape.name} ends at {shape.text.max_positions:,}"
        )
    return mix
