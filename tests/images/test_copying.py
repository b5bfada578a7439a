"""Copies in pieces: every row once, by whatever threads, also in a process whose main thread has ended."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest
from tests.forked_workers import program

from panscan.images.copying import copy_in_pieces


@pytest.mark.parametrize("rows", [0, 1, 3, 7, 8, 9, 1000, 1001])
def test_the_pieces_are_all_rows_once_in_order(rows: int) -> None:
    pieces: list[slice] = []
    copy_in_pieces(pieces.append, rows)
    covered = [row for piece in sorted(pieces, key=lambda piece: piece.start) for row in range(rows)[piece]]
    assert covered == list(range(rows))


def test_callers_copy_themselves_while_another_has_the_threads() -> None:
    """All rows are copied when the call returns, and no call waits for another."""
    started, finish = Event(), Event()

    def block(_: slice) -> None:
        started.set()
        assert finish.wait(60)

    with ThreadPoolExecutor(1) as others:
        blocked = others.submit(copy_in_pieces, block, 100)
        assert started.wait(60)
        source, to = np.arange(100), np.zeros(100, int)
        copy_in_pieces(lambda rows: np.copyto(to[rows], source[rows]), 100)
        assert np.array_equal(to, source)
        assert not blocked.done()
        finish.set()
        blocked.result(60)


def test_an_error_is_raised_after_all_pieces_and_the_threads_are_free_again() -> None:
    done: list[int] = []

    def fail(rows: slice) -> None:
        done.append(rows.start or 0)
        raise ValueError("bad piece")

    for _ in range(2):
        with pytest.raises(ValueError, match="bad piece"):
            copy_in_pieces(fail, 1000)
    assert len(done) == 2 * len(set(done))


def test_threads_that_outlive_the_main_thread_still_copy() -> None:
    """Python closes all thread pools when the main thread ends."""
    code = """
import threading
from panscan.images.copying import copy_in_pieces
def late():
    threading.main_thread().join()
    found = []
    copy_in_pieces(lambda rows: found.extend(range(100)[rows]), 100)
    print(sorted(found) == list(range(100)), flush=True)
copy_in_pieces(lambda rows: None, 100)
threading.Thread(target=late).start()
"""
    finished = subprocess.run(program(code), capture_output=True, text=True, timeout=120)
    assert (finished.stdout, finished.returncode) == ("True\n", 0), finished.stderr[-2000:]
