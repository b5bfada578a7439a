"""KV cache sizing: properties of every split, and what the memory of a device allows."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from panscan.core import SettingError, UnsupportedError
from panscan.engine.attention import KVCache
from panscan.engine.options import EngineOptions
from panscan.engine.scheduling.kv_sizes import DeviceMemory, KVShape, MemoryBudget, MemoryFacts, choose_slabs
from panscan.model.layers import LayerFacts
from panscan.model.machine import limit_process_memory, measure_memory, release_memory

CPU = torch.device("cpu")
LAYERS = [LayerFacts(local, 2, 16, torch.float32, torch.float32, CPU) for local in (True, True, False, True)]
FACTS = MemoryFacts(KVShape.of(LAYERS), "cpu", on_gpu=False, working_bytes=10**8, view_bytes=1024, max_positions=131072)
ON_GPU = replace(FACTS, device="cuda:0", on_gpu=True)
H100 = DeviceMemory(total=80 * 10**9, free=50 * 10**9, reserved=28 * 10**9)


def cache_bytes(slabs: int, block_size: int) -> int:
    """Bytes of that many slabs of :data:`FACTS`."""
    return slabs * FACTS.shape.slab_bytes(block_size)


@given(st.integers(0, 60), st.integers(0, 60))
@example(10, 52)
@example(5, 29)
def test_slabs_waste_less_than_a_25th_for_either_kind_of_layers(global_layers: int, local_layers: int) -> None:
    layers = [count for count in (global_layers, local_layers) if count]
    if not layers:
        return
    shape = KVShape(7, global_layers, local_layers)
    used = [blocks * count for blocks, count in zip(shape.slab_blocks, shape[1:], strict=True)]
    assert [bool(cells) for cells in used] == [bool(count) for count in shape[1:]]
    assert all(0.96 * shape.cells < cells <= shape.cells for cells in used if cells)
    smaller = range(max(layers), shape.cells, max(layers))
    assert all(any(cells % count >= cells / 25 for count in layers) for cells in smaller)
    assert shape.slab_bytes(3) == 21 * shape.cells


def test_layers_share_the_memory_of_a_slab_and_no_cell() -> None:
    """Each block of each layer, filled with a number of its own, keeps it."""
    for dtype, token in ((torch.float32, 2 * 16 * 4), (torch.int8, 2 * (16 + 4))):  # with a float32 scale
        layers = [replace(layer, kv_dtype=dtype) for layer in LAYERS]
        cache, shape = KVCache(layers, 5, 4), KVShape.of(layers)
        assert shape == KVShape(2 * token, 1, 3)
        assert (shape.cells, shape.slab_blocks, cache.spare) == (3, (3, 1), 5)
        held = {part.untyped_storage().data_ptr(): part for layer in cache.layers for part in layer if part is not None}
        spare = shape.slab_bytes(4) * 3  # one for rows that pad a pass, and up to three that align lanes
        assert 0 < sum(part.untyped_storage().nbytes() for part in held.values()) - 5 * shape.slab_bytes(4) <= spare
        blocks = [
            (layer, slab + 8 * number)
            for layer, facts in zip(cache.layers, layers, strict=True)
            for slab in range(6)
            for number in (range(1) if facts.local else range(3))
            if facts.local == slab % 2
        ]
        for value, (layer, block) in enumerate(blocks):
            rows = slice(block * 4, block * 4 + 4)
            layer.keys[rows], layer.values[rows] = value, value + 60
            if layer.scales is not None:
                layer.scales[:, :, rows] = value
        for value, (layer, block) in enumerate(blocks):
            rows = slice(block * 4, block * 4 + 4)
            assert (layer.keys[rows] == value).all() and (layer.values[rows] == value + 60).all()
            assert layer.scales is None or (layer.scales[:, :, rows] == value).all()


@pytest.mark.parametrize(("facts", "memory"), [(FACTS, DeviceMemory(10**11, 10**11)), (ON_GPU, H100)])
def test_an_explicit_size_is_used_up(facts: MemoryFacts, memory: DeviceMemory) -> None:
    options = EngineOptions(kv_cache_gb=0.01, max_num_seqs=2, prefill_chunk_size=64, block_size=16)
    slabs = choose_slabs(facts, options, memory)
    assert cache_bytes(slabs, 16) <= 10_000_000 < cache_bytes(slabs + 1, 16)


def test_without_a_size_a_cpu_takes_little() -> None:
    def taken(available: int, processes: int = 1, **options: Any) -> int:
        memory, facts = DeviceMemory(10**13, available), replace(FACTS, sharers=processes)
        return cache_bytes(choose_slabs(facts, EngineOptions(block_size=16, **options), memory), 16)

    assert 0.44e9 < taken(2 * 10**9, vision_cache_gb=1.35) <= 0.45e9  # 90%, less the vision cache
    assert 3.9e9 < taken(10**12, max_num_seqs=10_000) <= 4e9
    assert 0.9e9 < taken(10**12, processes=4, max_num_seqs=10_000) <= 1e9
    full = cache_bytes(FACTS.shape.slabs(FACTS.max_positions, 16), 16)  # one sequence with all its tokens
    assert full == pytest.approx(FACTS.max_positions * 4 * FACTS.shape.layer_bytes, rel=1e-4)
    assert taken(10**12, max_num_seqs=1) == full


def test_engines_on_one_gpu_leave_room_for_the_passes_of_all() -> None:
    """Of its working memory and its vision cache, an engine has allocated nothing when the next one is created."""
    options, held = EngineOptions(block_size=16, max_num_seqs=10_000, vision_cache_gb=1), []
    for holders in range(3):
        memory = DeviceMemory(H100.total, H100.free - sum(held), H100.reserved + sum(held))
        slabs = choose_slabs(replace(ON_GPU, sharers=3, holders=holders), options, memory)
        held.append(cache_bytes(slabs, 16))
    room = MemoryBudget.of(options, H100.total).bytes - H100.reserved
    assert max(held) - min(held) < 10**6 and 0 <= room - sum(held) - 3 * (10**9 + ON_GPU.working_bytes) < 10**6


@given(
    total=st.integers(10**10, 10**11),
    used=st.floats(0, 0.3),
    reserved=st.floats(0, 0.3),
    share=st.floats(0.5, 1),
    gigabytes=st.none() | st.floats(5, 200),
    working=st.integers(0, 10**9),
    views=st.booleans(),
)
def test_on_a_gpu_the_cache_takes_what_the_budget_and_others_leave(
    total: int, used: float, reserved: float, share: float, gigabytes: float | None, working: int, views: bool
) -> None:
    memory = DeviceMemory(total, total - int(total * used) - int(total * reserved), int(total * reserved))
    facts = replace(ON_GPU, working_bytes=working, view_bytes=1024 * views)
    options = EngineOptions(gpu_memory_utilization=share, gpu_memory_gb=gigabytes, max_num_seqs=10_000, block_size=16)
    bound = MemoryBudget.of(options, total).bytes
    assert bound == int(min(share * total, 1e9 * (gigabytes or 1e9)))
    others = working + 10**9 * views
    room = min(bound - memory.reserved, memory.free - int(0.01 * total)) - others
    taken = cache_bytes(choose_slabs(facts, options, memory), 16) if room > 10**6 else 0
    assert taken <= max(room, 0)
    assert room <= 10**6 or taken > room - FACTS.shape.slab_bytes(16)


LAPTOP = DeviceMemory(4 * 10**9, 2 * 10**9)


@pytest.mark.parametrize(
    ("facts", "memory", "options", "message"),
    [
        (FACTS, LAPTOP, {"kv_cache_gb": 3}, "^--kv-cache-gb 3: cpu has room for 1.8 GB; lower it, or leave it out"),
        (FACTS, LAPTOP, {"kv_cache_gb": 1e-6}, "^--kv-cache-gb: 1e-06 GB hold no block of keys and values; one takes"),
        (FACTS, DeviceMemory(10**9, 10**9), {"vision_cache_gb": 1.0}, "too little free memory: .*vision-cache-gb"),
        (ON_GPU, H100, {"kv_cache_gb": 20, "gpu_memory_gb": 40}, "-gb 40: .*10.9 GB, less than --kv-cache-gb 20"),
        (ON_GPU, H100, {"kv_cache_gb": 45}, "^--gpu-memory-utilization 0.92: cuda:0 has room for 44.5"),
        (ON_GPU, replace(H100, free=10**10), {"kv_cache_gb": 45}, "^--kv-cache-gb 45: .* room for 8.1 GB; lower"),
        (ON_GPU, H100, {"gpu_memory_gb": 28}, "-gb 28 leaves too little of cuda:0: raise --gpu-memory-gb, or"),
    ],
)
def test_a_refusal_names_the_available_memory_and_the_limiting_option(
    facts: MemoryFacts, memory: DeviceMemory, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        choose_slabs(facts, EngineOptions(**options), memory)


@pytest.mark.parametrize("block_size", [1, 3, 16, 37])
def test_the_size_that_a_refusal_recommends_is_enough(block_size: int) -> None:
    memory = DeviceMemory(10**10, 10**10)
    with pytest.raises(UnsupportedError, match=r"raise it to at least .* GB, or leave it out") as caught:
        choose_slabs(FACTS, EngineOptions(kv_cache_gb=1e-9, block_size=block_size), memory)
    [least] = re.findall("raise it to at least (.*) GB", str(caught.value))
    assert choose_slabs(FACTS, EngineOptions(kv_cache_gb=float(least), block_size=block_size), memory) == 2


@pytest.mark.parametrize(("name", "value"), [("kv_cache_gb", "1"), ("max_num_seqs", 2.5), ("block_size", 0)])
def test_sizes_out_of_range_are_refused_at_once(name: str, value: Any) -> None:
    with pytest.raises(SettingError, match=f"^(--)?{name.replace('_', '.')} is out of range: it must be .*number"):
        EngineOptions(**{name: value})


def test_a_cpu_has_its_memory_measured_and_no_limit() -> None:
    total, free, reserved = measure_memory(CPU)
    assert total >= free > 0 == reserved
    limit_process_memory(CPU, 1)()
    torch.empty(1000)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_gpu_refuses_more_than_the_limit(device: str) -> None:
    release_memory()  # cached blocks could serve the allocation
    before = torch.cuda.memory_reserved(0)
    undo = limit_process_memory(torch.device(device), before + 10**8)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * 10**8, dtype=torch.uint8, device=device)
    finally:
        undo()
    assert torch.empty(2 * 10**8, dtype=torch.uint8, device=device).nbytes == 2 * 10**8
