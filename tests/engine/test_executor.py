"""Every logit of the engine's path against one eager pass of Transformers' model."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.pages import MODELS, SOFT, Asked, Pages, ask, decoder_of, model_of, teacher

from panscan.engine.scheduling.sequence import Chunk, PromptLayout, Sequence, Step

NAMES = pytest.mark.parametrize("name", list(MODELS))


def features_of(name: str, batch: list[Asked]) -> dict[bytes, torch.Tensor]:
    pixels = {key: view for asked in batch for key, view in asked.pixels.items()}
    if not pixels:
        return {}
    return dict(zip(pixels, decoder_of(name).encode(torch.stack(list(pixels.values()))), strict=True))


def next_chunk(asked: Asked, draw: random.Random, most: int) -> Chunk:
    """Some of what a sequence has left: prompt that cuts no image block, or its newest token."""
    sequence = asked.sequence
    if sequence.computed == len(sequence.ids):
        sequence.ids.append(asked.forced[len(sequence.outputs)])
    end = min(len(sequence.ids), sequence.computed + draw.randint(1, most))
    return Chunk(sequence, sequence.computed, sequence.layout.cut(sequence.computed, end))


def led(name: str, batch: list[Asked], pages: Pages, draw: random.Random, most: int) -> dict[Sequence, torch.Tensor]:
    """Logits of all positions of sequences that run to their ends, each step some of them in some order."""
    features = features_of(name, batch)
    seen: dict[Sequence, list[torch.Tensor]] = {asked.sequence: [] for asked in batch}
    left = list(batch)
    while left:
        chunks = [next_chunk(asked, draw, most) for asked in draw.sample(left, draw.randint(1, len(left)))]
        done = pages.run(chunks, features)
        for sequence, hidden in done.hidden.items():
            seen[sequence].append(pages.decoder.logits(hidden))
        sampled = [chunk.sequence for chunk in chunks if chunk.samples]
        for sequence, logits in zip(sampled, done.logits, strict=True):
            torch.testing.assert_close(logits, seen[sequence][-1][-1])
        left = [asked for asked in left if asked.sequence.computed < asked.sequence.prompt_tokens + len(asked.forced)]
    return {sequence: torch.cat(parts) for sequence, parts in seen.items()}


def check(name: str, batch: list[Asked], logits: dict[Sequence, torch.Tensor]) -> None:
    for asked in batch:
        expected = teacher(name, asked)
        scale = float(expected.abs().max())
        torch.testing.assert_close(logits[asked.sequence], expected, rtol=0, atol=1e-5 * scale)


@NAMES
@given(seed=st.integers(0, 2**32), block_size=st.integers(1, 20), most=st.sampled_from([4, 20, 1000]))
@settings(deadline=None, max_examples=6)
def test_all_logits_are_those_of_one_eager_pass(name: str, seed: int, block_size: int, most: int) -> None:
    """Prompts of several sequences, whole or in chunks, mixed with decode rows, in scattered blocks."""
    draw = random.Random(seed)
    batch = [ask(name, draw, number=number) for number in range(draw.randint(1, 4))]
    check(name, batch, led(name, batch, Pages(name, block_size, draw), draw, most))


@pytest.mark.parametrize("name", ["window inside image blocks", "text only"])
def test_a_long_text_is_taken_in_parts(name: str) -> None:
    """Longer than a piece of the sdpa backend, with a decode row of few keys beside it."""
    draw = random.Random(0)
    long, short = ask(name, draw, longest=5), ask(name, draw, number=1, longest=3)
    ids = [draw.randrange(20, 1000) for _ in range(600)]
    long.sequence, long.pixels = Sequence(0, ids, len(ids), PromptLayout(), len(ids) + 3), {}
    pages = Pages(name, 16, draw)
    logits = led(name, [short], pages, draw, 1000) | led(name, [long], pages, draw, 1000)
    check(name, [long, short], logits)


def test_rows_of_one_pass_do_not_see_each_other() -> None:
    """Twins in one pass, one with another's picture: equal where they are equal, unequal where they are not."""
    name = "window inside image blocks"
    draw = random.Random(5)
    ids = [30, 31, *[SOFT] * 16, 32, 33, *[SOFT] * 16, 34]
    views = dict(zip([b"a", b"b"], decoder_of(name).encode(torch.rand(2, 3, 48, 48)), strict=True))
    pages = Pages(name, 4, draw)
    rows = [
        Sequence(number, list(ids), len(ids), PromptLayout.of(ids, SOFT, keys), 99)
        for number, keys in enumerate([(b"a", b"b"), (b"a", b"b"), (b"b", b"a")])
    ]
    done = pages.run([Chunk(row, 0, len(ids)) for row in rows], views)
    first, second, swapped = (done.hidden[row] for row in rows)
    torch.testing.assert_close(first, second, rtol=0, atol=1e-5)
    torch.testing.assert_close(first[:2], swapped[:2], rtol=0, atol=1e-5)
    assert float((first[2:] - swapped[2:]).abs().amax(1).min()) > 1e-2


def test_places_outside_of_a_chunk_are_left_out() -> None:
    name = "text only"
    pages = Pages(name, 4, random.Random(0))
    one, two = (Sequence(number, [20, 21, 22, 23, 24], 5, PromptLayout(), 9) for number in range(2))
    whole = pages.run([Chunk(one, 0, 5)], {}).hidden[one]
    for start, end in [(0, 2), (2, 5)]:
        for free, table in zip(pages.free, two.tables, strict=True):
            table.append(free.pop())
        done = pages.executor.run(Step([Chunk(two, start, end)]), {}.__getitem__, {two: [1, 3, 4], one: [0]})
        assert set(done.hidden) == {two}
        torch.testing.assert_close(done.hidden[two], whole[[place for place in (1, 3, 4) if start <= place < end]])
        assert len(done.logits) == (end == 5)


@pytest.mark.parametrize("name", ["window inside image blocks", "text only"])
def test_greedy_tokens_are_generates(name: str) -> None:
    """One model serves both, by turns; the cap on logits is there for the class that has one."""
    draw = random.Random(3)
    asked = ask(name, draw)
    model, pages, sequence = model_of(name), Pages(name, 16, draw), asked.sequence
    prompt = torch.tensor([sequence.ids])
    inputs = {"token_type_ids": (prompt == SOFT).long()} if MODELS[name].vision is not None else {}
    if asked.pixels:
        inputs["pixel_values"] = torch.stack(list(asked.pixels.values()))
    features = features_of(name, [asked])
    for _ in range(4):
        done = pages.run([Chunk(sequence, sequence.computed, len(sequence.ids))], features)
        done.logits[:, model.generation_config.suppress_tokens] = -torch.inf
        sequence.ids.append(int(done.logits[0].argmax()))
    out = model.generate(
        input_ids=prompt, **inputs, max_new_tokens=4, do_sample=False, eos_token_id=None,
    )  # fmt: skip
    assert sequence.ids == out[0].tolist()
