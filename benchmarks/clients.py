"""Whether clients of OpenAI's API work with ``panscan serve``: tests/clients with one server and the mini model.

    python -m benchmarks.clients --python PYTHON [--output benchmarks/records/clients.json]

PYTHON is that of an environment with tests/clients/requirements.txt. ``make test-clients`` makes one and runs this.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.workloads.client import MODEL, running_server
from panscan.model.bundled import mini_directory
from panscan.records.environment import environment
from panscan.settings import Settings
from panscan.workload.samples import write_samples

_TESTS = Path(__file__).parent.parent / "tests" / "clients"
_PACKAGES = {
    "openai": ["openai"],
    "openai_npm": [],
    "langchain": ["langchain-openai", "langchain-tests"],
    "instructor": ["instructor"],
    "pydantic_ai": ["pydantic-ai-slim"],
    "litellm": ["litellm"],
    "huggingface_hub": ["huggingface_hub"],
    "smolagents": ["smolagents"],
    "llama_index": ["llama-index-llms-openai-like"],
    "llm": ["llm"],
    "lm_eval": ["lm-eval"],
    "guidellm": ["guidellm"],
    "autogen": ["autogen-agentchat", "autogen-ext"],
}
_VERSIONS = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"


def _question(folder: Path) -> dict[str, str]:
    """Draw a receipt; return what tests/clients/endpoint.py reads about it from the environment."""
    line = write_samples(folder, count=1).read_text("utf-8").splitlines()[0]
    row = json.loads(line)
    image, answer = str(folder / row["image"]), row["answers"][0]
    names = ("IMAGE", "QUESTION", "ANSWER")
    return {f"PANSCAN_CLIENTS_{name}": text for name, text in zip(names, (image, row["question"], answer), strict=True)}


def _run(python: Path, folder: Path) -> int:
    """Run the tests in the clients' environment; their results are in ``results.xml`` of the folder."""
    with running_server(Settings(model="mini", device="cpu")) as url:
        variables = {
            **os.environ,
            **_question(folder),
            "PANSCAN_CLIENTS_URL": url,
            "PANSCAN_CLIENTS_MODEL": MODEL,
            "PANSCAN_CLIENTS_TOKENIZER": str(mini_directory()),
            "DO_NOT_TRACK": "1",
        }
        variables.pop("PYTHONPATH", None)
        words = [str(python), "-m", "pytest", "-c", str(_TESTS / "clients.ini"), "-ra", str(_TESTS)]
        return subprocess.run([*words, f"--junitxml={folder / 'results.xml'}"], env=variables, check=False).returncode


def _outcomes(results: Path) -> dict[str, dict[str, Any]]:
    """Return the number of tests that passed by client, and the reason of each that failed or does not apply."""
    clients: dict[str, dict[str, Any]] = {name: {"passed": 0, "failed": {}, "excused": {}} for name in _PACKAGES}
    for case in ElementTree.parse(results).iter("testcase"):
        client = clients[case.attrib["classname"].split(".")[0].removeprefix("test_")]
        reasons = [(part.tag, part.get("message", "")) for part in case if part.tag in ("failure", "error", "skipped")]
        client["passed"] += not reasons
        for tag, reason in reasons:
            client["excused" if tag == "skipped" else "failed"][case.attrib["name"]] = reason
    return clients


def _npm(python: Path) -> dict[str, str]:
    """Return the version of the package of npm, if it is installed."""
    path = python.parent.parent / "npm/node_modules/openai/package.json"
    return {"openai (npm)": json.loads(path.read_text("utf-8"))["version"]} if path.exists() else {}


def _record(python: Path, clients: Mapping[str, Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    names = [name for packages in _PACKAGES.values() for name in packages]
    process = subprocess.run([str(python), "-c", _VERSIONS, *names], check=True, capture_output=True, text=True)
    versions = json.loads(process.stdout)
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "make test-clients",
        "model": {"name": "mini", "device": "cpu"},
        "seconds": round(seconds),
        "clients": {
            client: {"versions": {name: versions[name] for name in _PACKAGES[client]} or _npm(python), **outcomes}
            for client, outcomes in clients.items()
        },
        "environment": environment(),
    }


def main() -> int:
    """Run the tests, write the record if one is asked for, and return pytest's exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clients", description=__doc__.partition("\n")[0])
    parser.add_argument("--python", type=Path, required=True, help="Python of the clients' environment")
    parser.add_argument("--output", type=Path, help="path of the record  [default: none is written]")
    options = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        code = _run(options.python, Path(folder))
        clients = _outcomes(Path(folder, "results.xml"))
    if options.output is not None:
        record = _record(options.python, clients, time.monotonic() - start)
        options.output.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
