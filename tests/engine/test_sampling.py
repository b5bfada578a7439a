"""Choosing tokens: the scores of Transformers' ``generate()``, the exact distribution, and no luck but the seed's."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2_contingency, chisquare
from tests.triton_here import DEVICE
from transformers import generation

from panscan import GenerateRunner, Sampling
from panscan.core import TokenLogprobs
from panscan.engine import sampling
from panscan.engine.engine import Engine
from panscan.engine.filters import Path, choose_cutoff, draws, heated, parameters_of, vocabulary_weights
from panscan.engine.options import EngineOptions
from panscan.engine.sampling import Sampler, SamplingRow
from panscan.engine.sampling_kernels import TritonVocabulary
from panscan.engine.scheduling.batch import NO_TOKEN
from panscan.engine.weights import BLOCK, Cutoff, VocabularyWeights
from panscan.model.machine import GraphRecorder

VOCABULARY = 24
SUPPRESSED = [0, 5, VOCABULARY + 3]


class SampledToken(NamedTuple):
    token: int
    logprobs: TokenLogprobs | None


def choose(sampler: Sampler, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    tokens, logprobs = sampler.launch(logits, rows).wait()
    return [SampledToken(token, logprobs.get(row)) for row, token in enumerate(tokens)]


def biased(scores: torch.Tensor, how: Sampling) -> torch.Tensor:
    scores = scores.clone()
    for token, bias in (how.logit_bias or {}).items():
        if token < scores.shape[-1]:
            scores[:, token] += bias
    return scores


def by_transformers(logits: torch.Tensor, row: SamplingRow) -> torch.Tensor:
    """One row's scores, by Transformers' own classes."""
    chain, how = generation.LogitsProcessorList(), row.sampling
    if how.repetition_penalty is not None:
        chain.append(generation.RepetitionPenaltyLogitsProcessor(float(how.repetition_penalty)))
    chain.append(lambda _, scores: by_openai(scores, row))
    chain.append(generation.SuppressTokensLogitsProcessor(SUPPRESSED))
    if row.allowed is not None:
        allowed = np.flatnonzero(np.unpackbits(row.allowed, bitorder="little"))
        others = sorted(set(range(VOCABULARY)) - set(allowed.tolist()))
        chain.append(generation.SuppressTokensLogitsProcessor(others))
    if not how.greedy:
        chain.append(generation.TemperatureLogitsWarper(float(how.temperature)))
        if how.top_k is not None:
            chain.append(generation.TopKLogitsWarper(how.top_k))
        if how.top_p is not None and how.top_p < 1:
            chain.append(generation.TopPLogitsWarper(how.top_p))
        if how.min_p is not None:
            chain.append(generation.MinPLogitsWarper(how.min_p))
    known = [token for token in row.token_ids or () if token < len(logits)]  # Transformers 5.17 fails at others
    return chain(torch.tensor([known], dtype=torch.long), biased(logits[None], how))[0]


def by_openai(scores: torch.Tensor, row: SamplingRow) -> torch.Tensor:
    """The formula of OpenAI's guide, over the answer's tokens."""
    answer = list(row.token_ids or ())[-row.position :] if row.position else []
    for token, count in Counter(answer).items():
        if token < scores.shape[1]:
            scores[0, token] -= torch.tensor(row.sampling.frequency_penalty) * count
            scores[0, token] -= row.sampling.presence_penalty
    return scores


def filter_scores(scores: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Scores at each row's temperature, minus infinity for ids that the sampler never draws."""
    parameters = torch.from_numpy(parameters_of(samplings, np.zeros(len(samplings), np.int64)))
    weights = vocabulary_weights(heated(scores, parameters))
    cutoff = choose_cutoff(weights, parameters, Path.of(samplings))
    return weights.scores.masked_fill(~cutoff.keep(weights.scores, 0), float("-inf"))


def draw(seed: int, position: int) -> int:
    [value] = draws([seed], [position]).tolist()
    return int(value)


