"""How blocks are counted: what is promised of every split, and what a machine's memory allows."""

from __future__ import annotations

import re
from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.pages import decoder_of

from panscan.core import SettingError, UnsupportedError
from panscan.engine.kv_memory import KVCache, KVShape, choose_blocks, free_bytes, split_blocks
from panscan.engine.options import EngineOptions

NAME = "a head of its own"  # 4 layers, one of them global; 2 kv heads of size 16 in float32


@given(
    global_bytes=st.integers(0, 1000), local_bytes=st.integers(0, 1000), room=st.integers(0, 10**8),
    block_size=st.integers(1, 32), seqs=st.integers(1, 50), window=st.integers(1, 1000), chunk=st.integers(1, 1000),
    longest=st.integers(1, 3000),
)  # fmt: skip
def test_a_split_fits_and_leaves_no_room_that_could_be_used(
    global_bytes: int, local_bytes: int, room: int, block_size: int, seqs: int, window: int, chunk: int, longest: int
) -> None:
    shape = KVShape(global_bytes, local_bytes + (global_bytes == 0))

    def cost(blocks: int, local: int) -> int:
        return block_size * (blocks * shape.global_bytes + local * shape.local_bytes)

    sizes = {"block_size": block_size, "max_num_seqs": seqs, "window": window, "chunk": chunk, "max_tokens": longest}
    if cost(1, 1) > room:
        with pytest.raises(UnsupportedError, match=r"--kv-cache-gb: .* hold no block"):
            split_blocks(shape, bytes=room, **sizes)
        return
    blocks, local = split_blocks(shape, bytes=room, **sizes)
    assert 1 <= local <= blocks
    assert cost(blocks, local) <= room
    full = blocks == full_count(seqs, longest, block_size)
    needed = local * block_size >= seqs * (window + 2 * block_size) + chunk
    for_windows = room // 2 if global_bytes else room
    all_windows = not shape.local_bytes or local == full_count(seqs, longest, block_size)
    enough = needed and (all_windows or cost(0, local + 1) > for_windows)
    assert local == blocks or enough
    assert full or not global_bytes or cost(blocks + 1, local if enough else local + 1) > room
    assert (local - 1) * block_size < seqs * (window + 2 * block_size) + chunk or cost(0, local) <= for_windows
    if needed:  # windows of all sequences, as they lie worst in blocks, and the chunks of a pass
        assert local >= seqs * (-(-(window - 1) // block_size) + 1) + chunk // block_size


def full_count(seqs: int, longest: int, block_size: int) -> int:
    """Blocks that all sequences fill."""
    return seqs * -(-longest // block_size)


def test_memory_is_that_of_the_tensors() -> None:
    decoder = decoder_of(NAME)
    cache = KVCache(decoder, (5, 3), 16)
    shape = KVShape.of(decoder.layers)
    assert shape == KVShape(2 * 2 * 16 * 4, 3 * 2 * 2 * 16 * 4)
    assert sum(tensor.nbytes for tensor in (*cache.k, *cache.v)) == 16 * (
        6 * shape.global_bytes + 4 * shape.local_bytes
    ), "the blocks, and a spare one"
    assert [len(tensor) // 16 for tensor in cache.k] == [4, 4, 6, 4] == [len(tensor) // 16 for tensor in cache.v]
    assert cache.spare == (5, 3)


def test_asked_for_gigabytes_are_kept_to() -> None:
    decoder = decoder_of(NAME)
    shape = KVShape.of(decoder.layers)
    blocks, local = choose_blocks(
        decoder, EngineOptions(kv_cache_gb=0.01, max_num_seqs=2, prefill_chunk_size=64, block_size=16)
    )
    used = 16 * (blocks * shape.global_bytes + local * shape.local_bytes)
    assert 10_000_000 - 16 * shape.global_bytes < used <= 10_000_000
    assert 16 * local * shape.local_bytes <= 5_000_000 < 16 * (local + 1) * shape.local_bytes


def test_layers_of_two_devices_take_no_more_than_those_of_one() -> None:
    decoder, options = (
        decoder_of(NAME),
        EngineOptions(kv_cache_gb=0.01, max_num_seqs=2, prefill_chunk_size=64, block_size=16),
    )
    spread = copy(decoder)
    spread.layers = tuple(
        replace(facts, device=torch.device("meta" if facts.local else "cpu")) for facts in decoder.layers
    )
    shape = KVShape.of(decoder.layers)
    blocks, local = choose_blocks(spread, options)
    # The device of the global layer alone has room for a quarter of all bytes.
    assert blocks == 2_500_000 // (16 * shape.global_bytes)
    assert local == 7_500_000 // (16 * shape.local_bytes)
    assert [tensor.device.type for tensor in KVCache(spread, (blocks, local), 16).k] == ["meta", "meta", "cpu", "meta"]


def test_without_a_size_a_cpu_takes_little(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(NAME)
    shape = KVShape.of(decoder.layers)

    def taken(available: int, **options: Any) -> int:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
        blocks, local = choose_blocks(decoder, EngineOptions(block_size=16, **options))
        assert blocks <= options.get("max_num_seqs", 128) * decoder.max_positions // 16
        return 16 * (blocks * shape.global_bytes + local * shape.local_bytes)

    assert 0.44e9 < taken(2 * 10**9, vision_cache_gb=1.35) <= 0.45e9  # 90%, less the views
    assert taken(10**12, max_num_seqs=10_000) <= 4e9
    assert taken(10**12, max_num_seqs=1) == decoder.max_positions * (shape.global_bytes + shape.local_bytes)


def test_more_than_there_is_names_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2 * 10**9))
    assert free_bytes(torch.device("cpu")) == 1_800_000_000
    with pytest.raises(UnsupportedError, match=r"--kv-cache-gb 3: cpu has room for 1\.8 GB; lower it, or leave it out"):
        choose_blocks(decoder_of(NAME), EngineOptions(kv_cache_gb=3))
    with pytest.raises(UnsupportedError, match="--kv-cache-gb: 1e-06 GB hold no block of keys and values; one takes"):
        choose_blocks(decoder_of(NAME), EngineOptions(kv_cache_gb=1e-6))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10**9))
    with pytest.raises(UnsupportedError, match=r"hold no block .* or lower --vision-cache-gb"):
        choose_blocks(decoder_of(NAME), EngineOptions(vision_cache_gb=1.0))


@pytest.mark.parametrize("block_size", [1, 3, 16, 37])
@pytest.mark.parametrize("spread", [False, True])
def test_what_a_refusal_says_to_raise_it_to_is_enough(spread: bool, block_size: int) -> None:
    decoder = copy(decoder_of(NAME))
    if spread:
        places = [torch.device("meta" if facts.local else "cpu") for facts in decoder.layers]
        decoder.layers = tuple(replace(facts, device=at) for facts, at in zip(decoder.layers, places, strict=True))
    with pytest.raises(UnsupportedError, match=r"raise it to at least .* GB, or leave it out") as caught:
        choose_blocks(decoder, EngineOptions(kv_cache_gb=1e-9, block_size=block_size))
    [least] = re.findall("raise it to at least (.*) GB", str(caught.value))
    assert choose_blocks(decoder, EngineOptions(kv_cache_gb=float(least), block_size=block_size)) == (1, 1)


@pytest.mark.parametrize(
    "given_",
    [{"kv_cache_gb": 0}, {"vision_cache_gb": 0.0}, {"max_num_seqs": 2.5}, {"block_size": 0}, {"kv_cache_gb": "1"}],
)
def test_sizes_out_of_range_are_refused_at_once(given_: dict[str, Any]) -> None:
    [name] = given_
    with pytest.raises(SettingError, match=f"^{name} is out of range: it must be a .*number"):
        EngineOptions(**given_)
