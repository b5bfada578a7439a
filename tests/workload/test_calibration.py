"""Documents of a calibration: what a sample opens, and what is held out."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from panscan.workload.calibration import CalibrationSource, load_calibration, load_documents


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty questions about thirty documents; the first eleven are copies of one file."""
    folder = tmp_path_factory.mktemp("dataset")
    rows = []
    for number in range(40):
        name = f"{number % 30}.png"
        if 0 < number < 11:
            shutil.copyfile(folder / "0.png", folder / name)
        elif number < 30:
            draw = torch.Generator().manual_seed(number)
            Image.fromarray(torch.randint(0, 256, (32, 32, 3), generator=draw, dtype=torch.uint8).numpy()).save(
                folder / name
            )
        rows.append({"image": name, "question": f"Question {number}?", "answers": ["12"]})
    (folder / "questions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder / "questions.jsonl"


def test_only_the_sample_of_a_dataset_is_opened(dataset: Path) -> None:
    steps: list[tuple[str, int, int]] = []

    def step(stage: str, done: int, total: int) -> None:
        steps.append((stage, done, total))

    kept, held_out, _ = load_calibration(CalibrationSource((str(dataset),), num_samples=4), pytest.fail, step)
    assert len(kept) == 4 and steps[-1] == ("opening documents", 12, 12)
    assert held_out
    measured, _ = load_documents(str(dataset), 3, 0, pytest.fail, step)
    assert len(measured.items) == 3
    whole, _ = load_documents(str(dataset), 100, 0, pytest.fail, step)
    assert len({item.id for item in whole.items}) == len(whole.items) == 40


@pytest.mark.parametrize("seed", range(4))
def test_no_file_is_both_calibrated_and_measured_on(dataset: Path, seed: int) -> None:
    wanted = CalibrationSource((str(dataset),), seed=seed)
    kept, held_out, _ = load_calibration(wanted, pytest.fail, lambda *_: None)
    assert len(kept) + len(held_out) == 40 and held_out
    contents = [{document.sha256 for item in side for document in item.documents} for side in (kept, held_out)]
    assert contents[0].isdisjoint(contents[1])
