"""The package from outside: the README's example, quick imports, nouns that check values, processes, the clock."""

import ast
import base64
import gc
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import Field, fields
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.conftest import noise

import panscan
from panscan import PanAndScan, Request, Sampling
from panscan.core import ImageError, SettingError, now
from panscan.core.process import import_uncollected, worker_command
from panscan.core.sampling import STRUCTURED
from panscan.model.inputs import read_images
from panscan.workload.samples import write_samples

ROOT = Path(__file__).parent.parent


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), flags=re.DOTALL)


def test_the_python_examples_run_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [first] = python_blocks(ROOT / "README.md")
    offline, streamed, structured = python_blocks(ROOT / "docs" / "python.md")
    assert offline.startswith(first)
    monkeypatch.chdir(tmp_path)
    write_samples(tmp_path / "demo/documents", count=1)
    names: dict[str, Any] = {}
    exec(offline, names)
    result = names["result"]
    answer, counts, stages, stats = capsys.readouterr().out.rstrip("\n").rsplit("\n", 3)
    assert answer == f"{result.text} {result.finish_reason} None"
    views, image_tokens, prompt_tokens, cached_tokens, output_tokens = map(int, counts.split())
    assert (image_tokens, cached_tokens) == (144 * views, 0)
    assert views > 1
    assert prompt_tokens > image_tokens
    assert output_tokens == len(result.token_ids) <= 32
    assert ast.literal_eval(stages) == result.stages_ms
    assert stats.startswith("Stats(running=0, waiting=0, ")
    exec(streamed, {"__name__": "__main__"})
    assert capsys.readouterr().out == result.text
    exec(structured, {})
    assert re.fullmatch(r"\d+\.\d\d\n", capsys.readouterr().out)


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, panscan; print([m for m in ('torch', 'transformers', 'PIL', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there_and_no_other() -> None:
    from panscan.runners.generate import GenerateRunner

    assert panscan.GenerateRunner is GenerateRunner
    for name in panscan.__all__:
        assert getattr(panscan, name) is not None
    misspelt = "GenerateRuner"
    with pytest.raises(AttributeError, match="module 'panscan' has no attribute 'GenerateRuner'"):
        getattr(panscan, misspelt)
    with pytest.raises(ImportError):
        exec("from panscan import Nothing")


@pytest.mark.parametrize(
    ("fields_", "message"),
    [
        ({}, "either prompt or messages"),
        ({"prompt": "x", "messages": []}, "either prompt or messages"),
        ({"messages": [], "system": "x"}, "messages hold the whole"),
        ({"messages": [], "raw": True}, "messages hold the whole"),
        ({"prompt": "x", "raw": True, "system": "y"}, "has no turns"),
    ],
)
def test_a_request_asks_in_one_way(fields_: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Request(**fields_)


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"prompt": 5}, "prompt must be a str, got int"),
        ({"prompt": "x", "system": b"y"}, "system must be a str, got bytes"),
        ({"prompt": "x", "sampling": {"seed": 1}}, "sampling must be a Sampling, got dict"),
        ({"prompt": "x", "pan_and_scan": True}, "pan_and_scan must be a PanAndScan, got bool"),
        ({"prompt": "x", "raw": "no"}, "raw must be a bool, got str"),
        ({"prompt": "x", "id": None}, "id must be a str, got NoneType"),
        ({"prompt": "x", "images": None}, "images must be a list of images, or a single image, got NoneType"),
        ({"prompt": "x", "images": {"a.png"}}, "images must be a list .* got set"),
        ({"prompt": "x", "images": 3}, "images must be a list .* got int"),
    ],
)
def test_a_request_names_the_field_of_another_type(given_: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Request(**given_)


def test_a_single_image_is_a_list_of_one(tmp_path: Path) -> None:
    page = noise(30, 20)
    path = tmp_path / "page.png"
    page.save(path)
    content = path.read_bytes()
    forms = (str(path), path, content, bytearray(content), page, np.asarray(page), torch.tensor(np.asarray(page)))
    for image in forms:
        [read] = read_images(Request("x", image)).images
        assert read.tobytes() == page.tobytes()
        assert read_images(Request("x", [image, image])).images == [read, read]


def test_an_image_is_not_decoded_until_it_is_read() -> None:
    stream = BytesIO()
    noise(90, 90).save(stream, "PNG")
    request = Request("x", Image.open(BytesIO(stream.getvalue()[:-40])))
    with pytest.raises(ImageError, match="truncated"):
        read_images(request)


RANGES: dict[str, tuple[Any, Any]] = {
    "max_new_tokens": (st.integers(1, 2**20), st.integers(max_value=0) | st.integers(2**20 + 1)),
    "temperature": (st.floats(1e-6, 1e6), st.floats(max_value=-1e-6) | st.sampled_from([float("inf"), float("nan")])),
    "top_k": (st.integers(1, 2**31 - 1), st.integers(max_value=0) | st.integers(2**31)),
    "top_p": (st.floats(1e-6, 1), st.floats(max_value=0) | st.floats(1, exclude_min=True) | st.just(float("nan"))),
    "min_p": (st.floats(0, 1), st.floats(max_value=-1e-6) | st.floats(1, exclude_min=True) | st.just(float("nan"))),
    "repetition_penalty": (st.floats(1e-6, 1e6), st.floats(max_value=0)),
    "frequency_penalty": (st.floats(-2, 2), st.floats(min_value=2.1) | st.floats(max_value=-2.1)),
    "presence_penalty": (st.floats(-2, 2), st.floats(min_value=2.1) | st.floats(max_value=-2.1)),
}


@given(st.data(), st.sampled_from(sorted(RANGES)))
def test_sampling_takes_what_is_in_range_and_names_what_is_not(data: st.DataObject, name: str) -> None:
    inside, outside = RANGES[name]
    value = data.draw(inside)
    sampled = {"temperature": 1.0, name: value}
    assert getattr(Sampling(**sampled), name) == value
    with pytest.raises(SettingError, match=f"^{name} is out of range"):
        Sampling(**{**sampled, name: data.draw(outside)})


ANYTHING = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(2**63, 2**1100)
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=3)
    | st.lists(st.integers() | st.text(max_size=1) | st.floats(), max_size=2).flatmap(
        lambda items: st.sampled_from([items, tuple(items), dict.fromkeys(items)])
    )
)
NUMBERS = {
    **dict.fromkeys(RANGES, (int, float)),
    **dict.fromkeys(("max_new_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"), (int,)),
}


