"""Access to the tensors of a checkpoint's safetensors files by module, independent of the naming layout.

Gemma 3 checkpoints name the decoder ``language_model.model.layers...`` (most of those published) or
``model.language_model.layers...`` (Transformers 5), and ``model.layers...`` without vision. The vision tower is
``vision_tower.vision_model...`` or ``vision_tower...``. A tensor's key is therefore its name without the segments in
which the layouts differ. The key of a submodule's name finds its tensors in every version of Transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open

from panscan.model.untrusted.headers import key_of

__all__ = ["key_of"]

_TYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def names_of(key: str, stored: MatrixTensors) -> tuple[str, ...]:
    """Return all names that a configuration may use for a module, the one in the files first."""
    return tuple(dict.fromkeys([stored.weight_name.removesuffix(".weight"), *_aliases(key)]))


def _aliases(key: str) -> tuple[str, ...]:
    """Return the names that configurations of all layouts give to the module of a key."""
    if key.startswith("layers."):
        return (f"model.language_model.{key}", f"language_model.model.{key}", f"model.{key}", key)
    if key.startswith("vision_tower."):
        rest = key.removeprefix("vision_tower.")
        owners = ("vision_tower", "vision_tower.vision_model", "vision_model")
        return tuple(f"{prefix}{owner}.{rest}" for owner in owners for prefix in ("model.", ""))
    return (key, f"model.{key}", f"language_model.{key}")


class StoredTensors:
    """Tensors of a checkpoint, read on demand. Use as a context manager, which closes the files.

    Args:
        files: safetensors files.

    Raises:
        ValueError: two tensor names refer to the same parameter.
        OSError: a file cannot be read.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._files: list[Any] = []
        self._tensors: dict[str, tuple[Any, str]] = {}
        self._modules: dict[str, dict[str, str]] = {}
        self.metadata: dict[str, str] = {}
        """Metadata of all files by key, because Transformers writes it with names of another layout."""
        for path in files:
            file: Any = safe_open(path, "pt")
            self._files.append(file)
            self.metadata.update({key_of(name): value for name, value in (file.metadata() or {}).items()})
            for name in file.keys():  # noqa: SIM118 - it is no dict
                self._add(name, file)

    def __enter__(self) -> StoredTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._tensors.clear()

    def _add(self, name: str, file: Any) -> None:
        key = key_of(name)
        if (other := self._tensors.get(key)) is not None:
            raise ValueError(f"the tensors {other[1]} and {name} refer to the same parameter")
        self._tensors[key] = (file, name)
        module, within, leaf = key.partition(".weight.")  # tensors that belong to a weight are the module's
        if within:
            leaf = f"weight.{leaf}"
        else:
            module, _, leaf = key.rpartition(".")
        self._modules.setdefault(module, {})[leaf] = name

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the stored tensors."""
        return tuple(name for _, name in self._tensors.values())

    @property
    def modules(self) -> Mapping[str, Mapping[str, str]]:
        """Stored tensor names by module key and leaf, such as ``weight``."""
        return MappingProxyType(self._modules)

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of the tensor of a key, from the file's header."""
        file, name = self._tensors[key]
        return tuple(file.get_slice(name).get_shape())

    def dtype(self, key: str) -> torch.dtype | None:
        """Return the type of the tensor of a key, from the file's header; None for types that torch lacks."""
        file, name = self._tensors[key]
        return _TYPES.get(file.get_slice(name).get_dtype())

    def bytes(self, key: str) -> int:
        """Return the size of the tensor of a key in its file."""
        dtype = self.dtype(key)
        return prod(self.shape(key)) * (1 if dtype is None else dtype.itemsize)

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def read(self, key: str, device: torch.device) -> torch.Tensor:
        """Return the tensor of a key on a device."""
        file, name = self._tensors[key]
        values: torch.Tensor = file.get_tensor(name)
        return values.to(device)

    def read_dense(self, key: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """Return an unquantised tensor on a device.

        Raises:
            ValueError: the tensor has another shape, or is not floating-point with at least 16 bits.
        """
        return self._checked(key, (shape,), _FLOATING, device)

    def of_module(self, key: str, device: torch.device) -> MatrixTensors:
        """Return the tensors of a module, to be read onto a device."""
        return MatrixTensors(self, key, device)

    def _checked(
        self, key: str, shapes: tuple[tuple[int, ...], ...], types: tuple[torch.dtype, ...], device: torch.device
    ) -> torch.Tensor:
        found, dtype, name = self.shape(key), self.dtype(key), self._tensors[key][1]
        if dtype not in types:
            expected = " or ".join(str(each).removeprefix("torch.") for each in types)
            raise ValueError(f"{name} has the type {str(dtype).removeprefix('torch.')}; expected {expected}")
        if shapes and found not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise ValueError(f"{name} has the shape {list(found)}; expected {expected}")
        return self.read(key, device)


class MatrixTensors:
    """The tensors of one quantised module, by leaf name.

    Args:
        stored: tensors of the checkpoint.
        key: key of the module.
        device: device to read tensors to.
    """

    def __init__(self, stored: StoredTensors, key: str, device: torch.device) -> None:
        self._stored, self._key, self._device = stored, key, device
        self._leaves = stored.modules.get(key, {})
        self.taken: set[str] = set()
        """Leaves that were read or ignored."""

    @property
    def weight_name(self) -> str:
        """Name that the unquantised weight would have in the checkpoint's layout."""
        # Only the bias may have been written by other software, in another layout.
        leaf, name = next((item for item in self._leaves.items() if item[0] != "bias"), ("", f"{self._key}."))
        return f"{name.removesuffix(leaf)}weight"

    @property
    def description(self) -> str | None:
        """Description of the weight in the file's metadata; None without one."""
        return self._stored.metadata.get(f"{self._key}.weight")

    def __contains__(self, leaf: str) -> bool:
        return leaf in self._leaves

    def shape(self, leaf: str) -> tuple[int, ...]:
        """Return the shape of a tensor.

        Raises:
            ValueError: the tensor is missing.
        """
        self._require(leaf)
        return self._stored.shape(f"{self._key}.{leaf}")

    def take(self, leaf: str, *shapes: tuple[int, ...], types: tuple[torch.dtype, ...]) -> torch.Tensor:
        """Read a tensor.

        Args:
            leaf: name of the tensor inside the module.
            shapes: allowed shapes; without any, all are allowed.
            types: allowed types.

        Raises:
            ValueError: the tensor is missing, or has another shape or type.
        """
        self._require(leaf)
        self.taken.add(leaf)
        return self._stored._checked(f"{self._key}.{leaf}", shapes, types, self._device)

    def take_scale(self, leaf: str, *shapes: tuple[int, ...]) -> torch.Tensor:
        """Read floating-point scales.

        Raises:
            ValueError: for the reasons of :meth:`take`, or because a value is infinite or NaN.
        """
        scale = self.take(leaf, *shapes, types=_FLOATING)
        if not torch.isfinite(scale).all():
            raise ValueError(f"{self._leaves[leaf]} contains infinite or NaN values: the file is damaged")
        return scale

    def take_values(self, leaf: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Read int8 or float8_e4m3fn weights.

        Raises:
            ValueError: for the reasons of :meth:`take`, or because a value is NaN.
        """
        values = self.take(leaf, shape, types=(dtype,))
        if dtype == torch.float8_e4m3fn and ((values.view(torch.uint8) & 0x7F) == 0x7F).any():  # every bit but the sign
            raise ValueError(f"{self._leaves[leaf]} contains NaN: the file is damaged")
        return values

    def ignore(self, *leaves: str) -> None:
        """Mark leaves that do not affect the weights as read."""
        self.taken.update(leaves)

    def skip_zero_bias(self, outputs: int) -> None:
        """Ignore the zero bias that old versions of AutoGPTQ write for a matrix without a bias.

        Raises:
            ValueError: a value is not zero.
        """
        if "bias" in self and self.take("bias", (outputs,), types=_FLOATING).any():
            raise ValueError(f"{self._leaves['bias']} is not zero, but the model has no such bias")

    def _require(self, leaf: str) -> None:
        if leaf not in self._leaves:
            raise ValueError(f"the tensor {self.weight_name.removesuffix('weight')}{leaf} is missing")
