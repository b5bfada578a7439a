"""Load Gemma 3 checkpoints, or random weights of the same shapes, with their tokenizer and processor."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.utils import CONFIG_NAME

from panscan.core import ModelError, UnsupportedError
from panscan.images.pixels import PixelSpec
from panscan.model.adapters import merged_tensors, untie, warn_of_companions
from panscan.model.build import build_model, empty_model
from panscan.model.families import FAMILIES, Family, family_module, refused_model
from panscan.model.files import CheckpointFiles, checked_files, checkpoint_files
from panscan.model.formats.load import StoredLoader, stored_scheme
from panscan.model.formats.schemes import QUANTIZATION_FIELDS, StoredScheme
from panscan.model.hub import model_source
from panscan.model.hub_errors import friendly_errors, quiet_transformers, read_by_transformers
from panscan.model.linear.quantized import WeightFormat
from panscan.model.linear.vocabulary import VocabularyMatrix
from panscan.model.prompt import PromptWriter
from panscan.model.shapes import SHAPES, Shape
from panscan.model.sharding import check_divides, fill_shard, shard_config
from panscan.model.untrusted.check import stored_template, template_file
from panscan.model.untrusted.fields import check_tokenizer
from panscan.model.untrusted.headers import EMBEDDING, HEAD, key_of
from panscan.model.untrusted.reading import DamagedFileError
from panscan.settings import Settings

log = logging.getLogger("panscan.model")

_NO_CODE = {"trust_remote_code": False}  # the default None lets Transformers ask on the terminal
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_MIN_VOCABULARY = 260  # all bytes and the turn tokens


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices, dtype and quantisation of a model that Transformers loads.

    Args:
        device: device of all weights, unless ``device_map`` is given.
        dtype: dtype of the weights; ``auto``: as stored.
        device_map: device map that distributes the weights, such as ``auto``.
        max_memory: memory limits for ``device_map``, such as ``0=30GiB;cpu=60GiB``.
        quantization: quantisation configuration of Transformers.
    """

    device: torch.device
    dtype: torch.dtype | Literal["auto"]
    device_map: str | None = None
    max_memory: str | None = None
    quantization: Any = None

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for ``from_pretrained``."""
        chosen: dict[str, Any] = {"dtype": self.dtype, "device_map": self.device_map or {"": self.device}}
        if self.quantization is not None:
            chosen["quantization_config"] = self.quantization
        if self.max_memory is not None:
            pairs = (part.strip().split("=") for part in self.max_memory.split(";"))
            chosen["max_memory"] = {int(device) if device.isdigit() else device: size for device, size in pairs}
        return chosen


@dataclass(frozen=True, slots=True)
class Reader:
    """The part of a checkpoint that needs no weights: tokenizer, prompts, pixel settings."""

    name: str
    processor: Any
    tokenizer: Any
    prompts: PromptWriter
    pixels: PixelSpec | None
    eos_ids: frozenset[int] = frozenset()
    """End tokens that ``config.json`` and the tokenizer name."""

    @property
    def reads_images(self) -> bool:
        return self.pixels is not None


@dataclass(slots=True)
class Loaded:
    """A model ready to run, with its reader."""

    model: Any
    reader: Reader
    eos_ids: frozenset[int] = field(default_factory=frozenset)
    rounded: torch.dtype | None = None
    """Type of the weights before they were quantised; None for dense weights."""
    vocab_size: int | None = None
    """Rows of the whole output matrix; None: as the configuration of the model says."""

    @property
    def device(self) -> torch.device:
        """Device of the inputs: the first device of ``hf_device_map`` that computes, else the device of the model."""
        placed = getattr(self.model, "hf_device_map", None) or {}
        real = [torch.device(place) for place in placed.values() if place not in ("disk", "meta")]
        return real[0] if real else torch.device(self.model.device)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the pixel values: the dtype of the model, or bfloat16 if that is not a floating-point type."""
        dtype: torch.dtype = self.model.dtype
        return dtype if dtype.is_floating_point else torch.bfloat16

    def shape(self) -> Shape:
        """Return the shape of the model.

        Raises:
            UnsupportedError: it has a part that the formulas of :mod:`panscan.model.shapes` leave out.
        """
        shape: Shape = family_module(self.model.config.model_type, "config").shape_of_config(self.model.config)
        return shape


def checkpoint_family(name: str, revision: str | None = None) -> Family | None:
    """Return the family of a checkpoint: ``mini``, ``tiny``, a directory or a hub id; None for one that is refused.

    Raises:
        ModelError: the checkpoint is not available.
    """
    return FAMILIES.get(str(checked_files(name, revision, weights=False).config.get("model_type")))


