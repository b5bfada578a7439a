"""The Triton backend, and padded passes as graphs record them: compiled on a GPU, by Triton's interpreter elsewhere."""

import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests import triton_here  # noqa: F401 - skips this module where there is no Triton
from tests.engine.attention_passes import BLOCKS, SCALING, SHAPES, Pass, check_backend, drawn_pass, interval, sequences
from tests.triton_here import DEVICE

from panscan.core import SettingError, UnsupportedError
from panscan.core.gpu_features import SHARED_BYTES
from panscan.engine import kernels, triton_attention
from panscan.engine.attention import KernelInputs, SegmentsBackend
from panscan.engine.graphs import Graphs
from panscan.engine.kernels import DECODE_MEMBERS, choose_splits, decode_sizes, prefill_sizes
from panscan.engine.model_runner import choose_backend
from panscan.engine.options import EngineOptions
from panscan.engine.scheduling import graph_sizes
from panscan.engine.scheduling.batch import Chunk, FlatBatch, PromptLayout, Sequence, Span, flatten
from panscan.engine.triton_attention import HEAD_SIZES, TritonBackend, TritonPlan, prefix_groups, shares_prefix
from panscan.model.layers import LayerCache, LayerFacts
from panscan.model.machine import GraphRecorder

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]  # NumPy has no bfloat16
EXAMPLES = 18 if DEVICE.type == "cuda" else 7  # the interpreter takes about a second for each


TILES = {"size": st.sampled_from([16, 32, 64]), "block_size": st.sampled_from([2, 8, 16, 32]), **SHAPES}


