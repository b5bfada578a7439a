"""Checks of installed packages: versions that must match, and attention kernels that import."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from panscan.core.errors import error_line
from panscan.inspect.doctor.checks import Findings, not_checked, ok, problem, warning

_OPTIONAL = {"bitsandbytes": "--quantization bnb-8bit and bnb-4bit", "ray": "--replicas"}


def requirements() -> Findings:
    """Check that the installed versions are those that panscan's own package metadata requires."""
    try:
        needs = requires("panscan") or ()
    except PackageNotFoundError:
        yield not_checked("panscan runs from its source tree; `pip install -e .` records its requirements")
        return
    wrong, shown = [], []
    for needed in map(Requirement, needs):
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        installed = _version(needed.name)
        if installed is None or not needed.specifier.contains(installed, prereleases=True):
            wrong.append(f"{needed.name} {installed or 'is missing'} (needs {needed.specifier})")
        elif needed.name in ("torch", "transformers", "tokenizers", "accelerate"):
            shown.append(f"{needed.name} {installed}")
    if wrong:
        yield problem(f"versions that panscan does not support: {', '.join(wrong)}", "pip install --upgrade panscan")
    else:
        yield ok(", ".join(shown))


def torchvision() -> Findings:
    """Check that torchvision, if installed, imports and belongs to the installed PyTorch."""
    installed, torch = _version("torchvision"), _version("torch")
    if installed is None:
        yield ok("torchvision is not installed; panscan resizes views without it (Pillow, or PyTorch on the GPU)")
        return
    fix = "Install the torchvision of this PyTorch, or uninstall torchvision: panscan does not need it."
    needs = [needed for needed in map(Requirement, requires("torchvision") or ()) if needed.name == "torch"]
    if (error := _import_error("torchvision")) is not None:
        yield problem(f"torchvision {installed} does not work with torch {torch}: {error}", fix)
    elif torch is not None and not all(needed.specifier.contains(torch, prereleases=True) for needed in needs):
        yield warning(f"torchvision {installed} requires torch{needs[0].specifier}, installed is {torch}", fix)
    else:
        yield ok(f"torchvision {installed} works with torch {torch}")


def attention_packages() -> Findings:
    """Report attention kernel packages, and whether they work with the installed PyTorch."""
    from panscan.model.support import FLASH_PACKAGES

    missing = []
    for module, name in FLASH_PACKAGES.values():
        if (installed := _version(name)) is None:
            missing.append(name)
        elif (error := _import_error(module)) is None:
            yield ok(f"{name} {installed} imports; see the attention checks before you use it")
        else:
            yield warning(
                f"{name} {installed} does not import: {error}",
                f"pip uninstall {name}, or install a build for this PyTorch and CUDA; panscan does not need it.",
            )
    if missing:
        yield ok(f"{', '.join(missing)}: not installed, and not needed")
    if (installed := _version("kernels")) is not None:
        yield warning(
            f"kernels {installed}: Transformers downloads flash-attention kernels from the hub if a flash"
            " implementation is requested",
            "Keep --attention at sdpa or eager; see the attention checks.",
        )


def optional_packages() -> Findings:
    """Report packages that only some settings need."""
    for name, purpose in _OPTIONAL.items():
        installed = _version(name)
        if installed is None:
            yield ok(f"{name} is not installed; only {purpose} needs it")
        elif (error := _import_error(name.replace("-", "_"))) is None:
            yield ok(f"{name} {installed} imports")
        else:
            yield warning(f"{name} {installed} does not import: {error}", f"Reinstall {name}; only {purpose} needs it.")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _import_error(module: str) -> str | None:
    """Return why a module cannot be imported; None if it can."""
    try:
        import_module(module)
    except Exception as error:  # extension modules raise anything: OSError, RuntimeError for operators, AttributeError
        return error_line(error)
    return None
