"""What faults that raise no error cost in answers: python benchmarks/task_cost.py [--documents N] [--output FILE]

The mini model answers questions about sample documents with `generate()`: unchanged, with attention that is causal at
image tokens, and without its images. All variants answer the same questions with the same views, greedily, in float32
on a CPU. The record has each question's score; `readme_tables.py` compares them in pairs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask

from panscan import GenerateRunner, Request
from panscan.model.runtime import apply_attention
from panscan.records.environment import environment
from panscan.records.scores import exact_match
from panscan.workload.documents import draw_document

RECORD = Path(__file__).parent / "records" / "task-cost.json"
SEED = 977  # of documents; the samples that panscan draws by default have seed 0
BATCH = 8
CAUSAL = "image-causal"


@contextmanager
def causal_images(runner: GenerateRunner) -> Iterator[None]:
    """Use SDPA with Transformers' flash-attention mask, which omits image blocks: image tokens become causal."""

    def forward(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        positions = torch.arange(key.shape[2])[None]
        last = positions[0, key.shape[2] - query.shape[2] :, None]
        visible = (positions <= last) & (positions > last - (options.get("sliding_window") or key.shape[2]))
        visible = visible if module.is_causal else torch.ones_like(visible)  # the vision tower's is not
        if mask is not None:
            visible = visible & mask[:, None, None, :].bool()
        visible = visible.expand(len(query), 1, *visible.shape[-2:])
        return sdpa_attention_forward(module, query, key, value, visible, **options)

    AttentionInterface.register(CAUSAL, forward)
    AttentionMaskInterface.register(CAUSAL, flash_attention_mask)
    apply_attention(runner.loaded.model, CAUSAL)
    yield
    apply_attention(runner.loaded.model, runner.settings.attention)


@contextmanager
def dropped_images(runner: GenerateRunner) -> Iterator[None]:
    """Set the features of all image tokens to 0: the prompt keeps its length and shows nothing."""
    projector = runner.loaded.model.model.multi_modal_projector
    hook = projector.register_forward_hook(lambda _module, _inputs, features: torch.zeros_like(features))
    yield
    hook.remove()


Fault = Callable[[GenerateRunner], AbstractContextManager[None]]
VARIANTS: dict[str, Fault] = {
    "reference": lambda _: nullcontext(),
    "causal image attention": causal_images,
    "dropped images": dropped_images,
}
"""Fault of each variant, the reference first."""


def questions(count: int) -> list[tuple[int, Request, tuple[str, ...]]]:
    """Return document, request and accepted answers of every question about ``count`` documents."""
    entries: list[tuple[int, Request, tuple[str, ...]]] = []
    for number in range(count):
        document = draw_document(SEED, number)
        entries += [(number, Request(ask.question, [document.image]), ask.answers) for ask in document.questions]
    return entries


def answers(runner: GenerateRunner, questions: Sequence[Request], name: str) -> list[str]:
    """Return the answers in the order of the questions. Batches hold pages of similar size, to limit padding."""
    order = sorted(range(len(questions)), key=lambda index: questions[index].images[0].size)
    texts: dict[int, str] = {}
    for start in track(range(0, len(order), BATCH), name):
        batch = order[start : start + BATCH]
        requests = [runner.request(questions[index].prompt or "", questions[index].images) for index in batch]
        texts |= zip(batch, (result.text for result in runner.run(requests)), strict=True)
    return [texts[index] for index in range(len(questions))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=96)
    parser.add_argument("--output", type=Path, default=RECORD)
    args = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    entries = questions(args.documents)
    variants: dict[str, Any] = {}
    for name, fault in VARIANTS.items():
        runner = GenerateRunner.from_pretrained("mini", dtype="fp32", device="cpu", max_new_tokens=32)
        with fault(runner):
            texts = answers(runner, [request for _, request, _ in entries], name)
        scores = [exact_match(text, accepted) for text, (_, _, accepted) in zip(texts, entries, strict=True)]
        variants[name] = {"exact_match": [round(score) for score in scores], "answers": texts}
        print(f"{name}: {sum(scores) / len(scores):.1%}, {time.perf_counter() - began:.0f} s")
    record = {
        "about": "exact match of the mini model with faults that raise no error",
        "command": f"python benchmarks/task_cost.py --documents {args.documents}",
        "documents": args.documents,
        "seed": SEED,
        "document_of_question": [document for document, _, _ in entries],
        "seconds": round(time.perf_counter() - began),
        "environment": environment(),
        "variants": variants,
    }
    args.output.write_text(json.dumps(record, indent=None) + "\n")


if __name__ == "__main__":
    main()
