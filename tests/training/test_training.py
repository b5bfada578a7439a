"""The training of the mini model: what it draws, what it hides from itself, and that its shortcuts are the model."""

import itertools
import json
import re
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from training.batches import IGNORED, SHAPE, Batch, Plan, draw_batch, encode, prefix_ids, slots_of, views_of
from training.checkpoint import load, load_trained, save
from training.data import as_tensors
from training.evaluate import WITH, documents
from training.export import export
from training.fonts import held_out_faces, training_faces
from training.model import Reader, new_model
from training.optimizer import Muon, optimizers
from training.pages import rows_of
from training.tokenizer import build_tokenizer
from training.train import to_device
from transformers import AutoModelForImageTextToText, AutoProcessor

from panscan.core import PanAndScan, Request
from panscan.images.ink import AILERON
from panscan.images.views import plan_views
from panscan.model.prompt import PromptWriter
from panscan.workload.documents import KINDS, Print, Sheet
from training import batches, finish

TOKENIZER = build_tokenizer(0)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> object:
    torch.manual_seed(3)
    return new_model().eval()


def drawn(views: int, documents: int = 2, **more: object) -> Batch:
    return draw_batch("test", 0, Plan(views, documents, **more))


def test_a_batch_is_a_function_of_seed_and_number() -> None:
    one, two, other = drawn(3), drawn(3), draw_batch("test", 1, Plan(3, 2))
    assert np.array_equal(one.pixels, two.pixels)
    assert np.array_equal(one.ids, two.ids)
    assert one.types == two.types
    assert not np.array_equal(one.pixels, other.pixels)


