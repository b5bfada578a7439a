"""Checks of GPUs: driver, PyTorch build, kernels for this architecture, precision, rates; how to use several."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pynvml

from panscan.core.errors import brief, error_line
from panscan.core.gpu_features import FEATURES, runs_on, supports
from panscan.inspect.doctor.checks import (
    NO_GPU,
    CheckFinding,
    Findings,
    file_text,
    not_checked,
    ok,
    on_gpus,
    problem,
    warning,
)
from panscan.plan.gpus import reported_gpu

_INSTALL = "pytorch.org/get-started/locally lists the index of each CUDA version"
_GIB = 2**30
_BUSY_SHARE, _BUSY_BYTES = 0.1, 2 * _GIB  # of a GPU's memory, used by others: both must be exceeded
_SLOW_SHARE = 0.7  # of the fastest GPU of its kind in this machine
_TF32_ERROR = 1e-4  # float32 products err by about 1e-6 here, TF32's by about 1e-3
_OVERRIDES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
_PCI = Path("/sys/bus/pci/devices")


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver's version, the highest CUDA version that it supports, and the number of GPUs that it manages."""

    version: str
    cuda: tuple[int, int]
    gpus: int


@cache
def driver() -> Driver | None:
    """Return the NVIDIA driver of this machine; None if there is none or it does not answer."""
    try:
        pynvml.nvmlInit()
        cuda = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        version = str(pynvml.nvmlSystemGetDriverVersion())
        return Driver(version, (cuda // 1000, cuda % 1000 // 10), int(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return None


def pci_gpus(devices: Path = _PCI) -> int | None:
    """Return how many NVIDIA GPUs are on the PCI bus, with or without a driver; None if it cannot be read."""
    try:
        entries = list(devices.iterdir())
    except OSError:
        return None
    return sum(
        file_text(entry / "vendor") == "0x10de" and file_text(entry / "class").startswith("0x03") for entry in entries
    )


def pytorch() -> Findings:
    """Check that PyTorch can be imported, and that its build and the driver match."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library is missing or of another version
        text = brief(error)
        yield problem(f"PyTorch cannot be imported: {text}", f"Reinstall torch; {_INSTALL}.")
        return
    if torch.version.hip is not None:
        yield not_checked(f"PyTorch {torch.__version__} is a ROCm build; AMD GPUs are not checked")
        return
    reason = None
    if torch.version.cuda is not None:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            reason = brief(error)
    yield build_finding(torch.__version__, torch.version.cuda, driver(), pci_gpus(), reason)
    installed = driver()
    if installed is not None and torch.version.cuda is not None and reason is None:
        yield driver_finding(torch.version.cuda, installed, torch.cuda.device_count())
    if torch.backends.mps.is_available():
        yield ok("an Apple GPU is available as --device mps; the checks of NVIDIA GPUs do not apply to it")


def build_finding(
    version: str, cuda: str | None, installed: Driver | None, on_bus: int | None, error: str | None
) -> CheckFinding:
    """Judge whether this build of PyTorch reaches the machine's NVIDIA GPUs.

    Args:
        version: of PyTorch.
        cuda: CUDA version that it was built for; None: a build without CUDA.
        installed: the driver; None: there is none.
        on_bus: NVIDIA GPUs on the PCI bus; None: unknown.
        error: why CUDA does not start.
    """
    built = "without CUDA" if cuda is None else f"for CUDA {cuda}"
    fact = f"PyTorch {version}, built {built}"
    gpus = installed.gpus if installed is not None else on_bus or 0
    if gpus == 0:
        bus = "no NVIDIA GPU found" if on_bus == 0 or installed is not None else "no NVIDIA driver found"
        return ok(f"{fact}; {bus}: Gemma 3 runs on the CPU")
    if installed is None:
        return problem(f"{fact}; {gpus} NVIDIA GPUs on the PCI bus, but no driver answers", "Install NVIDIA's driver.")
    supported = "{}.{}".format(*installed.cuda)
    if cuda is None:
        return problem(
            f"{fact}: it cannot use this machine's {gpus} NVIDIA GPUs",
            f"Install a build for CUDA {supported} or earlier: {_INSTALL}.",
        )
    if error is not None and int(cuda.split(".")[0]) > installed.cuda[0]:
        return problem(
            f"{fact}, but driver {installed.version} supports CUDA up to {supported}: {error}",
            f"Update the driver, or install a PyTorch built for CUDA {installed.cuda[0]}: {_INSTALL}.",
        )
    if error is not None:
        return problem(f"{fact}; CUDA does not start: {error}", "Check that `nvidia-smi` works in this environment.")
    return ok(fact)


def driver_finding(cuda: str, installed: Driver, visible: int) -> CheckFinding:
    """Judge the driver of a machine where CUDA starts.

    Args:
        cuda: CUDA version that PyTorch was built for.
        installed: the driver.
        visible: GPUs that PyTorch uses.
    """
    supported = "{}.{}".format(*installed.cuda)
    fact = f"driver {installed.version} supports CUDA up to {supported}; PyTorch was built for CUDA {cuda}"
    if visible == installed.gpus:
        return ok(fact)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    return warning(
        f"{fact}; the driver manages {installed.gpus} GPUs, PyTorch uses {visible}",
        "Set CUDA_VISIBLE_DEVICES to the GPUs that you want to use"
        + ("." if hidden is None else f", or unset it (it is {hidden!r} now)."),
    )


@on_gpus
def gpus() -> Findings:
    """Report each GPU, its memory, and who else uses it; of several, how to use them."""
    import torch

    if (count := torch.cuda.device_count()) > 1:
        yield ok(
            f"{count} GPUs: Transformers' device_map=\"auto\" spreads a model's layers over them, so only one computes"
            f" at a time; `panscan serve --replicas {count}` uses them all, and `panscan plan` compares other layouts"
        )
    for index in range(count):
        facts = torch.cuda.get_device_properties(index)
        capability = facts.major, facts.minor
        size = f"{facts.total_memory / _GIB:.1f} GiB"
        label = f"GPU {index}: {facts.name}, {size}, compute capability {facts.major}.{facts.minor}"
        if not supports("bf16", capability):
            first = "{}.{}".format(*FEATURES["bf16"].first)
            yield warning(
                f"{label}, which has no bfloat16 in hardware; Gemma 3 overflows in float16",
                f"Use --dtype fp32, or a GPU of compute capability {first} or later.",
            )
        else:
            yield ok(f"{label}, bfloat16" + (" and float8" if supports("fp8", capability) else ", no float8 products"))
        free, total = torch.cuda.mem_get_info(index)
        if total - free > max(_BUSY_SHARE * total, _BUSY_BYTES):
            yield warning(
                f"GPU {index}: {(total - free) / _GIB:.1f} of {total / _GIB:.1f} GiB are in use",
                "Stop the other processes (`nvidia-smi` lists them), or limit panscan with --gpu-memory-gb.",
            )


@on_gpus
def kernels() -> Findings:
    """Check that the installed wheel has kernels for each GPU, and that a bfloat16 product is right on it."""
    import torch

    built = torch.cuda.get_arch_list()
    inputs = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = inputs[0].double() @ inputs[1].double()
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        how, label = runs_on(built, capability), "GPU {}: compute capability {}.{}".format(index, *capability)
        if how is None:
            yield problem(
                f"{label} is not among this wheel's ({', '.join(built)})", f"Install a newer torch; {_INSTALL}."
            )
            continue
        matrices = inputs.to(f"cuda:{index}")
        error = float(((matrices[0] @ matrices[1]).double().cpu() - expected).abs().max() / expected.abs().max())
        if not error < 0.01:  # NaN counts
            yield problem(
                f"{label}: a bfloat16 product is wrong by {error:.1%}", "Check the GPU with its vendor's tools."
            )
        elif how == "PTX":
            yield warning(
                f"{label}: this wheel has no binary for it, the driver compiles its PTX (slow first start)",
                f"Install a wheel built for it; {_INSTALL}.",
            )
        else:
            yield ok(f"{label}: this wheel has kernels for it; a bfloat16 product is correct")


def tf32() -> Findings:
    """Check which precision float32 products have, by computing one where there is a GPU."""
    import torch

    named = [f"{name}={os.environ[name]}" for name in _OVERRIDES if os.environ.get(name, "0") != "0"]
    precision, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    fact = f"float32 matmul precision is {precision!r}, TF32 in convolutions is {'on' if convolutions else 'off'}"
    if not torch.cuda.is_available():
        yield ok(f"{fact}; neither changes anything on a CPU")
        return
    left, right = torch.randn(2, 512, 512, generator=torch.Generator().manual_seed(0)).double()
    product = (left.float().cuda() @ right.float().cuda()).double().cpu()
    error = float((product - left.float().double() @ right.float().double()).abs().max() / 512**0.5)
    if error < _TF32_ERROR:
        yield ok(f"{fact}: a float32 product is computed in float32; panscan sets both for each run")
        return
    where = " and ".join(named) or "a setting outside of PyTorch"
    yield warning(
        f"{fact}, but float32 products are computed in TF32 ({where}): float32 references are rounded to 10 bits",
        f"Unset {' and '.join(setting.split('=')[0] for setting in named) or 'it'}.",
    )


def triton_kernels() -> Findings:
    """Check that one of panscan's Triton kernels compiles and is right on the first GPU."""
    import torch

    from panscan.model.linear.multiply import has_kernels

    if not torch.cuda.is_available():
        yield not_checked(f"{NO_GPU}; panscan's Triton kernels run on NVIDIA GPUs only")
        return
    device = torch.device("cuda:0")
    if not has_kernels(device):
        yield warning("Triton is not installed: the engine runs slower kernels", "pip install triton")
        return
    from panscan.model.layer_kernels import rms_norm

    hidden = torch.randn(8, 512, device=device, dtype=torch.bfloat16)
    weight = torch.randn(512, device=device, dtype=torch.bfloat16)
    try:
        computed = rms_norm(hidden, weight, 1e-6)
    except Exception as error:  # Triton raises what its compilers raise: CalledProcessError, RuntimeError, ...
        yield problem(
            f"a Triton kernel does not compile or run: {error_line(error)}",
            "Install a C compiler (gcc) and the triton that torch requires.",
        )
        return
    values = hidden.double()
    expected = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight.double())
    assert isinstance(computed, torch.Tensor)  # no input type was asked for, so nothing is quantised
    if not torch.allclose(computed.double(), expected, rtol=0.02, atol=0.02):
        yield problem("a Triton kernel computes a wrong result", "Install the triton that torch requires.")
    else:
        yield ok("a Triton kernel compiles and computes the correct result")


@on_gpus
def ceilings() -> Findings:
    """Measure each GPU's product rate and bandwidth, and compare the GPUs with each other."""
    import torch

    from panscan.model.ceilings import measure_ceilings

    half = torch.bfloat16 if supports("bf16", torch.cuda.get_device_capability(0)) else torch.float16
    indices = range(torch.cuda.device_count())
    names = [torch.cuda.get_device_name(index) for index in indices]
    measured = [measure_ceilings(torch.device("cuda", index), half) for index in indices]
    rates = [(one.flops_per_s, one.bytes_per_s) for one in measured]
    for index, name in enumerate(names):
        alike = [rate for rate, other in zip(rates, names, strict=True) if other == name]
        yield ceilings_finding(index, name, rates[index], alike)


def ceilings_finding(
    index: int, name: str, rates: tuple[float, float], alike: Sequence[tuple[float, float]]
) -> CheckFinding:
    """Judge one GPU's measured rates, (FLOP/s, bytes/s).

    Args:
        index: of the GPU.
        name: as the driver reports it.
        rates: its rates.
        alike: the rates of all GPUs of this name here, itself included.
    """
    fact = f"GPU {index}: {rates[0] / 1e12:.0f} TFLOP/s in 16-bit products, {rates[1] / 1e12:.2f} TB/s copied"
    if (sheet := reported_gpu(name)) is not None:
        shares = f"{rates[0] / sheet.half_rate:.0%} and {rates[1] / sheet.bytes_per_s:.0%}"
        fact += f" ({shares} of the data sheet's, which measured rates do not reach)"
    for value, best in zip(rates, map(max, zip(*alike, strict=True)), strict=True):
        if value < _SLOW_SHARE * best:
            fix = "`nvidia-smi -q -d PERFORMANCE,CLOCK` says what slows it down; or another process uses it."
            return warning(f"{fact}: much slower than the fastest {name} here", fix)
    return ok(fact)