def scores_of(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """The scores of the sampler, greedy rows and others."""
    scores = Sampler(SUPPRESSED, "cpu").scores(logits, rows)
    for index, row in enumerate(rows):
        if not row.sampling.greedy:
            scores[index] = filter_scores(scores[index : index + 1], [row.sampling])[0]
    return scores


def levels(seed: int, step: float) -> list[float]:
    """Logits of one row, in steps: coarse ones have ties, as bfloat16 has."""
    drawn = np.random.default_rng(seed).normal(0, 3, VOCABULARY)
    return (np.round(drawn / step) * step).astype(np.float32).tolist()


logits_of_a_row = st.builds(levels, st.integers(0, 2**32), st.sampled_from([1e-5, 0.5, 2.0]))
penalty = st.none() | st.sampled_from([0.7, 1.0, 1.3])
# Ids with a share below 2^-34, which no draw reaches, count as removed: a top_p so close to 1 is not compared.
share = st.floats(0.01, 0.9999) | st.sampled_from([0.25, 0.5, 0.75, 1.0])
openai = {
    "frequency_penalty": st.sampled_from([0.0, 0.0, 0.3, -2.0]),
    "presence_penalty": st.sampled_from([0.0, 0.0, 1.1, -0.7]),
    "logit_bias": st.none()
    | st.dictionaries(st.integers(0, VOCABULARY + 2), st.floats(-100, 100, width=32), max_size=4),
}
greedy = st.builds(Sampling, repetition_penalty=penalty, logprobs=st.none() | st.integers(0, 4), **openai)
sampled = st.builds(
    Sampling,
    temperature=st.floats(0.1, 3) | st.just(1.0),
    top_k=st.none() | st.integers(1, VOCABULARY + 2),
    top_p=st.none() | share,
    min_p=st.none() | share | st.just(0.0),
    repetition_penalty=penalty,
    logprobs=st.none() | st.integers(0, 4),
    **openai,
)
masks = st.sets(st.integers(0, VOCABULARY + 7), max_size=VOCABULARY).map(
    lambda ids: np.packbits(np.isin(np.arange(VOCABULARY + 8), [*ids, 7]), bitorder="little")
)
row = st.builds(
    SamplingRow,
    greedy | sampled,
    st.integers(-(2**70), 2**70),
    st.integers(0, 9) | st.integers(0, 5000),
    st.lists(st.integers(0, VOCABULARY + 2), min_size=1, max_size=9),
    st.none() | masks,
)
batches = st.lists(st.tuples(logits_of_a_row, row), min_size=1, max_size=6)


def split(batch: Sequence[tuple[list[float], SamplingRow]]) -> tuple[torch.Tensor, list[SamplingRow]]:
    return torch.tensor([values for values, _ in batch]), [row for _, row in batch]


@settings(max_examples=300)
@given(batches)
def test_scores_are_those_of_transformers_classes(batch: list[tuple[list[float], SamplingRow]]) -> None:
    logits, rows = split(batch)
    before = logits.clone()
    scores = scores_of(logits, rows)
    for index, row in enumerate(rows):
        actual, expected = scores[index], by_transformers(logits[index], row)
        if row.sampling.top_p is not None:  # which of several equal ones it leaves is up to the machine's sort
            actual, expected = actual.sort().values, expected.sort().values
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    chosen = choose(Sampler(SUPPRESSED, "cpu"), logits, rows)
    for index, (token, row) in enumerate(zip((item.token for item in chosen), rows, strict=True)):
        assert scores[index, token] > float("-inf")
        if row.sampling.greedy:
            assert token == by_transformers(logits[index], row).argmax()
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("values", "top_p", "expected"),
    [
        ([0.0, 2.0, 2.0, 2.0, 2.0], 0.4, [1, 2]),  # of equal ones the first
        ([0.0, 0.0], 0.5, [0]),  # what is left out may be 1 - p
        ([1.0, 1.0, 0.0], 1e-9, [0]),  # one stays always
        ([0.0, 3.0, 1.0, 3.0], 1e-9, [1]),
        ([0.0, -200.0], 1.0, [0, 1]),  # 1 leaves out nothing
    ],
)
def test_top_p_at_its_edges(values: list[float], top_p: float, expected: list[int]) -> None:
    for top_k in (None, len(values)):
        scores = filter_scores(torch.tensor([values]), [Sampling(temperature=1.0, top_k=top_k, top_p=top_p)])
        assert (scores[0] > float("-inf")).nonzero().flatten().tolist() == expected


CASES = [
    Sampling(6, repetition_penalty=1.8),
    Sampling(6, temperature=0.7, top_k=40, top_p=0.8, min_p=0.05, repetition_penalty=1.3),
    Sampling(6, temperature=1.7, top_k=3),
    Sampling(6, temperature=1.0, top_p=0.3),
    Sampling(6, temperature=1.0, min_p=0.4),
]


