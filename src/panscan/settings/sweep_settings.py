"""What a sweep varies: model, runner, engine, views, sampling. Options, YAML keys and records use these names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, cached_property
from typing import Any

from panscan.core import Message, PanAndScan, Request, Sampling, SettingError
from panscan.core.option import Range, integers, option, shorten
from panscan.core.request import PAN_AND_SCAN_RANGES
from panscan.core.sampling import SAMPLING_NAMES, SEEDS, TOKENS, SamplingTable
from panscan.core.text import listed
from panscan.core.weight_formats import (
    GROUP_SIZES,
    QUANTIZATION,
    TOWER_KINDS,
    WEIGHT_KINDS,
    format_named,
    group_size_refusal,
    weight_words,
)
from panscan.settings.declaration import Option, declared_options, nearest, rare_option
from panscan.settings.spellings import FOREIGN_OPTIONS

SettingValues = dict[str, Any]
"""Values of settings by name."""
ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
ATTENTION_BACKENDS = ("auto", "triton", "sdpa")
"""What the engine attends with; see :func:`panscan.engine.model_runner.choose_backend`."""
MODEL_SHAPES = ("mini", "tiny", "270m", "1b", "4b", "12b", "27b")
KV_CACHE_DTYPES = ("auto", "fp8", "int8")
REMOVED_SETTINGS: SettingValues = {"tf32": False, "tp_plan": None, "pad_to_multiple_of": None}
"""Settings of older records that no longer exist, with the values that left them off."""
PREFILL_CHUNK_SIZE = 2048
"""The engine's default: a prompt of seven views in one pass."""
_REQUESTS = integers(1, 65_536)  # arrays have a row for each


def _gigabytes(note: str) -> Range:
    return Range(gt=0, le=1_000_000, note=note)


# The verbs that have a setting.
_BATCHED = "batch bench serve"
_ANSWER = f"ask {_BATCHED}"
_PROFILED = f"{_ANSWER} profile"
_SIMULATED = f"{_ANSWER} plan"
_CROPS = f"{_PROFILED} attention crops load plan quantize verify"
_GENERATE = "ask bench"
_SERVER_DEFAULT = {"load": {"shown_default": "the server's"}}


