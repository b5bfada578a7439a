"""All checks of ``panscan doctor``, in the order in which they are shown."""

from __future__ import annotations

from panscan.doctor.findings import Check

__all__ = ["CHECKS", "GROUPS", "SYMBOLS"]

CHECKS: tuple[Check, ...] = tuple(
    Check(name, group, f"panscan.doctor.{function}", lane, seconds)
    for name, group, function, lane, seconds in (
        ("pytorch", "gpu", "gpu:pytorch", "gpu", 60.0),
        ("gpus", "gpu", "gpu:gpus", "gpu", 20.0),
        ("kernels", "gpu", "gpu:kernels", "gpu", 20.0),
        ("tf32", "gpu", "gpu:tf32", "gpu", 20.0),
        ("triton", "gpu", "gpu:triton_kernels", "gpu", 40.0),
        ("load", "gpu", "gpu:load", "gpu", 20.0),
        ("several-gpus", "links", "links:idle_gpus", "gpu", 20.0),
        ("peer-to-peer", "links", "links:peers", "gpu", 20.0),
        ("host-links", "links", "links:host_links", "gpu", 20.0),
        ("requirements", "packages", "packages:requirements", "host", 20.0),
        ("torchvision", "packages", "packages:torchvision", "gpu", 30.0),
        ("attention-packages", "packages", "packages:attention_packages", "gpu", 30.0),
        ("optional-packages", "packages", "packages:optional_packages", "gpu", 30.0),
        ("transformers", "gemma", "gemma:transformers", "gemma", 60.0),
        ("attention", "gemma", "gemma:attention", "gemma", 40.0),
        ("flash-masks", "gemma", "gemma:flash_masks", "gemma", 30.0),
        ("prefill-chunk-size", "gemma", "gemma:prefill_chunks", "gemma", 30.0),
        ("generate-batch", "gemma", "gemma:generate_batch", "gemma", 30.0),
        ("padding", "gemma", "gemma:padding", "gemma", 30.0),
        ("image-processor", "gemma", "gemma:image_processor", "gemma", 30.0),
        ("preprocessing", "gemma", "gemma:preprocessing", "gemma", 30.0),
        ("compilation", "gemma", "gemma:compilation", "gemma", 40.0),
        ("sizes", "fit", "fit:fits", "gpu", 20.0),
        ("cores", "host", "host:cores", "host", 10.0),
        ("memory", "host", "host:memory", "host", 10.0),
        ("shared-memory", "host", "host:shared_memory", "host", 10.0),
        ("limits", "host", "host:limits", "host", 10.0),
        ("caches", "host", "host:caches", "host", 10.0),
        ("hub-access", "host", "host:hub_access", "host", 10.0),
        ("checkpoints", "host", "host:checkpoints", "host", 10.0),
    )
)
SYMBOLS = Check("symbols", "symbols", "panscan.doctor.symbols:symbols", "gemma", 90.0)
"""The check of ``--symbols``."""
GROUPS: dict[str, str] = {
    "gpu": "GPUs, driver and PyTorch",
    "links": "Links between GPUs and to the host",
    "packages": "Installed packages",
    "gemma": "What Transformers computes for Gemma 3 (tested on the tiny model)",
    "fit": "Gemma 3 sizes that fit in the free memory",
    "host": "Cores, memory, disks and access",
    SYMBOLS.group: "Names and arguments of Transformers that panscan uses",
}
"""Groups by name, with their headings."""
