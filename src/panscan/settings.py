"""Every knob of a run in one place: name, default, choices, help. Flags, YAML keys and records use these names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache, cached_property
from types import UnionType
from typing import Any, Literal, get_args, get_type_hints

from panscan.core import PanAndScan, Sampling, SettingError
from panscan.core.ranges import Range, shorten
from panscan.core.request import PAN_AND_SCAN_RANGES, SAMPLING_RANGES

__all__ = [
    "ALL_AT_ONCE",
    "ATTENTION",
    "ATTENTION_BACKENDS",
    "ENGINE_AXES",
    "ENGINE_LIMITS",
    "GROUP_SIZES",
    "KV_CACHE_DTYPES",
    "QUANTIZATION",
    "RANGES",
    "RUNNER_LIMITS",
    "SAMPLE_RANGES",
    "VLLM_AXES",
    "VLLM_LIMITS",
    "WEIGHT_KINDS",
    "Axis",
    "Settings",
    "axes",
    "axis_name",
    "check_weight_kind",
    "choose_runner",
    "foreign_settings",
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
KV_CACHE_DTYPES = ("auto", "fp8")
Level = Literal["load", "call"]


def _axis(
    default: Any,
    help: str,
    *,
    aliases: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    level: Level = "call",
    only: str = "",
) -> Any:
    """A field of :class:`Settings`. ``only``: the one runner that has this setting; empty for a shared one."""
    metadata = {"help": help, "aliases": aliases, "choices": choices, "level": level, "only": only}
    return field(default=default, metadata=metadata)


_REQUESTS = Range(whole=True, least=1, most=65_536)  # arrays have a row for each
_GIGABYTES = 1_000_000
RANGES = {
    **dict.fromkeys(("batch_size", "max_num_seqs", "vision_batch_size"), _REQUESTS),
    "max_concurrency": Range(whole=True, least=1, most=2**31 - 1),
    **dict.fromkeys(("prefill_chunk_size", "pad_to_multiple_of"), SAMPLING_RANGES["max_new_tokens"]),
    "tensor_parallel_size": Range(whole=True, least=1, most=64),
    "quantization_group_size": Range(whole=True, least=GROUP_SIZES[-1], most=GROUP_SIZES[0]),
    "gpu_memory_utilization": Range(above=0, most=1, note="a share: 0.92 is 92% of the memory"),
    "gpu_memory_gb": Range(above=0, most=_GIGABYTES, note="leave it out to set no limit in GB"),
    "kv_cache_gb": Range(above=0, most=_GIGABYTES, note="leave it out to take most of the free memory"),
    "image_memory_gb": Range(above=0, most=_GIGABYTES, note="an image that is larger is read alone"),
    "vision_cache_gb": Range(above=0, most=_GIGABYTES, note="it holds the encoded views of a pass"),
    **{"sampling_seed" if name == "seed" else name: allowed for name, allowed in SAMPLING_RANGES.items()},
    **{f"pan_and_scan_{name}": allowed for name, allowed in PAN_AND_SCAN_RANGES.items()},
}
"""The numbers that each setting accepts."""
SAMPLE_RANGES = {"count": Range(whole=True, least=1, most=10_000), "columns": Range(whole=True, least=12, most=200)}
"""The numbers that drawing sample documents accepts."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One point of a sweep. Values are checked on construction; what a machine cannot do is checked by the runner."""

    runner: str = _axis(
        "generate", "how requests are run", choices=("generate", "pipeline", "generate_batch", "engine", "vllm"),
        level="load",
    )  # fmt: skip
    model: str = _axis(
        "mini", "checkpoint: a hub id, a directory, 'mini' or 'tiny'", aliases=("model_id",), level="load"
    )
    revision: str | None = _axis(None, "branch, tag or commit of a hub checkpoint", level="load")
    random_weights: bool = _axis(False, "true shapes, random weights: speed without a download", level="load")
    model_shape: str | None = _axis(
        None, "with --random-weights", choices=("mini", "tiny", "270m", "1b", "4b", "12b", "27b"), level="load"
    )
    dtype: str = _axis(
        "auto", "auto: bf16 on a GPU, fp32 on a CPU", aliases=("precision",),
        choices=("auto", "bf16", "fp32", "fp16"), level="load",
    )  # fmt: skip
    quantization: str | None = _axis(
        None, "quantise the weights on load; bnb-8bit and bnb-4bit are slow", choices=QUANTIZATION, level="load"
    )
    quantization_group_size: int | None = _axis(
        None, "int4: input channels per scale; none: 128 if possible", level="load"
    )
    device: str = _axis("auto", "auto, cpu, cuda, cuda:N or mps", level="load")
    device_map: str | None = _axis(
        None, "spread layers over devices (one works at a time)",
        choices=("auto", "balanced", "balanced_low_0", "sequential"), level="load",
    )  # fmt: skip
    max_memory: str | None = _axis(None, "with --device-map, e.g. '0=30GiB;cpu=60GiB'", level="load")
    tp_plan: str | None = _axis(None, "tensor parallel, under torchrun", choices=("auto",), level="load")
    tensor_parallel_size: int = _axis(1, "GPUs that share one model (tensor parallelism)", level="load", only="engine")
    attention: str = _axis(
        "sdpa", "eager, sdpa, flex_attention, flash_attention_2/3/4 or a kernels-hub name", aliases=("attn_impl",)
    )
    vllm_attention: str | None = _axis(
        None, "attention backend; with TRITON_ATTN image tokens see both ways, as in Gemma 3", level="load", only="vllm"
    )
    cache: str = _axis("dynamic", "KV cache; static is compiled for decode on a GPU", choices=("dynamic", "static"))
    compile: str | None = _axis(
        None, "torch.compile mode of the vision tower and the language model",
        choices=("default", "reduce-overhead", "max-autotune"),
    )  # fmt: skip
    tf32: bool = _axis(False, "let float32 products use TF32")
    batch_size: int = _axis(1, "requests per generate() call")
    max_concurrency: int | None = _axis(None, "requests in flight at once; none: all of them", only="engine")
    max_num_seqs: int = _axis(128, "requests that compute at once", only="engine")
    gpu_memory_utilization: float = _axis(0.92, "maximum share of each GPU's memory", only="engine")
    gpu_memory_gb: float | None = _axis(None, "maximum memory per GPU in GB (10^9 bytes)", only="engine")
    kv_cache_gb: float | None = _axis(None, "KV cache per GPU in GB (10^9 bytes); none: free memory", only="engine")
    kv_cache_dtype: str = _axis(
        "auto", "data type of the KV cache; auto: the model's", choices=KV_CACHE_DTYPES, only="engine"
    )
    prefix_caching: bool = _axis(True, "requests that begin alike share what was computed", only="engine")
    vision_cache_gb: float = _axis(1.0, "encoded views that are kept, in GB (10^9 bytes)", only="engine")
    image_memory_gb: float = _axis(2.0, "decoded images in memory, in GB (10^9 bytes)", only="engine")
    vision_batch_size: int = _axis(16, "views encoded at once", only="engine")
    attention_backend: str = _axis(
        "auto",
        "kernels of paged attention; triton: ours, for NVIDIA GPUs; sdpa: PyTorch's, one sequence at a time",
        choices=ATTENTION_BACKENDS,
        only="engine",
    )
    equal_views: bool = _axis(False, "batch requests with equal view counts together")
    prefill_chunk_size: int | None = _axis(
        None,
        "prompt tokens per pass; generate() cuts image blocks (Transformers 5.17 drops images), the engine never",
    )
    pad_to_multiple_of: int | None = _axis(None, "pad prompts to a multiple of this many tokens")
    preprocess: str = _axis(
        "cpu",
        "where views are resized: cpu with Pillow, device with PyTorch as torchvision does",
        choices=("cpu", "device"),
    )
    do_pan_and_scan: bool = _axis(True, "crops besides the whole image")
    pan_and_scan_min_crop_size: int = _axis(256, "pixels", aliases=("min_crop_size", "grid_min_crop_size"))
    pan_and_scan_max_num_crops: int = _axis(4, "crops at most", aliases=("max_num_crops", "grid_max_crops"))
    pan_and_scan_min_ratio_to_activate: float = _axis(
        1.2, "longer over shorter side, from which crops are taken", aliases=("min_ratio_to_activate", "grid_min_ratio")
    )
    max_new_tokens: int = _axis(128, "output tokens at most")
    temperature: float = _axis(0.0, "0 is greedy")
    top_k: int | None = _axis(None, "sample from the k likeliest tokens")
    top_p: float | None = _axis(None, "sample from the likeliest tokens of this mass")
    min_p: float | None = _axis(None, "drop tokens less likely than this share of the likeliest")
    repetition_penalty: float | None = _axis(None, "over 1: repeat less")
    sampling_seed: int | None = _axis(None, "seed of the sampler")
    ignore_eos: bool = _axis(False, "always max_new_tokens tokens, for speed measurements")

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
        if self.random_weights != (self.model_shape is not None):
            raise SettingError("--random-weights and --model-shape go together")
        if self.random_weights and self.model != "mini":
            raise SettingError("--random-weights takes --model-shape instead of --model")
        for name in ("device_map", "tp_plan", "revision"):
            if self.random_weights and getattr(self, name) is not None:
                raise SettingError(
                    f"--random-weights are drawn in place: --{name.replace('_', '-')} does not go with it"
                )
        if self.device_map is not None and self.tp_plan is not None:
            raise SettingError("--device-map and --tp-plan exclude each other")
        if self.device_map is not None and self.device != "auto":
            raise SettingError("--device-map and --device exclude each other: the map places the layers")
        self._check_quantization()
        self._check_tensor_parallel()
        if self.max_memory is not None and self.device_map is None:
            raise SettingError("--max-memory needs --device-map")
        for part in self.max_memory.split(";") if self.max_memory is not None else ():
            if not re.fullmatch(r"\s*(\d+|cpu|disk|mps)=\d+(\.\d+)?\s*[KMGT]i?B\s*", part):
                raise SettingError(f"--max-memory takes e.g. '0=30GiB;cpu=60GiB'; got {shorten(part.strip())}")

    def _check_quantization(self) -> None:
        kind, size = self.quantization, self.quantization_group_size
        if size is not None and kind != "int4":
            raise SettingError(f"--quantization-group-size {size}: only --quantization int4 has groups")
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
                    f"--quantization {kind} and --{axes()[name].flag} exclude each other; use --runner engine with"
                    " --tensor-parallel-size, or --quantization bnb-8bit or bnb-4bit"
                )

    def _check_tensor_parallel(self) -> None:
        if self.tensor_parallel_size == 1:
            return
        for name in ("device_map", "tp_plan"):
            if getattr(self, name) is not None:
                raise SettingError(f"--tensor-parallel-size and --{axes()[name].flag} exclude each other")
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
            self.max_new_tokens, self.temperature, self.top_k, self.top_p, self.min_p,
            self.repetition_penalty, self.sampling_seed, self.ignore_eos,
        )  # fmt: skip

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
    """What is known of one setting. ``optional``: the word ``none`` stands for leaving it off."""

    name: str
    kind: type
    optional: bool
    default: Any
    help: str
    aliases: tuple[str, ...]
    choices: tuple[str, ...]
    level: Level
    only: str

    @property
    def flag(self) -> str:
        return self.name.replace("_", "-")


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
        if facts["only"]:
            facts["help"] = f"{facts['only']}: {facts['help']}"
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
    return {spelling: axis.name for axis in axes().values() for spelling in (axis.name, *axis.aliases)}


