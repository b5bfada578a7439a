"""The definition of a batch job, and the checks before it is resumed."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import Any

from msgspec import structs

from panscan import __version__
from panscan.batch.jsonl import JobHeader, JobSpec
from panscan.core import DatasetError, Request
from panscan.core.request import MAX_PAGES
from panscan.core.sampling import STRUCTURED
from panscan.model.bundled import fingerprints
from panscan.settings import ENGINE_AXES, REMOVED_SETTINGS, Settings, axes
from panscan.workload.rows import Row

SCHEMA = 1

_ANSWERS_STAY = frozenset(
    {*ENGINE_AXES, "device", "device_map", "max_memory", "prefill_chunk_size"} - {"kv_cache_dtype"}
)
"""Settings that do not affect answers, so that they may change when a job is resumed."""


class Job(JobSpec, kw_only=True):
    """What all requests of a job share.

    Args:
        settings: settings of the model and its runner.

    Raises:
        SettingError: the properties contradict each other.
    """

    settings: Settings

    def __post_init__(self) -> None:
        self.request(Row("", (), self.prompt or ""))

    def request(self, item: Row) -> Request:
        """Return the request of an item. The images of a table row are read now.

        Raises:
            InputError: the images cannot be read.
        """
        images = item.images() if callable(item.images) else item.images
        if not images and callable(item.images):
            raise DatasetError(f"{item.named[0]}: the row has no image")
        structure = {name: getattr(self, name) for name in STRUCTURED}
        choice: Any = self.tool_choice
        if choice not in ("auto", "required"):
            choice = {"type": "function", "function": {"name": choice}}
        return Request(
            prompt=self.prompt if item.question is None else item.question,
            images=images,
            system=self.system,
            raw=self.raw_prompt,
            pan_and_scan=self.settings.pan_and_scan,
            sampling=replace(self.settings.sampling, **structure),
            id=item.id,
            max_pages=self.max_pages or MAX_PAGES,
            template_kwargs=self.template_kwargs,
            tools=() if self.tools is None else json.loads(self.tools),
            tool_choice="auto" if self.tools is None else choice,
        )

    def header(self) -> JobHeader:
        """Return the header of the output file: prompt, settings and versions."""
        versions = {"panscan": __version__, **{name: version(name) for name in ("torch", "transformers")}}
        bundled = fingerprints([] if self.settings.random_weights else [self.settings.model])
        fields = {**structs.asdict(self), "settings": asdict(self.settings)}
        return JobHeader(schema=SCHEMA, **fields, versions=versions, bundled=bundled)


def with_resolved_dtype(settings: Settings) -> Settings:
    """Replace the dtype ``auto`` by its value on this machine; it may differ on the machine that resumes the job.

    Raises:
        UnsupportedError: the device is not available.
    """
    from panscan.model.machine import resolve_device, resolve_dtype

    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.dtype, device)
    names = ("fp32", "bf16", "fp16")
    return replace(settings, dtype=next(name for name in names if resolve_dtype(name, device) == dtype))


def difference(begun: JobHeader, header: JobHeader) -> str | None:
    """Return why a job with one header cannot be resumed with another; None if the answers would be the same."""
    if begun.schema != SCHEMA:
        return f"was made by another version of panscan (schema {begun.schema!r}, not {SCHEMA})"
    names = (*STRUCTURED, "tools", "tool_choice", "image_column", "template_kwargs")
    for name in ("prompt", "system", "raw_prompt", "whole_files", *names):
        if getattr(begun, name) != getattr(header, name):
            return f"was made with a different --{name.replace('_', '-')}"
    for name, value in header.settings.items():
        option = axes()[name].of_verb("batch")
        before = begun.settings.get(name, axes()[name].default)  # older files lack newer settings
        if before != value and name not in _ANSWERS_STAY:
            return f"was made with --{option.flag} {option.written(before)}, not {option.written(value)}"
    for name, off in REMOVED_SETTINGS.items():
        if begun.settings.get(name, off) != off:
            return f"was made with --{name.replace('_', '-')}, which this version does not have"
    for name, weights in (header.bundled or {}).items():
        if (begun.bundled or {}).get(name) != weights:
            return f"was made with different weights of {name}, which have changed since"
    return None


def changed_versions(begun: JobHeader, header: JobHeader) -> list[str]:
    """Return ``torch 2.11.0, now 2.12.0`` for each library whose version has changed, so that rounding may differ."""
    before = begun.versions
    return [f"{name} {before.get(name)}, now {now}" for name, now in header.versions.items() if before.get(name) != now]
