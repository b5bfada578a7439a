"""The workloads of ``benchmarks/``: they run on the tiny model, and their figures are what made-up stamps say."""

import json
import shlex
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest
from benchmarks import phases_worker
from benchmarks.phases import Configuration, Job, main, run_jobs
from benchmarks.workloads.common import RequestSeeds, ask, open_runners, parse, verdicts
from benchmarks.workloads.figures import decode_window, idle_share, latencies, stage_means, step_ms
from benchmarks.workloads.floors import Floors, ratios
from benchmarks.workloads.pages import question
from benchmarks.workloads.w2 import orders
from hypothesis import given
from hypothesis import strategies as st
from tests.analysis.test_floors import SMALL, requests_of, run_with
from tests.small_models import TOKENIZER

from panscan.analysis.floors import floor_of
from panscan.core import Request, Result, SettingError, Stamps
from panscan.model.prompt import PromptWriter
from panscan.model.shapes import SHAPES
from panscan.plan.cost import RequestCounts, Roofline, Variant

PARTS = {
    "w1": {"throughput", "alone", "decode", "vision", "decisions", "ratios"},
    "w2": {"image_major", "round_robin", "all_cached", "follow_up"},
    "traffic": {"turns", "ratio_to_greedy"},
}


def result(accepted: float, tokens: Sequence[float]) -> Result:
    stamps = Stamps(accepted, tokens=list(tokens))
    return Result("r", "", [1] * len(tokens), "length", 4, 3, 256, 300, stamps)


@pytest.mark.parametrize("name", PARTS)
def test_a_workload_writes_its_record(name: str, tmp_path: Path) -> None:
    place = tmp_path / "new" / "record.json"
    words = "--model tiny --dtype fp32 --device cpu --num-requests 4 --max-new-tokens 4 --repeats 1"
    more = {"w1": "--runner engine,generate --compared 1", "w2": "--compared 0", "traffic": "--compared 0 --brief"}
    words += f" {more[name]} --output {place}"
    assert import_module(f"benchmarks.workloads.{name}").main(words.split()) == 0
    record = json.loads(place.read_text())
    assert record["measured"]["engine"].keys() == PARTS[name]
    assert record["settings"]["ignore_eos"] and record["settings"]["max_new_tokens"] == 4
    assert record["command"].endswith(words)
    if name == "w1":
        assert record["measured"].keys() == record["verdict"].keys() == {"engine", "generate"}
        assert record["verdict"]["engine"]["verdict"] == "exact"
        assert record["work"]["prompt_tokens"] - record["work"]["image_tokens"] == 78
        assert record["measured"]["engine"]["throughput"][0]["cached_share"] == 0
        assert [row["batch"] for row in record["measured"]["engine"]["decode"]] == [1, 4]
        assert all(row["steps"] > 0 for row in record["measured"]["engine"]["decode"])
        assert [row["views"] for row in record["measured"]["engine"]["vision"]] == [4]  # four pages are not 32 views
    if name == "traffic":  # the kinds that vLLM answers, too
        assert [*record["measured"]["engine"]["turns"]] == ["greedy", "gemma_defaults", "json"]
    if name == "w2":
        assert record["verdict"] == {"engine": None}
        assert record["measured"]["engine"]["all_cached"][0]["cached_share"] > 0.5


def test_quantised_runs_read_an_unquantised_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model tiny --dtype fp32 --device cpu --num-requests 2 --max-new-tokens 2 --compared 1 --output x"
    by_kind = {}
    for kind in ("none", "int8"):
        line = [*words.split(), "--quantization", kind, "--references", str(tmp_path)]
        work = parse("w1", "", line, requests=2)
        runners = open_runners(work)
        requests = ask(work, runners["engine"].loaded, [RequestSeeds(seed, seed) for seed in range(2)])
        by_kind[kind] = verdicts(work, runners, requests)["engine"]
        runners["engine"].close()
    assert [verdict["verdict"] for verdict in by_kind.values()] == ["exact", "different"]
    assert by_kind["none"]["truth"] == by_kind["int8"]["truth"]
    assert capsys.readouterr().err.count("computing the reference") == 1


def test_what_the_user_says_wins_over_what_the_workload_sets() -> None:
    words = ["--output", "x", *shlex.split("--max-num-seqs 64 --prefix-caching=false --kv-cache-gb 2")]
    words.append("--do-pan-and-scan=false")
    settings = parse("w1", "", words, requests=4, max_num_seqs=128).settings
    assert (settings.max_num_seqs, settings.prefix_caching, settings.kv_cache_gb) == (64, False, 2.0)
    assert not settings.do_pan_and_scan and settings.ignore_eos


