"""Judgements of facts whose right answer is known."""

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from panscan.inspect.doctor.checks import CheckFinding
from panscan.inspect.doctor.gpu import Driver, build_finding, ceilings_finding, pci_gpus
from panscan.inspect.doctor.host import cores_finding, fit_finding, read_limits
from panscan.plan.gpus import Gpu, gpu_named

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


def test_a_gpu_is_compared_with_the_others_and_with_its_data_sheet() -> None:
    good, slow = (700e12, 4.2e12), (350e12, 4.2e12)
    found = ceilings_finding(0, "NVIDIA H200", good, [good, slow])
    assert (found.status, "88% of the data sheet's" in found.fact) == ("ok", True)
    assert ceilings_finding(1, "NVIDIA H200", slow, [good, slow]).status == "warning"
    assert ceilings_finding(0, "Voodoo 2", slow, [slow]).status == "ok"


@pytest.mark.parametrize(
    ("files", "cores", "free"),
    [
        ("cpu.max=150000 100000|memory.max=2000000000", 1.5, 2 * 10**9),
        ("cpu.max=max 100000|memory.max=max", None, None),
        (
            "memory.max=2000000000|memory.current=1000000000|memory.stat=anon 7,active_file 5,inactive_file 400000000",
            None,
            14 * 10**8,
        ),
        ("memory.max=2000000000|memory.stat=total_inactive_file 7", None, 2 * 10**9),
        ("cpu/cpu.cfs_quota_us=500", None, None),  # version 1
    ],
)
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
