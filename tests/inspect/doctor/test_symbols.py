"""The table of Transformers' names covers panscan's source, and finds what a version lacks."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

import panscan
from panscan.cli.main import run
from panscan.inspect.doctor.symbols import findings, used_symbols
from panscan.runners.symbols import METHODS

SOURCE = Path(panscan.__file__).parent


@pytest.fixture(scope="module")
def words() -> set[str]:
    """Every attribute, keyword and text of panscan's source, except the tables of the checked module."""
    found: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        if path.name == "symbols.py":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.keyword | ast.Constant | ast.Name):
                found.add(str(getattr(node, "arg", None) or getattr(node, "id", None) or getattr(node, "value", "")))
    return found


def test_every_import_of_transformers_is_looked_up() -> None:
    places = {place for use in used_symbols(SOURCE) for place in use.locations}
    for path in SOURCE.rglob("*.py"):
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
            if re.match(r"\s*(from|import) transformers\b", line):
                assert f"{path.relative_to(SOURCE).as_posix()}:{number}" in places


def test_listed_methods_and_arguments_are_used_in_the_source(words: set[str]) -> None:
    for method, arguments in METHODS.items():
        assert method.rpartition(".")[2] in words | {"Gemma3ForConditionalGeneration", "forward"}, method
        for argument in arguments:
            assert argument in words or argument == "attn_implementation", (method, argument)


def test_this_version_has_what_panscan_uses() -> None:
    assert [finding.fact for finding in findings(used_symbols(SOURCE)) if finding.status == "problem"] == []


def test_given_names_are_looked_up(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("GenerationConfig(max_new_tokens)", "transformers.NoSuchModel", "set_seed(sed)")
    assert run(["doctor", "--symbols", "--json", *names]) == 4
    findings = json.loads(capsys.readouterr().out)["findings"]
    facts = [finding["fact"] for finding in findings]
    assert all(finding["fix"].startswith("Check the spelling") for finding in findings[1:])
    assert facts[0].startswith("transformers.GenerationConfig(max_new_tokens): transformers/generation/")
    assert facts[1:] == ["transformers.NoSuchModel does not exist", "transformers.set_seed does not accept sed"]


def test_what_a_version_lacks_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text(
        "import transformers as t\n"
        "from transformers import GenerationConfig, NoSuchModel\n"
        "from transformers.utils import logging as log\n\n"
        "def use():\n"
        "    from transformers.no_such_module import thing\n"
        "    log.no_such_function()\n"
        "    t.NoSuchConfig.from_pretrained('x', revision='main')\n"
        "    t.BitsAndBytesConfig(load_in_8bit=True)\n"
        "    return GenerationConfig.from_pretrained('x', revision='main'), log.set_verbosity_error(level=1)\n"
    )
    found = {finding.fact for finding in findings(used_symbols(tmp_path)) if finding.status == "problem"}
    assert found == {
        "transformers.NoSuchModel does not exist (used: new.py:2)",
        "transformers.no_such_module.thing does not exist (used: new.py:6)",
        "transformers.utils.logging.no_such_function does not exist (used: new.py:7)",
        "transformers.NoSuchConfig.from_pretrained does not exist (used: new.py:8)",
        "transformers.utils.logging.set_verbosity_error does not accept level (used: new.py:10)",
    }