@dataclass(frozen=True, kw_only=True)
class _RunTable:
    """Settings of the model and its runner."""

    runner: str = option(
        "generate",
        "Runner",
        "Runner: engine, generate, pipeline, generate_batch or vllm.",
        _ANSWER,
        choices=("generate", "pipeline", "generate_batch", "engine", "vllm"),
        shown_default="engine; generate with options of generate()",
        level="load",
        by_verb={"batch serve": {"hidden": True}},
    )
    model: str = option(
        "mini",
        "Model",
        "Hub id, directory, 'mini' or 'tiny'.",
        f"{_PROFILED} attention crops verify",
        aliases=("model_id",),
        level="load",
        by_verb={"crops": {"shown_default": "the released Gemma 3"}, "verify": {"required": True}},
    )
    revision: str | None = rare_option(
        None,
        "Model",
        "Branch, tag or commit of a hub checkpoint.",
        f"{_PROFILED} attention crops quantize verify",
        level="load",
    )
    random_weights: bool = option(
        False, "Model", "Use random weights of --model-shape: no download.", f"{_PROFILED} attention", level="load"
    )
    model_shape: str | None = option(
        None,
        "Model",
        "Random shape: mini, tiny, 270m, 1b, 4b, 12b or 27b.",
        f"{_PROFILED} attention",
        choices=MODEL_SHAPES,
        level="load",
    )
    dtype: str = option(
        "auto",
        "Model",
        "Precision; auto: bf16 on a GPU, fp32 on a CPU.",
        f"{_PROFILED} verify",
        aliases=("precision", "torch_dtype"),
        choices=("auto", "bf16", "fp32", "fp16"),
        level="load",
    )
    quantization: str | None = option(
        None,
        "Model",
        f"Quantise weights: {listed(QUANTIZATION)}.",
        _PROFILED,
        choices=QUANTIZATION,
        level="load",
    )
    quantization_group_size: int | None = rare_option(
        None,
        "Model",
        "Input channels per int4 scale; none: 128 if it fits.",
        _PROFILED,
        range=integers(GROUP_SIZES[-1], GROUP_SIZES[0]),
        level="load",
    )
    quantize_head: str | None = rare_option(
        None,
        "Model",
        "Quantise embedding and output matrix (not exact): int8.",
        f"{_PROFILED} plan",
        choices=("int8",),
        level="load",
    )
    quantize_vision: str | None = rare_option(
        None,
        "Model",
        f"Quantise the vision tower (not exact): {listed(TOWER_KINDS)}.",
        f"{_PROFILED} plan",
        choices=TOWER_KINDS,
        level="load",
    )
    device: str = option(
        "auto",
        "Model",
        "Device: auto, cpu, cuda, cuda:N or mps.",
        f"{_PROFILED} attention quantize verify",
        level="load",
    )
    device_map: str | None = rare_option(
        None,
        "Model",
        "Spread layers: auto, balanced, balanced_low_0, sequential.",
        _GENERATE,
        choices=("auto", "balanced", "balanced_low_0", "sequential"),
        level="load",
    )
    max_memory: str | None = rare_option(
        None,
        "Model",
        "Memory per device for --device-map: '0=30GiB;cpu=60GiB'.",
        _GENERATE,
        mapping=True,
        level="load",
    )
    tensor_parallel_size: int = option(
        1,
        "Engine",
        "GPUs that share one model.",
        _PROFILED,
        aliases=("tp",),
        range=integers(1, 64),
        level="load",
        only="engine",
    )
    attention: str = option(
        "sdpa",
        "Runner",
        "Attention of generate(): sdpa, eager, flex_attention, ...",
        f"{_GENERATE} profile",
        aliases=("attn_impl", "attn_implementation"),
    )
    vllm_attention: str | None = rare_option(
        None,
        "Runner",
        "Attention backend of vLLM; TRITON_ATTN matches Gemma 3.",
        _GENERATE,
        level="load",
        only="vllm",
    )
    cache: str = option(
        "dynamic",
        "Runner",
        "KV cache of generate(); static compiles GPU decoding.",
        _GENERATE,
        choices=("dynamic", "static"),
    )
    compile: str | None = rare_option(
        None,
        "Runner",
        "Compile mode: default, reduce-overhead or max-autotune.",
        _GENERATE,
        choices=("default", "reduce-overhead", "max-autotune"),
    )
    batch_size: int = option(
        1,
        "Runner",
        "Requests per generate() call; selects --runner generate.",
        "bench profile",
        range=_REQUESTS,
        by_verb={"profile": {"help": "Requests at once."}},
    )
    max_concurrency: int | None = option(
        None,
        "Engine",
        "Maximum requests in flight; none: no limit.",
        "batch bench",
        range=integers(1, 2**31 - 1),
        only="engine",
    )


