"""The Dockerfile, as far as it can be checked without Docker."""

import json
import re
import shlex
import tomllib
from pathlib import Path

from click.testing import CliRunner

from panscan.cli.serve import command

ROOT = Path(__file__).parent.parent.parent
KNOWN = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK"}
KNOWN |= {"RUN", "USER", "VOLUME", "WORKDIR"}


def instructions() -> list[tuple[str, str]]:
    """Return the instructions in order, with continued lines joined and comments removed."""
    lines = (ROOT / "Dockerfile").read_text("utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#")).replace("\\\n", " ")
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def arguments(name: str) -> list[str]:
    return [rest for found, rest in instructions() if found == name]


def test_every_instruction_is_known_and_the_base_is_pinned():
    assert {name for name, _ in instructions()} <= KNOWN
    (base,) = arguments("ARG")
    assert re.fullmatch(r"BASE=python:3\.\d+\.\d+-slim-[a-z]+", base)
    assert arguments("FROM") == ["${BASE} AS build", "${BASE}"]
    python = base.removeprefix("BASE=python:").rsplit(".", 1)[0]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert f"Programming Language :: Python :: {python}" in project["classifiers"]


def test_every_copied_file_exists_and_is_not_ignored():
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert "*" in lines
    kept = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied = {source for each in arguments("COPY") if "--from" not in each for source in each.split()[:-1]}
    assert copied == kept
    assert all((ROOT / source).exists() for source in copied)


def test_the_build_has_what_the_package_needs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    (install,) = [each for each in arguments("RUN") if "pip install" in each]
    extras = re.findall(r"\[(.*)\]", install)[0].split(",")
    assert set(extras) <= set(project["project"]["optional-dependencies"])
    needed = {"pyproject.toml", "constraints.txt", *project["project"]["license-files"]}
    needed |= {each["path"] for each in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["fragments"]}
    assert needed <= set(" ".join(arguments("COPY")).split())


def test_the_server_runs_as_an_ordinary_user_and_its_command_is_accepted():
    names = [name for name, _ in instructions()]
    assert arguments("USER") == ["panscan"]
    assert names.index("USER") > max(at for at, name in enumerate(names) if name == "RUN")
    entry = json.loads(arguments("ENTRYPOINT")[0])
    assert entry[:2] == ["panscan", "serve"]
    assert entry[entry.index("--port") + 1] == arguments("EXPOSE")[0]
    assert CliRunner().invoke(command, [*entry[2:], "--help"]).exit_code == 0


def test_the_health_check_asks_for_health_on_the_port():
    (check,) = arguments("HEALTHCHECK")
    python, _, program = json.loads(check[check.index("[") :])
    assert python == "python"
    compile(program, "HEALTHCHECK", "exec")
    assert f"http://127.0.0.1:{arguments('EXPOSE')[0]}/health" in program
    assert all(shlex.split(each) for each in arguments("RUN"))
