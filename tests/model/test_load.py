"""Loading: the path that real checkpoints take from the hub or a directory, and one line for each way to fail."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from hashlib import sha1
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import noise
from tests.images.site import Site
from tests.model.conftest import edit

from panscan import GenerateRunner, Request
from panscan.core import ModelError, SettingError
from panscan.model.bundled import mini_directory
from panscan.model.checkpoint import Placement, load_meta_model, load_model, load_reader
from panscan.settings import settings_from

CPU = Placement(torch.device("cpu"), torch.float32)


def answer(runner: GenerateRunner) -> list[int]:
    return runner.generate([runner.request("What is the total?", [noise(300, 900)])])[0].token_ids


def test_a_sharded_local_directory_gives_the_same_answers(tiny: GenerateRunner, copy: Path) -> None:
    deepcopy(tiny.loaded.model).to(torch.bfloat16).save_pretrained(copy, max_shard_size="1MB")
    (copy / "model.safetensors").unlink()
    assert len(list(copy.glob("model-*.safetensors"))) > 2
    local = GenerateRunner.from_pretrained(str(copy), dtype="fp32", device="cpu", max_new_tokens=12)
    assert answer(local) == answer(tiny)


def test_a_base_checkpoint_takes_raw_prompts_only(tiny: GenerateRunner, copy: Path) -> None:
    (copy / "chat_template.jinja").unlink()
    base = GenerateRunner.from_pretrained(str(copy), dtype="fp32", device="cpu", max_new_tokens=12)
    with pytest.raises(ModelError, match="--raw-prompt"):
        base.generate([base.request("What?")])
    greedy = base.settings.sampling
    raw = Request(prompt="<start_of_image> reads: ", images=[noise(300, 900)], raw=True, sampling=greedy)
    [result] = base.generate([raw])
    assert result.views == 4
    assert result.token_ids == tiny.generate([raw])[0].token_ids


def test_the_checkpoints_sampling_defaults_do_not_leak(copy: Path) -> None:
    """Released checkpoints store do_sample=True, top_k=64: greedy must still be greedy, and silent."""
    edit(copy / "generation_config.json", do_sample=True, top_k=64, top_p=0.95)
    runner = GenerateRunner.from_pretrained(str(copy), dtype="fp32", device="cpu", max_new_tokens=12)
    assert answer(runner) == answer(runner)
    assert runner.loaded.model.generation_config.top_k != 64


def test_a_directory_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_reader(str(tmp_path))
    for name in ("./nowhere", "/nowhere/at/all", "a/b/c"):
        with pytest.raises(ModelError, match="no such directory"):
            load_reader(name)


FAMILIES = {"llama": "", "gemma2": ": it reads no images", "gemma3n": ": only 'panscan profile' runs Gemma 3n"}


@pytest.mark.parametrize(("kind", "reason"), FAMILIES.items())
def test_another_model_family_is_refused(copy: Path, kind: str, reason: str) -> None:
    config = {"model_type": kind, "architectures": ["LlamaForCausalLM"]}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"panscan runs Gemma 3; this is a {kind!r} model{reason}"):
        load_reader(str(copy))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_one_line(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(ModelError, match=r"\A.*--model.*\Z"):
        load_model(str(copy), CPU)


@pytest.fixture
def code(tmp_path: Path) -> str:
    """Python code that leaves a trace when it runs."""
    return f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"


class Runs:
    """Runs code when it is unpickled."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, (self.code,)


def with_own_model(copy: Path) -> str:
    edit(copy / "config.json", model_type="own", auto_map={"AutoConfig": "own.X", "AutoModel": "own.X"})
    return "panscan runs Gemma 3; this is a 'own' model"


def with_own_processor(copy: Path) -> str:
    for name in ("processor_config.json", "tokenizer_config.json"):
        edit(copy / name, processor_class="Own", auto_map={"AutoProcessor": "own.X"})
    return "it requires custom code (trust_remote_code), which panscan does not run"


def with_own_kernel(copy: Path) -> str:
    text = json.loads((copy / "config.json").read_text())["text_config"]
    edit(copy / "config.json", text_config={**text, "_attn_implementation": "somebody/kernel"})
    return "config.json names code to download ('somebody/kernel')"


@pytest.mark.parametrize("prepare", [with_own_model, with_own_processor, with_own_kernel])
def test_a_checkpoint_runs_no_custom_code_and_asks_nothing(
    copy: Path, code: str, tmp_path: Path, prepare: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy / "own.py").write_text(f"{code}class X: pass\n")
    message = prepare(copy)
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")  # the user's careless answer
    with pytest.raises(ModelError, match=rf"\A.*{re.escape(message)}.*\Z"):
        load_model(str(copy), CPU)
    assert asked == []
    assert not (tmp_path / "ran").exists()