def check(of: Pass, multiprocessors: int = 1) -> None:
    """``multiprocessors``: what the GPU seems to have; the kernels split keys where some would be idle."""
    with patch.object(kernels, "_multiprocessors", lambda _: multiprocessors):
        for backend in (TritonBackend(of.query.shape[-1], of.query.dtype), SegmentsBackend()):
            check_backend(of, backend, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@given(multiprocessors=st.sampled_from([1, 15, 60]), **TILES)
@settings(max_examples=EXAMPLES)
def test_every_row_attends_to_its_key_interval(dtype: torch.dtype, multiprocessors: int, **shape: Any) -> None:
    check(drawn_pass(dtype=dtype, **shape), multiprocessors)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_large_heads_of_the_published_models(dtype: torch.dtype, local: bool) -> None:
    """Of 128 and of 256 numbers, as these are and in int8."""
    shape = {"size": 256 if local != (dtype == torch.float16) else 128, "heads": (2, 2), "local": local, "int8": local}
    multiprocessors = 132 if local else 1  # few rows for the GPU, or many
    check(drawn_pass(seed=0, block_size=16, window=20, dtype=dtype, **shape), multiprocessors)


@pytest.mark.parametrize(("local", "multiprocessors"), [(False, 1), (True, 132)])
def test_chunks_of_many_tiles_behind_a_prefix(local: bool, multiprocessors: int) -> None:
    """An image span larger than a tile and than the window, in the middle of a prompt; two rows in a last tile."""
    chunks = []
    image, text = (PromptLayout([Span(100, 240, b"")]), 30, 260), (PromptLayout(), 100, 166)
    for number, (layout, start, end) in enumerate((image, text)):
        blocks = random.Random(number).sample(range(450 * number, 450 * number + 450), 34)
        sequence = Sequence(number, [0] * end, end, layout, end, tables=(blocks[:17], blocks[17:]))
        chunks.append(Chunk(sequence, start, end))
    shape = {"block_size": 16, "window": 50, "heads": (1, 2), "size": 16}
    check(drawn_pass(seed=0, local=local, chunks=chunks, **shape), multiprocessors)


@given(seed=SHAPES["seed"], window=SHAPES["window"], local=st.booleans(), size=st.sampled_from(HEAD_SIZES))
def test_tiles_hold_every_prefill_row_once_most_keys_first(seed: int, window: int, local: bool, size: int) -> None:
    chunks = sequences(random.Random(seed), 4, window)
    backend, batch = TritonBackend(size, torch.float32), flatten(chunks, block_size=4, window=window)
    inputs, single = backend.inputs(batch, local=local), batch.decode_rows
    tiles = inputs.tiles.tolist()
    rows = sorted(row + at for row, count, _, _ in tiles for at in range(count))
    assert rows == [*range(single, batch.rows)]
    assert max((count for _, count, _, _ in tiles), default=0) <= backend.tile_rows
    keys = []
    for _, count, place, chunk in tiles:
        first, last = (interval(chunks[chunk + single], at, window, local) for at in (place, place + count - 1))
        keys.append(last[1] - first[0])
    assert keys == sorted(keys, reverse=True)


@given(st.lists(st.tuples(st.sampled_from([np.int32, np.int64]), st.lists(st.integers(0, 5), min_size=1, max_size=3))))
def test_packed_arrays_keep_their_values_at_aligned_addresses(kinds: list[tuple[type[Any], list[int]]]) -> None:
    draw = np.random.default_rng(0)
    arrays = [draw.integers(-(1 << 31), 1 << 31, shape, kind, endpoint=False) for kind, shape in kinds]
    packed = torch.from_numpy(triton_attention.pack(arrays))
    for array, tensor in zip(arrays, triton_attention.unpack(packed, arrays), strict=True):
        assert tensor.storage_offset() * tensor.element_size() % 16 == 0
        assert torch.equal(tensor, torch.from_numpy(array)) and tensor.dtype == torch.from_numpy(array).dtype


def test_the_reason_names_a_missing_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module must import without Triton."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "panscan.engine.kernels")
    spec = importlib.util.find_spec("panscan.engine.triton_attention")
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    assert fresh.unsupported_reason(64, torch.float16, DEVICE) == "Triton is not installed"


def test_slots_beyond_32_bits() -> None:
    """Element offsets in the cache beyond the range of int32. Few pages of its 4 GB are ever touched."""
    size, block = 256, (1 << 31) // 256 // 16
    chunks = [
        Chunk(Sequence(number, [0] * end, end, PromptLayout(), end, tables=([block + number], [])), start, end)
        for number, (start, end) in enumerate([(0, 1), (0, 3)])
    ]
    batch = flatten(chunks, block_size=16, window=1)
    plan = TritonBackend(size, torch.float16).plan(batch, local=False, device=DEVICE)
    cache = torch.empty((block + 2) * 16, 1, size, dtype=torch.float16, device=DEVICE)
    query, key = torch.randn(2, 4, 1, size, device=DEVICE).half()
    cache[plan.slots] = key
    output = plan.attend(query, LayerCache(cache, cache), SCALING)
    assert torch.equal(output[:2], key[:2])
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(tensor[1:].transpose(0, 1).float() for tensor in (query, key, key)), is_causal=True, scale=SCALING
    )
    torch.testing.assert_close(output[1:].float(), expected.transpose(0, 1), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_triton_accepts_the_tile_sizes(head_size: int, itemsize: int) -> None:
    for group in range(1, 40):
        prefill = [prefill_sizes(head_size, itemsize, shared) for shared in (0, 1 << 20)]
        few = [prefill_sizes(head_size, itemsize, shared, few=True) for shared in (0, 1 << 20)]
        assert [sizes.rows for sizes in prefill] == [sizes.rows for sizes in few]  # tiles are cut before it is known
        decode = [decode_sizes(head_size, itemsize, group, shared=shared) for shared in (False, True)]
        for sizes in (*prefill, *few, *decode):
            assert all(number >= 16 and number.bit_count() == 1 for number in (sizes.rows, sizes.keys))
            assert sizes.warps.bit_count() == sizes.heads.bit_count() == 1
        assert sizes.rows >= group


@given(programs=st.integers(1, 5000), wanted=st.integers(1, 600))
def test_splits_make_as_many_programs_as_wanted_and_no_more(programs: int, wanted: int) -> None:
    splits = choose_splits(programs, wanted)
    assert splits in (1, 2, 4, 8, 16)
    assert splits == 16 or programs * splits >= wanted
    assert splits == 1 or programs * splits // 2 < wanted


LAYER = LayerFacts(local=True, kv_heads=4, head_size=128, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, device=DEVICE)


def test_auto_takes_the_kernels_on_a_gpu_and_explains_why_not_elsewhere() -> None:
    backend, reason = choose_backend("auto", LAYER)
    if DEVICE.type == "cuda":
        assert isinstance(backend, TritonBackend)
        backend, reason = choose_backend("auto", replace(LAYER, head_size=48))
        assert "heads of size 48" in reason
    else:
        assert reason == "not on an NVIDIA GPU", "interpreted or not"
    assert isinstance(backend, SegmentsBackend)


def test_a_requested_backend_is_taken_or_refused_with_the_reason() -> None:
    for name, kind in (("triton", TritonBackend), ("sdpa", SegmentsBackend)):
        backend, reason = choose_backend(name, LAYER)
        assert isinstance(backend, kind)
        assert (backend.name, reason) == (name, "requested")
    for layer, reason in [
        (replace(LAYER, head_size=48), "heads of size 48"),
        (replace(LAYER, dtype=torch.float64), "torch.float64"),
        (replace(LAYER, device=torch.device("mps")), "need an NVIDIA GPU, not mps"),
    ]:
        with pytest.raises(UnsupportedError, match=f"--attention-backend triton: .*{reason}"):
            choose_backend("triton", layer)
    with pytest.raises(SettingError, match=r"--attention-backend takes auto, triton, sdpa; got 'titron' \(did you"):
        EngineOptions(attention_backend="titron")


def questions(seed: int, pages: list[int], *, block: int, system: int, page: int, window: int) -> FlatBatch:
    """Return a decode pass of questions, each about one of the pages, behind one system prompt.

    Args:
        seed: of the lengths and the blocks.
        pages: the page of each question.
        block: tokens per block.
        system: blocks of the system prompt.
        page: blocks of each page.
        window: of local layers.
    """
    draw = random.Random(seed)
    free = iter(draw.sample(range(4000), 4000))
    common = [next(free) for _ in range(system)]
    of_page = {number: common + [next(free) for _ in range(page)] for number in sorted(set(pages))}
    chunks = []
    for number, of in enumerate(pages):
        blocks = of_page[of] + [next(free) for _ in range(draw.randint(1, 5))]
        end = draw.randint((len(blocks) - 1) * block + 1, len(blocks) * block)
        local = [-1 if (at + 1) * block <= end - window else block_id for at, block_id in enumerate(blocks)]
        sequence = Sequence(number, [0] * end, end, PromptLayout(), end, tables=(blocks, local))
        chunks.append(Chunk(sequence, end - 1, end))
    return flatten(chunks, block_size=block, window=window)


PASSES = {
    "seed": st.integers(0, 2**32),
    "pages": st.lists(st.integers(0, 3), min_size=1, max_size=20),
    "block": st.sampled_from([2, 16]),
    "system": st.sampled_from([0, 9, 70]),
    "page": st.sampled_from([0, 1, 20, 80]),
    "window": st.sampled_from([40, 130, 200, 4000]),
}


@given(units=st.integers(1, 25), local=st.booleans(), **PASSES)
def test_groups_share_their_blocks_and_hold_every_row_once(units: int, local: bool, **drawn: Any) -> None:
    batch = questions(**drawn)
    block = batch.block_size
    groups, members = prefix_groups(batch, local=local, most=DECODE_MEMBERS, units=units)
    assert sorted(members.tolist()) == list(range(batch.rows))
    used = groups[groups[:, 1] > 0]
    assert not groups[len(used) :].any() and used[:, 1].max() <= DECODE_MEMBERS
    assert used[:, 0].tolist() == [0, *np.cumsum(used[:, 1])[:-1].tolist()] and used[:, 1].sum() == batch.rows
    for first, count, shared in used.tolist():
        rows = members[first : first + count]
        lengths = batch.ends[rows]
        assert lengths[0] == lengths.min() and shared < lengths[0] and shared % block == 0
        assert (count == 1) == (shared == 0)
        begin = max(int(lengths.max()) - batch.window, 0) // block if local else 0
        blocks = batch.tables[local][rows, begin : shared // block]
        assert (blocks == blocks[0]).all() and (blocks >= 0).all()
        assert count == 1 or shared - begin * block >= 128


@pytest.mark.parametrize("local", [False, True])
def test_questions_about_one_document_are_grouped_whatever_their_order(local: bool) -> None:
    """Four pages of 1,024 tokens behind a system prompt of 160, five questions about each, in rounds over the pages."""
    batch = questions(0, [0, 1, 2, 3] * 5, block=16, system=10, page=64, window=1024)
    groups, members = prefix_groups(batch, local=local, most=DECODE_MEMBERS, units=8)
    used = groups[groups[:, 1] > 0]
    assert used[:, 1:].tolist() == [[5, 74 * 16]] * 4
    pages = [{row % 4 for row in members[first : first + count].tolist()} for first, count, _ in used.tolist()]
    assert sorted(pages, key=min) == [{0}, {1}, {2}, {3}]


FEW = {"pages": st.lists(st.integers(0, 3), min_size=1, max_size=8), "page": st.sampled_from([0, 1, 20])}
GROUPS = {"units": st.integers(1, 25), "local": st.booleans(), **PASSES, **FEW}
MANY_PAGES = {"pages": [0, 1] * 9, "block": 16, "system": 9, "page": 20, "window": 130}
FEW_KEYS = {"pages": [0, 1], "block": 2, "system": 0, "page": 0, "window": 40}


@given(heads=st.sampled_from([(1, 1), (2, 2), (1, 4)]), splits=st.sampled_from([1, 2, 3, 16]), **GROUPS)
@settings(max_examples=8)
@example(splits=2, units=12, heads=(2, 2), local=True, seed=0, **MANY_PAGES)
@example(splits=12, units=1, heads=(1, 2), local=False, seed=0, **FEW_KEYS)  # splits without keys have no weight
def test_groups_change_no_attention(splits: int, units: int, heads: tuple[int, int], local: bool, **drawn: Any) -> None:
    batch = questions(**drawn)
    kv_heads, group = heads
    generator = torch.Generator().manual_seed(drawn["seed"])
    cache = LayerCache(*torch.randn(2, 4000 * batch.block_size, kv_heads, 16, generator=generator).to(DEVICE))
    query = torch.randn(batch.rows, kv_heads * group, 16, generator=generator).to(DEVICE)
    arrays = TritonBackend(16, torch.float32, units).inputs(batch, local=local)
    inputs = KernelInputs(*(torch.from_numpy(array).to(DEVICE) for array in arrays))
    output = torch.full_like(query, torch.nan).contiguous()
    plan = TritonPlan(inputs, batch.block_size, batch.window if local else 0)
    kernels.decode(query, cache, output, plan, 0.3, splits)
    expected = SegmentsBackend().plan(batch, local=local, device=DEVICE).attend(query, cache, 0.3)
    torch.testing.assert_close(output, expected, rtol=2e-5, atol=2e-5)


HEADS, KV_HEADS, SIZE, HIDDEN = 2, 1, 16, 24
SPARE = BLOCKS
WINDOW = 20
KINDS = st.sampled_from([(False,), (True,), (False, True)])


@pytest.mark.parametrize("most", [1, 2, 3, 8, 64, 65, 128, 200])
def test_decode_sizes_are_close_together_and_end_with_the_most_rows(most: int) -> None:
    sizes = graph_sizes.decode_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    assert all(after - before <= (8 if after <= 64 else 16) for before, after in pairwise(sizes))


class Layers:
    """Attention layers with random projections, one of each kind, and their KV caches.

    Blocks of sequences hold random keys and values; the spare ones hold NaN, which must not reach a sequence's rows.
    """

    hidden_size, window, dtype, device = HIDDEN, WINDOW, torch.float32, DEVICE

    def __init__(self, kinds: tuple[bool, ...], block_size: int) -> None:
        self.layers = [SimpleNamespace(local=local) for local in kinds]
        generator = torch.Generator().manual_seed(0)
        shapes = (HIDDEN, (HEADS + 2 * KV_HEADS) * SIZE), (HEADS * SIZE, HIDDEN)
        self.kinds, self.used = kinds, BLOCKS * block_size
        self.shared: list[bool] = []  # whether plans expected common prefixes, run after run
        self.weights = {
            kind: [(torch.randn(shape, generator=generator) / 5).to(DEVICE) for shape in shapes] for kind in kinds
        }
        self.caches = {}
        for kind in kinds:
            caches = torch.full((2, (BLOCKS + 2) * block_size, KV_HEADS, SIZE), torch.nan)
            caches[:, : self.used] = torch.randn(2, self.used, KV_HEADS, SIZE, generator=generator)
            self.caches[kind] = caches.to(DEVICE)

    def run(
        self, embedded: torch.Tensor, positions: torch.Tensor, _: object, plans: Mapping[bool, TritonPlan]
    ) -> torch.Tensor:
        self.shared.append(any(plan.shared for plan in plans.values()))
        hidden = embedded + positions[:, None].float().sin()
        for kind in self.kinds:
            into, out = self.weights[kind]
            rows = (hidden @ into).view(len(hidden), -1, SIZE)
            for cache, part in zip(self.caches[kind], rows[:, HEADS:].split(KV_HEADS, 1), strict=True):
                cache.index_copy_(0, plans[kind].slots, part)
            attended = plans[kind].attend(rows[:, :HEADS], LayerCache(*self.caches[kind]), SIZE**-0.5)
            hidden = hidden + attended.flatten(1) @ out
        return hidden

    def sequence_blocks(self) -> torch.Tensor:
        """Return the keys and values of all blocks but the spare ones."""
        return torch.stack([self.caches[kind][:, : self.used] for kind in self.kinds])


class Compared:
    """Graphs of :class:`Layers`, and the same layers without graphs."""

    def __init__(self, kinds: tuple[bool, ...], block_size: int, decode_rows: int, chunk_rows: int) -> None:
        self.plain, self.layers = Layers(kinds, block_size), Layers(kinds, block_size)
        self.backend, self.block_size = TritonBackend(SIZE, torch.float32), block_size
        cache: Any = SimpleNamespace(layers=None, spare=SPARE)  # the layers have their own
        self.graphs = Graphs(
            self.layers,  # type: ignore[arg-type]  # these have one projection each
            cache,
            self.backend,
            sizes=graph_sizes.graph_sizes(decode_rows, chunk_rows),
            longest=150,
            block_size=block_size,
            recorder=GraphRecorder(DEVICE, capture=DEVICE.type == "cuda"),
        )
        self.graphs.prepare()

    def check(self, chunks: list[Chunk], seed: int = 0) -> bool:
        """Compare one pass; return whether a graph ran it."""
        batch = flatten(chunks, block_size=self.block_size, window=WINDOW)
        embedded = torch.randn(batch.rows, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        output = self.graphs.run(batch, embedded)
        if output is None:
            return False
        plans = {kind: self.backend.plan(batch, local=kind, device=DEVICE) for kind in self.plain.kinds}
        positions = torch.from_numpy(batch.positions).to(DEVICE)
        torch.testing.assert_close(output, self.plain.run(embedded, positions, None, plans), rtol=1e-4, atol=1e-4)
        blocks = self.layers.sequence_blocks()
        torch.testing.assert_close(blocks, self.plain.sequence_blocks(), rtol=1e-4, atol=1e-4)
        return True


def fits(batch: FlatBatch, decode_rows: int, chunk_rows: int) -> bool:
    """Whether some size has room for the rows of a pass."""
    single = batch.decode_rows
    return (not single or decode_rows >= single) and batch.rows - single <= chunk_rows


@given(seed=st.integers(0, 2**32), block_size=st.sampled_from([4, 16]), kinds=KINDS)
@settings(max_examples=4)
def test_padded_passes_equal_unpadded_passes(seed: int, block_size: int, kinds: tuple[bool, ...]) -> None:
    """Also after passes with longer tables, more chunks or more tiles, whose rows were elsewhere."""
    draw = random.Random(seed)
    compared = Compared(kinds, block_size, decode_rows=3, chunk_rows=64)
    for _ in range(6):
        chunks = sequences(draw, block_size, WINDOW)
        chunks.sort(key=lambda chunk: chunk.end - chunk.start > 1)
        batch = flatten(chunks, block_size=block_size, window=WINDOW)
        assert compared.check(chunks, draw.randrange(1000)) == fits(batch, 3, 64)


def text(number: int, start: int, end: int, first_block: int) -> Chunk:
    """Return a chunk of a text in consecutive blocks of 16 tokens."""
    blocks = list(range(first_block, first_block + -(-end // 16)))
    return Chunk(Sequence(number, [0] * end, end, PromptLayout(), end, tables=(blocks, blocks)), start, end)


@pytest.mark.parametrize("kinds", [(False,), (False, True)])
def test_tiles_and_tables_of_a_pass_do_not_outlive_it(kinds: tuple[bool, ...]) -> None:
    """Many short chunks, then one chunk in the same rows; long sequences, then short ones."""
    compared = Compared(kinds, 16, decode_rows=2, chunk_rows=32)
    assert compared.check([text(number, 0, 7, 20 * number) for number in range(4)])
    assert compared.check([text(9, 0, 28, 100)])
    assert compared.check([text(1, 140, 141, 200), text(2, 90, 91, 250)])
    assert compared.check([text(3, 2, 3, 300)])


def test_passes_with_and_without_common_prefixes() -> None:
    """They are recorded separately, and follow each other in any order."""
    compared = Compared((False, True), 16, decode_rows=4, chunk_rows=32)
    apart = [text(number, 150 + number, 151 + number, 20 * number) for number in range(4)]
    together = [replace(chunk, sequence=copy(chunk.sequence)) for chunk in apart]
    for chunk in together[1:]:
        tail = chunk.sequence.tables[0][9:]
        chunk.sequence.tables = ([*together[0].sequence.tables[0][:9], *tail],) * 2
    backend = compared.backend
    passes = [(apart, False), (together, True), (apart, False), (together[:3], True), (together[:1], False)]
    for chunks, shared in passes:
        batch = flatten(chunks, block_size=16, window=WINDOW)
        assert shares_prefix(backend.inputs(batch, local=False)) == shared
        assert compared.check(chunks)
        if not compared.graphs.recorder.capture:  # a captured pass does not call its layers again
            assert compared.layers.shared[-1] == shared


# What the kernels need, compiled for GPUs that need not be present. All of them: ``benchmarks/kernel_targets.py``.


RECORD = Path(__file__).parents[2] / "benchmarks" / "records" / "kernel-targets.json"


def test_the_kernels_fit_into_the_shared_memory_of_every_gpu() -> None:
    """In a separate process, because Triton's interpreter is active in this one."""
    script = Path(__file__).parent / "compiled_kernels.py"
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    finished = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-2000:]
    ampere, hopper = (set(line.split()[1:]) for line in finished.stdout.splitlines())
    layers = {"_rotate_and_store", "_add_rms_norms", "_add_layer_norm", "_gelu_product", "_gelu_rows"}
    assert ampere >= {"_decode", "_prefill", "_merge", *layers, "_product_int8", "_product_int4", "_vector_int4"}
    assert hopper - ampere == {"_attend"}  # of the vision tower


def test_everything_in_the_record_fits() -> None:
    kernels = json.loads(RECORD.read_text("utf-8"))["kernels"]
    assert {kernel["capability"] for kernel in kernels} == {80, 86, 89, 90, 100}
    assert all(kernel["shared"] <= SHARED_BYTES[divmod(kernel["capability"], 10)] for kernel in kernels)
    uses = {kernel["use"].split(":")[0] for kernel in kernels if kernel["capability"] == 89}
    assert {f"27b, TP 2, bfloat16, {cache} cache" for cache in ("auto", "fp8", "int8")} <= uses
