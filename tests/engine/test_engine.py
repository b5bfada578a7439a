"""The engine as users call it: offline, as a stream, cancelled, and with requests that cannot be answered."""

import gc
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import noise
from tests.engine.driving import BOI, SHORT, TOKENS, Driver, Reference, crops, requests
from tests.forked_workers import program

from panscan import GenerateRunner, Request, Result, Sampling, core
from panscan.core import ContextLengthError, ImageError, PanscanError, PanscanWarning, SettingError, UnsupportedError
from panscan.core.sampling import REST_OF_CONTEXT
from panscan.engine.engine import Engine
from panscan.engine.model_runner import ModelRunner
from panscan.engine.options import EngineOptions
from panscan.model.inputs import plan_request, read_images
from panscan.model.observation import ForcedTokens, sample_image_positions

SMALL: dict[str, Any] = {"kv_cache_gb": 0.01}
ENDLESS = replace(requests()[3], sampling=Sampling(max_new_tokens=500, ignore_eos=True))


@pytest.fixture
def engine(tiny: GenerateRunner) -> Iterator[Engine]:
    """An engine of the tiny model; it must hold nothing afterwards."""
    with Engine(tiny.loaded, EngineOptions(**SMALL)) as opened:
        yield opened
        stats = opened.stats()
        assert (stats.running, stats.waiting, stats.kv_slabs_used) == (0, 0, 0)


def tokens(results: list[Result]) -> list[list[int]]:
    return [result.token_ids for result in results]