@dataclass(frozen=True, kw_only=True)
class EngineTable:
    """The engine's sizes: fields of :class:`Settings` and of :class:`panscan.engine.options.EngineOptions`."""

    max_num_seqs: int = option(
        128, "Engine", "Maximum sequences per engine step.", f"{_BATCHED} plan", range=_REQUESTS, only="engine"
    )
    gpu_memory_utilization: float = option(
        0.92,
        "Engine",
        "Maximum share of each GPU's memory.",
        f"{_SIMULATED} profile",
        range=Range(gt=0, le=1, note="a share: 0.92 is 92% of the memory"),
        only="engine",
    )
    gpu_memory_gb: float | None = rare_option(
        None,
        "Engine",
        "Maximum memory per GPU, GB (10^9 bytes).",
        f"{_SIMULATED} profile",
        range=_gigabytes("leave it out to set no limit in GB"),
        only="engine",
    )
    kv_cache_gb: float | None = option(
        None,
        "Engine",
        "KV cache per GPU, GB; none: from free memory.",
        f"{_SIMULATED} profile",
        range=_gigabytes("leave it out to take most of the free memory"),
        only="engine",
    )
    kv_cache_dtype: str = option(
        "auto",
        "Engine",
        "Data type of the KV cache; auto: the model's, exact.",
        f"{_SIMULATED} profile",
        choices=KV_CACHE_DTYPES,
        only="engine",
    )
    prefix_caching: bool = option(
        True,
        "Engine",
        "Reuse the KV cache of equal prompt prefixes.",
        _PROFILED,
        aliases=("enable_prefix_caching",),
        only="engine",
    )
    vision_cache_gb: float = rare_option(
        1.0,
        "Engine",
        "Cache of encoded views, GB.",
        _SIMULATED,
        range=_gigabytes("it holds the encoded views of a pass"),
        only="engine",
    )
    image_memory_gb: float = rare_option(
        2.0,
        "Engine",
        "Memory for decoded images, GB.",
        _ANSWER,
        range=_gigabytes("an image that is larger is read alone"),
        only="engine",
    )
    tpot_target_ms: float | None = option(
        None,
        "Engine",
        "TPOT to keep by limiting prefill, ms; none: no limit.",
        _ANSWER,
        range=Range(gt=0, le=600_000, note="leave it out to set no target"),
        only="engine",
        by_verb={"serve": {"default": 50.0}},
    )
    vision_batch_size: int = rare_option(
        16,
        "Engine",
        "Maximum views encoded at once.",
        f"{_SIMULATED} profile",
        range=_REQUESTS,
        only="engine",
    )
    attention_backend: str = rare_option(
        "auto",
        "Engine",
        "Paged attention; triton: NVIDIA GPUs only.",
        f"{_PROFILED} attention",
        choices=ATTENTION_BACKENDS,
        only="engine",
    )


@dataclass(frozen=True, kw_only=True)
class _InputTable:
    """Settings of batches, prompts, pixels, and pan and scan."""

    equal_views: bool = rare_option(False, "Runner", "Batch requests with equal view counts together.", "bench")
    prefill_chunk_size: int | None = option(
        None,
        "Engine",
        "Prompt tokens per engine step; engine only.",
        f"{_SIMULATED} attention profile",
        range=TOKENS,
        shown_default=str(PREFILL_CHUNK_SIZE),
        by_verb={"attention batch plan serve": {"help": "Prompt tokens per engine step."}},
    )
    preprocess: str = option(
        "cpu",
        "Runner",
        "Resize views as Pillow (cpu) or PyTorch (device) does.",
        _PROFILED,
        choices=("cpu", "device"),
    )
    do_pan_and_scan: bool = option(
        True,
        "Pan and scan",
        "Add crops to the whole image.",
        _CROPS,
        flag="pan-and-scan",
        by_verb=_SERVER_DEFAULT,
    )
    pan_and_scan_min_crop_size: int = option(
        256,
        "Pan and scan",
        "Minimum side of a crop, pixels.",
        _CROPS,
        flag="min-crop-size",
        aliases=("grid_min_crop_size",),
        range=PAN_AND_SCAN_RANGES["min_crop_size"],
        by_verb=_SERVER_DEFAULT,
    )
    pan_and_scan_max_num_crops: int = option(
        4,
        "Pan and scan",
        "Maximum crops per image.",
        _CROPS,
        flag="max-num-crops",
        aliases=("grid_max_crops",),
        range=PAN_AND_SCAN_RANGES["max_num_crops"],
        by_verb=_SERVER_DEFAULT,
    )
    pan_and_scan_min_ratio_to_activate: float = option(
        1.2,
        "Pan and scan",
        "Minimum longer/shorter side for crops.",
        _CROPS,
        flag="min-ratio-to-activate",
        aliases=("grid_min_ratio",),
        range=PAN_AND_SCAN_RANGES["min_ratio_to_activate"],
        by_verb=_SERVER_DEFAULT,
    )


