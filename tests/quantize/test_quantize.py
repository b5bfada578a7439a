"""``panscan quantize`` on the tiny model: files, resumption, refusals, GPTQ, and audits that name wrong scales."""

import json
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from PIL import Image
from safetensors.torch import load_file, save_file
from tests.forked_workers import program

from panscan.cli.main import run
from panscan.core import InputError, SettingError
from panscan.model.build import decoder_linears
from panscan.model.bundled import tiny_directory
from panscan.model.checkpoint import Placement, load_model
from panscan.model.linear.quantized import QuantizedLinear, WeightFormat, quantized_linear
from panscan.quantize.audit import garbage_reason
from panscan.quantize.calibration import check_prompt_memory
from panscan.quantize.gptq import Hessian, gptq
from panscan.quantize.measure import MeasuredWeights
from panscan.quantize.partial import JOB_FILE, PartialCheckpoint
from panscan.quantize.source import DenseCheckpoint
from panscan.records.verdict_records import Top1, VerdictRecord

_CPU = Placement(torch.device("cpu"), torch.float32)

_DIES = """
import os, signal, sys
from pathlib import Path
from panscan.core.activity import Activity
from panscan.workload.calibration import CalibrationSource
from panscan.quantize.run import QuantizeOptions, quantize_checkpoint
from panscan.settings import Settings

def advance(step):
    step.done += 1
    if step.text == "quantising layers" and step.done == 3:
        os.kill(os.getpid(), signal.SIGKILL)

Activity.advance = advance

calibration = CalibrationSource((sys.argv[1],))
settings = Settings(model="tiny", do_pan_and_scan=False, device="cpu")
options = QuantizeOptions(settings, Path(sys.argv[2]), "int4", calibration=calibration, verify=False)
quantize_checkpoint(options, print)
"""


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scans")
    for number in range(3):
        noise = torch.randint(0, 256, (64, 64, 3), generator=torch.Generator().manual_seed(number), dtype=torch.uint8)
        Image.fromarray(noise.numpy()).save(folder / f"{number}.png")
    return folder


def _quantize(out: Path, *options: str) -> int:
    return run(["quantize", "tiny", str(out), "--device", "cpu", "--do-pan-and-scan", "false", *options])


def _contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "README.md"}


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_a_written_checkpoint_loads_with_rounded_weights(tmp_path: Path, kind: str) -> None:
    assert _quantize(tmp_path / "out", "--quantization", kind, "--no-verify") == 0
    modules = dict(load_model(str(tmp_path / "out"), _CPU).model.named_modules())
    dense = load_model("tiny", _CPU).model
    for name, linear in decoder_linears(dense):
        quantized = modules[name]
        assert isinstance(quantized, QuantizedLinear)
        expected = quantized_linear(linear.in_features, linear.out_features, WeightFormat(kind))
        expected.quantize(linear.weight.bfloat16(), stored_scale=torch.bfloat16)
        assert torch.equal(quantized.dequantized(), expected.dequantized()), name
    assert torch.equal(modules["lm_head"].weight, dense.lm_head.weight)
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors" and "re:.*vision_tower.*" in config["ignore"]
    assert (tmp_path / "out/README.md").read_text().startswith("---\nbase_model: tiny\n")
    assert not (tmp_path / "out.partial").exists()


def test_a_killed_job_resumes_to_the_same_bytes(tmp_path: Path, scans: Path) -> None:
    child = subprocess.run(program(_DIES, str(scans), str(tmp_path / "out")), timeout=120)
    assert child.returncode == -signal.SIGKILL
    partial = tmp_path / "out.partial"
    assert not (tmp_path / "out").exists() and not (partial / "config.json").exists()
    before = {file: file.stat().st_mtime_ns for file in partial.glob("model-*.safetensors")}
    assert len(before) == 4  # unquantised tensors and three layers
    options = ["--quantization", "int4", "--no-verify", "--calibration", str(scans)]
    assert _quantize(tmp_path / "out", *options) == 0
    assert {tmp_path / "out" / file.name: stamp for file, stamp in before.items()}.items() <= {
        file: file.stat().st_mtime_ns for file in (tmp_path / "out").iterdir()
    }.items()
    assert _quantize(tmp_path / "whole", *options) == 0
    assert _contents(tmp_path / "out") == _contents(tmp_path / "whole")
    assert _quantize(tmp_path / "rounded", "--quantization", "int4", "--no-verify") == 0
    assert _contents(tmp_path / "rounded") != _contents(tmp_path / "whole")


def test_another_jobs_work_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with PartialCheckpoint(tmp_path / "out", {"quantization": "fp8"}) as other:
        other.write_json("layer.json", 1)
        assert _quantize(tmp_path / "out", "--quantization", "int4", "--no-verify") == 3
        assert "is writing this checkpoint: wait for it" in capsys.readouterr().err
    assert _quantize(tmp_path / "out", "--quantization", "int4", "--no-verify") == 2
    assert "another job's partial work" in capsys.readouterr().err
    assert (tmp_path / "out.partial/layer.json").exists()
    assert _quantize(tmp_path / "out", "--quantization", "int4", "--no-verify", "--force") == 0
    assert not (tmp_path / "out/layer.json").exists() and (tmp_path / "out" / JOB_FILE).exists()


def test_only_an_own_checkpoint_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    for options in ([], ["--force"]):
        assert _quantize(tmp_path / "out", "--quantization", "int8", "--no-verify", *options) == 2
        assert "out" in capsys.readouterr().err
    assert (tmp_path / "out/mine.txt").read_text() == "mine"


