"""Measurement and audit: a usable checkpoint passes, one with wrongly folded scales is named."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from PIL import Image
from safetensors.torch import load_file, save_file

from panscan.cli.main import run
from panscan.model.bundled import tiny_directory
from panscan.quantize.audit import garbage_reason
from panscan.quantize.measure import MeasuredWeights
from panscan.records.verdict_records import Top1, VerdictRecord

_OPTIONS = ["--device", "cpu", "--do-pan-and-scan", "false", "--max-new-tokens", "4"]


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("questions")
    Image.new("RGB", (64, 64), "white").save(folder / "page.png")
    row = {"image": "page.png", "question": "What is the total?", "answers": ["12"]}
    (folder / "questions.jsonl").write_text(json.dumps(row) + "\n")
    return folder / "questions.jsonl"


def _folded(folder: Path) -> Path:
    """Return the tiny model with scales moved from matrices into norms as if a norm multiplied by w."""
    shutil.copytree(tiny_directory(), folder)
    tensors = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(0)
    for name in [
        key for key in tensors if key.endswith((".input_layernorm.weight", ".pre_feedforward_layernorm.weight"))
    ]:
        stem, norm = name.removesuffix(".weight").rsplit(".", 1)
        matrices = ["q_proj", "k_proj", "v_proj"] if norm == "input_layernorm" else ["gate_proj", "up_proj"]
        block = "self_attn" if norm == "input_layernorm" else "mlp"
        scales = torch.exp(torch.randn(tensors[name].shape, generator=draw))
        tensors[name] = ((tensors[name].float() + 1) / scales).bfloat16()  # w, where 1 + w is meant
        for matrix in matrices:
            key = f"{stem}.{block}.{matrix}.weight"
            tensors[key] = (tensors[key].float() * scales).bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_the_audit_names_scales_folded_into_norms(
    tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = _folded(tmp_path / "folded")
    assert run(["quantize", str(base), str(tmp_path / "bad"), "--quantization", "int8", "--no-verify"]) == 0
    capsys.readouterr()
    words = ["quantize", "--audit", str(tmp_path / "bad"), "--model", "tiny", "--dataset", str(questions), *_OPTIONS]
    assert run(words) == 5
    output = " ".join(capsys.readouterr().out.split())
    assert "Garbage: " in output and "Gemma multiplies by 1 + w (AWQ; 14 norms" in output
    unreadable = shutil.copytree(tiny_directory(), tmp_path / "base", ignore=shutil.ignore_patterns("tokenizer*"))
    words[words.index("tiny")] = str(unreadable)  # its weights can be compared, but it cannot answer
    assert run(words) == 6
    assert "the matrices do not compensate" in " ".join(capsys.readouterr().out.split())


def test_a_usable_checkpoint_passes_and_its_card_has_the_measurement(
    tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["quantize", "tiny", str(tmp_path / "good"), "--quantization", "int8", *_OPTIONS]
    assert run([*words, "--dataset", str(questions)]) == 0
    card = (tmp_path / "good/README.md").read_text()
    assert "| dense | reference |" in card and "| int8 (rounded) | different |" in card
    capsys.readouterr()
    assert run(["quantize", "--audit", str(tmp_path / "good"), "--dataset", str(questions), *_OPTIONS]) == 0
    output = capsys.readouterr().out
    assert "one scale per output channel, symmetric, inputs quantised per token" in output and "Garbage" not in output
    assert "vision" in output and "dense" in output  # the card names the base


def test_a_checkpoint_can_be_described_without_running_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["quantize", "tiny", str(tmp_path / "out"), "--quantization", "int4", "--no-verify"]) == 0
    capsys.readouterr()
    assert run(["quantize", "--audit", str(tmp_path / "out"), "--no-verify"]) == 0
    name, *table = capsys.readouterr().out.splitlines()
    assert name.endswith("compressed-tensors pack-quantized")
    header, decoder, vision, *_ = ([cell.strip() for cell in line.split("  ") if cell.strip()] for line in table)
    assert header == ["Part", "Tensors", "Quantised", "Stored as", "Size"]
    assert decoder == ["decoder", "91", "49", "int4, groups of 128, bfloat16", "0.7 MB"]
    assert vision == ["vision", "37", "0", "bfloat16", "0.9 MB"]
    assert run(["quantize", "--audit", str(tmp_path / "nothing")]) == 3


def test_an_audit_against_another_model_is_refused(
    tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["quantize", "tiny", str(tmp_path / "out"), "--quantization", "int8", "--no-verify"]) == 0
    words = ["quantize", "--audit", str(tmp_path / "out"), "--dataset", str(questions), *_OPTIONS]
    assert run([*words, "--model", "mini"]) == 3
    assert "--model mini" in capsys.readouterr().err
    assert run([*words, "--force"]) == 2


def judged(**figures: Any) -> VerdictRecord:
    return structs.replace(VerdictRecord.without_figures("", "different"), **figures)


@pytest.mark.parametrize(
    ("row", "reference", "says"),
    [
        (MeasuredWeights("q", judged(top1=Top1(10, 4))), None, "40%"),
        (MeasuredWeights("q", judged(reason="3 of 9 positions overflow")), None, "overflow"),
        (MeasuredWeights("q", contains=0.1, answers=20), MeasuredWeights("dense", contains=0.8, answers=20), "10%"),
        (MeasuredWeights("q", repetitive=0.9, answers=20), None, "repeat"),
        (MeasuredWeights("q", contains=0.0, answers=20), None, "none of 20"),
        (MeasuredWeights("q", contains=0.0, answers=20), MeasuredWeights("dense", problem="memory"), "none of 20"),
        (MeasuredWeights("q", judged(top1=Top1(10, 9)), contains=0.7), MeasuredWeights("d", contains=0.8), None),
        (MeasuredWeights("q", repetitive=0.9, answers=20), MeasuredWeights("dense", repetitive=0.9, answers=20), None),
    ],
)
def test_garbage(row: MeasuredWeights, reference: MeasuredWeights | None, says: str | None) -> None:
    found = garbage_reason(row, reference)
    assert (found is None) if says is None else (found is not None and says in found)
