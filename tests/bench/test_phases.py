"""The phase measurement: one configuration on the tiny shape, the processes of several, and what is refused."""

import json
from pathlib import Path

import pytest
from benchmarks import phases_worker
from benchmarks.phases import Configuration, Job, main, run_jobs

from panscan.core import SettingError


def test_a_configuration_is_measured_phase_by_phase(tmp_path: Path) -> None:
    place = tmp_path / "part.json"
    words = f"tiny:int8:1 --device cpu --requests 3 --output-tokens 4 --pages 1 --output {place}"
    assert phases_worker.main(words.split()) == 0
    part = json.loads(place.read_text())
    assert part["settings"]["quantization"] == "int8" and part["weight_bytes"] > 0
    assert [each["views"] for each in part["long_prompts"]] == [1, 4]
    assert all(each["prefill_ms"]["median"] > 0 for each in part["long_prompts"])
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
    run_jobs(jobs, 2, lambda: saves.append(sum("gpus" in each.found() for each in jobs.values())))
    found = {name: each.found() for name, each in jobs.items()}
    assert {found[name]["gpus"] for name in ("first", "failing")} == {"0", "1"}
    assert found["both"]["gpus"] == "0,1" and found["both"]["at"] > found["hanging"]["at"]
    errors = [found[name]["error"] for name in ("first", "failing", "hanging")]
    assert errors == [None, "exit status 3", "killed after 2 s"]
    assert found["unwritten"] == {"error": None}
    assert saves[-1] == 4 and len(saves) > 2


@pytest.mark.parametrize("text", ["27b", "27b:int2:1", "28b:fp8:1", "27b:fp8:two"])
def test_a_configuration_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="SHAPE:bf16"):
        Configuration.of(text)


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="--gpus 1: a configuration needs 2"):
        main(["--configurations", "4b:fp8:2", "--output", str(tmp_path / "phases.json")])
