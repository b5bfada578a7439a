"""Every broken engine is caught by the part of the verdict that should, and the intact one by none."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.mutations.broken import MUTATIONS, Mutation
from tests.mutations.harness import documents, verdict_under


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return documents(tmp_path_factory.mktemp("pages"))


SLOW = {
    "end marks are ignored",
    "answers end after three tokens",
    "wrong where more than 200 rows are sampled",
    "wrong behind a long cached prefix",
    "wrong for a request that is alone",
}
QUICK = [mutation for mutation in MUTATIONS if "model" not in mutation.settings and mutation.name not in SLOW]
"""Those of the tiny model that take seconds; ``python -m tests.mutations`` runs all."""


@pytest.mark.parametrize("mutation", QUICK, ids=lambda mutation: mutation.name)
def test_what_catches_it(mutation: Mutation, pages: list[Path], tmp_path: Path) -> None:
    found = verdict_under(mutation, pages, tmp_path / "run")
    assert mutation.caught_by <= found.caught_by
    if not mutation.caught_by:
        assert (found.verdict.word, found.caught_by) == ("exact", frozenset()), mutation.why_invisible