def model_reads_images(settings: Settings) -> bool:
    """Return whether the model of settings reads images, in any family.

    Raises:
        ModelError: the checkpoint is not available, or no command runs it.
    """
    if settings.model_shape is not None:
        return SHAPES[settings.model_shape].vision is not None
    if (family := checkpoint_family(settings.model, settings.revision)) is not None:
        return family.reads_images
    return hasattr(load_config(settings.model, settings.revision), "vision_config")  # refuses other families


def load_config(name: str, revision: str | None = None) -> Any:
    """Return the configuration of a checkpoint: ``mini``, ``tiny``, a directory or a hub id.

    Raises:
        ModelError: it cannot be loaded, or is not a Gemma 3; the message names the fix.
    """
    files = checkpoint_files(name, revision, weights=False)
    with friendly_errors(name):
        return _config_of(files, name)


def load_reader(name: str, revision: str | None = None) -> Reader:
    """Load the tokenizer and processor of a checkpoint: ``mini``, ``tiny``, a directory or a hub id.

    Raises:
        ModelError: it cannot be loaded, or is not a Gemma 3; the message names the fix.
    """
    files = checkpoint_files(name, revision, weights=False)
    source = str(files.directory)
    with friendly_errors(name):
        config = _config_of(files, name)
        reads_images = FAMILIES[config.model_type].reads_images
        _check_companions(files.directory, reads_images=reads_images)
        if reads_images:
            tools = _read_tools(AutoProcessor, source, *_PROCESSOR_FILES, *_TOKENIZER_FILES)
        else:
            tools = _read_tools(AutoTokenizer, source, *_TOKENIZER_FILES)
            if not tools.chat_template:  # Transformers reads chat_template.json for processors only
                tools.chat_template = stored_template(files.directory)
        eos_ids = [token for part in files.parts for token in _tokens(part.get("eos_token_id"))]
        reader = _reader_of(name, tools, config, template_file(files.directory), eos_ids)
        check_tokenizer(reader.tokenizer)
        reader.prompts.check_template()
    reader.prompts.vocabulary = int(config.get_text_config().vocab_size)
    # If its files are missing, Transformers silently creates a tokenizer with a handful of tokens.
    mismatched = reader.reads_images and reader.prompts.soft_id != config.image_token_id
    if mismatched or len(reader.tokenizer) < _MIN_VOCABULARY:
        raise ModelError(f"--model {name}: the tokenizer does not belong to the model (are its files there?)")
    return adapted_reader(reader, name, revision)


def _check_companions(directory: Path, *, reads_images: bool) -> None:
    """Check that a checkpoint has the files of a tokenizer and a processor, which training often does not save.

    Raises:
        DamagedFileError: it lacks one.
    """
    needed = [("tokenizer.json", "tokenizer.model"), *([("tokenizer_config.json",), _PROCESSOR_FILES] * reads_images)]
    for names in needed:
        if not any((directory / name).is_file() for name in names):
            raise DamagedFileError(f"there is no {' or '.join(names)}: copy it from the base model")


def adapted_reader(reader: Reader, name: str, revision: str | None = None) -> Reader:
    """Return the reader of a base as that of the base with adapters; warn if one of them has other files.

    Raises:
        ModelError: a file of an adapter is damaged.
    """
    directory = checkpoint_files(name, revision, weights=False).directory
    for adapter in model_source(name, revision).adapters:
        warn_of_companions(adapter, directory, reader.tokenizer)
    return replace(reader, name=name)


def load_random(
    name: str,
    shape: str | Shape,
    dtype: torch.dtype,
    device: torch.device,
    **options: Any,
) -> Loaded:
    """Build a model with random weights, to measure speed without a download.

    Args:
        name: name of the model in messages and records.
        shape: a shape, or the name of one.
        dtype: dtype of the weights.
        device: device of the model.
        options: as of :func:`panscan.model.bundled.random_weights.random_model`.

    Raises:
        UnsupportedError: ``size`` does not divide the shape.
    """
    from panscan.model.bundled.random_weights import random_model

    model, tools = random_model(shape, dtype=dtype, device=device, **options)
    return ready_model(model, _reader_of(name, tools, model.config))


