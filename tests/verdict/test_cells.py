"""Verdicts of the tiny model: what is exact, what is caught as different, and whose reference is used."""

import shutil
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from safetensors.torch import save_file
from tests.bench.observing import RecordingObserver, RecordingWriter
from tests.conftest import draw_documents, noise
from tests.model.formats.small import SMALL, Checkpoint, dense_weights
from tests.model.test_adapters import write_adapter

from panscan.bench.grid import Cell
from panscan.bench.plan import SweepPlan
from panscan.bench.sweep import run_sweep
from panscan.core import PanscanWarning, RecordsError
from panscan.model.bundled.random_weights import write_shape
from panscan.model.runtime import apply_attention
from panscan.records.verdict_records import VerdictRecord
from panscan.runners.factory import open_runner
from panscan.runners.generate import GenerateRunner
from panscan.runners.pipeline import PipelineRunner
from panscan.settings import Settings, settings_from
from panscan.verdict.cells import Verifier
from panscan.verdict.reference import FORMAT, find_references
from panscan.verdict.references import References
from panscan.workload.requests import Source, load_workload, request_of

STEPS = 8
Record = dict[str, Any]


class Bench:
    """A folder of documents, and verifiers over it."""

    def __init__(self, folder: Path) -> None:
        draw_documents(folder)
        self.truths = folder / "truth"
        self.source = Source(images=(str(folder / "*.png"),), prompt="What is it?")
        self.items = load_workload(self.source, on_problem=lambda error: pytest.fail(str(error))).items

    def verifier(
        self, *references: Path, directory: Path | None = None, source: Source | None = None
    ) -> "RecordingVerifier":
        return RecordingVerifier(self, references, directory or self.truths, source or self.source)


class RecordingVerifier(Verifier):
    """A verifier that keeps what it writes and says."""

    def __init__(self, bench: Bench, references: Sequence[Path], directory: Path, source: Source) -> None:
        reference_files = [file for path in references for file in find_references(path)]
        self.records: list[Mapping[str, Any]] = []
        self.said: list[str] = []
        super().__init__(
            References(bench.items, source, STEPS, directory, reference_files, self.records.extend, self.said.append)
        )

    def verdict(self, runner: GenerateRunner, settings: Settings) -> VerdictRecord:
        cell = Cell.of(settings)
        self.references.prepare_apart([settings])
        self.references.prepare(runner, [settings])
        runner.configure(settings)
        return self.verify(runner, cell)


def settings_of(model: str | Path = "tiny", **changes: Any) -> Settings:
    fixed = {"model": str(model), "dtype": "fp32", "device": "cpu", "max_new_tokens": STEPS}
    return settings_from({**fixed, **changes})


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("documents"))


@pytest.fixture(scope="module")
def half() -> GenerateRunner:
    return GenerateRunner.from_pretrained("tiny", dtype="bf16", device="cpu", max_new_tokens=STEPS)


EXACT: list[Record] = [
    {"attention": "eager"},
    {"attention": "sdpa"},
    {"cache": "static"},
    {"batch_size": 3},
    {"batch_size": 2, "equal_views": True, "temperature": 0.9},
    {"do_pan_and_scan": False},
    {"preprocess": "device"},
    {"max_new_tokens": 3},
]


@pytest.mark.parametrize("settings", EXACT, ids=str)
def test_exact_in_float32_means_equal_tokens(runner: GenerateRunner, bench: Bench, settings: Record) -> None:
    record = bench.verifier().verdict(runner, replace(runner.settings, **{"max_new_tokens": STEPS, **settings}))
    assert record.verdict == "exact", record
    assert record.equal_tokens
    assert record.top1.agree == record.top1.clear > record.answer.positions / 2
    assert max(record.answer.kl, record.image.kl) < 1e-8
    assert record.image.positions == 3 * 32


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_sdpa_is_exact_in_bf16_by_the_yardstick(half: GenerateRunner, bench: Bench, attention: str) -> None:
    record = bench.verifier().verdict(half, replace(half.settings, attention=attention, batch_size=2))
    assert record.verdict == "exact", record
    assert record.answer.noise > 1e-5
    assert record.answer.kl > 0


