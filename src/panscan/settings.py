"""The table of settings: names, defaults, ranges, help. Options, YAML keys and records use these names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache, cached_property
from importlib.util import find_spec
from types import UnionType
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

from panscan.core import PanAndScan, Sampling, SettingError
from panscan.core.ranges import Range, shorten
from panscan.core.request import PAN_AND_SCAN_RANGES, SAMPLING_RANGES
from panscan.spellings import FOREIGN_OPTIONS, FOREIGN_VALUES, SWITCHES

__all__ = [
    "ALL_AT_ONCE",
    "ATTENTION",
    "ATTENTION_BACKENDS",
    "BOOLEANS",
    "ENGINE_AXES",
    "ENGINE_LIMITS",
    "GROUPS",
    "GROUP_SIZES",
    "KV_CACHE_DTYPES",
    "MODEL_SHAPES",
    "QUANTIZATION",
    "RANGES",
    "RUNNER_LIMITS",
    "SAMPLE_RANGES",
    "VLLM_AXES",
    "VLLM_LIMITS",
    "WEIGHT_KINDS",
    "Axis",
    "Group",
    "RunnerChoice",
    "Settings",
    "axes",
    "axis_name",
    "check_weight_kind",
    "choose_runner",
    "foreign_option",
    "foreign_settings",
    "missing_package",
    "nearest",
    "parse_value",
    "recorded_settings",
    "settings_from",
]

ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
ATTENTION_BACKENDS = ("auto", "triton", "sdpa")
"""What the engine attends with; see :func:`panscan.engine.model_runner.choose_backend`."""
GROUP_SIZES = (128, 64, 32)
"""Supported input channels per scale of 4-bit weights, preferred size first."""
WEIGHT_KINDS = ("fp8", "int8", "int4")
"""panscan's own quantisations, supported by every runner except vLLM; only int4 has groups."""
QUANTIZATION = (*WEIGHT_KINDS, "bnb-8bit", "bnb-4bit")
MODEL_SHAPES = ("mini", "tiny", "270m", "1b", "4b", "12b", "27b")
KV_CACHE_DTYPES = ("auto", "fp8")
Level = Literal["load", "call"]
Group = Literal[
    "Input", "Model", "Pan and scan", "Runner", "Engine", "Generation", "Server", "Traffic", "Measurement", "Output"
]
GROUPS: tuple[Group, ...] = get_args(Group)
"""Headings of ``--help``, in their order."""


def _axis(
    default: Any,
    group: Group,
    help: str,
    *,
    flag: str = "",
    aliases: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    level: Level = "call",
    only: str = "",
    rare: bool = False,
) -> Any:
    """Return a field of :class:`Settings`; see :class:`Axis`."""
    metadata = {
        "group": group,
        "help": help,
        "flag": flag,
        "aliases": aliases,
        "choices": choices,
        "level": level,
        "only": only,
        "rare": rare,
    }
    return field(default=default, metadata=metadata)


