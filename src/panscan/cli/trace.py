"""``panscan trace``: the summary of a Chrome or Kineto trace, or several side by side."""

from __future__ import annotations

from dataclasses import asdict

import click

from panscan.cli.console import note, out, print_json, show
from panscan.cli.verb import verb
from panscan.core import SettingError
from panscan.core.activity import activity
from panscan.settings import Options

EPILOG = """\
Reads traces of torch.profiler: JSON, plain or gzip. See docs/trace.md.

\b
Examples
  panscan trace trace.json.gz
  panscan trace before.json.gz after.json.gz --html compared.html
  panscan trace vllm.pt.trace.json.gz --step execute_model
"""

_MOST_FILES = 8
_COMPARED = 1_000  # names to match between traces


@verb("trace", EPILOG)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
def command(options: Options, files: tuple[str, ...]) -> None:
    """Summarise each trace FILE: time by phase, GPU busy and idle, what fills the idle gaps, kernels.

    Several files are compared, the first with the last. Files of any size are read in pieces.
    """
    from panscan.core.files import replaced_source, write_file
    from panscan.inspect.trace.output import compare, lines, page
    from panscan.inspect.trace.read import TraceFile
    from panscan.inspect.trace.summary import summarize

    if len(files) > _MOST_FILES:
        raise SettingError(f"trace takes 1 to {_MOST_FILES} files, got {len(files)}")
    html, top = options.html, options.top
    if html is not None and html.is_dir():
        raise SettingError(f"--html {html} is a folder: name a file")
    if html is not None and replaced_source([html], files) is not None:
        raise SettingError(f"--html {html} would replace a trace: name another file")
    traces = [TraceFile(path) for path in files]
    summaries = []
    for trace in traces:
        with activity(f"reading {trace.path.name}"):
            summaries.append(summarize(trace, step=options.step, top=top if len(files) == 1 else _COMPARED))
    if html is not None:
        write_file(html, page(summaries, top=top))
    if options.json:
        document = {"traces": [asdict(summary) for summary in summaries]}
        compared = {"comparison": asdict(compare(summaries))} if len(summaries) > 1 else {}
        print_json({**document, **compared})
    else:
        for line in lines(summaries, width=out().width if out().is_terminal else 120):
            show(line)
    if html is not None:
        note(f"page: {html}")