def test_noise_is_that_of_the_positions_compared(half: GenerateRunner, bench: Bench) -> None:
    """The reference as a cell is as noisy as the yardstick, however few tokens it may write."""
    settings = replace(half.settings, attention="eager", batch_size=3)
    verifier = bench.verifier()
    verifier.references.prepare(half, [replace(settings, max_new_tokens=STEPS)])
    answers = {n: verifier.verdict(half, replace(settings, max_new_tokens=n)).answer for n in (1, 3, STEPS)}
    assert answers[STEPS].kl == pytest.approx(answers[STEPS].noise, rel=1e-4)
    noises = {tokens: answer.noise for tokens, answer in answers.items()}
    for tokens, answer in answers.items():
        # With fewer tokens, products have other shapes, and some processors round them differently.
        nearest = min(noises, key=lambda key: abs(noises[key] - answer.kl))
        assert nearest == tokens, (answer.kl, noises)


def test_causal_images_are_caught(runner: GenerateRunner, half: GenerateRunner, bench: Bench, causal: str) -> None:
    for candidate, least in ((runner, 1e3), (half, 10)):
        settings = replace(candidate.settings, max_new_tokens=STEPS, batch_size=2)
        verifier = bench.verifier()
        verifier.verdict(candidate, settings)
        try:
            apply_attention(candidate.loaded.model, causal)
            record = verifier.verify(candidate, Cell.of(settings))
        finally:
            apply_attention(candidate.loaded.model, settings.attention)
        assert record.verdict == "different", record
        assert record.image.kl > least * max(record.image.noise, 1e-6)


def test_a_prefill_that_cuts_image_blocks_is_caught(runner: GenerateRunner, bench: Bench) -> None:
    settings = replace(runner.settings, max_new_tokens=STEPS, prefill_chunk_size=100)
    record = bench.verifier().verdict(runner, settings)
    assert record.verdict == "different", record


@pytest.mark.parametrize("option", ["quantization", "quantize_head", "quantize_vision"])
def test_quantised_weights_have_the_unquantised_reference(option: str, bench: Bench, tmp_path: Path) -> None:
    settings = settings_of(**{option: "int8"})
    verifier = bench.verifier(directory=tmp_path)
    record = verifier.verdict(GenerateRunner.from_settings(settings), settings)
    assert record.verdict == "different", record  # by float32's noise; the figure is what counts
    assert 1e-4 < record.answer.kl < 0.5
    assert record.top1.agree > record.top1.clear / 2
    assert "loading tiny unquantised to compute the reference" in verifier.said
    [file] = tmp_path.glob("*.safetensors")
    again = bench.verifier(file, directory=tmp_path / "none")
    assert again.verdict(GenerateRunner.from_settings(settings), settings).answer == record.answer
    assert not any("unquantised" in line for line in again.said), "the reference has all that is needed"


def test_a_quantised_checkpoint_is_compared_with_its_base(bench: Bench, tmp_path: Path) -> None:
    base, stored = tmp_path / "base", tmp_path / "stored"
    for directory in (base, stored):
        directory.mkdir()
    write_shape(SMALL, base)
    weights = {name: value.clone() for name, value in dense_weights().items() if not name.startswith("lm_head")}
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    Checkpoint.read("gptq").write(stored)
    settings = settings_of(stored, dtype="bf16")
    runner = GenerateRunner.from_settings(settings)
    unknown = bench.verifier(directory=tmp_path / "truth").verdict(runner, settings)
    assert unknown.verdict == "unverified" and "names no base_model" in unknown.reason
    (stored / "README.md").write_text(f"---\nbase_model: {base}\n---\n", "utf-8")
    settings = replace(settings, max_new_tokens=STEPS - 1)  # what is known of other settings is kept for a sweep
    verifier = bench.verifier(directory=tmp_path / "truth")
    record = verifier.verdict(runner, settings)
    assert record.verdict != "unverified", record.reason
    assert record.answer.kl > 0 and any(f"loading {base} unquantised" in line for line in verifier.said)
    plain = replace(settings, model=str(stored / ".." / "base"))
    again = bench.verifier(directory=tmp_path / "truth")
    again.verdict(GenerateRunner.from_settings(plain), plain)
    assert again.verdict(runner, settings).answer == record.answer
    assert not any("unquantised" in line for line in again.said), "another spelling of the base is loaded once"


def test_a_quantised_pipeline_has_a_reference_for_its_own_pixels(bench: Bench, tmp_path: Path) -> None:
    settings = settings_of(quantization="int8", dtype="bf16", max_new_tokens=2, runner="pipeline")
    record = bench.verifier(directory=tmp_path).verdict(open_runner(settings), settings)
    assert record.verdict != "unverified", record.reason


