"""What the pages say is what the code and the records say."""

import os
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path

import click
import pytest
from benchmarks.faster import Figure, commands

from panscan.analysis.accuracy import ACCURACY_COLUMNS
from panscan.analysis.summary import LEVEL_COLUMNS
from panscan.cli.main import VERBS
from panscan.core import PanscanError
from panscan.engine.options import EngineOptions
from panscan.load.scenario import load_scenario
from panscan.records.fields import TIMES
from panscan.records.metrics import COLUMNS as METRIC_COLUMNS
from panscan.settings import GROUPS, Option, options_of
from panscan.settings.spellings import FOREIGN_OPTIONS, SAME_OPTION

FOREIGN = {*FOREIGN_OPTIONS, *(name for names in SAME_OPTION.values() for name in names)}
OTHER_TOOLS = {f"--{name.replace('_', '-')}" for name in FOREIGN} | {
    *("--max", "--x"),  # a beginning, and any option
    *("--backend", "--base-url", "--custom-output-len", "--dataset-name", "--endpoint", "--output-len"),  # vLLM
    "--shm-size",  # docker run
    "--trust-request-mm-kwargs",  # vllm serve
}
"""Options that pages name although no help shows them."""
ROOT = Path(__file__).parent.parent
OPTIONS_PAGE = """\
# Options

Every option of every command, with the numbers or words that it accepts. `panscan COMMAND --help-all` shows those of
one command. In Python, in presets and in grid files, settings have the same names with underscores; the crop settings
have Transformers' names, such as `pan_and_scan_max_num_crops`.

Shells complete commands and options after `eval "$(_PANSCAN_COMPLETE=bash_source panscan)"` in `~/.bashrc`, with
`zsh_source` in `~/.zshrc`, and with `_PANSCAN_COMPLETE=fish_source panscan | source` in fish's configuration."""


def test_tables_are_what_their_records_say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import readme_tables  # not at the top: it imports all other benchmarks

    monkeypatch.setattr(sys, "argv", ["readme_tables.py", "--check"])
    assert readme_tables.main() == 0, capsys.readouterr().out


def test_the_readme_links_to_files_that_exist() -> None:
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"


def test_no_page_installs_from_an_index_without_panscan() -> None:
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        assert not re.search(r"pip install \S*panscan", page.read_text("utf-8")), page.name


def test_the_readme_fits_its_first_screens() -> None:
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert len(lines) <= 130
    assert sum(line.startswith("![") for line in lines[:12]) == 2


def test_every_module_has_its_line_in_its_rooms_section() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    for module in (ROOT / "src" / "panscan").rglob("*/*.py"):
        room, *inner = module.relative_to(ROOT / "src" / "panscan").with_suffix("").parts
        if module.stem == "__init__" or inner[0] == "documents":
            continue
        if f"### `{room}/{inner[0]}/`\n" in text:
            room = f"{room}/{inner.pop(0)}"
        _, _, section = text.partition(f"### `{room}/`\n")
        assert f"`{'/'.join(inner)}`" in section.partition("\n## ")[0].partition("\n### ")[0], module


def test_the_index_for_language_models_lists_every_page() -> None:
    listed = re.findall(r"/main/docs/([\w-]+\.md)\)", (ROOT / "docs" / "llms.txt").read_text("utf-8"))
    assert sorted(listed) == sorted(path.name for path in ROOT.glob("docs/*.md"))


def test_every_command_of_the_readme_is_a_verb() -> None:
    used = re.findall(r"^    panscan (\S+)", (ROOT / "README.md").read_text("utf-8"), flags=re.MULTILINE)
    assert set(used) == set(VERBS)


def test_the_scenario_of_the_load_guide_is_accepted(tmp_path: Path) -> None:
    [text] = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "load.md").read_text("utf-8"), flags=re.M | re.S)
    path = tmp_path / "mine.yaml"
    path.write_text(text, "utf-8")
    assert load_scenario(str(path)).request_rate == (1.0, 2.0, 4.0)


SCRIPTS = sorted((ROOT / "benchmarks").glob("*.sh"))
"""No test runs them: they need GPUs."""


def test_modules_of_commands_and_shell_scripts_exist() -> None:
    rooms = [ROOT / name for name in ("benchmarks", "docs", "training")]
    pages = [path for room in rooms for path in room.rglob("*") if path.suffix in (".md", ".py", ".sh")]
    for path in (*pages, ROOT / "Makefile", ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        text = path.read_text("utf-8")
        ours = r"((?:benchmarks|panscan|tests|training)[\w.]*\w)"
        for module in re.findall(rf'(?:python3? -m |"-m",\s+"){ours}', text):
            assert _source_of(module), f"{path.name}: {module}"
        for module, name in re.findall(rf"^from {ours} import (\w+)$", text, re.M) if path.suffix == ".sh" else ():
            assert re.search(rf"^(def|class) {name}\b", _source_of(module), re.M), f"{path.name}: {module}.{name}"


def _source_of(module: str) -> str:
    paths = [folder / module.replace(".", "/") for folder in (ROOT, ROOT / "src")]
    files = [file for path in paths for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()]
    return files[0].read_text("utf-8") if files else ""


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_commands_of_a_shell_script_have_options_that_exist(path: Path) -> None:
    text = path.read_text("utf-8").replace("\\\n", " ")
    for name, value in re.findall(r'^(\w+)="([^"]*)"$', text, re.M):
        text = text.replace(f"${name}", value)
    for verb, words in re.findall(rf"\bpanscan ({'|'.join(VERBS)}) (.*)$", text, re.M):
        options = import_module(f"panscan.cli.{verb}").command.params
        known = {name for option in options for name in (*option.opts, *option.secondary_opts)}
        assert {word.replace("_", "-") for word in re.findall(r"(?<!\S)--[\w-]+", words)} <= known, words


PAGES = pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))])