_REQUESTS = Range(integer=True, ge=1, le=65_536)  # arrays have a row for each
_GIGABYTES = 1_000_000
RANGES = {
    **dict.fromkeys(("batch_size", "max_num_seqs", "vision_batch_size"), _REQUESTS),
    "max_concurrency": Range(integer=True, ge=1, le=2**31 - 1),
    **dict.fromkeys(("prefill_chunk_size", "pad_to_multiple_of"), SAMPLING_RANGES["max_new_tokens"]),
    "tensor_parallel_size": Range(integer=True, ge=1, le=64),
    "quantization_group_size": Range(integer=True, ge=GROUP_SIZES[-1], le=GROUP_SIZES[0]),
    "gpu_memory_utilization": Range(gt=0, le=1, note="a share: 0.92 is 92% of the memory"),
    "gpu_memory_gb": Range(gt=0, le=_GIGABYTES, note="leave it out to set no limit in GB"),
    "kv_cache_gb": Range(gt=0, le=_GIGABYTES, note="leave it out to take most of the free memory"),
    "image_memory_gb": Range(gt=0, le=_GIGABYTES, note="an image that is larger is read alone"),
    "tpot_target_ms": Range(gt=0, le=600_000, note="leave it out to set no target"),
    "vision_cache_gb": Range(gt=0, le=_GIGABYTES, note="it holds the encoded views of a pass"),
    **{"sampling_seed" if name == "seed" else name: allowed for name, allowed in SAMPLING_RANGES.items()},
    **{f"pan_and_scan_{name}": allowed for name, allowed in PAN_AND_SCAN_RANGES.items()},
}
"""The numbers that each setting accepts."""
SAMPLE_RANGES = {"count": Range(integer=True, ge=1, le=10_000), "columns": Range(integer=True, ge=12, le=200)}
"""The numbers that drawing sample documents accepts."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One point of a sweep. Values are checked on construction; what a machine cannot do is checked by the runner."""

    runner: str = _axis(
        "generate",
        "Runner",
        "Runner: engine, generate, pipeline, generate_batch or vllm.",
        choices=("generate", "pipeline", "generate_batch", "engine", "vllm"),
        level="load",
    )
    model: str = _axis("mini", "Model", "Hub id, directory, 'mini' or 'tiny'.", aliases=("model_id",), level="load")
    revision: str | None = _axis(None, "Model", "Branch, tag or commit of a hub checkpoint.", level="load", rare=True)
    random_weights: bool = _axis(False, "Model", "Use random weights of --model-shape: no download.", level="load")
    model_shape: str | None = _axis(
        None, "Model", "Random shape: mini, tiny, 270m, 1b, 4b, 12b or 27b.", choices=MODEL_SHAPES, level="load"
    )
    dtype: str = _axis(
        "auto",
        "Model",
        "Precision; auto: bf16 on a GPU, fp32 on a CPU.",
        aliases=("precision", "torch_dtype"),
        choices=("auto", "bf16", "fp32", "fp16"),
        level="load",
    )
    quantization: str | None = _axis(
        None, "Model", "Quantise weights: fp8, int8, int4, bnb-8bit or bnb-4bit.", choices=QUANTIZATION, level="load"
    )
    quantization_group_size: int | None = _axis(
        None, "Model", "Input channels per int4 scale; none: 128 if it fits.", level="load", rare=True
    )
    device: str = _axis("auto", "Model", "Device: auto, cpu, cuda, cuda:N or mps.", level="load")
    device_map: str | None = _axis(
        None,
        "Model",
        "Spread layers: auto, balanced, balanced_low_0, sequential.",
        choices=("auto", "balanced", "balanced_low_0", "sequential"),
        level="load",
        rare=True,
    )
    max_memory: str | None = _axis(
        None, "Model", "Memory per device for --device-map: '0=30GiB;cpu=60GiB'.", level="load", rare=True
    )
    tp_plan: str | None = _axis(
        None, "Runner", "Tensor parallelism of generate(), under torchrun.", choices=("auto",), level="load", rare=True
    )
    tensor_parallel_size: int = _axis(
        1, "Engine", "GPUs that share one model.", aliases=("tp",), level="load", only="engine"
    )
    attention: str = _axis(
        "sdpa",
        "Runner",
        "Attention of generate(): sdpa, eager, flex_attention, ...",
        aliases=("attn_impl", "attn_implementation"),
    )
    vllm_attention: str | None = _axis(
        None, "Runner", "Attention backend of vLLM; TRITON_ATTN matches Gemma 3.", level="load", only="vllm", rare=True
    )
    cache: str = _axis(
        "dynamic", "Runner", "KV cache of generate(); static compiles GPU decoding.", choices=("dynamic", "static")
    )
    compile: str | None = _axis(
        None,
        "Runner",
        "Compile mode: default, reduce-overhead or max-autotune.",
        choices=("default", "reduce-overhead", "max-autotune"),
        rare=True,
    )
    tf32: bool = _axis(False, "Runner", "Use TF32 for float32 matrix products.", rare=True)
    batch_size: int = _axis(1, "Runner", "Requests per generate() call; selects --runner generate.")
    max_concurrency: int | None = _axis(None, "Engine", "Maximum requests in flight; none: no limit.", only="engine")
    max_num_seqs: int = _axis(128, "Engine", "Maximum sequences per engine step.", only="engine")
    gpu_memory_utilization: float = _axis(0.92, "Engine", "Maximum share of each GPU's memory.", only="engine")
    gpu_memory_gb: float | None = _axis(
        None, "Engine", "Maximum memory per GPU, GB (10^9 bytes).", only="engine", rare=True
    )
    kv_cache_gb: float | None = _axis(None, "Engine", "KV cache per GPU, GB; none: from free memory.", only="engine")
    kv_cache_dtype: str = _axis(
        "auto", "Engine", "Data type of the KV cache; auto: the model's.", choices=KV_CACHE_DTYPES, only="engine"
    )
    prefix_caching: bool = _axis(
        True,
        "Engine",
        "Reuse the KV cache of equal prompt prefixes.",
        aliases=("enable_prefix_caching",),
        only="engine",
    )
    vision_cache_gb: float = _axis(1.0, "Engine", "Cache of encoded views, GB.", only="engine", rare=True)
    image_memory_gb: float = _axis(2.0, "Engine", "Memory for decoded images, GB.", only="engine", rare=True)
    tpot_target_ms: float | None = _axis(
        None, "Engine", "TPOT to keep by limiting prefill, ms; none: no limit.", only="engine"
    )
    vision_batch_size: int = _axis(16, "Engine", "Maximum views encoded at once.", only="engine", rare=True)
    attention_backend: str = _axis(
        "auto",
        "Engine",
        "Paged attention; triton: NVIDIA GPUs only.",
        choices=ATTENTION_BACKENDS,
        only="engine",
        rare=True,
    )
    equal_views: bool = _axis(False, "Runner", "Batch requests with equal view counts together.", rare=True)
    prefill_chunk_size: int | None = _axis(
        None, "Engine", "Prompt tokens per engine step; breaks images in generate()."
    )
    pad_to_multiple_of: int | None = _axis(None, "Runner", "Pad prompts to a multiple of this many tokens.", rare=True)
    preprocess: str = _axis(
        "cpu", "Runner", "Resize views as Pillow (cpu) or PyTorch (device) does.", choices=("cpu", "device")
    )
    do_pan_and_scan: bool = _axis(True, "Pan and scan", "Add crops to the whole image.", flag="pan-and-scan")
    pan_and_scan_min_crop_size: int = _axis(
        256, "Pan and scan", "Minimum side of a crop, pixels.", flag="min-crop-size", aliases=("grid_min_crop_size",)
    )
    pan_and_scan_max_num_crops: int = _axis(
        4, "Pan and scan", "Maximum crops per image.", flag="max-num-crops", aliases=("grid_max_crops",)
    )
    pan_and_scan_min_ratio_to_activate: float = _axis(
        1.2,
        "Pan and scan",
        "Minimum longer/shorter side for crops.",
        flag="min-ratio-to-activate",
        aliases=("grid_min_ratio",),
    )
    max_new_tokens: int = _axis(128, "Generation", "Maximum output tokens.", aliases=("max_tokens",))
    temperature: float = _axis(0.0, "Generation", "Sampling temperature; 0 is greedy.")
    top_k: int | None = _axis(None, "Generation", "Sample from the k most probable tokens.")
    top_p: float | None = _axis(None, "Generation", "Sample from top tokens with this total probability.")
    min_p: float | None = _axis(None, "Generation", "Drop tokens below this share of the most probable.", rare=True)
    repetition_penalty: float | None = _axis(
        None, "Generation", "Penalty on repeated tokens; above 1 repeats less.", rare=True
    )
    sampling_seed: int | None = _axis(None, "Generation", "Seed of the sampler.")
    ignore_eos: bool = _axis(False, "Generation", "Ignore end tokens: always generate the full length.")

    def __post_init__(self) -> None:
        for axis in axes().values():
            value = getattr(self, axis.name)
            if value is None and axis.optional:
                continue
            if axis.choices and value not in axis.choices:
                hint = nearest(value, axis.choices)
                raise SettingError(f"--{axis.flag} takes {', '.join(axis.choices)}; got {shorten(value)}{hint}")
            if axis.name in RANGES:
                RANGES[axis.name].check(f"--{axis.flag}", value)
            elif not isinstance(value, axis.kind):
                kind = "true or false" if axis.kind is bool else "text"
                raise SettingError(f"--{axis.flag} takes {kind}; got {shorten(value)}")
        if self.attention not in ATTENTION and not re.fullmatch(r"[\w.-]+/[\w.@:-]+", self.attention):
            hint = nearest(self.attention, ATTENTION)
            raise SettingError(
                f"--attention takes {', '.join(ATTENTION)} or a kernels-hub name (owner/kernel);"
                f" got {shorten(self.attention)}{hint}"
            )
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", self.device):
            raise SettingError(f"--device takes auto, cpu, mps, cuda or cuda:N; got {shorten(self.device)}")
        self._check_contradictions()
        self.pan_and_scan, self.sampling  # noqa: B018 - both check their values

    def _check_contradictions(self) -> None:
        if self.random_weights and self.model_shape is None:
            raise SettingError(f"--random-weights: no shape is given; add --model-shape {'|'.join(MODEL_SHAPES)}")
        if self.model_shape is not None and not self.random_weights:
            raise SettingError(f"--model-shape {self.model_shape}: requires --random-weights; add it, or use --model")
        if self.random_weights and self.model != "mini":
            raise SettingError("--model: not supported with --random-weights; leave out one of them")
        for name in ("device_map", "tp_plan", "revision"):
            if self.random_weights and getattr(self, name) is not None:
                raise SettingError(f"--{axes()[name].flag}: not supported with --random-weights; leave it out")
        if self.device_map is not None and self.tp_plan is not None:
            raise SettingError("--tp-plan: not supported with --device-map; leave out one of them")
        if self.device_map is not None and self.device != "auto":
            raise SettingError(f"--device {self.device}: --device-map places the layers; leave out one of them")
        self._check_quantization()
        self._check_tensor_parallel()
        if self.max_memory is not None and self.device_map is None:
            raise SettingError("--max-memory: requires --device-map; add --device-map auto")
        for part in self.max_memory.split(";") if self.max_memory is not None else ():
            if not re.fullmatch(r"\s*(\d+|cpu|disk|mps)=\d+(\.\d+)?\s*[KMGT]i?B\s*", part):
                raise SettingError(f"--max-memory takes e.g. '0=30GiB;cpu=60GiB'; got {shorten(part.strip())}")

    def _check_quantization(self) -> None:
        kind, size = self.quantization, self.quantization_group_size
        if size is not None and kind != "int4":
            raise SettingError(f"--quantization-group-size {size}: only int4 has groups; add --quantization int4")
        if size is not None and size not in GROUP_SIZES:
            sizes = _or([str(each) for each in GROUP_SIZES])
            raise SettingError(f"--quantization-group-size takes {sizes}; got {size}")
        if kind is None:
            return
        if kind not in WEIGHT_KINDS:
            if self.random_weights:
                raise SettingError(
                    f"--random-weights: --quantization {kind} requires a checkpoint; use {_or(WEIGHT_KINDS)}"
                )
            return
        for name in ("device_map", "tp_plan"):
            if getattr(self, name) is not None:
                raise SettingError(
                    f"--{axes()[name].flag}: not supported with --quantization {kind}; use --tensor-parallel-size, or"
                    " --quantization bnb-8bit or bnb-4bit"
                )

    def _check_tensor_parallel(self) -> None:
        if self.tensor_parallel_size == 1:
            return
        for name in ("device_map", "tp_plan"):
            if getattr(self, name) is not None:
                raise SettingError(
                    f"--{axes()[name].flag}: not supported with --tensor-parallel-size; leave out one of them"
                )
        if self.device.startswith("cuda:"):
            raise SettingError(
                f"--device {self.device}: --tensor-parallel-size takes the first visible GPUs; use --device cuda,"
                " and CUDA_VISIBLE_DEVICES to choose them"
            )
        if self.quantization not in (None, *WEIGHT_KINDS):
            raise SettingError(
                f"--tensor-parallel-size: --quantization {self.quantization} cannot be split; use {_or(WEIGHT_KINDS)}"
            )

    @cached_property
    def pan_and_scan(self) -> PanAndScan:
        return PanAndScan(
            enabled=self.do_pan_and_scan,
            min_crop_size=self.pan_and_scan_min_crop_size,
            max_num_crops=self.pan_and_scan_max_num_crops,
            min_ratio_to_activate=self.pan_and_scan_min_ratio_to_activate,
        )

    @cached_property
    def sampling(self) -> Sampling:
        return Sampling(
            self.max_new_tokens,
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.repetition_penalty,
            self.sampling_seed,
            self.ignore_eos,
        )

    @property
    def load_key(self) -> tuple[Any, ...]:
        """Cells with equal keys share one loaded model."""
        return tuple(getattr(self, axis.name) for axis in axes().values() if axis.level == "load")

    @property
    def model_name(self) -> str:
        return f"{self.model_shape} shape, random weights" if self.random_weights else self.model

    def changed(self) -> dict[str, Any]:
        """The settings that differ from the defaults."""
        plain = Settings()
        return {name: value for name, value in asdict(self).items() if value != getattr(plain, name)}


