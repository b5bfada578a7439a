"""What all verbs share."""

from __future__ import annotations

import logging

import pytest

from panscan.cli.main import run


def test_what_the_engine_says_at_its_start_goes_to_standard_error_once(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert run(["samples", "--help"]) == 0
    capsys.readouterr()
    logging.getLogger("panscan.engine").info("layers compiled for prefill: 3.2 s")
    logging.getLogger("panscan.engine").debug("a graph of 8 rows")
    assert capsys.readouterr() == ("", "layers compiled for prefill: 3.2 s\n")