@PAGES
def test_commands_on_a_page_use_the_names_that_help_shows(page: str) -> None:
    text = (ROOT / page).read_text("utf-8").replace("\\\n", " ")
    for verb, words in re.findall(r"^    panscan (\w+) (.*)$", text, flags=re.MULTILINE):
        shown = {f"--{item.flag}" for item in options_of(verb).values() if not item.hidden} | {"--help"}
        shown |= {f"--no-{item.flag}" for item in options_of(verb).values() if item.kind is bool}
        assert set(re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", words)) <= shown, words


@PAGES
def test_every_option_that_a_page_names_is_shown_by_help(page: str) -> None:
    shown = {f"--{item.flag}" for verb in VERBS for item in options_of(verb).values() if not item.hidden}
    shown |= {f"--no-{flag[2:]}" for flag in shown} | {"--help", "--version", "--help-all"} | OTHER_TOOLS
    named = re.findall(r"`(--[a-z][a-z0-9-]*)", (ROOT / page).read_text("utf-8"))
    assert set(named) <= shown


def test_every_column_of_a_summary_is_defined() -> None:
    page = (ROOT / "docs" / "output.md").read_text("utf-8")
    prefixes = tuple(f"{name}_" for name in ("mean", "median", "p90", "p95", "p99"))
    times = {f"{prefix}{time}_ms" for prefix in prefixes for time in TIMES}
    assert all(f"`{prefix}`" in page for prefix in prefixes)
    assert all(f"`{time}_ms`" in page for time in TIMES)
    names = {*METRIC_COLUMNS, *LEVEL_COLUMNS, *ACCURACY_COLUMNS} - times
    assert [name for name in names if f"`{name}`" not in page and not name.endswith(("_low", "_high"))] == []


def test_the_page_of_options_is_the_table() -> None:
    """``PANSCAN_RENEW_HELP=1 pytest tests/test_docs.py`` writes the page."""
    lines = [OPTIONS_PAGE]
    for group in GROUPS:
        rows: dict[tuple[str, ...], list[str]] = {}
        for verb in VERBS:
            for item in options_of(verb).values():
                if item.group == group and not item.hidden:
                    rows.setdefault(_option_row(item), []).append(verb)
        lines += [f"\n## {group}\n", "| option | accepts | default | | commands |", "| --- | --- | --- | --- | --- |"]
        lines += [f"| {' | '.join(row)} | {_commands(verbs)} |" for row, verbs in sorted(rows.items(), key=_flag_first)]
    page = ROOT / "docs" / "options.md"
    if os.environ.get("PANSCAN_RENEW_HELP"):
        page.write_text("\n".join(lines) + "\n", "utf-8")
    assert page.read_text("utf-8").splitlines() == "\n".join(lines).splitlines()


def _option_row(item: Option) -> tuple[str, ...]:
    names = [f"-{item.short}"] if item.short else []
    names.append(f"--{item.flag}")
    accepts = ", ".join(f"`{choice}`" for choice in item.choices) or str(item.range or "")
    also = f" (also `--{'`, `--'.join(SAME_OPTION[item.flag])}`)".replace("_", "-") if item.flag in SAME_OPTION else ""
    cells = (f"`{', '.join(names)}`{also}", accepts, item.default_text, item.help)
    return tuple(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells)


def _flag_first(row: tuple[tuple[str, ...], list[str]]) -> str:
    return row[0][0].partition("--")[2]


def _commands(verbs: list[str]) -> str:
    return "all" if verbs == list(VERBS) else ", ".join(verbs)


def test_the_engine_guide_has_the_engines_defaults() -> None:
    rows = re.findall(r"^\| `--([a-z-]+)` \| (\S*) ?\|", (ROOT / "docs" / "engine.md").read_text("utf-8"), flags=re.M)
    assert len(rows) >= 10
    words = {"None": "", "True": "on", "False": "off"}
    for name, shown in rows:
        default = str(getattr(EngineOptions(), name.replace("-", "_")))
        assert shown == words.get(default, default.removesuffix(".0")), name


# The speed guide: its commands are valid, its gains compare like with like.


def parse(line: str) -> None:
    """Parse a command line as ``panscan`` does, without running it."""
    program, verb, *arguments = shlex.split(line)
    assert program == "panscan" and verb in VERBS, line
    command: click.Command = import_module(f"panscan.cli.{verb}").command
    command.make_context(verb, arguments)


def test_every_command_of_the_speed_guide_is_valid() -> None:
    page = (ROOT / "docs" / "faster.md").read_text("utf-8")
    shown = {*re.findall(r"^    (panscan .+)$", page, re.M), *re.findall(r"\| `(panscan [^`]+)` \|", page)}
    assert {*commands()} <= shown
    for line in shown:
        try:
            parse(line)
        except (click.UsageError, PanscanError) as error:
            pytest.fail(f"{line}: {error}")


@pytest.mark.parametrize("line", ["panscan batch scans/ --quantisation int8", "panscan serve --replicas many"])
def test_a_wrong_command_would_be_noticed(line: str) -> None:
    with pytest.raises((click.UsageError, PanscanError)):
        parse(line)


def test_figures_of_other_hardware_or_units_are_not_compared() -> None:
    figure = Figure([2.0], "requests/s", "w1", "H200")
    for other in (Figure([2.0], "requests/s", "w1", "A100"), Figure([2.0], "ms", "w1", "H200")):
        with pytest.raises(ValueError, match="cannot be compared"):
            figure.gain(other)