@pytest.mark.parametrize("words", ["--max-nw-seqs 4", "4", "--runner vlm", "--runner engine,vllm", "--num-requests 1"])
def test_a_wrong_command_line_is_refused(words: str) -> None:
    with pytest.raises(SettingError):
        parse("w1", "", ["--output", "x", *words.split()], requests=4)


@pytest.mark.parametrize("image_tokens", [64, 256])
def test_prompts_have_the_stated_number_of_tokens(image_tokens: int) -> None:
    prompts = PromptWriter(TOKENIZER, image_tokens)
    texts = {seed: question(prompts, seed, crops=3, text_tokens=78) for seed in range(8)}
    assert len(set(texts.values())) == 8
    for text in texts.values():
        prompt = prompts.write(Request(prompt=text, images=["page"]), [3])
        assert len(prompt.ids) == 78 + 4 * image_tokens
    with pytest.raises(SettingError, match="not to be had"):
        question(prompts, 0, crops=3, text_tokens=20)


def test_a_step_is_timed_where_all_decode() -> None:
    """The first request's early steps ride in the other's prefill and are slow; its last ones come after the other."""
    first = Stamps(0.0, tokens=[1.0, 2.0, 3.0, 3.5, 4.0, 4.5, 4.6])
    other = Stamps(0.0, tokens=[3.0, 3.5, 4.0, 4.5])
    assert decode_window([first, other]) == (3.0, 4.5)
    assert step_ms([first, other]) == step_ms([other, first]) == (pytest.approx(500.0), 3)
    apart = [Stamps(0.0, tokens=[1.0, 2.0]), Stamps(0.0, tokens=[3.0, 4.0])]
    assert decode_window(apart) is step_ms(apart) is None


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), min_size=1, max_size=12))
def test_idle_is_what_no_interval_covers(drawn: list[tuple[int, int]]) -> None:
    intervals = [(float(start), float(start + length)) for start, length in drawn]
    covered = {at for start, length in drawn for at in range(start, start + length)}
    span = range(min(start for start, _ in drawn), max(start + length for start, length in drawn))
    assert idle_share(intervals) == pytest.approx(1 - len(covered) / len(span))
    assert idle_share([]) is None and idle_share([(1.0, 1.0)]) is None


def test_latencies_by_hand() -> None:
    results = [result(0.0, [0.1, 0.2, 0.3]), result(1.0, [1.4]), result(2.0, [5.0, 5.01])]
    percentiles = latencies(results)
    assert percentiles["ttft_ms"] == pytest.approx({"p50": 400, "p95": 400 + 0.9 * 2600, "p99": 400 + 0.98 * 2600})
    assert percentiles["e2e_ms"] == pytest.approx({"p50": 400, "p95": 400 + 0.9 * 2610, "p99": 400 + 0.98 * 2610})
    assert percentiles["tpot_ms"] == pytest.approx({"p50": 55, "p95": 10 + 0.95 * 90, "p99": 10 + 0.99 * 90})


def test_a_result_without_a_stage_spent_no_time_in_it() -> None:
    seen, unseen = result(0.0, [1.0]), result(0.0, [1.0])
    seen.stamps.vision_start, seen.stamps.vision = 0.2, 0.6
    assert stage_means([seen, unseen])["vision"] == pytest.approx(200)


SIZES = st.integers(1, 40)


@given(SIZES, SIZES, st.integers(2, 12), st.integers(1, 6), st.sampled_from([1e3, 1e6, 1e9]))
def test_floors_are_those_of_the_bench(views: int, prompt: int, outputs: int, batch: int, bytes_per_s: float) -> None:
    """As ``panscan bench`` counts a batch, where neither tower nor prompt is bound by reading its weights."""
    machine = {"flops_per_s": 1.0, "bytes_per_s": bytes_per_s}
    requests = requests_of([[(views, prompt, outputs)] * batch])
    bench = floor_of(run_with(requests, SMALL, **machine), "c")
    roofline = Roofline(Variant(SMALL, dtype="fp32"), 1.0, bytes_per_s, 4 * SMALL.parameters())
    floors = Floors(roofline, RequestCounts(views, prompt, outputs))
    assert floors.e2e_ms(batch) == pytest.approx(bench.e2e_ms)
    assert floors.requests_per_s(batch) == pytest.approx(bench.request_throughput)


