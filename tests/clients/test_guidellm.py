"""guidellm: a benchmark of completions and of chats, streamed, with counted tokens."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.clients.endpoint import MODEL, TOKENIZER, URL


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_benchmark(tmp_path: Path, route: str) -> None:
    backend = f"kind=openai_http,target={URL.removesuffix('/v1')},model={MODEL},request_format={route}"
    words = ["run", "--backend", backend, "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"]
    words += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=4"]
    words += ["--data", "kind=synthetic_text,prompt_tokens=20,output_tokens=8", "--disable-console"]
    words += ["--output", f"kind=json,path={tmp_path / 'out.json'}"]
    done = subprocess.run(
        [str(Path(sys.executable).parent / "guidellm"), *words],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    [benchmark] = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    assert len(benchmark["requests"]["successful"]) == 4 and not benchmark["requests"]["errored"]
    for request in benchmark["requests"]["successful"]:
        assert request["output_metrics"]["text_tokens"] == 8
