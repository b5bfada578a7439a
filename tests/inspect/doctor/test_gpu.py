"""The whole command on a machine with a GPU."""

import json

import pytest
import torch

from panscan.cli.main import run
from panscan.inspect.doctor.checks import CHECKS


@pytest.mark.gpu
def test_doctor_reports_the_facts_of_every_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    facts = {check.name: [] for check in CHECKS}
    for finding in found["findings"]:
        assert finding["seconds"] is not None, finding
        facts[finding["check"]].append(finding["fact"])
    for index in range(torch.cuda.device_count()):
        assert any(torch.cuda.get_device_name(index) in fact for fact in facts["gpus"])
        assert any(fact.startswith(f"GPU {index}: ") and "TFLOP/s" in fact for fact in facts["ceilings"])
    assert any("this wheel has kernels for it" in fact for fact in facts["kernels"])
    assert facts["triton"] == ["a Triton kernel compiles and computes the correct result"]
    assert any("27b" in fact for fact in facts["sizes"])