def foreign_settings(runner: str) -> Collection[str]:
    """Settings that a runner does not have: those of others alone, or those of all runners but it."""
    lacking = {"engine": (*ENGINE_LIMITS, *VLLM_AXES), "vllm": (*VLLM_LIMITS, *ENGINE_AXES)}
    return lacking.get(runner, (*ENGINE_AXES, *VLLM_AXES))


def choose_runner(given: Mapping[str, Any], preset: Mapping[str, Any]) -> str:
    """The runner for one request: the one that a flag names, or the preset, or the engine.

    ``generate`` takes the engine's place where the engine lacks what a flag sets, or what the preset sets without
    naming a runner.

    Args:
        given: typed settings that the user gave.
        preset: typed settings of a preset.
    """
    if "runner" in given:
        return str(given["runner"])
    named = str(preset.get("runner", "engine"))
    asked = given if "runner" in preset else {**preset, **given}
    lacks = any(asked.get(name, only) != only for name, only in ENGINE_LIMITS.items())
    return "generate" if named == "engine" and lacks else named


def _or(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


def check_weight_kind(kind: str) -> None:
    """Raise a SettingError unless ``panscan quantize`` can write weights of a kind."""
    if kind not in WEIGHT_KINDS:
        raise SettingError(f"--quantization takes {', '.join(WEIGHT_KINDS)}; got {kind!r}{nearest(kind, WEIGHT_KINDS)}")


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
    """The canonical name of a setting, from any of its spellings."""
    key = spelling.lstrip("-").replace("-", "_")
    if key not in _canonical():
        raise SettingError(f"unknown setting {spelling!r}{nearest(key, _canonical())}")
    return _canonical()[key]


_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


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
    if axis.kind is bool and text.lower() not in _WORDS:
        raise SettingError(f"{flag} takes true or false; got {shorten(text)}")
    return _WORDS[text.lower()] if axis.kind is bool else text
