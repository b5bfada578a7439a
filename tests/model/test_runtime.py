"""Switches of a loaded model: none of them undoes what another one needs."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from panscan import GenerateRunner
from panscan.core import PanscanWarning


@pytest.fixture(autouse=True)
def dynamo_as_before(runner: GenerateRunner) -> Iterator[None]:
    config = torch._dynamo.config
    names = ("automatic_dynamic_shapes", "fail_on_recompile_limit_hit", "recompile_limit")
    before = {name: getattr(config, name) for name in names}
    yield
    for name, value in before.items():
        setattr(config, name, value)


def strict() -> bool:
    config = torch._dynamo.config
    return bool(config.automatic_dynamic_shapes and config.fail_on_recompile_limit_hit and config.recompile_limit > 8)


def test_flex_attention_on_a_cpu_keeps_its_exception_whatever_else_is_switched(runner: GenerateRunner) -> None:
    """Compiling is switched on and off without running: it is lazy, so this costs nothing."""
    plain = runner.settings
    with pytest.warns(PanscanWarning, match="do not apply to GPUs"):
        runner.configure(replace(plain, attention="flex_attention", compile="default"))
    assert not strict(), "symbols for lengths do not compile here"
    runner.configure(replace(plain, attention="flex_attention"))
    assert not strict()
    runner.configure(replace(plain, compile="default"))
    assert strict(), "a compiled cell must not fall back to eager unnoticed"