@given(ANYTHING, st.sampled_from(fields(Sampling)))
def test_whatever_a_sampling_is_given_is_of_its_type_or_refused(value: Any, item: Field[Any]) -> None:
    sampled = {"temperature": 1.0, item.name: value}
    try:
        Sampling(**sampled)
    except SettingError as error:
        assert str(error).startswith(f"{item.name} ") or (item.name == "temperature" and value == 0)
        return
    if item.name in NUMBERS:
        assert (value is None and item.default is None) or type(value) in NUMBERS[item.name]
        float(value or 0)  # what the sampler makes of it
    elif item.name == "ignore_eos":
        assert type(value) is bool
    elif item.name in STRUCTURED:
        texts = item.name == "choice" and {type(part) for part in value or ()} == {str}
        assert value is None or texts or item.name in ("regex", "grammar")
    elif item.name == "logit_bias":
        assert value is None or value == {}
    else:
        assert isinstance(value, tuple)
        assert {type(part) for part in value} <= {int if item.name == "stop_token_ids" else str}


@pytest.mark.parametrize(
    ("biases", "message"),
    [
        ({5: 101}, "logit_bias of token 5 is out of range"),
        ({5: float("nan")}, "logit_bias of token 5 is out of range"),
        ({-1: 1}, "logit_bias must be a dict of token ids"),
        ({True: 1}, "logit_bias must be a dict of token ids"),
        (dict.fromkeys(range(1025), 1.0), "logit_bias has 1,025 entries: give at most 1,024"),
    ],
)
def test_biases_out_of_range_are_refused(biases: Any, message: str) -> None:
    assert Sampling(logit_bias=dict.fromkeys(range(1024), -100)).logit_bias
    with pytest.raises(SettingError, match=message):
        Sampling(logit_bias=biases)


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
def test_greedy_takes_no_filters(name: str) -> None:
    filters: dict[str, Any] = {name: 1}
    assert Sampling().greedy
    with pytest.raises(SettingError, match="temperature above 0"):
        Sampling(**filters)
    assert not Sampling(temperature=0.1, **filters).greedy


