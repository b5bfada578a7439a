"""The embedding and the output matrix as int8 with a scale per token: half the memory of bf16, stored once if tied."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from typing_extensions import override

from panscan.model.linear.multiply import multiply_int8, quantize_rows
from panscan.model.linear.quantized import Int8Linear, WeightFormat
from panscan.model.linear.rows import QuantizedRows

_ROWS = 16_384  # tokens that are quantised at once: on a CPU, each takes three float32 copies


class VocabularyMatrix(Int8Linear):
    """An output matrix whose only error is the rounding of its weights.

    A logit differs from the unquantised one by at most ``scale / 2 * sum(abs(input))``, and by roundings of the model's
    type. Inputs are the sum of two int8 terms, about 15 bits; the second one costs little, because reading the weights
    takes most of the time.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        outputs, inputs = weight.shape
        super().__init__(inputs, outputs, WeightFormat("int8"), device=weight.device)
        self.input_dtype = None
        for first in range(0, outputs, _ROWS):
            tokens = slice(first, first + _ROWS)
            rows = quantize_rows(weight[tokens], torch.int8)
            self.weight[tokens], self.scale[tokens] = rows.values, rows.scale[:, 0]

    @override
    def product(self, input: torch.Tensor | QuantizedRows, dtype: torch.dtype) -> torch.Tensor:
        assert isinstance(input, torch.Tensor)  # input_dtype is None
        first = quantize_rows(input, torch.int8)
        second = quantize_rows(input.float() - first.values.float() * first.scale, torch.int8)
        terms = QuantizedRows(torch.cat((first.values, second.values)), torch.cat((first.scale, second.scale)))
        product = multiply_int8(terms, self.weight, self.scale, dtype)
        return product[: len(input)] + product[len(input) :]

    @staticmethod
    def compiled_rows(most: int) -> list[int]:
        """Return numbers of rows, up to ``most``, whose products need all kernels that a GPU compiles for any of them.

        A kernel is compiled for each tile size, and again for multiples of 16 of the twice as many rows of both terms.
        """
        sizes = (1 << bit for bit in range(3, most.bit_length()))
        return [1, *(rows for size in sizes for rows in (size, size + 1, size + 8) if rows <= most)]


class QuantizedEmbedding(nn.Module):
    """Gemma's scaled embedding of tokens, dequantised row by row.

    Args:
        matrix: the weights ``[tokens, hidden]``; a tied output matrix is the same module.
        embedding: the unquantised embedding.
    """

    embed_scale: torch.Tensor

    def __init__(self, matrix: VocabularyMatrix, embedding: Any) -> None:
        super().__init__()
        self.matrix, self._dtype = matrix, embedding.weight.dtype
        self.register_buffer("embed_scale", embedding.embed_scale, persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """The int8 values, for their shape and device."""
        return self.matrix.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings ``[..., hidden]`` of int64 ids."""
        rows = self.matrix.weight[ids].float() * self.matrix.scale[ids].unsqueeze(-1)
        return rows.to(self._dtype) * self.embed_scale.to(self._dtype)


@torch.no_grad()
def quantize_vocabulary(model: Any) -> None:
    """Quantise the embedding and the output matrix of a loaded model, or of one rank's shard, in place."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = embedding.weight is head.weight
    output = VocabularyMatrix(head.weight)
    model.set_output_embeddings(output)
    model.set_input_embeddings(QuantizedEmbedding(output if tied else VocabularyMatrix(embedding.weight), embedding))
