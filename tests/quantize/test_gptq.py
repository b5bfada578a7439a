"""GPTQ and the stored layout, on matrices drawn at random."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from panscan.model.formats.compressed import stored_parts
from panscan.model.linear.quantized import WeightFormat, quantized_linear
from panscan.quantize.gptq import Hessian, gptq


@settings(max_examples=15)
@given(st.integers(0, 1000), st.sampled_from([32, 64]), st.integers(1, 6), st.integers(24, 48), st.integers(0, 9))
def test_gptq_lowers_the_output_error_on_correlated_inputs(
    seed: int, group: int, groups: int, outputs: int, idle: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    width = group * groups
    inputs = torch.randn(4 * width, width, generator=draw) @ torch.randn(width, width, generator=draw)
    inputs[:, :idle] = 0
    weight = torch.randn(outputs, width, generator=draw)
    hessian = Hessian()
    for part in inputs.split(width):
        hessian.add(part)
    assert torch.allclose(hessian.values, inputs.T @ inputs / len(inputs), rtol=1e-3, atol=1e-2)
    weight_format = WeightFormat("int4", group)
    nearest = quantized_linear(width, outputs, weight_format, scale_type=torch.float32)
    nearest.quantize(weight)
    fitted = gptq(weight, hessian.values, weight_format, scale_type=torch.float32)
    changes = [quantized.dequantized() - weight for quantized in (fitted, nearest)]
    error, before = (((change @ hessian.values) * change).sum() for change in changes)
    assert error < before
    assert (fitted.scale <= nearest.scale).all()
    steps = fitted.scale.T.repeat_interleave(group, dim=1)[:, :idle]
    assert torch.equal(fitted.dequantized()[:, :idle], torch.round(weight[:, :idle] / steps).clamp(-8, 7) * steps)


def test_gptq_survives_fewer_inputs_than_channels() -> None:
    draw = torch.Generator().manual_seed(0)
    weight, hessian = torch.randn(8, 256, generator=draw), Hessian()
    hessian.add(torch.randn(3, 256, generator=draw))
    assert gptq(weight, hessian.values, WeightFormat("int4", 64)).dequantized().isfinite().all()
    with pytest.raises(ValueError, match="not finite"):
        gptq(weight, hessian.values * torch.inf, WeightFormat("int4", 64))


def test_packing_is_that_of_compressed_tensors() -> None:
    draw = torch.Generator().manual_seed(0)
    linear = quantized_linear(32, 1, WeightFormat("int4", 32), scale_type=torch.float32)
    linear.quantize(torch.randn(1, 32, generator=draw))
    packed, scale, shape = stored_parts(linear, torch.float32).values()
    expected = [round(float(value)) + 8 for value in linear.dequantized()[0] / scale[0, 0]]
    words = [sum(level << 4 * at for at, level in enumerate(expected[start : start + 8])) for start in (0, 8, 16, 24)]
    assert [word & 0xFFFFFFFF for word in packed[0].tolist()] == words
    assert shape.tolist() == [1, 32]
