"""Check whether a server that loads checkpoint/ computes Gemma 3 correctly: python check.py http://127.0.0.1:8000

Prints one line per page, and the verdict with the likely fault. Exit code 0: correct; 1: wrong, or not answered.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import sys
import urllib.request
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def fetch(options: Any, path: str, body: Any = None) -> Any:
    url = options.url.rstrip("/") + ("" if options.url.rstrip("/").endswith("/v1") else "/v1") + path
    headers = {"content-type": "application/json", "authorization": f"Bearer {options.api_key}"}
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


def spelling(kit: Any, token: Any) -> str:
    raw = token.get("bytes")
    text = bytes(raw).decode("utf-8", "backslashreplace") if raw else token["token"].replace("\u2581", " ")
    return "" if text in kit["end_tokens"] else text


def divergence(reported: dict[str, float], row: dict[str, float]) -> float:
    """KL divergence in nats over the reported tokens, and one bucket for all others."""
    p = [math.exp(row.get(token, min(row.values()))) for token in reported]
    q = [*reported.values(), max(1 - sum(reported.values()), 1e-6)]
    return max(0.0, sum(a * math.log(a / b) for a, b in zip([*p, 1 - sum(p)], q) if a > 0))


def compare(kit: Any, question: Any, steps: Any) -> tuple[dict[str, float], int, bool]:
    """Divergences until the answer leaves the reference's, the number of positions, and if it is clearly wrong."""
    nats, rows = dict.fromkeys(kit["computations"], 0.0), question["log_probabilities"]
    for position, (step, token) in enumerate(zip(steps, question["tokens"])):
        reported: dict[str, float] = {}
        for top in step["top_logprobs"]:
            text = spelling(kit, top)
            reported[text] = reported.get(text, 1e-12) + math.exp(top["logprob"])
        if not 0 < sum(reported.values()) < 1.1:  # none, or NaN
            raise ValueError(f"token {position + 1} has no valid top_logprobs: {step['top_logprobs']}")
        for name in nats:
            nats[name] += divergence(reported, rows.get(name, rows["reference"])[position])
        if spelling(kit, step) != token:
            return nats, position + 1, question["clear"][position]
    count = min(len(steps), len(question["tokens"]))
    cut = any(question["tokens"][count : count + 1]) and question["clear"][count]  # not before an end token
    return nats, count, cut or not steps


def ask(options: Any, kit: Any, image: str, question: Any) -> tuple[str, dict[str, float], int, bool]:
    """One question: what to print, the divergences, the number of positions, and whether it failed."""
    parts = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": question["prompt"]}]
    body = {"model": options.model, "messages": [{"role": "user", "content": parts}], **kit["fields"]}
    if not options.no_pan_and_scan:
        body["mm_processor_kwargs"] = question["mm_processor_kwargs"]
    try:
        reply = fetch(options, "/chat/completions", body)
        nats, count, wrong = compare(kit, question, reply["choices"][0]["logprobs"]["content"])
        length = (reply.get("usage") or {}).get("prompt_tokens", question["prompt_tokens"])
    except Exception as error:  # no answer, or not that of a chat completion
        detail = f" {error.read(300)!r}" if hasattr(error, "read") else ""
        return f"no log-probabilities: {error!r}{detail}", {}, 0, True
    ratio = min(nats[name] for name in kit["correct"]) / max(count, 1) / max(kit["noise"], question["noise"])
    lengths = (
        "" if length == question["prompt_tokens"] else f", {length} prompt tokens, not {question['prompt_tokens']}"
    )
    text = f"{ratio:,.1f}x the noise{', wrong token' if wrong else ''}{lengths}"
    return text, nats, count, wrong or ratio > 2 * kit["limits"]["close"]


def verdict(kit: Any, sums: dict[str, float], positions: int, failures: int, crops: bool) -> int:
    """Print the verdict; return the exit code."""
    ratios = {name: nats / max(positions, 1) / kit["noise"] for name, nats in sums.items()}
    score, closest = min(ratios[name] for name in kit["correct"]), min(ratios, key=lambda name: ratios[name])
    fault = kit["computations"][closest]
    named = closest not in kit["correct"] and ratios[closest] <= score / 2
    explained = named and ratios[closest] <= kit["limits"]["exact"] < score
    if failures or score > kit["limits"]["close"] or explained:
        print(f"FAIL: {score:,.1f}x the rounding noise, {failures} questions wrong or not answered.")
        if named:
            fit = "This explains the answers" if explained else "The closest known fault"
            print(f"{fit} ({ratios[closest]:,.1f}x): {fault['title']}. {fault['cause']}")
        return 1
    causal, uncropped = (kit["computations"][name]["deviation"] for name in ("causal-image-tokens", "no-pan-and-scan"))
    missing = f", missing crops {uncropped:,.0f}x" if crops else ""
    print(f"PASS: {score:,.1f}x the rounding noise over {positions} tokens.", end=" ")
    print(f"A causal image mask would deviate {causal:,.0f}x{missing}.")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--model", help="name of the served model; default: the first that the server lists")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--no-pan-and-scan", action="store_true", help="ask without crops, for servers that never crop")
    options = parser.parse_args()
    kit = json.loads((HERE / "kit.json").read_text(encoding="utf-8"))
    try:
        options.model = options.model or fetch(options, "/models")["data"][0]["id"]
    except Exception as error:
        print(f"FAIL: {options.url} lists no model: {error!r}")
        return 1
    sums, positions, failures = dict.fromkeys(kit["computations"], 0.0), 0, 0
    for page in kit["pages"]:
        image = "data:image/png;base64," + base64.b64encode((HERE / page["file"]).read_bytes()).decode()
        lines = []
        for question in page["questions"][: 1 if options.no_pan_and_scan else None]:
            text, nats, count, failed = ask(options, kit, image, question)
            lines.append(f"{question['name']}: {text}")
            sums = {name: value + nats.get(name, 0.0) for name, value in sums.items()}
            positions, failures = positions + count, failures + failed
        print(f"{page['file']}: {'; '.join(lines)}", flush=True)
        if not positions and failures > 2:  # each may take until the timeout
            print("FAIL: the first questions have no answer with log-probabilities.")
            return 1
    return verdict(kit, sums, positions, failures, not options.no_pan_and_scan)


if __name__ == "__main__":
    sys.exit(main())