def test_a_bad_request_fails_alone(engine: Engine, reference: Reference, tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\nno")
    fine = requests()[3]
    bad = {
        "no such file": (Request("What?", [tmp_path / "none.png"]), ImageError, "none.png"),
        "damaged": (Request("What?", [broken]), ImageError, "broken.png"),
        "placeholders": (Request(f"{BOI} {BOI}", fine.images, raw=True), SettingError, "2 image placeholder"),
        "too long": (Request("word " * 9000, sampling=SHORT), SettingError, "--kv-cache-gb"),
        "too many images": (Request("What?", [*fine.images] * 120, sampling=SHORT), SettingError, "120 views"),
        "too long an answer": (Request("Hi", sampling=Sampling(max_new_tokens=30_000)), SettingError, "max-new-tokens"),
        "context": (Request("word " * 33_000), SettingError, "context length is 32768"),
    }
    asked = [fine, *(replace(request, id=name) for name, (request, _, _) in bad.items()), requests()[1]]
    results = engine.generate(asked)
    assert tokens(results)[0] == reference(fine).token_ids
    assert tokens(results)[-1] == reference(requests()[1]).token_ids
    for result in results[1:-1]:
        _, kind, words = bad[result.id]
        assert isinstance(result.error, kind) and words in str(result.error), result.id
        assert "\n" not in str(result.error)
        assert (result.finish_reason, result.token_ids, result.text) == ("error", [], "")
    assert tokens(engine.generate([fine])) == [reference(fine).token_ids]


def test_an_answer_may_fill_the_kv_cache(tiny: GenerateRunner) -> None:
    """An answer without a length ends where the cache or the context does; one of a length that does not fit fails."""
    sampling = Sampling(REST_OF_CONTEXT, ignore_eos=True)
    with Engine(tiny.loaded, EngineOptions(kv_cache_gb=0.0005)) as engine:
        [result] = engine.generate([Request("Hi", sampling=sampling)])
        total = result.prompt_tokens + result.output_tokens
        assert result.finish_reason == "length" and result.error is None
        long, longest = Sampling(result.output_tokens + 1), Request("word " * total, sampling=sampling)
        [refused, longer] = engine.generate([Request("Hi", sampling=long), longest])
    assert f"the KV cache holds {total} tokens of one request" in str(refused.error)
    assert isinstance(longer.error, ContextLengthError)
    assert f"this model's maximum context length is {total} tokens in this KV cache" in str(longer.error)


def test_a_vision_cache_too_small_for_a_view(tiny: GenerateRunner, reference: Reference) -> None:
    with Engine(tiny.loaded, EngineOptions(**SMALL, vision_cache_gb=1e-6)) as engine:
        seen, read = engine.generate([requests()[3], requests()[1]])
        assert isinstance(seen.error, SettingError)
        [least] = re.findall(r"--vision-cache-gb .* raise it to at least (\S+) GB", str(seen.error))
        assert read.token_ids == reference(requests()[1]).token_ids
        assert engine.stats().kv_slabs_used == 0
    with Engine(tiny.loaded, EngineOptions(**SMALL, vision_cache_gb=float(least))) as engine:
        assert tokens(engine.generate([requests()[3]])) == [reference(requests()[3]).token_ids]


@pytest.mark.parametrize("overlap", [False, True])
def test_prompt_tokens_are_counted_once(tiny: GenerateRunner, overlap: bool) -> None:
    """Also where a row of a request is under way that has ended."""
    driver = Driver(tiny, EngineOptions(**SMALL, overlap=overlap, prefix_caching=False))
    stopped = replace(requests()[3], sampling=replace(requests()[3].sampling, stop=("a", "e", "i", "o", "t", " ")))
    driven = [driver.add(request) for request in (stopped, requests()[0])]
    driver.run()
    assert driven[0].results[0].finish_reason == "stop"
    assert driver.loop.stats().prompt_tokens == sum(state.results[0].prompt_tokens for state in driven)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_pass_ends_only_its_newcomers(tiny: GenerateRunner, reference: Reference, overlap: bool) -> None:
    """A model that raises at one token: requests that decode keep tokens and cache, and so do later ones."""
    driver = Driver(tiny, EngineOptions(**SMALL, overlap=overlap))
    poison = tiny.loaded.reader.tokenizer.encode("%", add_special_tokens=False)[-1]

    def check(_module: Any, inputs: tuple[torch.Tensor]) -> None:
        if (inputs[0] == poison).any():
            raise ValueError("poison")

    hook = tiny.loaded.model.get_input_embeddings().register_forward_pre_hook(check)
    try:
        first = driver.add(requests()[3])
        driver.run(lambda: len(first.tokens) == 3)
        bad = driver.add(replace(requests()[4], prompt="100%?"))
        driver.step()
        later = driver.add(requests()[4])
        driver.run()
    finally:
        hook.remove()
    assert first.results[0].token_ids == reference(requests()[3]).token_ids
    assert later.results[0].token_ids == reference(requests()[4]).token_ids
    [failed] = bad.results
    assert failed.finish_reason == "error" and "ValueError: poison" in str(failed.error)
    assert driver.used == 0


def test_requests_are_drawn_as_others_finish(engine: Engine) -> None:
    drawn, finished = 0, 0

    def source() -> Iterator[Request]:
        nonlocal drawn
        for place in range(12):
            drawn += 1
            assert drawn - finished <= 3
            yield requests()[place % 3]

    for _ in engine.stream_results(source(), max_concurrency=3):
        finished += 1
    assert finished == 12


def test_leaving_early_cancels_what_is_in_flight(engine: Engine, reference: Reference) -> None:
    due = [reference(requests()[place]).token_ids for place in (0, 3)]  # while no other runner has the model
    results = engine.stream_results([requests()[0], ENDLESS, ENDLESS])
    index, result = next(results)
    assert (index, result.token_ids) == (0, due[0])
    results.close()  # type: ignore[attr-defined]  # a generator
    assert tokens(engine.generate([requests()[3]])) == [due[1]]


def test_closing_frees_the_model_and_the_cache_of_an_engine_that_is_still_referred_to() -> None:
    with Engine.from_pretrained("tiny", dtype="fp32", device="cpu", kv_cache_gb=0.01) as engine:
        engine.generate([requests()[3]])
        held = [weakref.ref(engine.loaded.model), weakref.ref(engine._worker.loop.runner)]
    gc.collect()
    assert [reference() for reference in held] == [None, None]
    assert engine.waiting == 0 and engine.decisions
    with pytest.raises(PanscanError, match="closed"):
        engine.count(requests()[0])


def test_contents_count_and_not_names(engine: Engine, reference: Reference, tmp_path: Path) -> None:
    """Another picture under the same path is another picture; the same one from a path is the same."""
    path, page = tmp_path / "page.png", requests()[3].images[0]
    page.save(path)
    asked = replace(requests()[3], images=[path])
    [first] = engine.generate([requests()[3]])
    encoded = engine.stats().views_encoded
    [copy] = engine.generate([asked])
    assert copy.token_ids == first.token_ids and copy.cached_tokens > 0
    assert engine.stats().views_encoded == encoded
    noise(*page.size, seed=99).save(path)
    [changed] = engine.generate([asked])
    assert changed.token_ids == reference(replace(asked, id="changed")).token_ids != first.token_ids
    assert changed.cached_tokens < 64


def test_ends_at_texts_and_tokens(engine: Engine, reference: Reference) -> None:
    request = requests()[4]
    due = reference(request)
    piece = due.text[len(due.text) // 2 :][:3]
    stop = replace(request, sampling=replace(SHORT, stop=(piece,)))
    at = replace(request, sampling=replace(SHORT, stop_token_ids=(due.token_ids[5],)))
    stopped, ended, plain = engine.generate([stop, at, request])
    assert stopped.finish_reason == "stop" and stopped.text == due.text[: due.text.index(piece)]
    assert stopped.token_ids == due.token_ids[: stopped.output_tokens]
    first = due.token_ids.index(due.token_ids[5])
    assert ended.finish_reason == "stop" and ended.token_ids == due.token_ids[: first + 1]
    assert plain.token_ids == due.token_ids and plain.logprobs is None


def test_drawn_tokens_depend_on_the_seed_alone(engine: Engine) -> None:
    """Whatever else runs. Requests without a seed get different ones."""
    how = Sampling(max_new_tokens=TOKENS, temperature=1.5, top_p=0.95)
    asked = [replace(requests()[1], sampling=replace(how, seed=seed)) for seed in (7, 7, 8, None, None)]
    first, same, *others = map(tuple, tokens(engine.generate(asked)))
    assert first == same and len({first, *others}) == 4


@pytest.mark.parametrize(("kind", "gigabytes", "close"), [("auto", 0.0025, 1e-4), ("int8", 0.0008, 2e-2)])
def test_preempted_requests_are_observed_once(tiny: GenerateRunner, kind: str, gigabytes: float, close: float) -> None:
    """Its prompt is computed twice, and seen once. Noise may move a value to the next integer."""
    loaded = tiny.loaded
    asked = [requests()[place] for place in (2, 10, 13) * 3]
    prompts = [plan_request(read_images(request), loaded.reader)[1].ids for request in asked]
    places = [sample_image_positions(ids, loaded.reader.prompts.soft_id) for ids in prompts]
    forced = [ForcedTokens([7 + place, *range(20, 59)], positions, 40) for place, positions in enumerate(places)]
    small = EngineOptions(kv_cache_gb=gigabytes, kv_cache_dtype=kind, block_size=1, max_num_seqs=32)
    with Engine(loaded, small) as engine:
        seen = engine.observe(asked, forced)
        assert engine.stats().preemptions > 0
    with Engine(loaded, EngineOptions(**SMALL, kv_cache_dtype=kind)) as engine:
        due = engine.observe(asked, forced)
        assert engine.stats().preemptions == 0
    for actual, expected in zip(seen, due, strict=True):
        torch.testing.assert_close(actual.image, expected.image, rtol=close, atol=close)
        torch.testing.assert_close(actual.answer, expected.answer, rtol=close, atol=close)


def test_prompts_have_the_log_probabilities_of_observed_positions(tiny: GenerateRunner) -> None:
    """In chunks, after preemption, beside requests that want none, and a second time, when prefixes are cached."""
    loaded = tiny.loaded
    asked = [requests()[place] for place in (2, 10, 13)]
    prompts = [plan_request(read_images(request), loaded.reader)[1].ids for request in asked]
    forced = [ForcedTokens([7], [*range(len(ids) - 1)], 1) for ids in prompts]
    with Engine(loaded, EngineOptions(**SMALL)) as engine:
        due = [observed.image.log_softmax(-1) for observed in engine.observe(asked, forced)]  # type: ignore[union-attr]
    counts = [None, 0, 3]
    scored = [
        replace(request, sampling=Sampling(20, prompt_logprobs=count, ignore_eos=True))
        for request, count in zip(asked, counts, strict=True)
    ]
    with Engine(loaded, EngineOptions(kv_cache_gb=0.001, block_size=1, prefill_chunk_size=80)) as engine:
        results = [*engine.generate(scored), *engine.generate(scored)]
        assert engine.stats().preemptions > 0
    for result, ids, values, count in zip(results, prompts * 2, due * 2, counts * 2, strict=True):
        if count is None:
            assert result.prompt_logprobs is result.prompt_ids is None
            continue
        assert result.prompt_ids == ids and result.prompt_logprobs is not None and result.prompt_logprobs[0] is None
        for token, row, entry in zip(ids[1:], values, result.prompt_logprobs[1:], strict=True):
            assert entry is not None and entry.logprob == pytest.approx(float(row[token]), abs=1e-3)
            assert abs(entry.rank - 1 - int((row > row[token]).sum())) <= 1
            assert [value for _, value in entry.top] == pytest.approx(row.topk(count).values.tolist(), abs=1e-3)
            assert all(float(row[top]) == pytest.approx(value, abs=1e-3) for top, value in entry.top)


def test_opening_by_name(tmp_path: Path) -> None:
    preset = tmp_path / "mine.yaml"
    preset.write_text("pan_and_scan_max_num_crops: 2\nmax_new_tokens: 3\nkv_cache_gb: 0.01\n")
    page = noise(700, 100)
    with Engine.from_pretrained("tiny", preset=str(preset), dtype="fp32", device="cpu", min_crop_size=50) as engine:
        assert engine.settings.runner == "engine"
        [result] = engine.generate([engine.request("What?", [page])])
        assert (result.views, result.output_tokens) == (3, 3)
        [more] = engine.generate([engine.request("What?", [page], pan_and_scan=crops(4))])
        assert more.views == 5
    preset.write_text("max_new_tokens: 2\nbatch_size: [4, 8]\n")
    with (
        pytest.warns(PanscanWarning, match="ignoring batch_size: not supported by the engine"),
        pytest.warns(core.DemonstrationModelWarning, match="tiny is a demonstration model: its weights are random"),
    ):
        Engine.from_pretrained("tiny", preset=str(preset), dtype="fp32", device="cpu", kv_cache_gb=0.01).close()
    preset.write_text("max_new_tokens: [3, 4]\n")
    for error, message, given in (
        (SettingError, "runner: expected 'engine', got 'generate'", {"runner": "generate"}),
        (SettingError, "one max_new_tokens", {"preset": str(preset)}),
        (SettingError, "max_num_seqs", {"max_num_seq": 3}),
        (SettingError, "max_queued_requests is out of range", {"device": "cpu", "max_queued_requests": -1}),
        (UnsupportedError, "--cache must stay at dynamic", {"cache": "static"}),
    ):
        with pytest.raises(error, match=message):
            Engine.from_pretrained("tiny", **given)


def test_what_is_no_request_is_refused_by_name(engine: Engine) -> None:
    for odd in (None, [None], "What?", Request("What?"), [Request("x"), {"prompt": "x"}], 3):
        with pytest.raises(SettingError, match=r"must be a (panscan\.Request|list of panscan\.Request), got"):
            engine.generate(odd)
    with pytest.raises(SettingError, match="max_concurrency is out of range"):
        list(engine.stream_results([Request("x")], max_concurrency=-1))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("a bug"), torch.OutOfMemoryError("no memory")])
