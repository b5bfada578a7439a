"""What several tests of the modules ask the tiny model."""

import pytest
import torch
from tests.conftest import noise

from panscan import GenerateRunner, Request
from panscan.model.inputs import collate, prepare, read_images


@pytest.fixture
def two_asked(tiny: GenerateRunner) -> dict[str, torch.Tensor]:
    """Inputs of ``generate()`` for two requests, one with crops."""
    reader, cpu = tiny.loaded.reader, torch.device("cpu")
    asked = [Request("What is it?", [noise(300, 900)]), Request("And this?", [noise(90, 70)])]
    ready = [prepare(read_images(item), reader, cpu, torch.float32, on_device=False) for item in asked]
    return collate(ready, tiny.loaded)
