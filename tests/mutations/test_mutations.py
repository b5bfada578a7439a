"""Every broken engine is caught by the part of the verdict that should, and the intact one by none."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.mutations.broken import INTACT, MUTATIONS, Mutation
from tests.mutations.harness import documents, verdict_under

SLOW = {
    "end marks are ignored",
    "answers end after three tokens",
    "wrong where more than 16 rows are sampled",
    "wrong where more than 200 rows are sampled",
    "wrong behind a long cached prefix",
    "wrong for a request that is alone",
    "wrong for one request that the reference does not hold",
}
QUICK = [m for m in MUTATIONS if "model" not in m.settings and m.name not in SLOW and m is not INTACT]
"""Those of the tiny model that take seconds; ``python -m tests.mutations`` runs all, at both precisions."""
TURNS = [(mutation, "fp32" if mutation.plan or number % 2 == 0 else "bf16") for number, mutation in enumerate(QUICK)]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return documents(tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="module")
def intact(pages: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Verified runs of the engine as it is, by precision; the others use their references."""
    runs = {dtype: tmp_path_factory.mktemp("intact") / dtype for dtype in ("fp32", "bf16")}
    for dtype, directory in runs.items():
        mutation = INTACT if dtype == "fp32" else replace(INTACT, plan={})
        outcome = verdict_under(mutation, pages, directory, dtype)
        assert (outcome.verdict.word, outcome.caught_by) == ("exact", frozenset()), INTACT.why_invisible
    return runs


@pytest.mark.parametrize(("mutation", "dtype"), TURNS, ids=lambda value: getattr(value, "name", value))
def test_is_caught(mutation: Mutation, dtype: str, pages: list[Path], intact: dict[str, Path], tmp_path: Path) -> None:
    outcome = verdict_under(mutation, pages, tmp_path / "run", dtype, intact[dtype])
    assert mutation.expected(dtype) <= outcome.caught_by