def load_shard_of(
    name: str,
    rank: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    revision: str | None = None,
    weight_format: WeightFormat | None = None,
) -> Loaded:
    """Load one rank's part of a checkpoint.

    The whole model is loaded into host memory (memory-mapped if the dtype does not change), and only the rank's part is
    copied to the device, one parameter at a time. With ``weight_format``, the device quantises each decoder matrix as
    it arrives, so it never holds more than the quantised model and one dense matrix. The matrices of a quantised
    checkpoint are read, converted and split one at a time.

    Raises:
        ModelError: as :func:`load_model`, or ``weight_format`` is given for a quantised checkpoint.
        UnsupportedError: ``size`` does not divide the model.
    """
    merged = merged_tensors(name, revision)
    if (scheme := stored_scheme_of(name, revision)) is not None:
        if weight_format is not None:
            raise already_quantized(name, scheme.name, weight_format.kind)
        return _load_stored(name, scheme, dtype, device, revision, rank, size)
    dense = _load_dense(name, Placement(torch.device("cpu"), "auto"), revision)  # as stored: memory-mapped
    if merged is not None and merged.unties:
        untie(dense.model)
    config = dense.model.config
    shard = empty_model(shard_config(config, size), weight_format, dtype, device)
    parameters = dense.model.named_parameters()
    if merged is not None:  # quantised as panscan quantize does: from weights in the type of the checkpoint
        parameters = merged.weights_of(dense.model, rounded=weight_format is not None)
    fill_shard(shard, parameters, rank, size)
    shard.generation_config = dense.model.generation_config
    loaded = ready_model(shard, dense.reader)
    loaded.rounded = None if weight_format is None else dense.model.dtype
    loaded.vocab_size = config.get_text_config().vocab_size
    return loaded


def drop_weights(loaded: Loaded) -> None:
    """Drop all weights except the output matrix, which turns a reference's hidden states into logits.

    The output matrix moves to the host; a quantised one is dropped, too.
    """
    model, device, head = loaded.model, loaded.device, loaded.model.get_output_embeddings()
    weight = None if isinstance(head, VocabularyMatrix) else head.weight.detach().cpu()
    loaded.model = model.to("meta")
    if weight is not None:
        keep_head(model, weight)
    model.hf_device_map = {"": str(device)}


def _tokens(value: int | Sequence[int] | None) -> list[int]:
    """Return the ids of a field that holds one, several or none."""
    values = [value] if value is None or isinstance(value, int) else value
    return [token for token in values if token is not None and token >= 0]


def _reader_of(
    name: str,
    tools: Any,
    config: Any,
    template: str = "chat_template.jinja",
    eos_ids: Sequence[int] = (),
) -> Reader:
    """Return the reader of a configuration's model whose processor, or tokenizer if it is text-only, is ``tools``."""
    tokenizer, image_tokens, spec = tools, 0, None
    if hasattr(config, "vision_config"):
        images = getattr(tools, "image_processor", None)
        side, image_tokens = config.vision_config.image_size, config.mm_tokens_per_image
        if images is None or (images.size["height"], getattr(tools, "image_seq_length", None)) != (side, image_tokens):
            raise DamagedFileError(
                f"processor_config.json: it does not fit config.json, which expects views of {side} pixels and"
                f" {image_tokens} tokens"
            )
        spec = pixel_spec(side, images)
        tokenizer = tools.tokenizer
        # The processor's template, as in Transformers, for whatever asks either of them.
        tools.chat_template = tokenizer.chat_template = tools.chat_template or tokenizer.chat_template
    context = int(config.get_text_config().max_position_embeddings)
    prompts = PromptWriter(tokenizer, image_tokens, context, template)
    return Reader(name, tools, tokenizer, prompts, spec, frozenset([*eos_ids, *_tokens(tokenizer.eos_token_id)]))


def pixel_spec(side: int, images: Any) -> PixelSpec:
    """Return what an image processor of Transformers does to views of ``side`` pixels."""
    rescale = images.rescale_factor if images.do_rescale is not False else 1.0
    mean, std = (images.image_mean, images.image_std) if images.do_normalize is not False else ([0.0] * 3, [1.0] * 3)
    return PixelSpec(side, rescale, tuple(mean), tuple(std), int(images.resample))


def _read_tools(kind: Any, source: str, *files: str) -> Any:
    return read_by_transformers(lambda directory: kind.from_pretrained(directory, **_NO_CODE), source, *files)