def test_scores_and_answers_are_those_of_generate(tiny: GenerateRunner) -> None:
    """The order of the steps, too: whole answers of ``generate()`` with its scores before and after, and OpenAI's
    formula as a logits processor. Greedy ones are the engine's, together."""
    loaded, ask, due = tiny.loaded, tiny.request("What is the total?"), {}
    prompt = loaded.reader.prompts.write(ask, []).ids
    biases = {40: 1.5, 41: -100, prompt[5]: 20}  # one in the prompt, which does not count as said
    penalised = Sampling(24, frequency_penalty=0.9, presence_penalty=1.5, logit_bias=biases, ignore_eos=True)
    suppressed = loaded.model.generation_config.suppress_tokens
    assert suppressed

    def adjusted(how: Sampling, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        row = SamplingRow(how, 0, ids.shape[1] - len(prompt), ids[0].tolist())
        return by_openai(biased(scores, how), row)

    for how in (*CASES, replace(penalised, logit_bias=None), penalised):
        torch.manual_seed(0)
        output = loaded.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=how.max_new_tokens,
            eos_token_id=10**6 if how.ignore_eos else None,
            do_sample=not how.greedy,
            temperature=how.temperature or None,
            top_k=how.top_k or 0,
            top_p=how.top_p or 1.0,
            min_p=how.min_p,
            repetition_penalty=how.repetition_penalty or 1.0,
            logits_processor=[partial(adjusted, how)],
            output_scores=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
        ids = output.sequences[0].tolist()
        for step, (logits, expected) in enumerate(zip(output.logits, output.scores, strict=True)):
            sampled_row = SamplingRow(how, 0, step, ids[: len(prompt) + step])
            scores = Sampler(suppressed, "cpu").scores(logits.float(), [sampled_row])
            scores = scores if how.greedy else filter_scores(scores, [how])
            torch.testing.assert_close(scores, expected, rtol=0, atol=0)
        if how.greedy:
            due[how] = ids[len(prompt) :]
    asked = [replace(ask, sampling=how) for how in [*due, Sampling(logit_bias={10**6: 1.0})]]
    with Engine(loaded, EngineOptions(kv_cache_gb=0.02)) as engine:
        *results, unknown = engine.generate(asked)
    assert [result.token_ids for result in results] == [*due.values()]
    assert "logit_bias: the token 1000000 is not one of the model's" in str(unknown.error)


def tokens(logits: torch.Tensor, how: Sampling, places: Sequence[tuple[int, int]], suppressed: Any = ()) -> list[int]:
    """One token per (seed, position), all from the same logits ``[vocabulary]``."""
    rows = [SamplingRow(how, seed, position, [1, 2]) for seed, position in places]
    return [choice.token for choice in choose(Sampler(suppressed, "cpu"), logits.expand(len(rows), -1), rows)]


@pytest.mark.parametrize(
    "how",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.5),
        Sampling(temperature=2.0, top_k=4),
        Sampling(temperature=1.0, top_p=0.7),
        Sampling(temperature=1.5, min_p=0.2, repetition_penalty=1.4),
        Sampling(temperature=1.3, top_k=8, top_p=0.9, min_p=0.1),
    ],
    ids=str,
)
@pytest.mark.parametrize("walk", ["seeds", "positions", "both"])
def test_tokens_follow_the_distribution(how: Sampling, walk: str) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 1.5
    count = 6_000
    places = {
        "seeds": [(seed, 7) for seed in range(count)],
        "positions": [(7, position) for position in range(count)],
        "both": [(-seed, position) for seed in range(120) for position in range(count // 120)],
    }[walk]
    row = SamplingRow(how, 0, 0, [1, 2])
    scores = filter_scores(Sampler([11], "cpu").scores(logits[None], [row]), [how])
    expected = scores.double().softmax(-1)[0].numpy()
    counts = np.bincount(tokens(logits, how, places, [11]), minlength=12)
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    assert possible.sum() > 1
    assert chisquare(counts[possible], expected[possible] * count).pvalue > 1e-3


@pytest.mark.parametrize("other", [(0, 1), (1, 0), (1, -1), (1 << 32, 0), (0, 64), (-1, 0)], ids=str)
def test_draws_of_neighbours_have_nothing_to_do_with_each_other(other: tuple[int, int]) -> None:
    seeds, places = np.divmod(np.arange(6400), 80)
    cells = [draws((seeds + at).tolist(), (places + to).tolist()) >> 28 for at, to in ((100, 100), np.add(100, other))]
    table = np.zeros((8, 8))
    np.add.at(table, tuple(cells), 1)
    assert chi2_contingency(table).pvalue > 1e-3
    assert chisquare(table.sum(0)).pvalue > 1e-3


def test_draws_are_the_same_in_every_version() -> None:
    """A seed is kept in records: what it gave must come again."""
    expected = [1401122455, 1505841538, 790680964, 2026288756, 786498899, 1590866757]
    assert [draw(seed, at) for seed in (0, 1, -1) for at in (0, 1)] == expected
    assert all(0 <= draw(seed, 3) < 2**31 for seed in range(1000))


def test_a_draw_on_the_edge_of_two_ids_is_the_second() -> None:
    """Of 2^16 equally likely ids each has 2^15 draws."""
    seeds = range(1 << 17)
    edges = [(seed, 0) for seed in np.flatnonzero(draws(seeds, [0] * len(seeds)) % (1 << 15) == 0).tolist()]
    places = [*edges, *((seed, 1) for seed in range(8))]
    assert edges
    chosen = tokens(torch.zeros(1 << 16), Sampling(temperature=1.0), places)
    assert chosen == [draw(*place) >> 15 for place in places]


def test_a_larger_draw_gives_no_lower_id() -> None:
    """The distribution is walked in order of ids, however likely they are."""
    logits = torch.tensor([0.1, 2.0, -1.0, 3.0, 0.5, 1.0])
    places = [(seed, 3) for seed in range(400)]
    drawn = [draw(*place) for place in places]
    ordered = sorted(zip(drawn, tokens(logits, Sampling(temperature=1.5), places), strict=True))
    ids = [token for _, token in ordered]
    assert ids == sorted(ids)
    assert set(ids) == set(range(6))


@settings(max_examples=150)
@given(batches, st.data())
def test_a_row_does_not_depend_on_its_batch(batch: list[tuple[list[float], SamplingRow]], data: st.DataObject) -> None:
    """Nor on padding and on what earlier batches left: the steps that a GPU records have both."""
    sampler, recorded = Sampler(SUPPRESSED, "cpu"), Sampler(SUPPRESSED, "cpu")
    recorded.record(GraphRecorder(torch.device("cpu"), capture=False), VOCABULARY, 4)
    logits, rows = split(batch)
    alone = [choose(sampler, logits[index : index + 1], [row])[0] for index, row in enumerate(rows)]
    order = data.draw(st.permutations(range(len(rows))))
    for together in (sampler, recorded):
        chosen = choose(together, logits[list(order)], [rows[index] for index in order])
        assert chosen == [alone[index] for index in order]
    assert [item.logprobs is None for item in alone] == [row.sampling.logprobs is None for row in rows]


@pytest.mark.parametrize("width", [13, 8, 3], ids=str)
def test_ids_beyond_a_mask_are_forbidden_and_bits_beyond_the_vocabulary_ignored(width: int) -> None:
    mask = np.array([0b10000110], np.uint8)
    logits = torch.arange(float(width)).expand(2, -1)
    rows = [SamplingRow(Sampling(), 0, 0, allowed=mask), SamplingRow(Sampling(), 0, 0)]
    assert [choice.token for choice in choose(Sampler([], "cpu"), logits, rows)] == [7 if width > 7 else 2, width - 1]


@pytest.mark.parametrize(("top_k", "parts"), [(64, [100]), (1000, [8] * 12 + [4])])
def test_many_candidates_are_sampled_in_parts(top_k: int, parts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The candidates of a top_k of 1000 take twice the memory of the scores. Greedy rows between them add no parts."""
    sampled = []
    sample = sampling.sample

    def counted(scores: torch.Tensor, parameters: torch.Tensor, path: Path) -> torch.Tensor:
        sampled.append(len(scores))
        return sample(scores, parameters, path)

    monkeypatch.setattr(sampling, "sample", counted)
    how = Sampling(temperature=1.0, top_k=top_k, logprobs=2)
    logits = torch.randn(200, 2000, generator=torch.Generator().manual_seed(0))
    masks = np.random.default_rng(0).integers(1, 256, (200, 250), dtype=np.uint8)
    how_of = [how if seed % 2 else Sampling() for seed in range(200)]
    rows = [SamplingRow(how_of[at], at, at, allowed=mask if at % 3 else None) for at, mask in enumerate(masks)]
    sampler = Sampler([], "cpu")
    choices = choose(sampler, logits, rows)
    assert sampled == parts and choose(sampler, torch.empty(0, 2000), []) == []
    assert choices == [choose(sampler, logits[index : index + 1], [row])[0] for index, row in enumerate(rows)]


@settings(max_examples=150)
@given(logits_of_a_row, row, st.integers(0, 20))
def test_logprobs_are_those_of_the_raw_logits(values: list[float], sampling_row: SamplingRow, count: int) -> None:
    sampling_row = replace(sampling_row, sampling=replace(sampling_row.sampling, logprobs=count))
    logits = torch.tensor([values])
    [choice] = choose(Sampler(SUPPRESSED, "cpu"), logits, [sampling_row])
    expected = logits.log_softmax(-1)[0].tolist()
    assert choice.logprobs.logprob == expected[choice.token]
    ranked = sorted(range(VOCABULARY), key=lambda token: (-expected[token], token))
    assert choice.logprobs.top == tuple((token, expected[token]) for token in ranked[:count])


@pytest.mark.parametrize("temperature", [1e-45, 1e-300, 1e-6])
def test_the_coldest_temperatures_are_greedy(temperature: float) -> None:
    logits = torch.tensor([300.0, -4e4, 300.5, 299.0])
    assert set(tokens(logits, Sampling(temperature=temperature), [(seed, 0) for seed in range(50)])) == {2}


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")], ids=str)
@pytest.mark.parametrize("limits", [{}, {"top_p": 0.9}, {"top_k": 3, "top_p": 0.9}, {"top_k": 3, "min_p": 0.1}])
@pytest.mark.parametrize("count", [7, 8])
def test_logits_without_probabilities_give_no_token(count: int, limits: dict[str, Any], value: float) -> None:
    """The next pass, which reads the ids on the device before that is known, finds some that exist."""
    rows = [SamplingRow(Sampling(temperature=1.0, **limits), seed, 0) for seed in range(20)]
    pending = Sampler([], "cpu").launch(torch.full((20, count), value), rows)
    assert set(pending.tokens.tolist()) <= set(range(count))
    chosen, _ = pending.wait()
    assert chosen == (pending.tokens.tolist() if value < 0 else [NO_TOKEN] * 20)  # below: all are forbidden


def test_a_penalty_needs_what_was_seen() -> None:
    with pytest.raises(ValueError, match="ids seen so far"):
        choose(Sampler([], "cpu"), torch.zeros(1, 4), [SamplingRow(Sampling(repetition_penalty=1.2), 0, 0)])


SHARES = st.sampled_from([0.0, 0.1, 0.5, 0.999])


@settings(max_examples=5)  # the interpreter is slow
@given(st.integers(0, 2**32), st.sampled_from([2, 100, 5000]), st.sampled_from([1e-5, 0.5, 2.0]), SHARES)
def test_the_kernels_sums_are_those_of_pytorch(seed: int, vocabulary: int, step: float, share: float) -> None:
    drawn = np.random.default_rng(seed).normal(0, 3, (2, vocabulary))
    scores = torch.tensor(np.round(drawn / step) * step, dtype=torch.float32, device=DEVICE)
    scores[0, ::2] = float("-inf")
    results = []
    for weights in (VocabularyWeights(scores), TritonVocabulary(scores)):
        sums = weights.of(scores).sum(-1, keepdim=True)
        least, before = weights.search((sums * share).long())
        limits = Cutoff(least, torch.full_like(sums, vocabulary // 2))
        block = torch.full_like(sums, vocabulary // 2 // BLOCK)
        results.append((least, before, weights.ties(least), weights.by_block(limits), weights.of_block(limits, block)))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)  # exp() is rounded differently


@pytest.mark.gpu
def test_a_gpu_chooses_the_same_tokens() -> None:
    """Launched step by step, or replayed."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(150, 262_208, generator=generator) * 4
    kinds = [*CASES, Sampling(logprobs=5), Sampling(temperature=1.0, logprobs=20)]
    rows = [SamplingRow(kinds[index % len(kinds)], index, index, list(range(0, 9000, 7))) for index in range(150)]
    expected = choose(Sampler([0, 262_144], "cpu"), logits, rows)
    plain, recorded = (Sampler([0, 262_144], "cuda") for _ in range(2))
    recorded.record(GraphRecorder(torch.device("cuda")), 262_208, 128)
    for sampler, count in ((plain, 150), (recorded, 150), (recorded, 7), (recorded, 40)):
        chosen = choose(sampler, logits[:count].cuda(), rows[:count])
        assert [item.token for item in chosen] == [item.token for item in expected[:count]]
        for item, reference in zip(chosen, expected, strict=False):
            assert (item.logprobs is None) == (reference.logprobs is None)
            if item.logprobs is not None and reference.logprobs is not None:
                assert [token for token, _ in item.logprobs.top] == [token for token, _ in reference.logprobs.top]
                assert item.logprobs.logprob == pytest.approx(reference.logprobs.logprob, abs=1e-4)