@given(st.text("ABCxyz0189 $.,:-/'\"()", max_size=40))
def test_characters_are_encoded_as_the_tokenizer_does(text: str) -> None:
    assert encode(text) == TOKENIZER(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("views", [1, 3, 4, 5, 6, 7])
def test_a_slot_behind_its_prefix_is_the_prompt_that_users_write(views: int) -> None:
    """Prefix, question and answer mark, against the prompt writer; what is learnt is the answer and its end."""
    batch = drawn(views)
    writer = PromptWriter(TOKENIZER, SHAPE.image_tokens)
    start = 0
    for length in slots_of(views):
        ids, targets = batch.ids[0, 0, start : start + length], batch.targets[0, 0, start : start + length]
        start += length
        learnt = np.flatnonzero(targets != IGNORED)
        text = TOKENIZER.decode(ids[: learnt[0] + 1].tolist())
        question = text.removesuffix("<end_of_turn>\n<start_of_turn>model\n")
        assert question != text
        expected = writer.write(Request(prompt=question, images=["page"]), [views - 1]).ids
        assert expected == [*prefix_ids(views), *ids[: learnt[0] + 1].tolist()]
        answer = TOKENIZER.decode(targets[learnt].tolist())
        assert np.array_equal(learnt, np.arange(learnt[0], learnt[-1] + 1))
        if length == min(slots_of(views)):
            assert answer.endswith("<end_of_turn>")
        assert np.array_equal(ids[learnt[1:]], targets[learnt[:-1]])


@settings(max_examples=20)
@given(st.integers(300, 700), st.floats(1.3, 4.4), st.booleans(), st.integers(0, 2**31))
def test_views_are_those_of_pan_and_scan(short: int, ratio: float, wide: bool, seed: int) -> None:
    """Cut and resized as the image processor that ships with the model does it, whatever count it chooses."""
    long = round(short * ratio)
    size = (long, short) if wide else (short, long)
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    plan = plan_views(*size, PanAndScan(min_crop_size=200, max_num_crops=6))
    mine = views_of(image, plan.crops)
    assert len(mine) == len(plan.views)
    for view, pixels in zip(plan.views, mine, strict=True):
        expected = image.crop(view.box).resize((192, 192), Image.Resampling.BILINEAR)
        assert np.array_equal(pixels, np.asarray(expected))


@pytest.mark.parametrize("views", [1, 4])
def test_the_loss_is_the_model_s_own_for_each_question_alone(model: object, views: int) -> None:
    """All slots at once behind one prefix, against Transformers' forward on one prompt at a time, eager and unmasked
    by us: so no slot sees another, positions are right, and image blocks look both ways."""
    batch = as_tensors(drawn(views, 1))
    reader = Reader(model, compiled=False).eval()
    pixels = to_device(batch["pixels"], CPU)
    ids, targets = batch["ids"][0], batch["targets"][0]
    with torch.no_grad():
        start, losses = 0, []
        for length in slots_of(views):
            slot, goal = ids[0, start : start + length].long(), targets[0, start : start + length].long()
            start += length
            used = int((goal != IGNORED).nonzero().max()) + 1
            sequence = torch.cat([torch.tensor(prefix_ids(views)), slot[:used]])[None]
            soft = sequence == TOKENIZER.image_token_id
            logits = model(input_ids=sequence, pixel_values=pixels, token_type_ids=soft.long(), use_cache=False).logits[
                0, -used:
            ]
            losses.append(torch.nn.functional.cross_entropy(logits.float(), goal[:used], reduction="sum"))
        counted = int((targets != IGNORED).sum())
        loss, _ = reader(views, pixels, ids, targets, torch.ones(targets.shape))
    assert float(loss) == pytest.approx(float(sum(losses)) / counted, rel=1e-5)


def test_training_never_sees_what_is_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fonts by name, layouts by number; and all else is seen."""
    assert not {face.name for face in training_faces()} & {face.name for face in held_out_faces()}
    assert len(held_out_faces()) >= 2
    seen: set[tuple[str, int]] = set()
    faces: set[str] = set()

    def noting(kind: str):
        draw, layouts = KINDS[kind]

        def note(rng: Random, sheet: Sheet, layout: int):
            seen.add((kind, layout))
            faces.add(sheet.style.face.name)
            return draw(rng, sheet, layout)

        return note, layouts

    monkeypatch.setattr("training.pages.KINDS", {kind: noting(kind) for kind in KINDS})
    for number in range(80):
        draw_batch("seen", number, Plan((1, 1, 3, 4)[number % 4], 5))
    assert seen == {(kind, layout) for kind, (_, layouts) in KINDS.items() for layout in range(layouts - 1)}
    assert faces == {face.name for face in training_faces()}
    seen.clear()
    faces.clear()
    for number in range(10):
        draw_batch("new", number, Plan(1, 4, held_out="both"))
    assert {layout - KINDS[kind][1] for kind, layout in seen} == {-1}
    assert faces <= {face.name for face in held_out_faces()}


def test_evaluation_draws_what_training_never_saw() -> None:
    held = list(documents(12, 5))
    assert [one.shape for one in held[:3]] == ["tall", "wide", "square"]
    assert [one.new for one in held[::3]] == ["seed", "fonts", "layouts", "fonts and layouts"]
    for one in held:
        width, height = one.page.image.size
        assert 448 <= min(width, height) <= 900
        crops = plan_views(width, height, WITH).crops
        assert (crops == 0) == (one.shape == "square")
        assert 1 <= len(one.questions) <= 4


def test_a_page_is_read_line_by_line() -> None:
    style = Print(AILERON, 20)
    sheet = Sheet(400, 300, style)
    for y, left, right in ((60, "Tea", "$1.00"), (100, "Rye bread", "$2.50")):
        sheet.text(20, y, left)
        sheet.text(380, y, right, anchor="rs")
    assert rows_of(sheet.document("x")) == ["Tea $1.00", "Rye bread $2.50"]


def test_muon_turns_gradients_into_nearly_orthogonal_steps() -> None:
    torch.manual_seed(0)
    wide, tall = (torch.nn.Parameter(torch.randn(*shape)) for shape in ((16, 48), (48, 16)))
    before = [wide.detach().clone(), tall.detach().clone()]
    muon = Muon([wide, tall], lr=0.1, weight_decay=0.0)
    for parameter in (wide, tall):
        parameter.grad = torch.randn_like(parameter) * 100
    muon.step()
    for parameter, old, scale in zip((wide, tall), before, (1.0, 3**0.5), strict=True):
        singular = torch.linalg.svdvals((old - parameter.detach()) / (0.1 * scale))
        assert 0.5 < float(singular.min()) <= float(singular.max()) < 1.4


def test_a_checkpoint_goes_on_where_it_was(tmp_path: Path) -> None:
    torch.manual_seed(1)
    one = new_model()
    chosen = optimizers(one, muon_lr=0.01, adam_lr=0.001)
    for parameter in one.parameters():
        parameter.grad = torch.randn_like(parameter)
    for optimizer in chosen:
        optimizer.step()
    save(tmp_path, 7, 60.5, one, chosen)
    assert all(file.stat().st_size < 16 * 2**20 for file in tmp_path.iterdir())
    other = new_model()
    others = optimizers(other, muon_lr=0.01, adam_lr=0.001)
    assert load(tmp_path, other, others) == (7, 60.5)
    for expected, actual in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(expected, actual)
    adam, loaded = chosen[1].state_dict()["state"], others[1].state_dict()["state"]
    assert all(torch.equal(adam[index][key], loaded[index][key]) for index in adam for key in adam[index])
    save(tmp_path, 9, 80.0, one, chosen)
    assert {re.match(r"step-(\d+)", file.name)[1] for file in tmp_path.glob("step*")} == {"000009"}


def test_finishing_teaches_the_text_layers_alone_and_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two calls with time for one batch each, by a clock that a look at it moves on by a second."""
    trained, out = tmp_path / "trained", tmp_path / "finished"
    one = new_model()
    save(trained, 9, 60.0, one, [])
    (trained / "log.jsonl").write_text('{"step": 9}\n')
    monkeypatch.setattr(finish, "_DOCUMENTS", dict.fromkeys(range(1, 8), 1))
    before = {name: parameter.detach().clone() for name, parameter in one.named_parameters()}
    clock = itertools.count()
    monkeypatch.setattr(finish, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    for call, seconds in enumerate((1.5, 4.5), 1):
        arguments = [str(trained), "--out", str(out), "--minutes", str(seconds / 60)]
        monkeypatch.setattr(sys, "argv", ["finish", *arguments])
        finish.main()
        assert load(out, one)[0] == call
        changed = {name for name, p in one.named_parameters() if not torch.equal(p, before[name])}
        assert changed == {name for name in before if "language_model.layers" in name}
        before |= {name: parameter.detach().clone() for name, parameter in one.named_parameters() if name in changed}
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert lines[0] == {"step": 9}
    assert [line["documents"] for line in lines if "command" in line] == [1, 2]
    assert load(trained, one)[0] == 9
    (trained / "log.jsonl").write_text('{"step": 8}\n')
    with pytest.raises(SystemExit, match="finishes another training"):
        finish.main()


def test_weights_that_were_never_trained_are_not_taken_for_trained_ones(tmp_path: Path, model: object) -> None:
    with pytest.raises(SystemExit, match="no checkpoint"):
        load_trained(tmp_path, model)


def test_what_is_exported_is_a_gemma_3_that_transformers_loads_alone(model: object, tmp_path: Path) -> None:
    export(model, tmp_path)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(tmp_path)
    assert processor.image_seq_length == SHAPE.image_tokens
    parameters = dict(model.named_parameters())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, parameters[name].bfloat16().float()), name


def test_a_page_that_cannot_be_drawn_does_not_end_a_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, calls = batches._drawn, iter([True, True])

    def sometimes(rng: Random, plan: Plan) -> object:
        if next(calls, False):
            raise ValueError("y1 must be greater")
        return good(rng, plan)

    monkeypatch.setattr(batches, "_drawn", sometimes)
    assert drawn(1, 2).pixels.shape[0] == 2
    assert "drawn anew" in capsys.readouterr().out