def load_model(name: str, placement: Placement, *, revision: str | None = None) -> Loaded:
    """Load a checkpoint's model in evaluation mode, with its reader.

    Raises:
        ModelError: the checkpoint cannot be loaded, is not a Gemma 3, or lacks weights.
        UnsupportedError: the quantisation format is not supported, or not with this placement.
    """
    merged = merged_tensors(name, revision)
    if merged is not None and placement.quantization is not None:
        raise UnsupportedError("--adapter: bitsandbytes quantises while it loads; use --quantization int8 or int4")
    if (scheme := stored_scheme_of(name, revision)) is not None:
        if placement.quantization is not None:
            raise already_quantized(name, scheme.name, placement.quantization.quant_method.value)
        for option in ("device_map", "max_memory"):
            if getattr(placement, option) is not None:
                raise UnsupportedError(
                    f"--{option.replace('_', '-')}: not supported for quantised checkpoints (--model {name} is"
                    f" {scheme.name}); use --runner engine --tensor-parallel-size"
                )
        assert placement.dtype != "auto"  # only used for dense checkpoints
        return _load_stored(name, scheme, placement.dtype, placement.device, revision)
    loaded = _load_dense(name, placement, revision)
    if merged is not None:
        merged.merge_into(loaded.model)
    return loaded


def _load_dense(name: str, placement: Placement, revision: str | None) -> Loaded:
    """Load the checkpoint of a name, without its adapters."""
    files = checkpoint_files(name, revision)
    reader = load_reader(name, revision)
    with friendly_errors(name), quiet_transformers():
        model, missing = _from_files(files, _config_of(files, name), placement)
        names = files.names
        if renamed := {names[key]: weight for weight in missing if (key := key_of(weight)) in names}:
            model, missing = _from_files(files, _config_of(files, name), placement, renamed)
        _set_generation_config(model, files)
        if files.quantization is not None and isinstance(placement.dtype, torch.dtype):
            _convert_dense_parts(model, placement.dtype)
    if missing:
        raise ModelError(f"--model {name}: {len(missing)} weights are missing, e.g. {missing[0]}: download it again")
    return ready_model(model, reader)


def _from_files(
    files: CheckpointFiles, config: Any, placement: Placement, renamed: Mapping[str, str] | None = None
) -> tuple[Any, list[str]]:
    """Load a model by Transformers; return it with the names of its parameters that are not stored.

    Args:
        files: files of the checkpoint.
        config: its configuration.
        placement: where and how.
        renamed: name of the model's parameter for each tensor that Transformers does not know by its stored name.
    """
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    options = {"config": config, "output_loading_info": True, **_NO_CODE, **placement.arguments()}
    if renamed is None and files.plain:
        model, info = kind.from_pretrained(str(files.directory), use_safetensors=True, **options)
    else:  # Transformers would choose other files, or apply an adapter that lies there
        names, tensors = renamed or {}, files.open_by_key()
        weights = {names.get(stored, stored): tensors.slice(key) for key, stored in tensors.names.items()}
        model, info = kind._model_mapping[type(config)].from_pretrained(None, state_dict=weights, **options)
    return model, sorted(info["missing_keys"])


def _convert_dense_parts(model: Any, dtype: torch.dtype) -> None:
    """Convert what is not quantised, and the computation of what is: Transformers leaves it as stored."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        if getattr(module, "compute_dtype", None) is not None:
            module.compute_dtype = dtype


def stored_scheme_of(name: str, revision: str | None = None) -> StoredScheme | None:
    """Return the quantisation format of a checkpoint; None if it is unquantised, or if Transformers loads the format.

    Raises:
        ModelError: the checkpoint is not available.
        UnsupportedError: the format is not supported.
    """
    files = checkpoint_files(name, revision, weights=False)
    with friendly_errors(name):
        return stored_scheme(files.config, name)


def stored_format(name: str, revision: str | None = None) -> str | None:
    """Return the name of a checkpoint's quantisation format; None if it is unquantised.

    Raises:
        ModelError: the checkpoint is not available, or its configuration is damaged.
        UnsupportedError: the format is not supported.
    """
    if (scheme := stored_scheme_of(name, revision)) is not None:
        return scheme.name
    stored = checkpoint_files(name, revision, weights=False).quantization  # bitsandbytes
    return None if stored is None else quantization_method(stored)


def quantization_method(stored: Any) -> str:
    """Return the method that a ``quantization_config`` (a mapping or an object of Transformers) names."""
    method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
    return str(getattr(method, "value", method))


def already_quantized(name: str, method: str, asked: str) -> ModelError:
    """Return the error for ``--quantization asked`` with a checkpoint whose weights are quantised by ``method``."""
    return ModelError(
        f"--quantization {asked}: --model {name} is quantised already: {method}; leave out --quantization, or use the"
        " unquantised checkpoint"
    )


def _load_stored(
    name: str,
    scheme: StoredScheme,
    dtype: torch.dtype,
    device: torch.device,
    revision: str | None,
    rank: int = 0,
    size: int = 1,
) -> Loaded:
    """Load a quantised checkpoint, or one rank's part of it."""
    files = checkpoint_files(name, revision)
    reader = load_reader(name, revision)
    with friendly_errors(name):
        config = _unquantized(_config_of(files, name))
        check_divides(config, size)
        model = StoredLoader(config, scheme, files.open_by_key(), dtype, device, rank, size).load(name)
        _set_generation_config(model, files)
    return replace(ready_model(model, reader), vocab_size=config.get_text_config().vocab_size)


