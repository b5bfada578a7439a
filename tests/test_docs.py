"""What the pages say is what the code and the records say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from panscan.cli.main import VERBS

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