@pytest.mark.parametrize("name", ["enabled", "min_crop_size", "max_num_crops", "min_ratio_to_activate"])
@pytest.mark.parametrize("value", [-1, "2", None, float("inf")])
def test_pan_and_scan_names_what_it_refuses(name: str, value: Any) -> None:
    with pytest.raises(SettingError, match=f"do_pan_and_scan|pan_and_scan_{name}"):
        PanAndScan(**{name: value})


def test_the_clock_only_goes_forward_and_tells_the_time_of_day() -> None:
    moments = [now() for _ in range(1000)]
    assert all(earlier <= later for earlier, later in pairwise(moments))
    assert moments[0] < moments[-1]
    assert abs(now() - time.time()) < 60  # the wall clock may be set while the process runs


_WORKER = """
import gc, json, sys

AT_IMPORT = gc.isenabled()

def main():
    print(json.dumps([AT_IMPORT, gc.isenabled(), gc.get_freeze_count() > 0, sys.argv[1:]]))
"""


def test_a_worker_imports_uncollected_and_ignores_modules_of_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('shadowed')")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "worker_of_this_test.py").write_text(_WORKER)
    path = os.pathsep.join([str(tmp_path / "lib"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        worker_command("worker_of_this_test", "3"),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.returncode) == ('[false, true, true, ["3"]]\n', 0), done.stderr


def test_the_notebook_shows_what_its_cells_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``PANSCAN_RENEW_SNAPSHOTS=1 pytest tests/test_api.py`` writes the outputs."""
    path = ROOT / "docs" / "notebook.ipynb"
    notebook = json.loads(path.read_text("utf-8"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    renew = bool(os.environ.get("PANSCAN_RENEW_SNAPSHOTS"))
    for number, cell in enumerate(cells, 1):
        value = executed_cell("".join(cell["source"]), names)
        text = capsys.readouterr().out
        outputs = [{"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}] if text else []
        if value is not None and renew:
            picture = base64.b64encode(value._repr_png_()).decode()
            data = {"data": {"image/png": picture}, "execution_count": number, "metadata": {}}
            outputs.append({**data, "output_type": "execute_result"})
        if renew:
            cell |= {"execution_count": number, "outputs": outputs}
        assert [output for output in cell["outputs"] if output["output_type"] == "stream"] == outputs[: bool(text)]
    if renew:
        path.write_text(json.dumps(notebook, indent=1) + "\n", "utf-8")
    assert len(cells) == 3


def executed_cell(source: str, names: dict[str, Any]) -> Any:
    """Execute a notebook's cell, and return the value of an expression at its end."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) and isinstance(body[-1].value, ast.Name) else None
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)


def test_the_end_of_a_process_prints_no_leaks_of_libraries() -> None:
    code = """
import atexit, os
atexit.register(os.write, 2, b"leaked")
from panscan.core.process import import_uncollected
import_uncollected("json.tool")
atexit.register(os.write, 2, b"shown")
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).stderr == b"shown"


def test_an_import_that_fails_leaves_garbage_collection_on() -> None:
    with pytest.raises(ModuleNotFoundError):
        import_uncollected("panscan.no_such_module")
    assert gc.isenabled()