def test_a_failed_start_leaves_nothing(
    tiny: GenerateRunner, reference: Reference, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """However it fails, no limit and no thread. A CPU has no limit: a function that is called on the way out stands for
    it."""
    lifted: list[str] = []

    def start(runner: ModelRunner) -> None:
        runner._closing.callback(lifted.append, "limit")
        raise error

    due = reference(requests()[0]).token_ids
    expected = UnsupportedError if isinstance(error, torch.OutOfMemoryError) else type(error)
    before = set(threading.enumerate())
    with monkeypatch.context() as patched, pytest.raises(expected) as caught:
        patched.setattr(ModelRunner, "_start", start)
        Engine(tiny.loaded, EngineOptions(**SMALL))
    assert lifted == ["limit"]
    assert set(threading.enumerate()) <= before  # those of an earlier test may end meanwhile
    with Engine(tiny.loaded, EngineOptions(**SMALL)) as engine:
        assert tokens(engine.generate([requests()[0]])) == [due], "the model is usable"
    if expected is UnsupportedError:
        assert "out of memory at engine startup: lower --kv-cache-gb" in str(caught.value)


def test_a_cpu_launches_layers_one_by_one_and_overlaps_nothing(tiny: GenerateRunner) -> None:
    """Closing undoes what the start did, once."""
    undone: list[str] = []
    with Engine(tiny.loaded, EngineOptions(kv_cache_gb=0.05)) as engine:
        runner = engine._worker.loop.runner
        assert isinstance(runner, ModelRunner) and runner.graphs is None
        assert not runner.facts.overlaps
        runner._closing.callback(undone.append, "limit")
        attention, layers, resizing, cache = engine.decisions
    runner.stop()
    assert undone == ["limit"]
    assert attention == "attention: sdpa (not on an NVIDIA GPU)"
    assert layers == "layers: launched one by one (not on an NVIDIA GPU)"
    assert resizing == "view resizing: Pillow on the host (not on an NVIDIA GPU)"
    assert cache.startswith("KV cache: ")


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_is_kept_for_the_next_pass() -> None:
    code = """
import resource, numpy
from panscan.model.machine import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    numpy.ones(20 << 20, numpy.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
print(faults(), faults())
"""
    first, second = map(int, subprocess.check_output(program(code), text=True).split())
    assert second < first / 4