@dataclass(frozen=True, kw_only=True)
class Settings(SamplingTable, _InputTable, EngineTable, _RunTable):
    """One point of a sweep. Values are checked on construction; what a machine cannot do is checked by the runner."""

    sampling_seed: int | None = option(None, "Generation", "Seed of the sampler.", _ANSWER, range=SEEDS)

    def __post_init__(self) -> None:
        for axis in axes().values():
            axis.check(getattr(self, axis.name))
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
        kind, size = self.quantization, self.quantization_group_size
        drawn, mapped, split = self.random_weights, self.device_map is not None, self.tensor_parallel_size > 1
        shapes, written = "|".join(MODEL_SHAPES), kind in WEIGHT_KINDS
        loaded = kind is not None and not written  # by Transformers
        refusals = (
            (drawn and self.model_shape is None, f"--random-weights: no shape is given; add --model-shape {shapes}"),
            (
                self.model_shape is not None and not drawn,
                f"--model-shape {self.model_shape}: requires --random-weights; add it, or use --model",
            ),
            (drawn and self.model != "mini", "--model: not supported with --random-weights; leave out one of them"),
            (drawn and mapped, "--device-map: not supported with --random-weights; leave it out"),
            (drawn and self.revision is not None, "--revision: not supported with --random-weights; leave it out"),
            (
                mapped and self.device != "auto",
                f"--device {self.device}: --device-map places the layers; leave out one of them",
            ),
            (
                size is not None and not format_named(kind).grouped,
                group_size_refusal(size),
            ),
            (
                size is not None and size not in GROUP_SIZES,
                f"--quantization-group-size takes {listed(GROUP_SIZES)}; got {size}",
            ),
            (
                drawn and loaded,
                f"--random-weights: --quantization {kind} requires a checkpoint; use {listed(WEIGHT_KINDS)}",
            ),
            (
                written and mapped,
                f"--device-map: not supported with --quantization {kind}; use --tensor-parallel-size, or"
                " --quantization bnb-8bit or bnb-4bit",
            ),
            *(
                (
                    getattr(self, name) is not None and (mapped or loaded),
                    f"--{axes()[name].flag}: not supported with --device-map or --quantization bnb-*; use"
                    f" --tensor-parallel-size or --quantization {listed(WEIGHT_KINDS)}, or leave it out",
                )
                for name in ("quantize_head", "quantize_vision")
            ),
            (split and mapped, "--device-map: not supported with --tensor-parallel-size; leave out one of them"),
            (
                split and self.device.startswith("cuda:"),
                f"--device {self.device}: --tensor-parallel-size takes the first visible GPUs; use --device cuda,"
                " and CUDA_VISIBLE_DEVICES to choose them",
            ),
            (
                split and loaded,
                f"--tensor-parallel-size: --quantization {kind} cannot be split; use {listed(WEIGHT_KINDS)}",
            ),
            (
                self.max_memory is not None and not mapped,
                "--max-memory: requires --device-map; add --device-map auto",
            ),
        )
        for wrong, problem in refusals:
            if wrong:
                raise SettingError(problem)
        for part in self.max_memory.split(";") if self.max_memory is not None else ():
            if not re.fullmatch(r"\s*(\d+|cpu|disk|mps)=\d+(\.\d+)?\s*[KMGT]i?B\s*", part):
                raise SettingError(f"--max-memory takes e.g. '0=30GiB;cpu=60GiB'; got {shorten(part.strip())}")

    @property
    def quantized(self) -> str:
        """What is quantised on load, such as ``int4, int8 head``; empty without quantisation."""
        return ", ".join(weight_words(self.quantization, self.quantize_head, self.quantize_vision))

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
        return Sampling(**{name: getattr(self, name) for name in SAMPLING_NAMES}, seed=self.sampling_seed)

    def request(self, prompt: str | Sequence[Message], images: Sequence[Any], options: SettingValues) -> Request:
        """Return a request with these settings as defaults.

        Args:
            prompt: the user's text, or a conversation whose image parts may hold their images as in Transformers.
            images: of the request.
            options: fields of the request or of its sampling, or settings of its views and its sampling under any of
                their names.

        Raises:
            SettingError: an unknown name, a setting that a request cannot have, or something that is given twice.
        """
        given: SettingValues = {}
        settings: SettingValues = {}
        sampled: SettingValues = {}
        parts: dict[str, str] = {}
        for name, value in options.items():
            if name in _REQUEST_FIELDS and (name, type(value)) != ("pan_and_scan", bool):
                given[name] = value
            elif name in _SAMPLING_FIELDS:
                sampled[name] = value
                parts["sampling"] = name
            elif (setting := axis_name(name)) in _OF_REQUESTS:
                settings[setting] = axes()[setting].parse(value)
                parts["pan_and_scan" if "pan_and_scan" in setting else "sampling"] = name
            else:
                raise SettingError(f"{name}: applies to the model, not to one request; give it to from_pretrained")
        for field in parts.keys() & given.keys():
            raise SettingError(f"{parts[field]} and {field} exclude each other: give one of them")
        chosen = replace(self, **settings) if settings else self
        given = {"pan_and_scan": chosen.pan_and_scan, "sampling": replace(chosen.sampling, **sampled), **given}
        if isinstance(prompt, str):
            return Request(prompt=prompt, images=images, **given)
        if not isinstance(prompt, Iterable):
            raise SettingError(f"prompt must be a text or a list of messages, got {shorten(prompt)}")
        return Request(messages=[*prompt], images=images, **given)

    @property
    def load_key(self) -> tuple[Any, ...]:
        """Cells with equal keys share one loaded model."""
        return tuple(getattr(self, axis.name) for axis in axes().values() if axis.level == "load")

    @property
    def model_name(self) -> str:
        return f"{self.model_shape} shape, random weights" if self.random_weights else self.model

    def changed(self) -> SettingValues:
        """The settings that differ from the defaults."""
        plain = Settings()
        return {name: value for name, value in asdict(self).items() if value != getattr(plain, name)}