def _unquantized(config: Any) -> Any:
    """Return a configuration without its quantisation, which Transformers would otherwise apply."""
    for part in (config, config.get_text_config()):
        for name in QUANTIZATION_FIELDS:
            if getattr(part, name, None) is not None:
                delattr(part, name)
    return config


def load_meta_model(
    name: str, dtype: torch.dtype, device: torch.device, *, revision: str | None, embedding: bool
) -> Loaded:
    """Build a checkpoint's model on the meta device, with its reader, for a runner that holds the weights elsewhere.

    Args:
        name: as in :func:`load_model`.
        dtype: of the weights that are elsewhere.
        device: where they are.
        revision: of a hub checkpoint.
        embedding: load the embedding (and output matrix) onto ``device``, which turns a reference's hidden states into
            logits. All other weights are on the meta device.

    Raises:
        ModelError: the checkpoint cannot be loaded, or is not a Gemma 3.
    """
    merged = merged_tensors(name, revision)
    files = checkpoint_files(name, revision, weights=embedding) if merged is None else merged.files
    reader = load_reader(name, revision)
    scheme = None if embedding else stored_scheme_of(name, revision)
    with friendly_errors(name):
        config = _config_of(files, name)
        model = build_model(config if scheme is None else _unquantized(config), dtype, torch.device("meta"))
        _set_generation_config(model, files)
        if embedding:
            key = EMBEDDING if files.tied else HEAD
            if merged is not None and key in merged.keys:
                head = merged.read(key)
            else:
                head = files.open_by_key().slice(key_of(files.stored_name(key)))[:]
            keep_head(model, head.to(device, dtype))
    model.hf_device_map = {"": str(device)}  # read by Loaded.device: parameters may be on the meta device
    return ready_model(model, reader)


def _set_generation_config(model: Any, files: CheckpointFiles) -> None:
    """Give a model the generation settings of its checkpoint; without such a file, those of its configuration."""
    try:
        read, source = GenerationConfig.from_pretrained, str(files.directory)
        model.generation_config = read_by_transformers(read, source, "generation_config.json")
    except OSError:
        model.generation_config = GenerationConfig.from_model_config(model.config)


def keep_head(model: Any, weight: torch.Tensor) -> None:
    """Set the output matrix ``[vocabulary, hidden]`` of a model, and its embedding if both are tied."""
    parameter = torch.nn.Parameter(weight, requires_grad=False)
    model.get_output_embeddings().weight = parameter
    if model.config.tie_word_embeddings:
        model.get_input_embeddings().weight = parameter


def ready_model(model: Any, reader: Reader) -> Loaded:
    """Put a model into evaluation mode and discard the checkpoint's sampling defaults."""
    model.eval().requires_grad_(False)
    stored = model.generation_config
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "suppress_tokens")
    model.generation_config = GenerationConfig(**{key: getattr(stored, key, None) for key in names})
    named = frozenset(_tokens(stored.eos_token_id))
    eos = named | reader.eos_ids
    if named and eos != named:
        text = " ".join(str(reader.tokenizer.convert_ids_to_tokens(token)) for token in sorted(eos))
        log.info("end tokens: %s (of generation_config.json, config.json and the tokenizer together)", text)
    model.generation_config.eos_token_id = sorted(eos)
    if model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = reader.tokenizer.pad_token_id
    return Loaded(model, reader, eos)


def _config_of(files: CheckpointFiles, name: str) -> Any:
    """Return Transformers' configuration of a checkpoint, as its tensors are.

    Raises:
        ModelError: it is not that of a Gemma 3.
    """
    config = _read_tools(AutoConfig, str(files.directory), CONFIG_NAME)
    if (reason := refused_model({"model_type": config.model_type})) is not None:  # derived from the name if not stored
        raise ModelError(f"--model {name}: {reason}")
    if files.quantization is None:
        _unquantized(config)
    if files.tensors:
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = files.tied
    return config
