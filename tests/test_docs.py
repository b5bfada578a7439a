"""What the pages say is what the code and the records say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from panscan.cli import load
from panscan.cli.main import VERBS
from panscan.engine.options import EngineOptions
from panscan.load.scenario import load_scenario

ROOT = Path(__file__).parent.parent


def test_tables_are_what_their_records_say() -> None:
    done = subprocess.run([sys.executable, "benchmarks/readme_tables.py", "--check"], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stdout.decode()


def test_the_readme_links_to_files_that_exist() -> None:
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_module_has_its_line_in_its_rooms_section() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    for module in (ROOT / "src" / "panscan").rglob("*/*.py"):
        room, *inner = module.relative_to(ROOT / "src" / "panscan").with_suffix("").parts
        if module.stem == "__init__" or inner[0] == "documents":
            continue
        _, _, section = text.partition(f"### `{room}/`\n")
        assert f"`{'/'.join(inner)}`" in section.partition("\n## ")[0].partition("\n### ")[0], module


def test_every_command_of_the_readme_is_a_verb() -> None:
    used = re.findall(r"^    panscan (\S+)", (ROOT / "README.md").read_text("utf-8"), flags=re.MULTILINE)
    assert set(used) == set(VERBS)


def test_the_scenario_of_the_load_guide_is_accepted(tmp_path: Path) -> None:
    [text] = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "load.md").read_text("utf-8"), flags=re.M | re.S)
    path = tmp_path / "mine.yaml"
    path.write_text(text, "utf-8")
    assert load_scenario(str(path)).request_rate == (1.0, 2.0, 4.0)


def test_the_flags_of_the_load_guide_exist() -> None:
    own = (ROOT / "docs" / "load.md").read_text("utf-8").partition("## Coming from")[0]
    known = {name for option in load.command.params for name in option.opts}
    assert set(re.findall(r"--[a-z][a-z-]+", own)) <= known


def test_the_engine_guide_has_the_engines_defaults() -> None:
    rows = re.findall(r"^\| `--([a-z-]+)` \| (\S*) ?\|", (ROOT / "docs" / "engine.md").read_text("utf-8"), flags=re.M)
    assert len(rows) >= 10
    words = {"None": "", "True": "on", "False": "off"}
    for name, shown in rows:
        default = str(getattr(EngineOptions(), name.replace("-", "_")))
        assert shown == words.get(default, default.removesuffix(".0")), name