_OF_REQUESTS = (
    *SAMPLING_NAMES,
    "sampling_seed",
    "do_pan_and_scan",
    *(f"pan_and_scan_{name}" for name in PAN_AND_SCAN_RANGES),
)
"""Settings that a request may have."""
_REQUEST_FIELDS = frozenset(field.name for field in fields(Request))
_SAMPLING_FIELDS = {field.name for field in fields(Sampling)} - {*SAMPLING_NAMES}  # those that are no settings


def axes() -> dict[str, Option]:
    """Return every setting by name, in the order of :class:`Settings`."""
    return declared_options(Settings)


@cache
def axis_names() -> dict[str, str]:
    """Return the canonical name of every spelling of a setting."""
    return {spelling: axis.name for axis in axes().values() for spelling in axis.spellings}


def settings_from(values: SettingValues) -> Settings:
    """Settings from names (aliases and dashes too) and values (typed or text).

    Raises:
        SettingError: an unknown name (the nearest one is suggested), a name given twice, a value out of its choices.
    """
    typed: SettingValues = {}
    for spelling, value in values.items():
        name = axis_name(spelling)
        if name in typed:
            raise SettingError(f"{spelling}: {name} is set twice")
        typed[name] = axes()[name].parse(value)
    return Settings(**typed)


def recorded_settings(values: Mapping[str, Any]) -> Settings:
    """Return the settings of a record. Settings that later versions removed are ignored if they changed no answer.

    Raises:
        SettingError: a value that this version does not accept.
        TypeError: an unknown setting.
    """
    for name, off in REMOVED_SETTINGS.items():
        if values.get(name, off) != off:
            raise SettingError(f"{name} {values[name]}: this version of panscan has no such setting; measure again")
    removed = {"fast_start", *REMOVED_SETTINGS}  # the former changed no answer
    return Settings(**{name: value for name, value in values.items() if name not in removed})


def axis_name(spelling: str) -> str:
    """Return the canonical name of a setting, from any of its spellings.

    Raises:
        SettingError: an unknown name, or another tool's without an equivalent; the message has the fix.
    """
    key = spelling.lstrip("-").replace("-", "_")
    if key in axis_names():
        return axis_names()[key]
    if (reason := FOREIGN_OPTIONS.get(key)) is not None:
        raise SettingError(f"{spelling}: {reason}")
    raise SettingError(f"unknown setting {spelling!r}{nearest(key, axis_names())}")
