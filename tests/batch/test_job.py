"""The job: its requests, and with what it may be resumed."""

from dataclasses import asdict, replace
from typing import Any

import pytest
from msgspec import structs

from panscan.batch.job import Job, changed_versions, difference
from panscan.core import Request, SettingError
from panscan.settings import ENGINE_AXES, Settings, axes, foreign_settings
from panscan.workload.rows import Row

JOB = Job(settings=Settings(runner="engine"), prompt="What?")


def test_a_request_has_the_jobs_settings() -> None:
    settings = Settings(runner="engine", do_pan_and_scan=False, max_new_tokens=5, temperature=0.5, sampling_seed=3)
    job = Job(settings=settings, prompt="What?", system="In French.", raw_prompt=False)
    plain, row = Row("0.png", ("0.png",)), Row("7", ("docs/a.pdf",), "Who?", named=("a.pdf",))
    common = {"system": "In French.", "pan_and_scan": settings.pan_and_scan, "sampling": settings.sampling}
    assert job.request(plain) == Request("What?", ("0.png",), id="0.png", **common)
    assert job.request(row) == Request("Who?", ("docs/a.pdf",), id="7", **common)
    assert structs.replace(job, system=None, raw_prompt=True).request(plain).raw


@pytest.mark.parametrize("name", sorted(axes().keys() - {*foreign_settings("engine"), "runner", "max_memory"}))
def test_only_what_changes_no_answer_may_change_on_the_way(name: str) -> None:
    begun = JOB.header()
    changed = structs.replace(begun, settings={**begun.settings, name: "another"})
    assert difference(begun, begun) is None
    for one, other in ((begun, changed), (changed, begun)):
        reason = difference(one, other)
        if name in (*ENGINE_AXES, "device", "device_map", "prefill_chunk_size") and name != "kv_cache_dtype":
            assert reason is None
        else:
            assert reason is not None and reason.startswith(f"was made with --{axes()[name].flag} ")


def test_a_setting_that_is_newer_than_the_file_had_its_default() -> None:
    header = JOB.header()
    older = {name: value for name, value in header.settings.items() if name != "max_new_tokens"}
    begun = structs.replace(header, settings=older)
    assert difference(begun, header) is None
    longer = structs.replace(JOB, settings=replace(JOB.settings, max_new_tokens=129)).header()
    assert difference(begun, longer) == "was made with --max-new-tokens 128, not 129"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt": "Who?"}, "a different --prompt"),
        ({"prompt": None}, "a different --prompt"),
        ({"system": "In French."}, "a different --system"),
        ({"raw_prompt": True}, "a different --raw-prompt"),
        ({"whole_files": True}, "a different --whole-files"),
        ({"json_schema": "{}"}, "a different --json-schema"),
        ({"choice": ("yes", "no")}, "a different --choice"),
        ({"tools": '[{"type": "function", "function": {"name": "a"}}]'}, "a different --tools"),
    ],
)
def test_another_question_is_another_job(change: dict[str, Any], reason: str) -> None:
    assert reason in (difference(JOB.header(), structs.replace(JOB, **change).header()) or "")


def test_files_of_other_versions_are_known() -> None:
    header = JOB.header()
    assert "another version of panscan" in (difference(structs.replace(header, schema=0), header) or "")
    assert set(header.versions) == {"panscan", "torch", "transformers"}
    assert header.settings == asdict(JOB.settings)
    older = structs.replace(header, versions={**header.versions, "torch": "1.0"})
    assert difference(older, header) is None
    assert changed_versions(older, header) == [f"torch 1.0, now {header.versions['torch']}"]
    assert changed_versions(header, header) == []


def test_a_bundled_model_that_changed_is_another_model() -> None:
    header = JOB.header()
    assert header.settings["model"] == "mini"
    for kept in ({"mini": "000000000000"}, {}, None):
        assert difference(structs.replace(header, bundled=kept), header) == (
            "was made with different weights of mini, which have changed since"
        )
    drawn = structs.replace(JOB, settings=Settings(runner="engine", random_weights=True, model_shape="270m")).header()
    assert difference(structs.replace(drawn, bundled=None), drawn) is None


def test_a_job_that_contradicts_itself_is_refused_before_its_first_request() -> None:
    with pytest.raises(SettingError, match="system is not supported with a raw prompt"):
        structs.replace(JOB, system="In French.", raw_prompt=True)
    with pytest.raises(SettingError, match="system is not supported with a raw prompt"):
        structs.replace(JOB, prompt=None, system="In French.", raw_prompt=True)
