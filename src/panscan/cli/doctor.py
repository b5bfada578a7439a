"""``panscan doctor``: what makes Gemma 3 slow or wrong on this machine, and the fix."""

from __future__ import annotations

import time

from panscan.cli.console import print_json, show
from panscan.cli.verb import verb
from panscan.core import SettingError, UnsupportedError
from panscan.inspect.doctor.checks import CHECKS, GROUPS, Check, as_json, lines, summary
from panscan.inspect.doctor.run import run_checks
from panscan.settings import Options, nearest

_COLOURS = {"ok": "green", "warning": "yellow", "problem": "bold red", "not checked": "dim"}

EPILOG = """\
Nothing is downloaded, sent or changed. Exit codes: 0 no problem, 4 a problem: something
makes Gemma 3 wrong or impossible here. See docs/doctor.md.

\b
Examples
  panscan doctor
  panscan doctor --only gpu,packages
  panscan doctor --json > doctor.json
"""


@verb("doctor", EPILOG)
def command(options: Options) -> int:
    """Check GPUs, packages, Transformers and this host, and print what to change."""
    checks = _chosen(options.only)
    start = time.perf_counter()
    results = run_checks(checks, options.timeout)
    seconds = time.perf_counter() - start
    if options.json:
        print_json(as_json(results, seconds))
    else:
        for colour, line in lines(results):
            style = "bold" if colour is None and line and not line.startswith(" ") else _COLOURS.get(colour or "", "")
            show(line, style)
        show(summary(results, seconds))
    worst = any(finding.status == "problem" for result in results for finding in result.findings)
    return UnsupportedError.exit_code if worst else 0


def _chosen(only: str | None) -> list[Check]:
    """Return the checks of the given groups and names; None: all.

    Raises:
        SettingError: an unknown name.
    """
    if only is None:
        return list(CHECKS)
    known = {*GROUPS, *(check.name for check in CHECKS)}
    chosen = [name.strip() for name in only.split(",")]
    for name in chosen:
        if name not in known:
            raise SettingError(f"--only: no group or check is called {name!r}{nearest(name, known)}")
    return [check for check in CHECKS if check.group in chosen or check.name in chosen]