def test_files_beside_a_checkpoint_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--quantization", "int8", "--no-verify"]
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk/out")
    assert _quantize(tmp_path / "out", *words) == 0
    assert (tmp_path / "out").is_symlink() and (tmp_path / "disk/out" / JOB_FILE).is_file()
    notes = tmp_path / "disk/out/notes.txt"
    notes.write_text("mine")
    assert _quantize(tmp_path / "out", *words, "--force") == 2
    assert f"{notes} was not written by this command" in capsys.readouterr().err
    notes.unlink()
    assert _quantize(tmp_path / "out", *words, "--force") == 0
    assert [entry.name for entry in (tmp_path / "disk").iterdir()] == ["out"]


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    with PartialCheckpoint(tmp_path / "out", {}) as target:
        target.check_space(1)
        with pytest.raises(InputError, match="of disk space"):
            target.check_space(1 << 62)
        (target.path / ".model.safetensors").mkdir()  # safetensors cannot write there
        with pytest.raises(InputError, match=r"model\.safetensors cannot be written"):
            target.write_tensors("model.safetensors", {"weight": torch.ones(1)})


def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _quantize(tmp_path / "out", "--quantization", "int8", "--no-verify") == 0
    assert run(["quantize", str(tmp_path / "out"), str(tmp_path / "again"), "--quantization", "int4"]) == 3
    assert "quantised already" in capsys.readouterr().err


def test_a_null_quantization_config_is_dense(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_directory(), tmp_path / "dense")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    assert len(DenseCheckpoint(str(folder)).layers) == len(DenseCheckpoint("tiny").layers)


def test_prompts_that_memory_cannot_hold_are_refused() -> None:
    check_prompt_memory([100], {"hidden_size": 64}, torch.bfloat16)
    with pytest.raises(SettingError, match="lower --num-prompts or --max-pages"):
        check_prompt_memory([1 << 25], {"hidden_size": 64}, torch.bfloat16)


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
    norms = (".input_layernorm.weight", ".pre_feedforward_layernorm.weight")
    for name in [key for key in tensors if key.endswith(norms)]:
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


def test_the_audit_names_folded_scales(tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_no_audit_against_another_model(tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["quantize", "tiny", str(tmp_path / "out"), "--quantization", "int8", "--no-verify"]) == 0
    words = ["quantize", "--audit", str(tmp_path / "out"), "--dataset", str(questions), *_OPTIONS]
    assert run([*words, "--model", "mini"]) == 3
    assert "--model mini" in capsys.readouterr().err
    assert run([*words, "--force"]) == 2


def judged(**figures: Any) -> VerdictRecord:
    return structs.replace(VerdictRecord.without_figures("", "different"), **figures)


GARBAGE = [
    (MeasuredWeights("q", judged(top1=Top1(10, 4))), None, "40%"),
    (MeasuredWeights("q", judged(reason="3 of 9 positions overflow")), None, "overflow"),
    (MeasuredWeights("q", contains=0.1, answers=20), MeasuredWeights("dense", contains=0.8, answers=20), "10%"),
    (MeasuredWeights("q", repetitive=0.9, answers=20), None, "repeat"),
    (MeasuredWeights("q", contains=0.0, answers=20), None, "none of 20"),
    (MeasuredWeights("q", contains=0.0, answers=20), MeasuredWeights("dense", problem="memory"), "none of 20"),
    (MeasuredWeights("q", judged(top1=Top1(10, 9)), contains=0.7), MeasuredWeights("d", contains=0.8), None),
    (MeasuredWeights("q", repetitive=0.9, answers=20), MeasuredWeights("dense", repetitive=0.9, answers=20), None),
]


@pytest.mark.parametrize(("row", "reference", "says"), GARBAGE)
def test_garbage(row: MeasuredWeights, reference: MeasuredWeights | None, says: str | None) -> None:
    reason = garbage_reason(row, reference)
    assert (reason is None) if says is None else (reason is not None and says in reason)


@settings(max_examples=15)
@given(st.integers(0, 1000), st.sampled_from([32, 64]), st.integers(1, 6), st.integers(24, 48), st.integers(0, 9))
def test_gptq_is_better_on_correlated_inputs(seed: int, group: int, groups: int, outputs: int, idle: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    width = group * groups
    inputs = torch.randn(4 * width, width, generator=draw) @ torch.randn(width, width, generator=draw)
    inputs[:, :idle] = 0
    weight = torch.randn(outputs, width, generator=draw)
    hessian = Hessian(width)
    for part in inputs.split(width):
        hessian.add(part)
    assert torch.allclose(hessian.values, inputs.T @ inputs / len(inputs), rtol=1e-3, atol=1e-2)
    weight_format = WeightFormat("int4", group)
    nearest = quantized_linear(width, outputs, weight_format, scale_type=torch.float32)
    nearest.quantize(weight)
    fitted = gptq(weight, hessian.values, weight_format, scale_type=torch.float32)
    changes = [quantized.dequantized() - weight for quantized in (fitted, nearest)]
    error, before = (((change @ hessian.values) * change).sum() for change in changes)
    assert error < before
    assert (fitted.scale <= nearest.scale).all()
    steps = fitted.scale.T.repeat_interleave(group, dim=1)[:, :idle]
    assert torch.equal(fitted.dequantized()[:, :idle], torch.round(weight[:, :idle] / steps).clamp(-8, 7) * steps)


def test_gptq_survives_fewer_inputs_than_channels() -> None:
    draw = torch.Generator().manual_seed(0)
    weight, hessian = torch.randn(8, 256, generator=draw), Hessian(256)
    hessian.add(torch.randn(3, 256, generator=draw))
    assert gptq(weight, hessian.values, WeightFormat("int4", 64)).dequantized().isfinite().all()
    with pytest.raises(ValueError, match="not finite"):
        gptq(weight, hessian.values * torch.inf, WeightFormat("int4", 64))