@dataclass(frozen=True, slots=True)
class Axis:
    """One setting.

    Args:
        name: field of :class:`Settings`, YAML key and key in records.
        kind: type of its values.
        optional: whether the word ``none`` stands for leaving it off.
        default: value without an option.
        group: heading in ``--help``; one of :data:`GROUPS`.
        help: line in ``--help``.
        flag: option in ``--help`` and in errors, without dashes in front.
        aliases: other accepted names.
        choices: accepted values; empty if there are others.
        level: whether it counts when a model is loaded, or for each call.
        only: the one runner that has this setting; empty if several do.
        rare: whether only ``--help-all`` lists it.
    """

    name: str
    kind: type
    optional: bool
    default: Any
    group: Group
    help: str
    flag: str
    aliases: tuple[str, ...]
    choices: tuple[str, ...]
    level: Level
    only: str
    rare: bool

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every accepted name, as an identifier."""
        return tuple(dict.fromkeys((self.name, self.flag.replace("-", "_"), *self.aliases)))


@cache
def axes() -> dict[str, Axis]:
    """Every setting by name, in the order of :class:`Settings`."""
    hints = get_type_hints(Settings)
    found = {}
    for item in fields(Settings):
        hint = hints[item.name]
        optional = isinstance(hint, UnionType)
        kind = next(t for t in get_args(hint) if t is not type(None)) if optional else hint
        facts = dict(item.metadata)
        facts["flag"] = facts["flag"] or item.name.replace("_", "-")
        found[item.name] = Axis(item.name, kind, optional, item.default, **facts)
    return found


ENGINE_AXES = tuple(axis.name for axis in axes().values() if axis.only == "engine")
"""Settings of the engine alone."""
VLLM_AXES = tuple(axis.name for axis in axes().values() if axis.only == "vllm")
"""Settings of vLLM alone."""
ENGINE_LIMITS: dict[str, Any] = {
    "attention": "sdpa",
    "cache": "dynamic",
    "compile": None,
    "batch_size": 1,
    "equal_views": False,
    "pad_to_multiple_of": None,
    "tp_plan": None,
}
"""Settings of ``generate()`` that the engine does not have, or decides itself: the only value that each may have."""
VLLM_LIMITS: dict[str, Any] = {**ENGINE_LIMITS, "preprocess": "cpu", "prefill_chunk_size": None, "tf32": False}
"""Settings that vLLM does not have, or decides itself: the only value that each may have."""
RUNNER_LIMITS: dict[str, dict[str, Any]] = {
    "engine": ENGINE_LIMITS,
    "vllm": {**VLLM_LIMITS, "quantization": None, "device_map": None},
    "pipeline": {"batch_size": 1, "pad_to_multiple_of": None, "preprocess": "cpu"},
    "generate_batch": {
        "cache": "dynamic",
        "compile": None,
        "prefill_chunk_size": None,
        "pad_to_multiple_of": None,
        "preprocess": "cpu",
    },
}
"""What each runner does not offer: the only value that a setting may have with it."""
ALL_AT_ONCE = ("engine", "vllm")
"""Runners that take all requests of a cell at once, and mix prefill and decode in one step."""
_REMOVED = frozenset({"fast_start"})


@cache
def _canonical() -> dict[str, str]:
    return {spelling: axis.name for axis in axes().values() for spelling in axis.spellings}


def foreign_settings(runner: str) -> Collection[str]:
    """Settings that a runner does not have: those of others alone, or those of all runners but it."""
    lacking = {"engine": (*ENGINE_LIMITS, *VLLM_AXES), "vllm": (*VLLM_LIMITS, *ENGINE_AXES)}
    return lacking.get(runner, (*ENGINE_AXES, *VLLM_AXES))


class RunnerChoice(NamedTuple):
    """A runner, and why it was chosen.

    Args:
        runner: name of the runner.
        reason: empty where the user or a preset names the runner.
        option: option, with its value, that the engine does not support; empty without one.
    """

    runner: str
    reason: str = ""
    option: str = ""


def choose_runner(given: Mapping[str, Any], preset: Mapping[str, Any]) -> RunnerChoice:
    """Choose the runner for some settings: the one that they name, or the engine, or ``generate()``.

    ``generate()`` replaces the engine where the engine does not support a given setting. It also does so for a preset
    that names the engine, where an option overrides a setting of the preset.

    Args:
        given: typed settings that the user gave; a list or tuple holds the values of a sweep.
        preset: typed settings of a preset.
    """
    if "runner" in given:
        return RunnerChoice(str(given["runner"]))
    named = preset.get("runner")
    if named not in (None, "engine"):
        return RunnerChoice(str(named))
    for name, value in (given if named else {**preset, **given}).items():
        for each in value if isinstance(value, list | tuple) else (value,):
            if not _engine_takes(name, each):
                option = f"--{axes()[name].flag} {each}"
                advice = "; --max-num-seqs limits its batches" if name == "batch_size" else ""
                return RunnerChoice("generate", f"the engine does not support {option}{advice}", option)
    return RunnerChoice("engine", "" if named else "the default; it supports all your options")


def _engine_takes(name: str, value: object) -> bool:
    """Return whether the engine supports a value; it runs on CPUs and NVIDIA GPUs."""
    if name == "device":
        return value != "mps"
    if name == "device_map":
        return value is None
    return name not in ENGINE_LIMITS or bool(value == ENGINE_LIMITS[name])


def _or(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


def check_weight_kind(kind: str) -> None:
    """Raise a SettingError unless ``panscan quantize`` can write weights of a kind."""
    if kind not in WEIGHT_KINDS:
        raise SettingError(f"--quantization takes {', '.join(WEIGHT_KINDS)}; got {kind!r}{nearest(kind, WEIGHT_KINDS)}")


def missing_package(quantization: str | None) -> str | None:
    """Return which package a quantisation lacks on this machine, and how to install it; None if none."""
    if quantization is None or quantization in WEIGHT_KINDS or find_spec("bitsandbytes"):
        return None
    return f"--quantization {quantization} needs bitsandbytes: pip install bitsandbytes"


def nearest(word: object, known: Iterable[str]) -> str:
    """`` (did you mean ...?)`` if one of the known words is close, else nothing."""
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def settings_from(values: Mapping[str, Any]) -> Settings:
    """Settings from names (aliases and dashes too) and values (typed or text).

    Raises:
        SettingError: an unknown name (the nearest one is suggested), a name given twice, a value out of its choices.
    """
    found: dict[str, Any] = {}
    for spelling, value in values.items():
        name = axis_name(spelling)
        if name in found:
            raise SettingError(f"{spelling}: {name} is set twice")
        found[name] = parse_value(name, value)
    return Settings(**found)


def recorded_settings(values: Mapping[str, Any]) -> Settings:
    """Return the settings of a record. Settings that later versions removed, and that changed no answer, are ignored.

    Raises:
        SettingError: a value that this version does not accept.
        TypeError: an unknown setting.
    """
    return Settings(**{name: value for name, value in values.items() if name not in _REMOVED})


def axis_name(spelling: str) -> str:
    """Return the canonical name of a setting, from any of its spellings.

    Raises:
        SettingError: an unknown name, or another tool's without an equivalent; the message has the fix.
    """
    key = spelling.lstrip("-").replace("-", "_")
    if key in _canonical():
        return _canonical()[key]
    if key in SWITCHES:
        name, value = SWITCHES[key]
        raise SettingError(f"{spelling}: unknown setting; use {name}: {value}")
    if (reason := foreign_option(key)) is not None:
        raise SettingError(f"{spelling}: {reason}")
    raise SettingError(f"unknown setting {spelling!r}{nearest(key, _canonical())}")


def foreign_option(spelling: str) -> str | None:
    """Return what to use instead of an option of another tool; None for an unknown one."""
    return FOREIGN_OPTIONS.get(spelling.lstrip("-").replace("-", "_"))


BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
"""Words for the values of a setting that is on or off."""


def parse_value(name: str, value: Any) -> Any:
    """One typed value of a setting, from text or from a typed YAML value.

    Raises:
        SettingError: naming the flag, if the value is of another kind.
    """
    axis = axes()[name]
    if value is None or (isinstance(value, str) and value.lower() == "none"):
        if axis.optional:
            return None
        raise SettingError(f"--{axis.flag} takes no 'none'")
    flag, allowed = f"--{axis.flag}", RANGES.get(name)
    if allowed is not None and isinstance(value, int | float) and not isinstance(value, bool):
        allowed.check(flag, value)
        return axis.kind(value)
    if isinstance(value, list | tuple | dict | set | bytes):
        raise SettingError(f"{flag} takes {allowed or 'one value'}; got {shorten(value)}")
    text = str(value).strip()
    if allowed is not None:
        return allowed.parse(flag, text)
    if axis.kind is bool and text.lower() not in BOOLEANS:
        raise SettingError(f"{flag} takes true or false; got {shorten(text)}")
    if axis.kind is bool:
        return BOOLEANS[text.lower()]
    return FOREIGN_VALUES.get(name, {}).get(text.removeprefix("torch."), text)
