"""The repository's habits: package metadata, distributions, Dockerfile, Makefile, hooks, CI, documentation site."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from click.testing import CliRunner
from markdown_it import MarkdownIt

from panscan.cli.serve import command
from panscan.core.installation import install_command
from panscan.images.decode import PDF_MAX_SIDE
from panscan.images.fetch import MAX_BYTES, TIMEOUT_S
from panscan.images.headers import MAX_PIXELS

if TYPE_CHECKING:
    from hatchling.builders.sdist import SdistBuilder

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
SOURCE = PROJECT["urls"]["Source"]
RAW = SOURCE.replace("https://github.com/", "https://raw.githubusercontent.com/")

needs_mkdocs = pytest.mark.skipif(find_spec("material") is None, reason="needs the extra docs; see 'make docs'")


def output_of(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tracked_files() -> list[str]:
    """Files of the commit; skips the test in an unpacked source distribution."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("needs a git checkout")
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("git cannot read this checkout")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).exists()]


class Addresses(HTMLParser):
    """Collects the tags of a page that have an address: ``(tag, attributes, address)``."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src", "srcset", "action", "data", "poster") and value:
                self.found.append((tag, dict(attrs), value))


def repository_path(address: str) -> Path:
    """The file or folder of the checkout that an absolute address of this repository shows."""
    for prefix in (f"{SOURCE}/blob/main/", f"{SOURCE}/tree/main/", f"{RAW}/main/"):
        if address.startswith(prefix):
            return ROOT / address.removeprefix(prefix).partition("#")[0]
    raise AssertionError(f"{address} is not a file on the main branch of {SOURCE}")


# Package metadata


@pytest.fixture(scope="module")
def description() -> str:
    """The long description that a package index shows, as HTML."""
    metadata = json.loads(output_of(sys.executable, "-m", "hatchling", "metadata", cwd=ROOT))
    assert metadata["readme"]["content-type"] == "text/markdown"
    return MarkdownIt("commonmark").render(metadata["readme"]["text"])


def test_the_long_description_has_no_relative_link_or_image(description):
    addresses = Addresses(description).found
    assert {"a", "img"} <= {tag for tag, _, _ in addresses}
    for tag, _, address in addresses:
        assert re.match(r"https://", address), address
        if "panscan/panscan" in address:
            assert repository_path(address).exists(), address
            assert address.startswith(RAW) == (tag == "img"), f"{address} is not what a <{tag}> can show"


def test_the_long_description_differs_from_the_readme_in_addresses_only(description):
    def without_addresses(html: str) -> str:
        return re.sub(r'(href|src)="[^"]*"', "", html)

    readme = MarkdownIt("commonmark").render((ROOT / "README.md").read_text("utf-8"))
    assert without_addresses(description) == without_addresses(readme)
    assert len(Addresses(description).found) == len(Addresses(readme).found)


def test_every_address_of_the_repository_is_the_source_url():
    assert set(PROJECT["urls"]) == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md", "pyproject.toml", "mkdocs.yml"):
        text = (ROOT / name).read_text("utf-8")
        for repository in re.findall(r"https://(?:raw\.githubusercontent|github)\.com/([\w.-]+/[\w.-]+)", text):
            if "panscan" in repository:
                assert f"https://github.com/{repository}" == SOURCE, name
    for name in ("Documentation", "Changelog"):
        assert repository_path(PROJECT["urls"][name]).exists()


# Source distribution


@pytest.fixture(scope="module")
def builder() -> SdistBuilder:
    from hatchling.builders.sdist import SdistBuilder  # not at the top: pytest -m gpu does not need it

    return SdistBuilder(str(ROOT))


@pytest.fixture(scope="module")
def sdist(builder) -> set[str]:
    """Paths in a source distribution of this checkout; listed, not built, since compressing the model takes seconds."""
    chosen = {file.distribution_path for file in builder.recurse_included_files()}
    return chosen | set(builder.get_default_build_data()["force_include"].values())


def test_the_sdist_has_every_tracked_file(sdist):
    missing = set(tracked_files()) - sdist
    assert not missing, f"add to [tool.hatch.build.targets.sdist] in pyproject.toml: {sorted(missing)}"


@pytest.mark.parametrize("stray", ["answers.jsonl", "samples/receipt-00.png", "runs/a/records.jsonl", "scans/page.pdf"])
def test_the_sdist_leaves_out_what_panscan_writes_into_a_checkout(builder, stray):
    assert builder.config.include_path("tests/test_new.py")
    assert not builder.config.include_path(stray)


# Makefile

FAKE_PYTHON = """#!{python}
import pathlib, shutil, sys
with open({log!r}, "a") as log:
    print(*sys.argv[1:], file=log)
if sys.argv[1:3] == ["-m", "venv"]:
    bin = pathlib.Path(sys.argv[-1], "bin")
    bin.mkdir(parents=True)
    for name in ("python", "panscan", "ruff", "mypy", "lint-imports", "mkdocs"):
        shutil.copy(__file__, bin / name)
