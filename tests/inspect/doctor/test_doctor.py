"""``panscan doctor``: checks that do not take others with them, judgements of facts, checks of Gemma 3."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from tests.conftest import documented, needs_images_in_chunks
from tests.inspect.doctor.odd_checks import ROOT, odd

from panscan.cli.main import run
from panscan.core.activity import Activity
from panscan.core.child import Child
from panscan.inspect.doctor import gemma
from panscan.inspect.doctor.checks import CHECKS, GROUPS, CheckFinding
from panscan.inspect.doctor.gpu import Driver, build_finding, ceilings_finding, pci_gpus
from panscan.inspect.doctor.host import cores_finding, fit_finding, read_limits
from panscan.inspect.doctor.run import run_checks
from panscan.model.attention_masks import LayerKind, measured_mask
from panscan.plan.gpus import Gpu, gpu_named
from panscan.runners.generate_check import AttentionFacts, attention_facts, chunked_prefill, tiny_model


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes of lanes import the checks of this directory."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, sys.path)]))


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the checks that have begun, as the progress line shows them."""
    names: list[str] = []
    monkeypatch.setattr(Activity, "rename", lambda _, text: names.append(text.removeprefix("running ")))
    return names


def test_each_check_has_its_result_whatever_the_others_do(begun: list[str]) -> None:
    checks = [
        odd("fine"),
        odd("hangs", seconds=0.5),
        odd("fails"),
        odd("crashes"),
        odd("again", function="fine"),
        odd("elsewhere", function="fine", lane="b"),
    ]
    fine, hung, failed, crashed, again, elsewhere = run_checks(checks, 120.0)
    for result in (fine, again, elsewhere):
        assert [finding.fact for finding in result.findings] == ["one", "two"]
        assert result.seconds is not None
    assert [finding.fact for finding in hung.findings] == ["before it hung", "the check did not finish within 0.5 s"]
    assert hung.findings[-1].status == "warning"
    assert hung.seconds is None
    assert [finding.fact for finding in failed.findings] == ["the check failed: ValueError: two lines"]
    assert failed.findings[0].status == "not checked"
    [crash] = crashed.findings
    assert crash.status == "warning"
    assert "SIGSEGV" in crash.fact
    assert "broken kernel" in crash.fact
    assert sorted(begun) == sorted(check.name for check in checks)


def test_a_lane_is_given_up_after_three_lost_processes() -> None:
    checks = [odd(str(number), function="leaves") for number in range(4)] + [odd("fine")]
    *lost, skipped, fine = run_checks(checks, 120.0)
    assert all("exited with code 3" in result.findings[0].fact for result in lost)
    for result in (skipped, fine):
        assert [finding.status for finding in result.findings] == ["not checked"]


def test_all_checks_together_have_a_deadline() -> None:
    hung, after, other = run_checks([odd("hangs"), odd("fine"), odd("other", function="hangs", lane="b")], timeout=4.0)
    for result in (hung, after, other):
        assert result.findings[-1].status == "not checked"
        assert "more than 4 s" in result.findings[-1].fact
        assert result.findings[-1].fix == "Raise --timeout."
    assert hung.findings[0].fact == "before it hung"


