"""What all verbs share."""

import logging
from pathlib import Path

import pytest
from tests.conftest import noise

from panscan.cli.main import run

pytestmark = pytest.mark.usefixtures("without_charts")


def test_what_the_engine_says_at_its_start_goes_to_standard_error_once(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert run(["samples", "--help"]) == 0
    capsys.readouterr()
    logging.getLogger("panscan.engine").info("prefill warm-up: 3.2 s")
    logging.getLogger("panscan.engine").debug("a graph of 8 rows")
    assert capsys.readouterr() == ("", "prefill warm-up: 3.2 s\n")


@pytest.mark.parametrize("verb", ["ask", "batch -o a", "bench --repeats 1 --runner engine --no-verify --warmup 0"])
def test_limits_of_gpus_change_nothing_on_a_cpu(verb: str, folder: Path) -> None:
    noise(60, 60).save("doc.png")
    limits = ["--gpu-memory-utilization", "0.1", "--gpu-memory-gb", "0.001", "--tensor-parallel-size", "1"]
    words = ["-p", "What?", "--model", "tiny", "--device", "cpu", "--max-new-tokens", "1"]
    assert run([*verb.split(), "doc.png", *words, *limits]) == 0