elif sys.argv[1:2] == ["-c"]:
    exec(sys.argv[2])
"""


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., list[str]]:
    """A function that runs make with a Python that installs nothing, and returns the arguments of 'pip install'."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    log = tmp_path / "log"
    python = tmp_path / "python3"
    python.write_text(FAKE_PYTHON.format(python=sys.executable, log=str(log)))
    python.chmod(0o755)

    def run(*targets: str) -> list[str]:
        log.write_text("")
        output_of("make", *targets, f"PYTHON={python}", cwd=tmp_path, TORCH_INDEX="", MAKEFLAGS="")
        return [line.partition(" install ")[2] for line in log.read_text().splitlines() if " pip install " in line]

    return run


PINNED = "--disable-pip-version-check -c constraints.txt"


def test_make_demo_installs_the_package_with_its_server(make):
    assert make("demo") == [f"{PINNED} -e .[serve]"]
    assert make("demo") == []
    assert make("test") == [f"{PINNED} -e .[dev,training]"]


def test_make_demo_after_make_test_installs_nothing(make):
    assert make("test") == [f"{PINNED} -e .[dev,training]"]
    assert make("check", "format", "demo") == []


def test_make_docs_installs_the_extra_without_the_package(make):
    [line] = make("docs")
    assert line == " ".join([PINNED, *PROJECT["optional-dependencies"]["docs"]])
    assert make("docs") == []


def test_make_tools_installs_for_ci_in_one_call(make):
    assert make("tools") == [f"{PINNED} -e .[dev,training,docs]"]
    assert make("test", "check", "docs") == []


def test_make_takes_pytorch_from_its_own_index(make):
    [torch, package] = make("demo", "TORCH_INDEX=https://index.example/cpu")
    assert re.fullmatch(r"\S+ --index-url https://index.example/cpu torch==[\d.]+", torch)
    assert package == f"{PINNED} -e .[serve]"


# Hooks and CI


def test_pre_commit_runs_the_commands_of_make_check():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    [recipe] = re.findall(r"^check:.*\n((?:\t.*\n)+)", makefile, flags=re.MULTILINE)
    commands = [line.strip().replace("$(BIN)", ".venv/bin").removesuffix(" .") for line in recipe.splitlines()]
    hooks = [
        hook
        for repository in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
        for hook in repository["hooks"]
        if repository["repo"] == "local" and hook["language"] == "system"  # others would download their tools
    ]
    assert [hook["entry"].replace(" --force-exclude", "") for hook in hooks] == commands


def test_ci_runs_the_script_without_further_rights():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    job, other = workflow["jobs"]["test"], workflow["jobs"]["transformers"]
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["cancel-in-progress"] is True
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert other["steps"][-1]["run"] == "make test-transformers VERSION=${{ matrix.version }}"
    [needed] = [line for line in PROJECT["dependencies"] if line.startswith("transformers")]
    assert f"{needed.removeprefix('transformers>=').partition(',')[0]}.0" in other["strategy"]["matrix"]["version"]
    oldest = PROJECT["requires-python"].removeprefix(">=")
    tested = job["strategy"]["matrix"]["python-version"]
    assert oldest in tested
    assert all(f"Programming Language :: Python :: {version}" in PROJECT["classifiers"] for version in tested)


def test_every_requirement_of_dev_and_docs_is_pinned():
    def name(line: str) -> str:
        return re.sub(r"[-_.]+", "-", re.split(r"[=<>~!;\[ ]", line)[0]).lower()

    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pinned = {name(line) for line in lines if not line.startswith("#")}
    extras = PROJECT["optional-dependencies"]
    wanted = {name(requirement) for extra in ("dev", "docs", "training") for requirement in extras[extra]}
    assert wanted - {"panscan"} <= pinned
    assert "pre-commit" in pinned  # CONTRIBUTING.md installs it with these constraints


def test_the_security_policy_names_the_limits_of_the_code():
    text = " ".join((ROOT / "SECURITY.md").read_text("utf-8").split())
    for limit in (
        f"{MAX_PIXELS:,} pixels",
        f"{PDF_MAX_SIDE:,} pixels",
        f"{MAX_BYTES >> 20} MiB",
        f"{TIMEOUT_S:.0f} seconds",
    ):
        assert limit in text


# Documentation site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built without network access: every proxy refuses."""
    folder = tmp_path_factory.mktemp("site")
    refuse = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    output_of(sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder), cwd=ROOT, **refuse)
    return folder