def test_no_lane_waits_for_the_end_of_a_process_of_another(begun: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is stuck in a driver does not end when it is killed."""
    waited: list[int] = []
    close = Child.close
    monkeypatch.setattr(Child, "close", lambda child: (waited.append(len(begun)), close(child)))
    checks = [odd("hangs", seconds=0.1), odd("fine"), odd("other", function="fine", lane="b")]
    results = run_checks(checks, 120.0)
    assert [result.findings[-1].status for result in results] == ["warning", "ok", "ok"]
    assert waited == [3, 3, 3]  # the processes of both lanes, and the one that hung, after all checks


# The command: what it prints, and how it exits.


def test_json_holds_every_finding_and_each_that_asks_for_action_has_a_fix(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--only", "host,gpus", "--json"]) == 0
    report = documented("doctor", capsys.readouterr().out)
    ran = {finding["check"] for finding in report["findings"]}
    assert ran == {check.name for check in CHECKS if check.group == "host"} | {"gpus"}
    assert sum(report["summary"].values()) == len(report["findings"])
    for finding in report["findings"]:
        assert finding["status"] not in ("warning", "problem") or finding["fix"]
        assert finding["seconds"] is not None


def test_a_problem_gives_exit_code_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A torchvision that belongs to another PyTorch raises an error on import."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text('raise RuntimeError("no operator torchvision::nms")\n')
    (tmp_path / "torchvision-0.1.dist-info").mkdir()
    (tmp_path / "torchvision-0.1.dist-info" / "METADATA").write_text("Name: torchvision\nVersion: 0.1\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    assert run(["doctor", "--only", "torchvision"]) == 4
    shown = capsys.readouterr().out
    assert "torchvision 0.1 does not work" in shown
    assert "torchvision::nms" in shown
    assert "1 problem, 0 warnings" in shown


def test_checks_have_unique_names_known_groups_and_existing_functions() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert {check.group for check in CHECKS} == set(GROUPS)


# The whole command on a machine with a GPU.


@pytest.mark.gpu
def test_doctor_reports_the_facts_of_every_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    facts = {check.name: [] for check in CHECKS}
    for finding in report["findings"]:
        assert finding["seconds"] is not None, finding
        facts[finding["check"]].append(finding["fact"])
    for index in range(torch.cuda.device_count()):
        assert any(torch.cuda.get_device_name(index) in fact for fact in facts["gpus"])
        assert any(fact.startswith(f"GPU {index}: ") and "TFLOP/s" in fact for fact in facts["ceilings"])
    assert any("this wheel has kernels for it" in fact for fact in facts["kernels"])
    assert facts["triton"] == ["a Triton kernel compiles and computes the correct result"]
    assert any("27b" in fact for fact in facts["sizes"])


# Judgements of facts whose right answer is known.


_DRIVER = Driver("570.86", (12, 8), 2)


BUILDS = [
    ("12.8", _DRIVER, 2, None, "ok", "built for CUDA 12.8"),
    (None, None, 0, None, "ok", "Gemma 3 runs on the CPU"),
    ("12.8", None, 0, "no driver", "ok", "Gemma 3 runs on the CPU"),
    (None, _DRIVER, 2, None, "problem", "cannot use this machine's 2 NVIDIA GPUs"),
    ("12.8", None, 1, "no driver", "problem", "no driver answers"),
    ("13.0", _DRIVER, 2, "too old", "problem", "supports CUDA up to 12.8"),
    ("12.8", _DRIVER, 2, "busy", "problem", "CUDA does not start: busy"),
]


@pytest.mark.parametrize(("cuda", "driver", "on_bus", "error", "status", "text"), BUILDS)
def test_pytorch_and_the_driver(
    cuda: str | None, driver: Driver | None, on_bus: int, error: str | None, status: str, text: str
) -> None:
    finding = build_finding("2.13.0", cuda, driver, on_bus, error)
    assert finding.status == status
    assert text in finding.fact


def test_a_gpu_is_compared_with_the_others_and_with_its_data_sheet() -> None:
    good, slow = (700e12, 4.2e12), (350e12, 4.2e12)
    finding = ceilings_finding(0, "NVIDIA H200", good, [good, slow])
    assert (finding.status, "88% of the data sheet's" in finding.fact) == ("ok", True)
    assert ceilings_finding(1, "NVIDIA H200", slow, [good, slow]).status == "warning"
    assert ceilings_finding(0, "Voodoo 2", slow, [slow]).status == "ok"


CONTAINERS = [
    ("cpu.max=150000 100000|memory.max=2000000000", 1.5, 2 * 10**9),
    ("cpu.max=max 100000|memory.max=max", None, None),
    (
        "memory.max=2000000000|memory.current=1000000000|memory.stat=anon 7,active_file 5,inactive_file 400000000",
        None,
        14 * 10**8,
    ),
    ("memory.max=2000000000|memory.stat=total_inactive_file 7", None, 2 * 10**9),
    ("cpu/cpu.cfs_quota_us=500", None, None),  # version 1
]


@pytest.mark.parametrize(("files", "cores", "free"), CONTAINERS)
def test_limits_of_a_container(tmp_path: Path, files: str, cores: float | None, free: int | None) -> None:
    for file in files.split("|"):
        name, content = file.split("=")
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content.replace(",", "\n") + "\n")
    assert read_limits(tmp_path) == (cores, free)


def test_few_cores_are_warnings() -> None:
    assert cores_finding(64, 64, None).status == "ok"
    throttled = cores_finding(64, 64, 4.0)
    assert throttled.status == "warning"
    assert "OMP_NUM_THREADS=4" in str(throttled.fix)
    assert cores_finding(2, 2, None).status == "warning"


def test_gpus_are_counted_on_the_pci_bus(tmp_path: Path) -> None:
    for number, (vendor, kind) in enumerate([("0x10de", "0x030200"), ("0x10de", "0x040300"), ("0x8086", "0x030000")]):
        device = tmp_path / str(number)
        device.mkdir()
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    assert pci_gpus(tmp_path) == 1
    assert pci_gpus(tmp_path / "none") is None


def _fit(size: str, gpu: str) -> CheckFinding:
    return fit_finding(size, gpu_named(gpu))


def test_sizes_that_fit() -> None:
    assert "with --dtype bf16:" in _fit("27b", "h200").fact
    assert "with --dtype bf16 --quantization int8" in _fit("27b", "a100-40gb").fact
    assert "--quantization" not in _fit("12b", "a100-40gb").fact
    small = Gpu("cpu", "cpu", 8 * 10**9, 1.0, MappingProxyType({"fp32": 1.0, "bf16": 1.0}), "", 1.0, None)
    assert fit_finding("27b", small).status == "warning"
    no_request = replace(gpu_named("rtx4090"), memory_bytes=23_600_000_000)  # beside int4 weights
    assert fit_finding("27b", no_request).fact.startswith("27b does not fit"), "weights, but not one request"
    assert "1 request of" in fit_finding("27b", replace(no_request, memory_bytes=24_200_000_000)).fact
    assert fit_finding("270m", small).status == "ok"


# Live checks of Transformers on the tiny model, and that they notice the faults that they are for.


def test_the_default_attention_is_right_and_causal_image_tokens_are_noticed() -> None:
    loaded = tiny_model(torch.device("cpu"))
    eager, sdpa = (attention_facts(loaded, name) for name in ("eager", "sdpa"))
    causal = attention_facts(loaded, "flash_attention_2", kernel=False)
    assert gemma.attention_finding("sdpa", sdpa, eager).status == "ok"
    wrong = gemma.attention_finding("sdpa", causal, eager)
    assert wrong.status == "problem"
    assert "image tokens are causal" in wrong.fact
    assert gemma.attention_finding("flash_attention_2", causal, eager).status == "warning"


def test_a_mask_that_lets_text_look_ahead_is_noticed() -> None:
    eager = attention_facts(tiny_model(torch.device("cpu")), "eager")
    image = np.arange(40) % 20 > 9  # text before and after each of two images

    def everything(values: torch.Tensor) -> dict[LayerKind, torch.Tensor]:
        mean = values.mean(0, keepdim=True).expand(values.shape)
        return {"global": mean, "local": mean}

    blind = AttentionFacts.of(measured_mask(everything, image, 128), image, eager.last)
    finding = gemma.attention_finding("eager", blind, eager)
    assert finding.status == "problem"
    assert "later tokens" in finding.fact


def test_final_states_that_differ_from_those_of_eager_attention_are_noticed() -> None:
    eager = attention_facts(tiny_model(torch.device("cpu")), "eager")
    finding = gemma.attention_finding("sdpa", replace(eager, last=eager.last.roll(1)), eager)
    assert finding.status == "problem"
    assert "final states differ" in finding.fact


def test_each_live_check_reports_what_this_transformers_does() -> None:
    checks = [gemma.transformers, gemma.flash_masks, gemma.prefill_chunks]
    checks += [gemma.generate_batch, gemma.padding, gemma.image_processor]
    for check in checks:
        findings = list(check())
        assert findings, check
        assert not [finding for finding in findings if finding.status == "problem"], check


@needs_images_in_chunks
def test_chunks_of_the_whole_prompt_are_right_and_shorter_ones_are_not() -> None:
    loaded = tiny_model(torch.device("cpu"))
    assert chunked_prefill(loaded, 4096) == "right"
    assert chunked_prefill(loaded, 40) != "right"
