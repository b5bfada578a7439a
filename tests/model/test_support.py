"""Which settings this machine can run, found out without loading a model."""

from dataclasses import replace

import pytest
import torch

from panscan.core import UnsupportedError
from panscan.model.support import require_supported, unsupported_reason
from panscan.settings import Settings

SPLIT = Settings(runner="engine", device="cpu", tensor_parallel_size=64)


def test_a_cpu_splits_a_model_any_number_of_times() -> None:
    assert unsupported_reason(SPLIT) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="without a GPU, cuda itself is refused")
@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_too_few_gpus_are_counted(device: str) -> None:
    count = torch.cuda.device_count()
    with pytest.raises(UnsupportedError, match=rf"size 64 needs 64 GPUs; visible: {count}$"):
        require_supported(replace(SPLIT, device=device))
    assert unsupported_reason(replace(SPLIT, device=device, tensor_parallel_size=count)) is None


def test_only_the_engine_splits_a_model() -> None:
    reason = unsupported_reason(replace(SPLIT, runner="generate"))
    assert reason == "runner generate: --tensor-parallel-size is for --runner engine"


def test_a_float8_vision_tower_needs_a_gpu_and_the_reason_names_the_alternatives() -> None:
    assert unsupported_reason(Settings(device="cpu", quantize_vision="int8")) is None
    reason = str(unsupported_reason(Settings(device="cpu", quantize_vision="fp8")))
    assert reason.startswith("--quantize-vision fp8 needs an NVIDIA GPU of compute capability 8.9 or later")
    assert reason.endswith("on a CPU use int8 or none")
