"""Judgements of facts whose right answer is known."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import MappingProxyType

import pynvml
import pytest
from huggingface_hub import constants

import panscan.inspect.doctor
from panscan.inspect.doctor.checks import CheckFinding
from panscan.inspect.doctor.fit import fit_finding
from panscan.inspect.doctor.gpu import GpuLoad, build_finding, ceilings_finding, load_finding
from panscan.inspect.doctor.host import Limits, checkpoints, cores_finding, hub_access, memory_finding, read_limits
from panscan.inspect.doctor.links import layout_finding
from panscan.inspect.doctor.nvml import Driver, pci_gpus
from panscan.plan.gpus import Gpu, gpu_named

_GIB = 2**30
_DRIVER = Driver("570.86", (12, 8), 2)


@pytest.mark.parametrize(
    ("cuda", "driver", "on_bus", "error", "status", "text"),
    [
        ("12.8", _DRIVER, 2, None, "ok", "built for CUDA 12.8"),
        (None, None, 0, None, "ok", "Gemma 3 runs on the CPU"),
        ("12.8", None, 0, "no driver", "ok", "Gemma 3 runs on the CPU"),
        (None, _DRIVER, 2, None, "problem", "cannot use this machine's 2 NVIDIA GPUs"),
        ("12.8", None, 1, "no driver", "problem", "no driver answers"),
        ("13.0", _DRIVER, 2, "too old", "problem", "supports CUDA up to 12.8"),
        ("12.8", _DRIVER, 2, "busy", "problem", "CUDA does not start: busy"),
    ],
)
def test_pytorch_and_the_driver(
    cuda: str | None, driver: Driver | None, on_bus: int, error: str | None, status: str, text: str
) -> None:
    found = build_finding("2.13.0", cuda, driver, on_bus, error)
    assert found.status == status
    assert text in found.fact


def test_lowered_clocks_and_power_limits_are_warnings() -> None:
    def judged(reasons: int, limit: float = 700.0) -> CheckFinding:
        return load_finding(0, GpuLoad([1700, 1710, 1720], [650.0], [60], reasons), 1980, limit, 700.0)

    assert judged(0).fact == "GPU 0 under load: 1710 MHz of 1980 MHz, 650 W of 700 W, 60 °C"
    assert judged(pynvml.nvmlClocksThrottleReasonSwPowerCap).status == "ok"
    hot = judged(pynvml.nvmlClocksThrottleReasonHwThermalSlowdown)
    assert (hot.status, "thermal slowdown" in hot.fact) == ("warning", True)
    assert judged(0, limit=400.0).status == "warning"
    assert "nvidia-smi -i 0 -rac" in str(judged(pynvml.nvmlClocksThrottleReasonApplicationsClocksSetting).fix)


@pytest.mark.parametrize(
    ("count", "commands"),
    [
        (3, "`panscan serve --replicas 3` uses"),
        (6, "`panscan serve --replicas 6` or `panscan serve --replicas 3 --tensor-parallel-size 2` uses"),
        (8, "`panscan serve --replicas 8` or `panscan serve --tensor-parallel-size 8` uses"),
    ],
)
def test_commands_for_several_gpus_use_all_of_them(count: int, commands: str) -> None:
    assert commands in layout_finding(count).fact


def test_a_gpu_is_compared_with_the_others_and_with_its_data_sheet() -> None:
    good, slow = (700e12, 4.2e12), (350e12, 4.2e12)
    found = ceilings_finding(0, "NVIDIA H200", good, [good, slow])
    assert (found.status, "88% of the data sheet's" in found.fact) == ("ok", True)
    assert ceilings_finding(1, "NVIDIA H200", slow, [good, slow]).status == "warning"
    assert ceilings_finding(0, "Voodoo 2", slow, [slow]).status == "ok"


def test_container_limits_of_both_versions(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text(f"{2 * 10**9}\n")
    assert read_limits(tmp_path) == Limits(1.5, 2 * 10**9)
    (tmp_path / "memory.current").write_text(f"{10**9}\n")
    (tmp_path / "memory.stat").write_text("anon 7\nactive_file 5\ninactive_file 400000000\n")
    assert read_limits(tmp_path).free_memory == 14 * 10**8
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert read_limits(tmp_path) == Limits(None, None)
    old = tmp_path / "v1"
    (old / "cpu").mkdir(parents=True)
    (old / "memory").mkdir()
    (old / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (old / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (old / "memory" / "memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")
    assert read_limits(old) == Limits(None, None)
    (old / "memory" / "memory.limit_in_bytes").write_text(f"{2 * 10**9}\n")
    (old / "memory" / "memory.usage_in_bytes").write_text(f"{10**9}\n")
    (old / "memory" / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 400000000\n")
    assert read_limits(old).free_memory == 14 * 10**8


def test_few_cores_and_little_memory_are_warnings() -> None:
    assert cores_finding(64, 64, None).status == "ok"
    throttled = cores_finding(64, 64, 4.0)
    assert throttled.status == "warning"
    assert "OMP_NUM_THREADS=4" in str(throttled.fix)
    assert cores_finding(2, 2, None).status == "warning"
    assert memory_finding(256 * _GIB, 200 * _GIB, Limits(None, None)).status == "ok"
    assert memory_finding(256 * _GIB, 200 * _GIB, Limits(None, 2 * _GIB)).status == "warning"
    assert memory_finding(256 * _GIB, 200 * _GIB, Limits(None, 32 * _GIB, 31 * _GIB)).status == "warning"


def test_gpus_are_counted_on_the_pci_bus(tmp_path: Path) -> None:
    for number, (vendor, kind) in enumerate([("0x10de", "0x030200"), ("0x10de", "0x040300"), ("0x8086", "0x030000")]):
        device = tmp_path / str(number)
        device.mkdir()
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    assert pci_gpus(tmp_path) == 1
    assert pci_gpus(tmp_path / "none") is None


def test_checkpoints_in_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    [none] = checkpoints()
    assert none.fact.startswith("no Gemma 3 checkpoint")
    snapshot = tmp_path / "models--google--gemma-3-4b-it" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    [bare] = checkpoints()
    assert (bare.status, bare.fact) == ("ok", "google/gemma-3-4b-it: only its configuration is in the cache")
    index = snapshot / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    (snapshot / "1.safetensors").touch()
    [partial] = checkpoints()
    assert partial.status == "warning"
    assert partial.fact == "google/gemma-3-4b-it in the hub cache lacks 1 of 2 weight files"
    (snapshot / "2.safetensors").touch()
    [complete] = checkpoints()
    assert complete.status == "ok"
    index.write_text("{torn")
    [damaged] = checkpoints()
    assert "damaged" in damaged.fact


def test_a_hub_token_is_found_but_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert [finding.status for finding in hub_access()] == ["warning"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert [finding.status for finding in hub_access()] == ["ok"]
    (tmp_path / "token").write_text("hf_secret")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    found = list(hub_access())
    assert [finding.status for finding in found] == ["ok", "ok"]
    assert "hf_secret" not in str(found)


def _fit(size: str, gpu: str, count: int = 1) -> CheckFinding:
    return fit_finding(size, [gpu_named(gpu)] * count)


def test_sizes_that_fit() -> None:
    assert "with bf16" in _fit("27b", "h200").fact
    assert "with --quantization int8" in _fit("27b", "a100-40gb").fact
    assert _fit("27b", "a100-40gb", 4).fact.endswith("unquantised with --tensor-parallel-size 2")
    assert "--quantization" not in _fit("12b", "a100-40gb").fact
    mixed = fit_finding("27b", [gpu_named("a100-40gb"), gpu_named("h200")])
    assert "27b fits on one GPU (NVIDIA H200" in mixed.fact
    small = Gpu("cpu", "cpu", 8 * 10**9, 1.0, MappingProxyType({"fp32": 1.0, "bf16": 1.0}), "", 1.0, None)
    assert fit_finding("27b", [small]).status == "warning"
    assert fit_finding("270m", [small]).status == "ok"


def test_what_the_driver_is_asked_for_exists() -> None:
    source = "".join(path.read_text("utf-8") for path in Path(panscan.inspect.doctor.__file__).parent.glob("*.py"))
    names = set(re.findall(r'\bread\("(\w+)"', source))
    assert len(names) > 10 and all(hasattr(pynvml, f"nvmlDeviceGet{name}") for name in names)
