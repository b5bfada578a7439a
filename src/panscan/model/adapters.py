"""Merge LoRA adapters into the tensors of a checkpoint, as ``merge_and_unload()`` of PEFT does.

Tensors are merged in float32 on the host, from their values as stored, so that every runner, rank and weight format
gets the same weights.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from filecmp import cmp
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from panscan.core import ModelError, PanscanWarning, UnsupportedError
from panscan.model.files import CheckpointFiles, checkpoint_files
from panscan.model.formats.tensors import FLOATING, StoredTensors
from panscan.model.hub import AdapterSource, model_source
from panscan.model.hub_errors import friendly_errors
from panscan.model.linear.quantized import QuantizedLinear
from panscan.model.untrusted.adapter import ADAPTER_CONFIG, adapter_weights, read_adapter_config
from panscan.model.untrusted.check import stored_template
from panscan.model.untrusted.headers import EMBEDDING, HEAD, key_of, read_header
from panscan.model.untrusted.reading import DamagedFileError, checkpoint_entries, read_json

_PREFIX = "base_model.model."
_PART = re.compile(
    r"(?P<module>.+?)\.(?:(?P<factor>lora_(?:embedding_)?[AB])(?:\.weight)?|(?P<bias>lora_B\.bias)"
    r"|(?P<magnitude>lora_magnitude_vector)(?:\.weight)?|(?:token_adapter\.)?(?P<rows>trainable_tokens_delta)"
    r"|base_layer\.(?P<leaf>weight|bias))"
)
_HOST = torch.device("cpu")
_TOKENIZER = "tokenizer.json"


def merged_tensors(name: str, revision: str | None = None) -> MergedTensors | None:
    """Return the tensors that the adapters of a name change, all of them checked; None without adapters.

    Raises:
        ModelError: an adapter is damaged or belongs to another base, or the base is quantised.
    """
    return adapted_tensors(name, revision) if model_source(name, revision).adapters else None


def adapted_tensors(name: str, revision: str | None = None) -> MergedTensors:
    """Return the tensors that the adapters of a name change, which may be none.

    Raises:
        ModelError: as :func:`merged_tensors`.
    """
    source = model_source(name, revision)
    files = checkpoint_files(name, revision)
    if files.quantization is not None and source.adapters:
        raise ModelError(
            f"{source.adapters[0].option}: the base {source.base} is quantised: use --model with the unquantised base"
            " and --adapter, and quantise the merged weights with --quantization or panscan quantize"
        )
    with friendly_errors(name):
        base = files.open_by_key()
    return MergedTensors(source.adapters, files, base)


def write_merged(name: str, directory: Path, revision: str | None = None) -> None:
    """Write the checkpoint of a name with its adapters merged, for software that reads directories.

    Raises:
        ModelError: as :func:`merged_tensors`.
    """
    merged = merged_tensors(name, revision)
    assert merged is not None  # callers have a name with adapters
    files = merged.files
    for file in sorted({stored.file for stored in files.tensors.values()}):
        names = [tensor for tensor, stored in files.tensors.items() if stored.file == file]
        save_file({tensor: merged.stored(tensor) for tensor in names}, directory / file, {"format": "pt"})
    index = {"weight_map": {tensor: stored.file for tensor, stored in files.tensors.items()}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    (directory / "config.json").write_text(json.dumps(dict(files.config)), "utf-8")
    for companion, path in files.companions.items():
        shutil.copyfile(path, directory / companion)


def warn_of_companions(source: AdapterSource, base: Path, tokenizer: Any) -> None:
    """Warn of a chat template or tokenizer in an adapter's directory that is not the one in use, the base's.

    Args:
        source: the adapter.
        base: directory of the base.
        tokenizer: the base's.

    Raises:
        ModelError: a file is damaged.
    """
    with source.friendly_errors():
        entries = checkpoint_entries(source.directory)
        ignored = []
        if (template := stored_template(source.directory)) and template != tokenizer.chat_template:
            ignored.append("chat template")
        path = source.directory / _TOKENIZER
        if _TOKENIZER in entries and not ((base / _TOKENIZER).is_file() and cmp(path, base / _TOKENIZER, False)):
            stored = read_json(path)
            try:
                added = {token["content"]: token["id"] for token in stored["added_tokens"]}
                same = {**stored["model"]["vocab"], **added} == tokenizer.get_vocab()
            except (LookupError, TypeError):  # damaged, or of another kind
                same = False
            if not same:
                ignored.append("tokenizer")
    if ignored:
        fix = "if it was trained with its own, merge it with PEFT and save the model with its tokenizer"
        note = f"{source.option}: ignoring its {' and '.join(ignored)}, unlike the base's: {fix}"
        warnings.warn(note, PanscanWarning, stacklevel=2)


class MergedTensors:
    """The tensors of a dense checkpoint that adapters change. All files are checked before the first one is merged.

    Args:
        adapters: adapters in the order in which they are merged.
        files: files of the checkpoint.
        base: its tensors.

    Attributes:
        files: files of the checkpoint; its output matrix is listed if ``unties``.
        unties: whether the adapters replace only one of two tied matrices, or both by different values.
        keys: keys of the tensors that the adapters change.

    Raises:
        ModelError: an adapter is damaged, belongs to another base, or has the same tensor as an earlier one.
    """

    def __init__(self, adapters: Sequence[AdapterSource], files: CheckpointFiles, base: StoredTensors) -> None:
        self._base, self._tied = base, files.tied
        self._changes: dict[str, list[_Change]] = defaultdict(list)
        for source in adapters:
            with source.friendly_errors():
                for key, change in _changes_of(source).items():
                    self._add(key, change)
        self.unties = self._tied and self._is_untied()
        if self._tied and not self.unties:
            self._changes[EMBEDDING] += self._changes.pop(HEAD, [])
        self.files = _untied_files(files) if self.unties else files
        changed = {key for key, changes in self._changes.items() if changes}
        self.keys = changed | {EMBEDDING, HEAD} if self.unties else changed

    def _add(self, key: str, change: _Change) -> None:
        stored = EMBEDDING if self._tied and key == HEAD else key
        if stored not in self._base:
            raise DamagedFileError(f"changes {change.name}, which the base model lacks: is it an adapter for another?")
        if self._base.dtype(stored) not in FLOATING:
            raise DamagedFileError(f"changes {change.name}, which is quantised: use the unquantised base model")
        change.check(self._base.shape(stored))
        if "values" in change.parts and any("values" in other.parts for other in self._changes[key]):
            raise DamagedFileError(f"replaces {change.name}, as an earlier adapter does: leave out one of them")
        self._changes[key].append(change)

    def _is_untied(self) -> bool:
        """Return whether the embedding and the output matrix of a tied model become different."""
        stored = [change for key in (EMBEDDING, HEAD) for change in self._changes[key] if "values" in change.parts]
        if not stored:
            return False
        return len(stored) == 1 or not torch.equal(self.read(EMBEDDING), self.read(HEAD))

    def read(self, key: str) -> torch.Tensor:
        """Return a merged tensor in float32, on the host.

        Args:
            key: the tensor's :func:`panscan.model.untrusted.headers.key_of`.

        Raises:
            ModelError: a value overflows.
        """
        stored = EMBEDDING if self._tied and key == HEAD else key
        base = self._base.read(stored, _HOST).float()
        for change in self._changes[key]:
            base = change.replaced(base)
        merged = base
        for change in self._changes[key]:
            merged = change.merged(merged, base)
        if not torch.isfinite(merged).all():
            option = self._changes[key][-1].adapter.source.option if self._changes[key] else "--model"
            raise UnsupportedError(f"{option}: {key} has infinite or NaN values once it is merged")
        return merged

    def stored(self, name: str) -> torch.Tensor:
        """Return a tensor of ``files`` in its stored type, merged if an adapter changes it."""
        key = key_of(name)
        stored = key if key in self._base else EMBEDDING
        if key in self.keys:
            return self.read(key).to(self._base.dtype(stored))
        return self._base.read(stored, _HOST, types=None)

    def weights_of(self, model: Any, *, rounded: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and value of each parameter of a model of the checkpoint, with the adapters merged.

        Args:
            model: the model; it is untied if the adapters do so.
            rounded: round merged tensors to the type of the parameter, as in a saved checkpoint; False: float32.
        """
        if self.unties:
            untie(model)
        for name, parameter in model.named_parameters():
            if (key := key_of(name)) not in self.keys:
                yield name, parameter
            else:
                yield name, self.read(key).to(parameter.dtype) if rounded else self.read(key)

    @torch.no_grad()
    def merge_into(self, model: Any, restored: Collection[str] = (), rounded: torch.dtype | None = None) -> None:
        """Write merged tensors into a loaded model of the checkpoint, in place.

        Args:
            model: the model; it is untied if the adapters do so.
            restored: keys of tensors that other adapters had changed.
            rounded: type to which values are rounded first; None: float32.

        Raises:
            UnsupportedError: a weight is offloaded, or a value overflows.
        """
        if self.unties:
            untie(model)
        for name, weight in weights_in(model):
            if (key := key_of(name)) not in self.keys and key not in restored:
                continue
            value = self.read(key) if rounded is None else self.read(key).to(rounded)
            if isinstance(weight, QuantizedLinear):
                weight.quantize(value)
            elif weight.is_meta:
                raise UnsupportedError("--device-map offloads weights that --adapter changes; leave out --device-map")
            else:
                weight.copy_(value)


