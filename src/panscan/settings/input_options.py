"""Options that name documents, prompts and datasets, and say how they are read."""

from __future__ import annotations

from dataclasses import dataclass

from panscan.core.option import SECONDS, integers, option
from panscan.core.request import MAX_PAGES
from panscan.core.sampling import SEEDS
from panscan.settings.declaration import rare_option
from panscan.settings.endpoint_options import MAX_PROMPTS, Repeated

_COUNT = integers(1, MAX_PROMPTS)
_LARGE = integers(1, 2**31 - 1)
_SEEDED_SAMPLES = {"help": "Seed of the generated documents."}


@dataclass(frozen=True, kw_only=True)
class InputTable:
    """What a command reads."""

    scenario: str | None = option(
        None, "Input", "Built-in scenario (see below), or a YAML file.", "load", metavar="NAME|FILE"
    )
    images: Repeated = option(
        (),
        "Input",
        "Glob, directory, file (PDF too) or URL; repeatable.",
        "bench load plan verify",
        metavar="PATH",
        by_verb={"verify": {"help": "Documents to ask about; repeatable."}},
    )
    prompts: str | None = option(
        None, "Input", "Prompts for every document, one per line.", "bench load", metavar="FILE"
    )
    calibration: Repeated = option(
        (), "Input", "Documents to calibrate int4 on; repeatable.", "quantize", metavar="PATH"
    )
    prompt: str | None = option(
        None,
        "Input",
        "Prompt; '-' or none reads standard input.",
        "ask attention batch bench load profile",
        short="p",
        by_verb={
            "bench load": {"help": "Prompt for every document."},
            "profile": {"help": "Prompt.", "shown_default": "one for the sample documents"},
        },
    )
    prompt_list: Repeated = option(
        (),
        "Input",
        "Prompt for the documents; repeatable.",
        "quantize verify",
        flag="prompt",
        short="p",
        by_verb={"quantize": {"help": "Prompt for calibration documents; repeatable."}},
    )
    dataset: str | None = option(
        None,
        "Input",
        "Labelled questions: JSON Lines, DocVQA, ChartQA, ...",
        "bench load quantize",
        metavar="PATH",
        by_verb={"quantize": {"group": "Measurement", "help": "Labelled questions to measure accuracy on."}},
    )
    dataset_format: str | None = option(
        None, "Input", "Layout of --dataset: jsonl, docvqa, ...; found by default.", "bench", metavar="NAME"
    )
    dataset_split: str | None = rare_option(
        None, "Input", "Split of a dataset that has several.", "bench", metavar="NAME"
    )
    no_images: bool = rare_option(False, "Input", "Send prompts alone, for text-only checkpoints.", "bench")
    limit: int | None = option(
        None,
        "Input",
        "Requests per cell, sampled or repeated.",
        "batch bench",
        flag="num-prompts",
        range=_COUNT,
        by_verb={"batch": {"help": "Maximum documents (pages, questions) to process.", "range": _LARGE}},
    )
    num_questions: int = option(
        128,
        "Input",
        "Maximum prompts and questions.",
        "quantize",
        flag="num-prompts",
        range=integers(1, 100_000),
    )
    system: str | None = option(
        None,
        "Input",
        "System message.",
        "ask attention batch bench",
        by_verb={"batch bench": {"help": "System message for every request."}},
    )
    template_kwargs: str | None = rare_option(
        None,
        "Input",
        "Values for the chat template, as a JSON object.",
        "ask attention batch bench",
        metavar="JSON",
    )
    raw_prompt: bool = rare_option(
        False,
        "Input",
        "Send -p as is, with one <start_of_image> per image.",
        "ask attention batch bench",
        by_verb={"attention": {"rare": False}},
    )
    whole_files: bool = option(False, "Input", "Send all pages of a file in one request.", "batch")
    image_column: str | None = rare_option(
        None, "Input", "Image column of Parquet.", "batch", metavar="NAME", shown_default="image"
    )
    id_column: str | None = rare_option(
        None, "Input", "Id column of Parquet.", "batch", metavar="NAME", shown_default="id"
    )
    prompt_column: str | None = option(
        None, "Input", "Prompt column of Parquet.", "batch", metavar="NAME", shown_default="question"
    )
    view_mix: str | None = option(
        None,
        "Input",
        "Views per page, with relative shares: 1:20,3:50.",
        "plan",
        metavar="MIX",
        shown_default="4",
    )
    text_tokens: int = option(42, "Input", "Tokens of the question and the chat template.", "plan", range=_COUNT)
    count: int = option(
        12,
        "Input",
        "Documents to generate.",
        "demo samples",
        range=integers(1, 10_000),
        by_verb={"demo": {"default": 18, "range": integers(2, 10_000)}},
    )
    seed: int = option(
        0,
        "Input",
        "Seed of the samples.",
        "bench demo load plan quantize samples",
        range=SEEDS,
        by_verb={
            "bench": {"group": "Measurement", "help": "Seed of the cell order and the sample."},
            "demo": {**_SEEDED_SAMPLES, "default": 2},
            "load": {"group": "Traffic", "help": "Seed of arrivals and content."},
            "plan": {"group": "Traffic", "help": "Seed of arrivals, pages and lengths."},
            "samples": _SEEDED_SAMPLES,
        },
    )
    columns: int = option(
        30,
        "Input",
        "Characters per short side; 110 suits Google's models.",
        "samples",
        range=integers(12, 200),
    )
    step: str | None = option(
        None,
        "Input",
        "Range or function that begins each step.",
        "trace",
        metavar="NAME",
        shown_default="panscan.decode",
    )
    storage_timeout: float | None = rare_option(
        None,
        "Input",
        "Deadline per stored object, seconds.",
        "batch",
        range=SECONDS,
        metavar="SECONDS",
        shown_default="60",
    )
    allow_external_images: bool = rare_option(
        False, "Input", "Allow dataset images from URLs and other folders.", "batch bench load"
    )
    allow_private_urls: bool = rare_option(
        False,
        "Input",
        "Fetch URLs of local and private addresses, too.",
        "ask attention batch bench crops load plan profile quantize verify",
    )
    max_pages: int = rare_option(
        MAX_PAGES,
        "Input",
        "Maximum pages per PDF or TIFF.",
        "ask attention batch bench crops load plan profile quantize serve",
        range=integers(1, 1_000_000),
        by_verb={"serve": {"group": "Server", "help": "Maximum pages per document.", "default": 50}},
    )
