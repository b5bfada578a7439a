"""The vision tower's attention kernel for Hopper GPUs, against float64."""

from typing import Any

import pytest
import torch
from tests.triton_here import DEVICE
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from panscan.model.gemma3.vision_attention import attend, supported

HOPPER = supported(DEVICE, torch.bfloat16)


def on_hopper(test: Any) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")(test))


def packed(
    views: int, heads: int, patches: int, size: int, dtype: torch.dtype, device: str = "cuda"
) -> list[torch.Tensor]:
    """Query, key and value as views of one fused product ``[views, patches, 3, heads, size]``."""
    generator = torch.Generator(device).manual_seed(0)
    drawn = torch.randn(views, patches, 3, heads, size, generator=generator, device=device, dtype=torch.float32)
    return [part.transpose(1, 2) for part in drawn.to(dtype).unbind(2)]


def expected(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """The same in float64, one head at a time, as ``[views, patches, heads, size]``."""
    parts = [
        torch.softmax(q.double() @ k.double().transpose(-1, -2) * scale, -1) @ v.double()
        for q, k, v in zip(query.unbind(1), key.unbind(1), value.unbind(1), strict=True)
    ]
    return torch.stack(parts, 2)


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


@on_hopper
@pytest.mark.parametrize(("views", "patches"), [(1, 4096), (3, 4096), (2, 1000), (1, 64), (5, 1)])
def test_true_shapes(views: int, patches: int) -> None:
    query, key, value = packed(views, 16, patches, 72, torch.bfloat16)
    found = attend(query, key, value)
    truth = expected(query, key, value, 72**-0.5)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], set_priority=True):
        usual = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    assert relative(found, truth) < 4e-3
    error, usual_error = ((part.double() - truth).abs().max() for part in (found, usual))
    # Both round weights to bfloat16. A running maximum makes the largest weight 1, which needs no rounding.
    assert error <= 1.5 * usual_error + 1e-6


@on_hopper
@pytest.mark.parametrize("size", [16, 40, 64, 80, 96, 128])
def test_head_sizes(size: int) -> None:
    query, key, value = packed(2, 3, 500, size, torch.float16)
    found = attend(query, key, value)
    assert relative(found, expected(query, key, value, size**-0.5)) < 1e-3


@on_hopper
def test_large_scores() -> None:
    query, key, value = packed(1, 16, 4096, 72, torch.bfloat16)
    found = attend(query * 16, key * 16, value)
    assert relative(found, expected(query * 16, key * 16, value, 72**-0.5)) < 4e-3


@on_hopper
@pytest.mark.parametrize("patches", [129, 300, 4096])
def test_scores_that_rise_after_the_first_keys(patches: int) -> None:
    """Weights relative to the highest score of the first 128 keys would overflow in one head of one view, or in all."""
    query, key, value = (part.clone() for part in packed(2, 3, patches, 72, torch.bfloat16))
    for heads in (slice(1, 2), slice(None)):
        query[1, heads] = query[1, heads].abs() * 8
        key[1, heads, :128] = -key[1, heads, :128].abs() * 8
        key[1, heads, 128:] = key[1, heads, 128:].abs() * 8
        truth = expected(query, key, value, 72**-0.5)
        assert relative(attend(query, key, value), truth) < 4e-3


@on_hopper
def test_repeats_exactly_and_writes_everything() -> None:
    """A race or an element that is not written would show between runs over poisoned memory."""
    query, key, value = packed(4, 16, 4000, 72, torch.bfloat16)
    first = attend(query, key, value)
    for _ in range(5):
        poison = torch.full_like(first, float("nan"))
        del poison
        again = attend(query, key, value)
        assert torch.equal(again, first)
        del again


@on_hopper
def test_any_strides() -> None:
    query, key, value = (part[..., 1:73] for part in packed(1, 2, 300, 79, torch.bfloat16))  # not 16-byte aligned
    assert relative(attend(query, key, value), expected(query, key, value, 72**-0.5)) < 4e-3


@on_hopper
def test_what_it_does_not_take_is_refused() -> None:
    query = torch.zeros(1, 1, 4, 72, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ValueError, match="head size 8"):
        attend(*[query[..., :8]] * 3)
    assert attend(query[:0], query[:0], query[:0]).shape == (0, 4, 1, 72)


def test_other_devices_and_precisions_are_refused() -> None:
    assert not supported(torch.device("cpu"), torch.bfloat16)
    assert not supported(DEVICE, torch.float32)
    with pytest.raises(ValueError, match="expected 16 bits on a Hopper GPU"):
        attend(*[torch.zeros(1, 1, 4, 72)] * 3)