def test_code_beside_a_gemma_3_is_ignored(copy: Path, code: str, tmp_path: Path) -> None:
    (copy / "own.py").write_text(f"{code}class X: pass\n")
    edit(copy / "config.json", auto_map={"AutoConfig": "own.X", "AutoModelForImageTextToText": "own.X"})
    edit(copy / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.X", "own.X"]})
    (copy / "custom_generate").mkdir()
    (copy / "custom_generate" / "generate.py").write_text(code)
    assert load_model(str(copy), CPU).model.config.model_type == "gemma3"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("place", ["pytorch_model.bin", "index"])
def test_pickled_weights_are_refused(copy: Path, code: str, tmp_path: Path, place: str) -> None:
    tensors: dict[str, object] = dict(load_file(copy / "model.safetensors"))
    (copy / "model.safetensors").unlink()
    names = dict.fromkeys(tensors, "weights.bin")
    torch.save({**tensors, "x": Runs(code)}, copy / "weights.bin")
    if place == "index":
        index = {"metadata": {"total_size": 1}, "weight_map": names}
        (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        (copy / "weights.bin").rename(copy / place)
    with pytest.raises(ModelError, match=r"\A.*not all of its weights are in safetensors files: convert them.*\Z"):
        load_model(str(copy), CPU)
    assert not (tmp_path / "ran").exists()


def test_a_meta_model_needs_no_generation_settings(copy: Path) -> None:
    """Fine-tuned checkpoints often lack the file; ranks need a meta model of them."""
    (copy / "generation_config.json").unlink()
    meta_model = load_meta_model(str(copy), torch.float32, torch.device("cpu"), revision=None, embedding=False)
    loaded = load_model(str(copy), Placement(torch.device("cpu"), torch.float32))
    assert meta_model.eos_ids == loaded.eos_ids
    assert meta_model.model.generation_config.suppress_tokens == loaded.model.generation_config.suppress_tokens


def test_missing_weights_are_not_drawn_at_random(copy: Path) -> None:
    weights = copy / "model.safetensors"
    tensors = load_file(weights)
    lost = next(name for name in tensors if "mm_input_projection_weight" in name)
    del tensors[lost]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 weights are missing, e\.g\. .*mm_input_projection_weight"):
        load_model(str(copy), CPU)


@pytest.mark.parametrize("text", ["30GiB", "gpu=30GiB", "0=", "=3", "cpu=XGiB", "0=3"])
def test_max_memory_is_read_or_refused(text: str) -> None:
    with pytest.raises(SettingError, match="--max-memory takes"):
        settings_from({"device_map": "auto", "max_memory": text})


def test_max_memory_as_accelerate_wants_it() -> None:
    placed = Placement(torch.device("cpu"), torch.float32, device_map="auto", max_memory="0=30GiB; cpu=60GiB")
    assert placed.arguments()["max_memory"] == {0: "30GiB", "cpu": "60GiB"}


def test_device_map_places_the_model(tiny: GenerateRunner) -> None:
    spread = GenerateRunner.from_pretrained("tiny", dtype="fp32", device_map="auto", max_memory="cpu=2GiB")
    if torch.cuda.is_available():
        pytest.skip("auto takes the GPU here")
    asked = [tiny.request("What?", [noise(300, 900)])]
    assert spread.generate(asked)[0].token_ids == tiny.generate(asked)[0].token_ids


# Checkpoints of the hub: download with progress, the copy in the cache, and a hub that does not answer.


NAME = "somebody/gemma"
# No PyTorch: what a command does before it imports that. The recorded line is what a display would show.
RESOLVE = """
import sys, time
time.sleep = lambda _: None  # huggingface_hub waits for seconds between its attempts
from panscan.core import PanscanError
from panscan.core.activity import displayed
from panscan.model.hub import checkpoint_directory

class Recorder:
    def show(self, running):
        self.seen.extend(step for step in running if step not in self.seen)
    seen = []

with displayed(Recorder().show):
    try:
        print(checkpoint_directory(sys.argv[1], weights=sys.argv[2] == "all"))
    except PanscanError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    finally:
        for step in Recorder.seen:
            print(step.text, step.unit, int(step.done), step.total, file=sys.stderr)
assert "torch" not in sys.modules
"""


FILES = {path.name: path.read_bytes() for path in mini_directory().iterdir() if path.is_file()}


def publish(hub: Site, commit: str = "c" * 40, files: dict[str, bytes] = FILES, *, breaks: bool = False) -> None:
    """Serve a checkpoint as the hub does. ``breaks``: connections are closed before a file is complete."""
    etags = {name: sha1(data).hexdigest() for name, data in files.items()}
    tree = [{"type": "file", "path": name, "size": len(files[name]), "oid": etag} for name, etag in etags.items()]
    siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
    hub.put(f"/api/models/{NAME}", json.dumps({"id": NAME, "sha": commit, "siblings": siblings}).encode())
    for revision, (name, data) in product(("main", commit), files.items()):
        headers = {"Content_Length": str(len(data)), "ETag": f'"{etags[name]}"', "X_Repo_Commit": commit}
        hub.put(f"/{NAME}/resolve/{revision}/{name}", b"" if breaks else data, **headers)
        hub.put(f"/api/models/{NAME}/tree/{revision}", json.dumps(tree).encode())


@pytest.fixture
def hub(site: Site) -> Site:
    publish(site)
    return site


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def closed() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def resolve(endpoint: str | Site, home: Path, what: str = "all", **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RESOLVE, NAME, what]
    variables = hub_variables(endpoint, home) | env
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)


def hub_variables(endpoint: str | Site, home: Path) -> dict[str, str]:
    endpoint = endpoint if isinstance(endpoint, str) else endpoint.url("")
    return {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home)}


