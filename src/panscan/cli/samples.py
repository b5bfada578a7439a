"""``panscan samples``: sample documents, and request sets for load generators."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from panscan.cli.console import show
from panscan.cli.verb import verb
from panscan.core.foreign import JsonObject
from panscan.settings import Options

EPILOG = """\
A request set is one JSON Lines file with the images as data: URLs. Each request uses a
different document, so caches do not help. 60% of the prompts are questions (32 output
tokens), 25% ask for the fields as JSON (128), 15% for a transcription (256). vllm bench
serve reads no output tokens from its file; set --custom-output-len there.

\b
Examples
  panscan samples samples/
  panscan bench --dataset samples/questions.jsonl --pan-and-scan true,false

\b
  panscan samples requests/ --format guidellm --count 200 --columns 110
  guidellm run --backend kind=openai_http,target=http://127.0.0.1:8000 \\
    --profile kind=poisson,rate=2 --data kind=json_file,path=requests/guidellm.jsonl
"""


@verb("samples", EPILOG)
@click.argument("directory", type=click.Path(path_type=Path))
def command(options: Options, directory: Path) -> None:
    """Generate receipts, tables, pages and pictures in DIRECTORY.

    questions.jsonl is for --dataset; prompts.txt, which has each question once, for --prompts.
    """
    facts: JsonObject = {
        "count": options.count,
        "seed": options.seed,
        "columns": options.columns,
        "overwrite": options.force,
    }
    if options.request_set is None:
        from panscan.workload.samples import write_samples

        questions = write_samples(directory, **facts)
        show(f"{options.count} documents in {questions.parent}")
        show(f"next: panscan bench --dataset {shlex.quote(str(questions))}")
    else:
        from panscan.workload.request_sets import write_request_set

        written = write_request_set(directory, options.request_set, **facts)
        mix = ", ".join(f"{count} with {views} view{'s'[: views > 1]}" for views, count in written.views.items())
        show(f"{options.count} requests in {written.path}: {mix}")
        show(f"next: {written.command}")