def test_text_only_checkpoints_have_verdicts_but_for_generate_batch(text_checkpoint: Path, bench: Bench) -> None:
    source = Source(no_images=True, prompt="Say it.")
    items = load_workload(source, on_problem=lambda error: pytest.fail(str(error))).items
    for name, word in (("generate_batch", "unverified"), ("generate", "exact")):
        verifier = bench.verifier(directory=text_checkpoint / "truth", source=source)
        verifier.references.items = items
        settings = settings_of(text_checkpoint, max_new_tokens=3, runner=name)
        record = verifier.verdict(open_runner(settings), settings)
        assert (record.verdict, record.image) == (word, None)
        assert len(verifier.records) == (word == "exact"), "what cannot be compared needs no reference"
        assert bool(record.reason) == (word != "exact")


def test_an_adapter_of_one_row_has_its_own_reference(runner: GenerateRunner, bench: Bench, tmp_path: Path) -> None:
    row = {"model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(1, 128)}
    adapter = write_adapter(tmp_path / "row", row, trainable_token_indices=[999])
    settings = replace(runner.settings, max_new_tokens=STEPS)
    verifier = bench.verifier()
    adapted = replace(settings, model=f"{settings.model}+{adapter}")
    records = [verifier.verdict(open_runner(cell_settings), cell_settings) for cell_settings in (settings, adapted)]
    assert len({record.truth for record in records}) == 2


def test_the_pipeline_is_watched_through_its_own_call(tiny: GenerateRunner, bench: Bench) -> None:
    settings = replace(tiny.settings, runner="pipeline", max_new_tokens=STEPS)
    record = bench.verifier().verdict(PipelineRunner(tiny.loaded, settings), settings)
    assert record.verdict == "exact", record


def test_a_reference_is_computed_once_and_found_again(runner: GenerateRunner, bench: Bench, tmp_path: Path) -> None:
    settings = replace(runner.settings, max_new_tokens=STEPS)
    first = bench.verifier(directory=tmp_path)
    record = first.verdict(runner, settings)
    assert any(line.startswith("computing the reference:") for line in first.said)
    steps = len(first.said)
    first.verdict(runner, replace(settings, batch_size=3))
    later = first.said[steps:]
    assert not any(line.startswith("computing the reference:") for line in later), "other batches are the same views"
    [line] = first.records
    assert (line.source, line.tokens, line.requests) == ("computed", record.answer.positions, 3)
    again = bench.verifier(directory=tmp_path)
    assert again.verdict(runner, settings).answer == record.answer
    assert not any(line.startswith("computing the reference:") for line in again.said)
    elsewhere = bench.verifier(next(tmp_path.iterdir()), directory=tmp_path / "elsewhere")
    assert elsewhere.verdict(runner, settings).answer == record.answer
    assert [computed.source for computed in elsewhere.records] == ["reference"]
    assert not (tmp_path / "elsewhere").exists()


def test_fewer_crops_that_give_the_same_views_share_a_reference(runner: GenerateRunner, bench: Bench) -> None:
    views = bench.verifier().references.views
    settings = runner.settings
    assert views(settings, "cpu") == views(replace(settings, pan_and_scan_max_num_crops=9), "cpu")
    others = [
        views(replace(settings, pan_and_scan_max_num_crops=2), "cpu"),
        views(settings, "device"),
        bench.verifier(source=replace(bench.source, system="Be short.")).references.views(settings, "cpu"),
    ]
    assert len({views(settings, "cpu"), *others}) == 4


def test_a_reference_of_other_views_or_weights_is_refused(
    runner: GenerateRunner, half: GenerateRunner, bench: Bench, tmp_path: Path
) -> None:
    settings = replace(runner.settings, max_new_tokens=STEPS)
    bench.verifier(directory=tmp_path / "truth").verdict(runner, settings)
    verifier = bench.verifier(tmp_path)
    verifier.references.check_files([settings])
    with pytest.raises(RecordsError, match=r"--reference .* computed for other views: use the same .* --seed"):
        verifier.references.check_files([replace(settings, do_pan_and_scan=False)])
    with pytest.raises(RecordsError, match=r"--reference .* computed from other weights \(tiny, possibly another"):
        verifier.verdict(half, half.settings)


def test_a_reference_of_several_loads_serves_each(
    runner: GenerateRunner, half: GenerateRunner, bench: Bench, tmp_path: Path
) -> None:
    loads = [(candidate, replace(candidate.settings, max_new_tokens=STEPS)) for candidate in (runner, half)]
    first = bench.verifier(directory=tmp_path / "truth")
    expected = [first.verdict(*load).answer for load in loads]
    second = bench.verifier(tmp_path)
    assert [second.verdict(*load).answer for load in loads] == expected
    assert {record.source for record in second.records} == {"reference"}
    of_half = tmp_path / "truth" / f"{second.verdict(*loads[1]).truth}.safetensors"
    third = bench.verifier(of_half, directory=tmp_path / "third")
    third.references.check_files([settings for _, settings in loads])
    with pytest.warns(PanscanWarning, match="other weights.*computing the reference for tiny in fp32"):
        assert third.verdict(*loads[0]).answer == expected[0]


def test_cells_that_cannot_run_do_not_ask_for_views(runner: GenerateRunner, bench: Bench, tmp_path: Path) -> None:
    bench.verifier(directory=tmp_path / "truth").verdict(runner, replace(runner.settings, max_new_tokens=2))
    noise(1, 5).save(tmp_path / "thin.png")
    source = Source(images=(str(tmp_path / "thin.png"),), prompt="What is it?")
    items = load_workload(source, on_problem=lambda error: pytest.fail(str(error))).items
    cell = Cell.of(settings_from({"pan_and_scan_min_crop_size": 1, "device": "cpu"}))
    verifier = bench.verifier(tmp_path, source=source)
    verifier.references.items = items
    lines = RecordingWriter()
    run_sweep(SweepPlan(cells=[cell], items=items, source=source), lines, set(), RecordingObserver(), verifier)
    assert [record.outcome for record in lines.records] == ["skipped"]


def test_what_is_no_reference_is_refused(runner: GenerateRunner, bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(RecordsError, match="stored no reference"):
        find_references(tmp_path)
    (tmp_path / "garbage").write_bytes(b"garbage")
    for name in ("nowhere", "garbage"):
        with pytest.raises(RecordsError, match=name):
            find_references(tmp_path / name)
    torn = tmp_path / "torn.safetensors"
    bench.verifier(directory=tmp_path / "whole").verdict(runner, replace(runner.settings, max_new_tokens=2))
    shutil.copy(next((tmp_path / "whole").iterdir()), torn)
    torn.write_bytes(torn.read_bytes()[:-100])
    with pytest.raises(RecordsError, match="torn"):
        find_references(torn)
    save_file({}, torn, {"panscan_truth": FORMAT, "header": '{"leads": [], "noise": {"bf16": {"answer": 1}}}'})
    with pytest.raises(RecordsError, match="torn"):
        find_references(torn)


def test_a_cell_without_a_reference_is_unverified(tiny: GenerateRunner, bench: Bench, tmp_path: Path) -> None:
    settings = replace(tiny.settings, max_new_tokens=STEPS)
    offloaded = cpu_offload(deepcopy(tiny.loaded.model), execution_device="cpu")
    runner = GenerateRunner(replace(tiny.loaded, model=offloaded), settings)
    record = bench.verifier(directory=tmp_path).verdict(runner, settings)
    assert (record.verdict, record.truth) == ("unverified", None)
    assert "offloaded" in record.reason
    assert "--reference" in record.reason


@pytest.mark.parametrize("place", ["directory", "reference"])
def test_a_follower_takes_the_reference_of_its_own_weights(
    runner: GenerateRunner, half: GenerateRunner, bench: Bench, tmp_path: Path, place: str
) -> None:
    """Two loads have references for the same views; each replica compares with that of the weights it loaded."""
    for candidate in (runner, half):
        bench.verifier(directory=tmp_path).verdict(candidate, replace(candidate.settings, max_new_tokens=STEPS))
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 2
    verifier = (
        bench.verifier(directory=tmp_path) if place == "directory" else bench.verifier(*files, directory=tmp_path / "x")
    )
    verifier.references.follows = True
    for candidate in (runner, half):
        settings = replace(candidate.settings, max_new_tokens=STEPS)
        requests = [request_of(item, settings, bench.source) for item in bench.items]
        candidate.configure(settings)
        results = [candidate.run([request])[0] for request in requests]
        checked = verifier.check(candidate, Cell.of(settings), results, None)
        assert (checked.requests, checked.departed, checked.note) == (3, 0, "")
    verifier.references.directory, verifier.references.files = tmp_path / "none", []
    missing = verifier.check(runner, Cell.of(runner.settings), [runner.run([requests[0]])[0]], None)
    assert missing.note == "no reference for these weights and views"