@given(SIZES, st.integers(2, 200), st.integers(1, 200), st.sampled_from(["4b", "12b", "27b"]))
def test_riding_along_never_takes_longer(views: int, outputs: int, batch: int, shape: str) -> None:
    variant = Variant(SHAPES[shape])
    roofline = Roofline(variant, 7e14, 4e12, variant.weight_bytes())
    floors = Floors(roofline, RequestCounts(views, 256 * views + 78, outputs))
    assert floors.requests_per_s_riding(batch) >= floors.requests_per_s(batch)
    assert floors.step_ms(batch) >= 1e3 * 2 * SHAPES[shape].text.parameters() / 4e12


def test_ratios_say_how_many_times_the_floor() -> None:
    floors = {"requests_per_s": 8.0, "requests_per_s_riding": 10.0, "ttft_ms": 100.0, "step_ms_64": 20.0}
    multiples = ratios({"requests_per_s": 4.0, "ttft_ms": 150.0, "step_ms_64": None}, floors)
    assert multiples == {"requests_per_s": 2.0, "requests_per_s_riding": 2.5, "ttft_ms": 1.5}


def test_both_orders_ask_the_same() -> None:
    by_order = orders(12)
    assert sorted(map(repr, by_order["image_major"])) == sorted(map(repr, by_order["round_robin"]))
    assert [request.page for request in by_order["image_major"]] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert [request.page for request in by_order["round_robin"]] == [0, 1, 2] * 4
    assert len({request.question for request in by_order["image_major"]}) == 12


# The phase measurement: one configuration on the tiny shape, the processes of several, and what is refused.


def test_a_configuration_is_measured_phase_by_phase(tmp_path: Path) -> None:
    place = tmp_path / "part.json"
    words = f"tiny:int8:1 --device cpu --requests 3 --output-tokens 4 --pages 1 --output {place}"
    assert phases_worker.main(words.split()) == 0
    part = json.loads(place.read_text())
    assert part["settings"]["quantization"] == "int8" and part["weight_bytes"] > 0
    assert [row["views"] for row in part["long_prompts"]] == [1, 4]
    assert all(row["prefill_ms"]["median"] > 0 for row in part["long_prompts"])
    assert part["alone"]["step"]["batch"] == 1 and part["decode"]["batch"] == part["w1"]["step"]["batch"] == 3
    ends, tokens = zip(*part["w1"]["passes"], strict=True)
    assert list(ends) == sorted(ends) and sum(tokens) == 3 * 4
    assert part["work"]["views"] == 4 and part["work"]["output_tokens"] == 4


def test_processes_share_the_gpus_and_keep_what_they_wrote(tmp_path: Path) -> None:
    write = "import json, os, sys, time; gpus = os.environ['CUDA_VISIBLE_DEVICES'];"
    write += "json.dump({'gpus': gpus, 'at': time.monotonic()}, open(sys.argv[1], 'w'));"

    def job(name: str, gpus: int, then: str, seconds: float = 60) -> Job:
        part = tmp_path / f"{name}.json"
        return Job(["-c", write + then, str(part)], gpus, seconds, part)

    jobs = {
        "first": job("first", 1, ""),
        "failing": job("failing", 1, "sys.exit(3)"),
        "hanging": job("hanging", 1, "time.sleep(1000)", seconds=2),
        "both": job("both", 2, ""),
        "unwritten": Job(["-c", ""], 1, 60, tmp_path / "unwritten.json"),
    }
    saves: list[int] = []
    run_jobs(jobs, 2, lambda: saves.append(sum("gpus" in job.result() for job in jobs.values())))
    results = {name: job.result() for name, job in jobs.items()}
    assert {results[name]["gpus"] for name in ("first", "failing")} == {"0", "1"}
    assert results["both"]["gpus"] == "0,1" and results["both"]["at"] > results["hanging"]["at"]
    errors = [results[name]["error"] for name in ("first", "failing", "hanging")]
    assert errors == [None, "exit status 3", "killed after 2 s"]
    assert results["unwritten"] == {"error": None}
    assert saves[-1] == 4 and len(saves) > 2


@pytest.mark.parametrize("text", ["27b", "27b:int2:1", "28b:fp8:1", "27b:fp8:two"])
def test_a_configuration_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="SHAPE:bf16"):
        Configuration.of(text)


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="--gpus 1: a configuration needs 2"):
        main(["--configurations", "4b:fp8:2", "--output", str(tmp_path / "phases.json")])
