"""Which attention backend the engine chooses, and the reason that it gives."""

from dataclasses import replace

import pytest
import torch
from tests.triton_here import DEVICE

from panscan.core import SettingError, UnsupportedError
from panscan.engine.attention import SegmentsBackend
from panscan.engine.model_runner import choose_backend
from panscan.engine.options import EngineOptions
from panscan.engine.triton_attention import TritonBackend
from panscan.model.layers import LayerFacts

LAYER = LayerFacts(local=True, kv_heads=4, head_size=128, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, device=DEVICE)


def test_auto_takes_the_kernels_on_a_gpu_and_explains_why_not_elsewhere() -> None:
    backend, reason = choose_backend("auto", LAYER)
    if DEVICE.type == "cuda":
        assert isinstance(backend, TritonBackend)
        backend, reason = choose_backend("auto", replace(LAYER, head_size=48))
        assert "heads of size 48" in reason
    else:
        assert reason == "not on an NVIDIA GPU", "interpreted or not"
    assert isinstance(backend, SegmentsBackend)


def test_a_requested_backend_is_taken() -> None:
    for name, kind in (("triton", TritonBackend), ("sdpa", SegmentsBackend)):
        backend, reason = choose_backend(name, LAYER)
        assert isinstance(backend, kind)
        assert (backend.name, reason) == (name, "requested")


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (replace(LAYER, head_size=48), "heads of size 48"),
        (replace(LAYER, dtype=torch.float64), "torch.float64"),
        (replace(LAYER, device=torch.device("mps")), "need an NVIDIA GPU, not mps"),
    ],
)
def test_kernels_that_cannot_run_are_refused_with_the_reason(layer: LayerFacts, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=f"--attention-backend triton: .*{reason}"):
        choose_backend("triton", layer)


def test_an_unknown_backend_is_named_with_its_setting() -> None:
    with pytest.raises(SettingError, match=r"--attention-backend takes auto, triton, sdpa; got 'titron' \(did you"):
        EngineOptions(attention_backend="titron")