@needs_mkdocs
def test_no_page_of_the_site_loads_a_remote_resource(site):
    pages = list(site.rglob("*.html"))
    assert pages
    for page in pages:
        text = page.read_text("utf-8")
        for tag, attributes, address in Addresses(text).found:
            if tag != "a" and attributes.get("rel") != "canonical":
                assert not re.match(r"(\w+:)?//", address), f"{page.name}: <{tag}> {address}"
        assert not re.search(r"(@import|url\()\s*[\"']?(\w+:)?//", text), page.name
        # The theme's script asks api.github.com where it finds a source badge, and a CDN where it finds a diagram.
        assert 'data-md-component="source"' not in text, f"{page.name}: remove repo_url from mkdocs.yml"
        assert 'class="mermaid"' not in text, page.name
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(\w+:)?//", style.read_text("utf-8")), style.name


@needs_mkdocs
def test_the_site_has_every_page_and_its_links_lead_somewhere(site):
    written = {page.name for page in (ROOT / "docs").glob("*.md")}
    wanted = {page.replace(".md", ".html") for page in written} | {"index.html", "changelog.html", "contributing.html"}
    assert wanted <= {page.name for page in site.iterdir()}
    for page in site.glob("*.html"):
        for _, _, address in Addresses(page.read_text("utf-8")).found:
            if address.startswith(SOURCE) and address not in PROJECT["urls"].values() and "/security/" not in address:
                assert repository_path(address).exists(), f"{page.name}: {address}"
            elif not re.match(r"\w+:|#|/", address):  # 404.html has absolute paths, as it is shown at any depth
                assert (page.parent / address.partition("#")[0]).exists(), f"{page.name}: {address}"


# The Dockerfile, as far as it can be checked without Docker.


KNOWN = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK"}
KNOWN |= {"RUN", "USER", "VOLUME", "WORKDIR"}


def instructions() -> list[tuple[str, str]]:
    """Return the instructions in order, with continued lines joined and comments removed."""
    lines = (ROOT / "Dockerfile").read_text("utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#")).replace("\\\n", " ")
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def arguments(name: str) -> list[str]:
    return [rest for keyword, rest in instructions() if keyword == name]


def test_every_instruction_is_known_and_the_base_is_pinned():
    assert {name for name, _ in instructions()} <= KNOWN
    (base,) = arguments("ARG")
    assert re.fullmatch(r"BASE=python:3\.\d+\.\d+-slim-[a-z]+", base)
    assert arguments("FROM") == ["${BASE} AS build", "${BASE}"]
    python = base.removeprefix("BASE=python:").rsplit(".", 1)[0]
    assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]


def test_every_copied_file_exists_and_is_not_ignored():
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert "*" in lines
    allowed = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied = {source for argument in arguments("COPY") if "--from" not in argument for source in argument.split()[:-1]}
    assert copied == allowed
    assert all((ROOT / source).exists() for source in copied)


def test_the_build_has_what_the_package_needs():
    build = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]
    (install,) = [command for command in arguments("RUN") if "pip install" in command]
    extras = re.findall(r"\[(.*)\]", install)[0].split(",")
    assert set(extras) <= set(PROJECT["optional-dependencies"])
    needed = {"pyproject.toml", "constraints.txt", *PROJECT["license-files"]}
    needed |= {fragment["path"] for fragment in build["metadata"]["hooks"]["fancy-pypi-readme"]["fragments"]}
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
    assert all(shlex.split(command) for command in arguments("RUN"))


# The command that installs this copy again, from the metadata that installers write.


GIT = {"url": "https://host/panscan.git", "vcs_info": {"vcs": "git", "commit_id": "0" * 40}}
CHECKOUT = {"url": "file:///home/a%20b/panscan", "dir_info": {"editable": True}}


@pytest.mark.parametrize(
    ("origin", "installer", "extras", "expected"),
    [
        (None, "pip", "serve", "pip install 'panscan[serve]'"),
        (None, "pip", "", "pip install --upgrade panscan"),
        (None, "uv", "serve", "uv pip install 'panscan[serve]'"),
        (CHECKOUT, "pip", "serve,tracing", "pip install -e '/home/a b/panscan[serve,tracing]'"),
        (CHECKOUT, "uv", "", "uv pip install -e '/home/a b/panscan'"),
        ({**CHECKOUT, "dir_info": {}}, "pip", "serve", "pip install '/home/a b/panscan[serve]'"),
        (GIT, "pip", "serve", "pip install 'panscan[serve] @ git+https://host/panscan.git'"),
        (GIT, "pip", "", "pip install 'panscan @ git+https://host/panscan.git'"),
    ],
)
def test_the_command_repeats_how_panscan_was_installed(
    origin: Any, installer: str, extras: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "panscan-9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: panscan\nVersion: 9\n")
    (metadata / "INSTALLER").write_text(f"{installer}\n")
    if origin is not None:
        (metadata / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(tmp_path)
    assert install_command(extras) == expected


def test_a_source_tree_is_installed_from_its_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    root = shlex.split(install_command())[-1]
    assert (Path(root) / "pyproject.toml").is_file()