def _untied_files(files: CheckpointFiles) -> CheckpointFiles:
    """Return files that have an output matrix, which is not the embedding."""
    config = {**files.config, "tie_word_embeddings": False}
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], "tie_word_embeddings": False}
    head = files.tensors[files.stored_name(EMBEDDING)]
    others = {name: stored for name, stored in files.tensors.items() if key_of(name) != HEAD}
    return replace(files, config=config, tensors={**others, HEAD: head})


def weights_in(model: Any) -> Iterator[tuple[str, torch.nn.Parameter | QuantizedLinear]]:
    """Yield name and parameter of each weight of a model; for a quantised matrix, its module."""
    yield from model.named_parameters()
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            yield f"{name}.weight", module


def untie(model: Any) -> None:
    """Separate a model's output matrix from its embedding, with equal values."""
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)


class _Adapter:
    """The files of an adapter, checked.

    Args:
        source: where they are.

    Raises:
        DamagedFileError: a file is damaged, or a value is infinite or NaN.
    """

    def __init__(self, source: AdapterSource) -> None:
        self.source = source
        checkpoint_entries(source.directory)
        self.config = read_adapter_config(source.directory)
        path = adapter_weights(source.directory)
        self.shapes = {name: facts.shape for name, facts in read_header(path).items()}
        self.ranks: dict[str, int] = {}
        """Rank of each module's factors."""
        self._file: Any = safe_open(path, "pt")
        for name in self.shapes:
            if not torch.isfinite(self.read(name)).all():
                raise DamagedFileError(f"{path.name}: {name} has infinite or NaN values")

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor in float32."""
        values: torch.Tensor = self._file.get_tensor(name)
        if not values.is_floating_point():
            raise DamagedFileError(f"{name} is {values.dtype}; expected floating-point numbers")
        return values.float()


@dataclass(slots=True)
class _Change:
    """What an adapter does to one tensor.

    Args:
        adapter: the adapter.
        module: the module's name in the model that it was trained on.
        leaf: ``weight``, ``bias``, or a parameter of the module.
        parts: names of the adapter's tensors, by what they are: ``lora_A`` and so on, ``base`` and ``values`` for those
            that replace the tensor before and after training.
    """

    adapter: _Adapter
    module: str
    leaf: str
    parts: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the tensor in messages."""
        return f"{self.module}.{self.leaf}"

    def check(self, shape: tuple[int, ...]) -> None:
        """Check the shapes of all parts.

        Args:
            shape: shape of the tensor in the base.

        Raises:
            DamagedFileError: a part is missing, or one does not fit.
        """
        rows, kind = self._rows(), self._kind()
        rank, ones = self.adapter.ranks.get(self.module, 0), [1] * (len(shape) - 2)
        factors: dict[str, tuple[int, ...]] = {}
        if kind == "lora_":
            magnitude = (1, shape[0], *ones) if ones else shape[:1]
            factors = {"lora_A": (rank, *shape[1:]), "lora_B": (shape[0], rank, *ones), "magnitude": magnitude}
        elif kind is not None:
            factors = {f"{kind}A": (rank, shape[0]), f"{kind}B": (shape[-1], rank), "magnitude": shape[1:]}
        expected = {"base": shape, "values": shape, "bias": shape, "rows": (len(rows), *shape[1:]), **factors}
        for part in factors:
            if part not in self.parts and (part != "magnitude" or self.adapter.config.use_dora):
                raise DamagedFileError(f"{self.name} has no {part}")
        for part, name in self.parts.items():
            if (stored := self.adapter.shapes[name]) != expected.get(part):
                fitting = list(expected[part]) if part in expected else "none"
                raise DamagedFileError(
                    f"{name} has the shape {list(stored)}; expected {fitting}: is it an adapter for another model?"
                )
        if rows and not all(0 <= row < shape[0] for row in rows):
            raise DamagedFileError(f"{ADAPTER_CONFIG}: trainable_token_indices are not all below {shape[0]:,}")
        if factors or "bias" in self.parts:
            self._scaling()

    def replaced(self, base: torch.Tensor) -> torch.Tensor:
        """Return the tensor that the adapter was trained on, or the one that it stores whole."""
        for part in ("base", "values"):
            if part in self.parts:
                base = self.adapter.read(self.parts[part])
        return base

    def merged(self, weight: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        """Return a tensor after this adapter.

        Args:
            weight: the tensor after the adapters before it.
            base: the tensor before all of them, which decides the norms of DoRA.
        """
        tensors = {part: self.adapter.read(name) for part, name in self.parts.items() if part not in ("base", "values")}
        if "rows" in tensors:
            weight = weight.clone()
            weight[list(self._rows())] = tensors["rows"]
        if "bias" in tensors:
            weight = weight + tensors["bias"] * self._scaling()
        if (kind := self._kind()) is None:
            return weight
        first, second = (tensors[f"{kind}{letter}"].flatten(1) for letter in "AB")
        embedding = kind != "lora_"
        product = (second @ first).T if embedding else second @ first
        delta = (product * self._scaling()).reshape(weight.shape)
        if "magnitude" not in tensors:
            return weight + delta
        norms = torch.linalg.norm((base + delta).flatten(1), dim=0 if embedding else 1)
        factors: torch.Tensor = tensors["magnitude"].flatten() / norms
        return factors.view((1, -1) if embedding else (-1, *[1] * (weight.ndim - 1))) * (weight + delta)

    def _kind(self) -> str | None:
        """Return the beginning of the factors' names; None without factors."""
        kinds = ("lora_embedding_", "lora_")
        return next((kind for kind in kinds if not {f"{kind}A", f"{kind}B"}.isdisjoint(self.parts)), None)

    def _rows(self) -> Sequence[int]:
        """Return the rows that the adapter replaces."""
        if "rows" not in self.parts:
            return ()
        indices = self.adapter.config.token_rows.items()
        return next((rows for name, rows in indices if f".{self.module}".endswith(f".{name}")), ())

    def _scaling(self) -> float:
        return self.adapter.config.scaling(self.module, self.adapter.ranks.get(self.module, 0))


def _changes_of(source: AdapterSource) -> dict[str, _Change]:
    """Return what an adapter does to each tensor, by its key.

    Raises:
        DamagedFileError: a file is damaged, or two tensors are the same part.
    """
    adapter = _Adapter(source)
    changes: dict[str, _Change] = {}
    for name in adapter.shapes:
        module, leaf, part = _part_of(name.removeprefix(_PREFIX))
        if part.endswith("_A"):
            adapter.ranks[module] = next(iter(adapter.shapes[name]), 0)
        change = changes.setdefault(key_of(f"{module}.{leaf}"), _Change(adapter, module, leaf))
        if change.parts.setdefault(part, name) != name:
            raise DamagedFileError(f"the tensors {change.parts[part]} and {name} are the same part")
    if not changes:
        raise DamagedFileError("its adapter_model.safetensors has no tensors")
    return changes


def _part_of(name: str) -> tuple[str, str, str]:
    """Return module, leaf and part of an adapter's tensor."""
    match = _PART.fullmatch(name)
    if match is None:
        module, _, leaf = name.rpartition(".")
        return module, leaf, "values"
    part = str(match.lastgroup)  # the one behind the module
    if part == "leaf":
        return match["module"], match["leaf"], "base"
    return match["module"], "bias" if part == "bias" else "weight", match["factor"] or part
