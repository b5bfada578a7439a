"""Runs and their pages that several tests of reports read."""

import pytest
from tests.report.report_known import known_run
from tests.report.report_page import Element, page_of

from panscan.records.store import Run


@pytest.fixture(scope="session")
def known(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Element]:
    """The known run and its page. Drawing the charts takes seconds, so do not change them."""
    run = known_run(tmp_path_factory.mktemp("known"))
    return run, page_of(run)
