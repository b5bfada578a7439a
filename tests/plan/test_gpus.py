"""The GPU data file, names, and specifications that users type."""

from urllib.parse import urlsplit

import pytest

from panscan.core import SettingError
from panscan.plan.gpus import Gpu, all_gpus, gpu_named, reported_gpu

NVIDIA = [pytest.param(gpu, id=name) for name, gpu in all_gpus().items() if gpu.capability is not None]
SPECIFICATION = "memory=24, bandwidth=936,bf16=71,int8=142,link=16"


def test_the_data_file_has_the_promised_gpus() -> None:
    promised = "a100-40gb a100-80gb h100 h100-pcie h200 b200 l4 l40s rtx-3090 rtx-4090 rtx-5090 rtx-5060-ti t4 cpu"
    assert set(promised.split()) <= set(all_gpus())


@pytest.mark.parametrize("gpu", NVIDIA)
def test_figures_are_plausible(gpu: Gpu) -> None:
    assert gpu.sources
    assert all(
        urlsplit(source).hostname in ("www.nvidia.com", "images.nvidia.com", "resources.nvidia.com")
        for source in gpu.sources
    )
    nominal = float(gpu.label.split(" GB")[0].split()[-1]) * 2**30
    assert 0.9 * nominal < gpu.memory_bytes < 1.01 * nominal
    assert 200e9 < gpu.bytes_per_s < 10e12
    assert gpu.link_bytes_per_s < gpu.bytes_per_s
    rates = gpu.flops_per_s
    dense = rates.get("bf16", rates["fp16"])
    assert rates["fp32"] < dense == rates["fp16"]
    assert all(1.9 * dense < rates[kind] < 4.1 * dense for kind in ("int8", "fp8") if kind in rates)
    assert ("bf16" in rates) == (gpu.capability is not None and gpu.capability >= (8, 0))
    assert ("fp8" in rates) == (gpu.capability is not None and gpu.capability >= (8, 9))


ALIASES = [
    ("a100-40gb", "a100-40gb"),
    ("A100", "a100-40gb"),
    ("NVIDIA A100 80 GB (SXM)", "a100-80gb"),
    ("H100", "h100"),
    ("RTX 4090", "rtx-4090"),
    ("5060ti", "rtx-5060-ti"),
    (" CPU ", "cpu"),
]


@pytest.mark.parametrize(("text", "name"), ALIASES)
def test_names_and_aliases_in_any_spelling(text: str, name: str) -> None:
    assert gpu_named(text).name == name


def test_names_and_aliases_are_unique() -> None:
    names = [each for gpu in all_gpus().values() for each in (gpu.name, gpu.label, *gpu.aliases)]
    assert len({"".join(filter(str.isalnum, name.lower())) for name in names}) == len(names)


def test_a_specification_has_the_figures_that_were_typed() -> None:
    gpu = gpu_named(SPECIFICATION)
    assert (gpu.memory_bytes, gpu.bytes_per_s, gpu.link_bytes_per_s) == (24 * 10**9, 936e9, 16e9)
    assert dict(gpu.flops_per_s) == {"bf16": 71e12, "int8": 142e12}
    assert gpu.capability == (8, 0)
    assert gpu_named(f"{SPECIFICATION},fp8=142").capability == (8, 9)
    assert gpu_named(f"{SPECIFICATION},capability=7.5").capability == (7, 5)


BAD_SPECIFICATIONS = [
    ("memory=24", "bandwidth, bf16 missing"),
    ("memory=24,memory=24,bandwidth=1,bf16=1", "memory is given twice"),
    ("memry=24,bandwidth=1,bf16=1", r"unknown key 'memry' \(did you mean 'memory'\?\)"),
    ("memory=24,bandwidth=fast,bf16=1", "bandwidth takes a number above 0"),
    ("memory=24,bandwidth=-1,bf16=1", "bandwidth is out of range: it must be a number above 0 and"),
    ("memory=24,bandwidth=nan,bf16=1", "bandwidth is out of range: it must be a number above 0 and"),
    ("memory=24,bandwidth=1e9,bf16=1", "bandwidth is out of range: it must be a number above 0 and"),
    ("memory=24,bandwidth=1,bf16=1,capability=8", "capability takes a version such as 8.9"),
    ("memory=24,,bandwidth=1,bf16=1", "unknown key ''"),
    ("", "unknown GPU ''"),
]


@pytest.mark.parametrize(("text", "reason"), BAD_SPECIFICATIONS)
def test_bad_specifications_are_refused(text: str, reason: str) -> None:
    with pytest.raises(SettingError, match=f"--gpu: {reason}"):
        gpu_named(text)


def test_a_gpu_refuses_types_that_its_products_do_not_have() -> None:
    a100, t4, cpu, h100 = map(gpu_named, ("a100", "t4", "cpu", "h100"))
    assert h100.refusal("fp8", "fp8") is None is a100.refusal("int8")
    assert "8.9 or later; a100-40gb has 8.0: use int8 or int4" in str(a100.refusal("fp8"))
    assert "--kv-cache-dtype fp8 needs" in str(a100.refusal(None, "fp8"))
    assert a100.refusal(None, tower="int8") is None
    reason = str(a100.refusal(None, tower="fp8"))
    assert reason.startswith("--quantize-vision fp8 needs compute capability 8.9 or later; a100-40gb has 8.0: use int8")
    assert "no bf16 products" in str(t4.refusal(None))
    custom, newer = gpu_named(SPECIFICATION), gpu_named(f"{SPECIFICATION},capability=8.6")
    assert "custom has 8.0 (assumed; give capability=8.9)" in str(custom.refusal("fp8"))
    assert "custom has 8.6: use" in str(newer.refusal("fp8"))
    assert "8.0 or later; t4 has 7.5" in str(t4.refusal("int4", dtype="fp32"))
    assert t4.refusal(None, dtype="fp32") is None is cpu.refusal("int4")
    assert "on a CPU use int8 or int4" in str(cpu.refusal("fp8"))


REPORTED = [
    ("NVIDIA H200", 139.8, "h200"),
    ("NVIDIA A100-SXM4-80GB", 79.15, "a100-80gb"),
    ("NVIDIA A100 80GB PCIe", 79.15, "a100-pcie-80gb"),
    ("NVIDIA A100-PG509-200", 39.4, "a100-40gb"),
    ("NVIDIA H100 80GB HBM3", 79.1, "h100"),
    ("NVIDIA H100 NVL", 93.0, None),
    ("NVIDIA GeForce RTX 4090", 23.5, "rtx-4090"),
    ("Tesla T4", 14.6, "t4"),
    ("Tesla V100-SXM2-32GB", 31.7, None),
]


@pytest.mark.parametrize(("name", "gib", "expected"), REPORTED)
def test_a_gpu_is_found_by_the_name_that_its_driver_reports(name: str, gib: float, expected: str | None) -> None:
    found = reported_gpu(name, int(gib * 2**30))
    assert (found.name if found else None) == expected