ASK = [sys.executable, "-m", "panscan", "ask", "-p", "Hello?", "--model", NAME]


def test_a_download_reports_its_bytes_and_is_used_when_the_hub_is_away(hub: Site, silent: str, tmp_path: Path) -> None:
    first = resolve(hub, tmp_path, "small")
    assert first.returncode == 0, first.stderr
    directory = Path(first.stdout.strip())
    assert not (directory / "model.safetensors").exists()
    small = sum(len(data) for name, data in FILES.items() if not name.endswith(".safetensors"))
    assert f"downloading {NAME} B {small} {small}" in first.stderr
    assert resolve(closed(), tmp_path).returncode == 3, "an incomplete copy is no checkpoint"

    second = resolve(hub, tmp_path)
    weights = len(FILES["model.safetensors"])
    assert f"downloading {NAME} B {weights} {weights}" in second.stderr
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == FILES
    hub.asked.clear()
    assert resolve(hub, tmp_path).stdout == second.stdout
    assert sum(count for path, count in hub.asked.items() if NAME in path) == 1, "the hub is asked for the commit only"

    for away in ({"endpoint": silent}, {"endpoint": closed()}, {"endpoint": hub, "HF_HUB_OFFLINE": "1"}):
        offline = resolve(home=tmp_path, **away)
        assert (offline.stdout, offline.returncode) == (second.stdout, 0), offline.stderr


REFUSALS = [
    (403, "GatedRepo", f"accept its licence at https://huggingface.co/{NAME}, then run 'hf auth login'"),
    (401, "RepoNotFound", "no such checkpoint on the hub"),
    (404, "RevisionNotFound", "no such --revision"),
]


@pytest.mark.parametrize(("status", "code", "advice"), REFUSALS)
def test_what_the_hub_refuses_becomes_advice(hub: Site, tmp_path: Path, status: int, code: str, advice: str) -> None:
    for path in [*hub.answers]:
        if status != 403 or "/resolve/" in path:  # what gated files are is public
            hub.put(path, status=status, X_Error_Code=code, X_Error_Message="refused")
    refused = resolve(hub, tmp_path)
    assert refused.returncode == 3 and refused.stderr.startswith(f"--model {NAME}: "), refused.stderr
    assert advice in refused.stderr


def test_a_download_that_breaks_off(hub: Site, tmp_path: Path) -> None:
    """An error without an earlier copy; with one, a warning and the copy."""
    publish(hub, breaks=True)
    failed = resolve(hub, tmp_path)
    assert failed.returncode == 3
    assert f"--model {NAME}: the download broke off (" in failed.stderr
    publish(hub)
    complete = resolve(hub, tmp_path)
    assert complete.returncode == 0, complete.stderr
    publish(hub, "d" * 40, {name: data + b" " for name, data in FILES.items()}, breaks=True)
    cached = resolve(hub, tmp_path)
    assert (cached.returncode, cached.stdout) == (0, complete.stdout), cached.stderr
    warning = "using the cached copy, because the latest commit was not downloaded: the download broke off"
    assert warning in cached.stderr


def test_ctrl_c_ends_a_download(hub: Site, tmp_path: Path) -> None:
    done = threading.Event()
    hub.before_answer = lambda path, _: path.endswith("tokenizer.json") and done.wait(60)
    with subprocess.Popen(ASK, env=hub_variables(hub, tmp_path), stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if line.startswith(f"downloading {NAME}: "):
                break
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    done.set()
    assert (process.returncode, said.strip()) == (130, "panscan: interrupted")


@pytest.mark.parametrize("kind", ["silent", "closed", "offline"])
def test_an_unreachable_hub_is_one_line_within_seconds(silent: str, tmp_path: Path, kind: str) -> None:
    endpoint = silent if kind == "silent" else closed()
    environment = {"HF_HUB_OFFLINE": "1"} if kind == "offline" else {}
    variables = hub_variables(endpoint, tmp_path) | environment
    # huggingface_hub alone would retry for minutes; the rest of the limit is for a busy machine
    done = subprocess.run(ASK, env=variables, capture_output=True, text=True, timeout=30)
    assert done.returncode == 3
    *progress, last = done.stderr.splitlines()
    assert last.startswith(f"panscan: --model {NAME}: not downloaded, and ")
    assert ("HF_HUB_OFFLINE is set" in last) == (kind == "offline")
    if kind == "silent":
        assert f"{endpoint} cannot be reached (no answer within 4 s): check the network" in last
        assert f"contacting {endpoint} ..." in progress
