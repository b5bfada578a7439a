"""Access to the tensors of a checkpoint's safetensors files by module, independent of the naming layout.

Gemma 3 checkpoints name the decoder ``language_model.model.layers...`` (most of those published) or
``model.language_model.layers...`` (Transformers 5), and ``model.layers...`` without vision. The vision tower is
``vision_tower.vision_model...`` or ``vision_tower...``. A tensor's key is therefore its name without the segments in
which the layouts differ. The key of a submodule's name finds its tensors in every version of Transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from panscan.model.untrusted.headers import StoredShape, key_of

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
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class StoredTensors:
    """Tensors of a checkpoint's files, read on demand.

    Args:
        directory: directory of the files.
        stored: type, shape and file of each tensor, by name; no two names refer to the same parameter.

    Raises:
        OSError: a file cannot be read.
    """

    def __init__(self, directory: Path, stored: Mapping[str, StoredShape]) -> None:
        self.names = {key_of(name): name for name in stored}
        """Names of the stored tensors by key."""
        self.modules: dict[str, dict[str, str]] = {}
        """Stored tensor names by module key and leaf, such as ``weight``."""
        for key, name in self.names.items():
            module, within, leaf = key.partition(".weight.")  # tensors that belong to a weight are the module's
            if not within:
                module, _, leaf = key.rpartition(".")
            self.modules.setdefault(module, {})[f"weight.{leaf}" if within else leaf] = name
        self._stored = {key: stored[name] for key, name in self.names.items()}
        self._files: dict[str, Any] = {
            file: safe_open(directory / file, "pt") for file in sorted({facts.file for facts in stored.values()})
        }
        described = (file.metadata() or {} for file in self._files.values())
        self.metadata = {key_of(name): value for metadata in described for name, value in metadata.items()}
        """Metadata of all files by key, because Transformers writes it with names of another layout."""

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of the tensor of a key."""
        return self._stored[key].shape

    def dtype(self, key: str) -> torch.dtype | None:
        """Return the type of the tensor of a key; None for types that torch lacks."""
        return _TYPES.get(self._stored[key].dtype)

    def bytes(self, key: str) -> int:
        """Return the size of the tensor of a key in its file."""
        return self._stored[key].bytes

    def __contains__(self, key: str) -> bool:
        return key in self.names

    def slice(self, key: str) -> Any:
        """Return a slice of safetensors, which reads all of a tensor or some rows."""
        return self._files[self._stored[key].file].get_slice(self.names[key])

    def read(
        self,
        key: str,
        device: torch.device,
        *shapes: tuple[int, ...],
        types: tuple[torch.dtype, ...] | None = FLOATING,
    ) -> torch.Tensor:
        """Return a tensor on a device.

        Args:
            key: key of the tensor.
            device: device of the result.
            shapes: allowed shapes; without any, all are allowed.
            types: allowed types; None: all.

        Raises:
            ValueError: the tensor has another shape or type.
        """
        stored_shape, dtype, name = self.shape(key), self.dtype(key), self.names[key]
        if types is not None and dtype not in types:
            expected = " or ".join(str(allowed).removeprefix("torch.") for allowed in types)
            raise ValueError(f"{name} has the type {str(dtype).removeprefix('torch.')}; expected {expected}")
        if shapes and stored_shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise ValueError(f"{name} has the shape {list(stored_shape)}; expected {expected}")
        values: torch.Tensor = self._files[self._stored[key].file].get_tensor(name)
        return values.to(device)


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
        # Only the bias may have been written by other software, in another layout.
        leaf, name = next((item for item in self._leaves.items() if item[0] != "bias"), ("", f"{key}."))
        self.weight_name = f"{name.removesuffix(leaf)}weight"
        """Name that the unquantised weight would have in the checkpoint's layout."""
        self.description = stored.metadata.get(f"{key}.weight")
        """Description of the weight in the file's metadata; None without one."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names that a configuration may use for the module, the one in the files first."""
        key = self._key
        aliases = [key, f"model.{key}", f"language_model.{key}"]
        if key.startswith("layers."):
            aliases = [f"model.language_model.{key}", f"language_model.model.{key}", f"model.{key}", key]
        elif key.startswith("vision_tower."):
            owners = ("vision_tower", "vision_tower.vision_model", "vision_model")
            rest = key.removeprefix("vision_tower.")
            aliases = [f"{prefix}{owner}.{rest}" for owner in owners for prefix in ("model.", "")]
        return tuple(dict.fromkeys([self.weight_name.removesuffix(".weight"), *aliases]))

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
        return self._stored.read(f"{self._key}.{leaf}", self._device, *shapes, types=types)

    def take_scale(self, leaf: str, *shapes: tuple[int, ...]) -> torch.Tensor:
        """Read floating-point scales.

        Raises:
            ValueError: for the reasons of :meth:`take`, or because a value is infinite or NaN.
        """
        scale = self.take(leaf, *shapes, types=FLOATING)
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

    def skip_zero_bias(self, outputs: int) -> None:
        """Ignore the zero bias that old versions of AutoGPTQ write for a matrix without a bias.

        Raises:
            ValueError: a value is not zero.
        """
        if "bias" in self and self.take("bias", (outputs,), types=FLOATING).any():
            raise ValueError(f"{self._leaves['bias']} is not zero, but the model has no such bias")

    def _require(self, leaf: str) -> None:
        if leaf not in self._leaves:
            raise ValueError(f"the tensor {self.weight_name.removesuffix('weight')}{leaf} is missing")
