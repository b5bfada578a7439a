"""Gemma 3's decoder, written once for every device: rows of any sequences in, final hidden states and logits out.

The weights are those of a loaded Transformers model; projections of the same input share one product
(:mod:`panscan.model.linear.products`). What lies between the products runs in Triton kernels on NVIDIA GPUs
(:mod:`panscan.model.layer_kernels`) and in PyTorch operators elsewhere. Attention and the KV cache are the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import Gemma3ForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm, apply_rotary_pos_emb

from panscan.core import UnsupportedError
from panscan.model.layers import AttentionPlan, LayerCache, LayerFacts, OutputRows
from panscan.model.linear.multiply import apply_scales, quantize_rows
from panscan.model.linear.products import Product, RowParallelLinear, Rows, is_plain, linear_of
from panscan.model.shapes import decoder_working_bytes
from panscan.model.sharding import SINGLE_RANK, Ranks


class TextLayers:
    """The decoder of a loaded ``Gemma3ForConditionalGeneration`` or ``Gemma3ForCausalLM``.

    Between passes the model serves ``generate()`` and the reference. ``layers``: facts of each layer, in order.
    ``window``: positions that a local layer attends to, the row's own included. ``device``, ``dtype``: of embeddings.
    ``kernels``: whether Triton kernels compute what lies between the products.

    Args:
        loaded_model: in evaluation mode, on one device. With several ranks, its parameters are this rank's shards.
        ranks: the processes that share the model.
        vocab_size: rows of the whole output matrix; None: as the configuration says.
        kv_dtype: type of keys and values in the cache; None: type of the model.

    Raises:
        UnsupportedError: the layers are on several devices.
    """

    def __init__(
        self,
        loaded_model: Any,
        ranks: Ranks = SINGLE_RANK,
        *,
        vocab_size: int | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        # Layers on several devices: one would work while the others wait.
        devices = {str(device) for device in (getattr(loaded_model, "hf_device_map", None) or {}).values()}
        computing = devices - {"cpu", "disk", "meta"}
        if len(computing) > 1:
            raise UnsupportedError(
                f"--device-map spreads the layers over {len(computing)} devices, which the engine does not support:"
                f" use --tensor-parallel-size {len(computing)}, or --runner generate"
            )
        self._model, self._ranks = loaded_model, ranks
        self._text = loaded_model.get_decoder()
        config = self._text.config
        # Transformers' conditional class leaves the capping out.
        capped = isinstance(loaded_model, Gemma3ForCausalLM)
        self._softcap: float | None = config.final_logit_softcapping if capped else None
        self._head = linear_of(loaded_model.lm_head)
        self.window: int = config.sliding_window
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = vocab_size or config.vocab_size
        # The longest sequence whose rotary frequencies depend on positions alone: ``dynamic`` ones change behind the
        # model's context, ``longrope`` ones behind its original context.
        ropes = [rope for kind, rope in config.rope_parameters.items() if kind in config.layer_types]
        originals = [rope["original_max_position_embeddings"] for rope in ropes if rope["rope_type"] == "longrope"]
        self.max_positions: int = min([config.max_position_embeddings, *originals])
        # Hooks of offloaded modules move input ids to the module's device.
        weight = loaded_model.get_input_embeddings().weight
        device = torch.device("cpu") if weight.is_meta else weight.device
        probe = self.embed(torch.zeros(1, dtype=torch.long, device=device))
        self.device, self.dtype = probe.device, probe.dtype
        self._kv_dtype = kv_dtype or self.dtype
        kinds = config.layer_types
        self._layers = [
            _Layer(module, kind, config, ranks) for module, kind in zip(self._text.layers, kinds, strict=True)
        ]
        self._rotary = _Rotary(self._text.rotary_emb, kinds, self.device, self.dtype)
        self._ops = _TorchOps(self.dtype)
        self.kernels = False

    def use_kernels(self) -> None:
        """Use Triton kernels between the matrix products, if norms and activation are the standard Gemma 3 ones."""
        norms = [norm for layer in self._layers for norm in (*layer.norms, layer.q_norm, layer.k_norm)]
        if (
            all(is_plain(norm, Gemma3RMSNorm) for norm in (*norms, self._text.norm))
            and self._text.config.hidden_activation == "gelu_pytorch_tanh"
        ):
            self.kernels, self._ops = True, _KernelOps(self.dtype)

    @property
    def layers(self) -> tuple[LayerFacts, ...]:
        """Facts of each layer's keys and values, in order."""
        return tuple(
            LayerFacts(layer.local, layer.kv_heads, layer.head_size, self.dtype, self._kv_dtype, self.device)
            for layer in self._layers
        )

    @torch.no_grad()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings ``[T, hidden]``, scaled as Gemma scales them, of int64 ids ``[T]``."""
        embedding = self._text.embed_tokens
        if self._ranks.size == 1:
            hidden: torch.Tensor = embedding(ids)
            return hidden
        held = len(embedding.weight)
        local = ids - self._ranks.rank * held
        outside = (local < 0) | (local >= held)
        hidden = embedding(local.masked_fill(outside, 0)).masked_fill(outside[:, None], 0.0)
        return self._ranks.all_reduce(hidden)

    @torch.no_grad()
    def run(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[LayerCache],
        plans: Mapping[bool, AttentionPlan],
        output: OutputRows | None = None,
    ) -> torch.Tensor:
        """Return final hidden states ``[n, hidden]``, normed, of embeddings ``[T, hidden]``.

        Args:
            hidden: rows of any sequences, one after the other; they meet in attention only.
            positions: int64 ``[T]``: position of each row in its sequence.
            caches: keys and values of each layer; the rows' own are written.
            plans: attention by kind of layer (local or not).
            output: the n rows to return; None: all T rows. Keys and values of all rows are written in any case.
        """
        ops, layers, dtype = self._ops, self._layers, hidden.dtype
        rotary = self._rotary(positions)
        following = [*(layer.norms[0] for layer in layers[1:]), self._text.norm]
        following_dtypes = [*(layer.qkv.input_dtype for layer in layers[1:]), None]
        normed = ops.norm(hidden, layers[0].norms[0], layers[0].qkv.input_dtype)
        steps = zip(layers, caches, following, following_dtypes, strict=True)
        for layer, cache, next_norm, next_dtype in steps:
            plan = plans[layer.local]
            qkv = layer.qkv.product(normed, dtype)
            query = ops.rotate_and_store(layer, qkv, rotary[layer.local], plan.slots, cache)
            if output is not None and layer is layers[-1]:
                plan, query, hidden = output.plan, query[output.rows], hidden[output.rows]
                if not len(hidden):  # no prompt ends in this pass, and the keys and values are written
                    return hidden
            attended = plan.attend(query, cache, layer.scaling)
            part = layer.out.product(attended.flatten(1), dtype)
            hidden, normed = ops.add_norms(hidden, part, layer.norms[1], layer.norms[2], layer.gate_up.input_dtype)
            part = layer.down.product(ops.activate(layer, layer.gate_up.product(normed, dtype)), dtype)
            hidden, normed = ops.add_norms(hidden, part, layer.norms[3], next_norm, next_dtype)
        assert isinstance(normed, torch.Tensor)  # the last norm is not quantised, because no product follows here
        return normed

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return next-token logits, float32 ``[n, vocab_size]``, of final hidden states ``[n, hidden]``.

        As ``generate()`` has them: computed in the model's precision, capped where its class caps them, then upcast.
        """
        logits = self._head(hidden)
        if self._ranks.size > 1:
            logits = self._ranks.all_gather_columns(logits)[:, : self.vocab_size]
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits.float()

    def working_bytes(self, *, tokens: int, rows: int) -> int:
        """Return a generous bound on the bytes that passes need (see :func:`decoder_working_bytes`).

        Args:
            tokens: rows that go through the layers at once.
            rows: rows whose logits are computed.
        """
        config = self._text.config
        return decoder_working_bytes(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            vocabulary=self.vocab_size,
            tokens=tokens,
            rows=rows,
            width=self.dtype.itemsize,
        )


class _Rotary:
    """Cosines and sines of positions for each kind of layer, as Transformers computes them.

    Frequencies are those of a fresh model: ``generate()`` may leave others behind in a module of a dynamic type.

    Args:
        module: Transformers' rotary embedding.
        kinds: type of each layer, as Transformers names them.
        device: device of the positions.
        dtype: type of the results.
    """

    def __init__(self, module: Any, kinds: Sequence[str], device: torch.device, dtype: torch.dtype) -> None:
        used = sorted(set(kinds))
        half = torch.stack([getattr(module, f"{kind}_original_inv_freq") for kind in used]).to(device, torch.float32)
        scaling = [getattr(module, f"{kind}_attention_scaling") for kind in used]
        self._local = [kind == "sliding_attention" for kind in used]
        self._frequencies = torch.cat((half, half), -1)[:, None]
        self._scaling = torch.tensor(scaling, dtype=torch.float32, device=device)[:, None, None]
        self._dtype = dtype

    def __call__(self, positions: torch.Tensor) -> dict[bool, tuple[torch.Tensor, torch.Tensor]]:
        """Return cosines and sines ``[T, D]`` of int64 positions ``[T]``, by kind of layer (local or not).

        The kinds share every operator, because launches are what this costs.
        """
        angles = positions[:, None].float() * self._frequencies
        cos, sin = ((table * self._scaling).to(self._dtype) for table in (angles.cos(), angles.sin()))
        return {local: (cos[at], sin[at]) for at, local in enumerate(self._local)}


class _Layer:
    """One decoder layer. ``norms``: before attention, after it, before the MLP, after it."""

    def __init__(self, module: Any, kind: str, config: Any, ranks: Ranks) -> None:
        attention, mlp = module.self_attn, module.mlp
        self.local = kind == "sliding_attention"
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_size: int = config.head_dim
        self.scaling: float = attention.scaling
        self.qkv = linear_of(attention.q_proj, attention.k_proj, attention.v_proj)
        self.gate_up = linear_of(mlp.gate_proj, mlp.up_proj)
        self.out, self.down = linear_of(attention.o_proj), linear_of(mlp.down_proj)
        if ranks.size > 1:
            self.out = RowParallelLinear(self.out, ranks.all_reduce)
            self.down = RowParallelLinear(self.down, ranks.all_reduce)
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm
        self.norms = (
            module.input_layernorm,
            module.post_attention_layernorm,
            module.pre_feedforward_layernorm,
            module.post_feedforward_layernorm,
        )
        self.activation: Callable[[torch.Tensor], torch.Tensor] = mlp.act_fn


class _TorchOps:
    """Operators between the products, by PyTorch through the model's own norms: any device, precision and module.

    All tensors have rows ``[T, ...]``. With ``input_dtype``, a result is the input of the next product and may be
    quantised to that type; here, products quantise their inputs themselves.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def norm(self, hidden: torch.Tensor, norm: Any, input_dtype: torch.dtype | None) -> Rows:
        normed: torch.Tensor = norm(hidden)
        return normed

    def add_norms(
        self, hidden: torch.Tensor, part: Product, part_norm: Any, next_norm: Any, input_dtype: torch.dtype | None
    ) -> tuple[torch.Tensor, Rows]:
        """Return ``hidden`` + the norm of ``part``, and the next norm of that sum."""
        total = hidden + part_norm(apply_scales(part, self._dtype))
        return total, next_norm(total)

    def activate(self, layer: _Layer, gate_up: Product) -> Rows:
        """Return ``activation(gate) * up`` ``[T, M]`` of ``[T, 2 M]``, the gate first."""
        gate, up = apply_scales(gate_up, self._dtype).chunk(2, -1)
        return layer.activation(gate) * up

    def rotate_and_store(
        self,
        layer: _Layer,
        qkv: Product,
        rotary: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        cache: LayerCache,
    ) -> torch.Tensor:
        """Norm and rotate queries and keys, write keys and values to their slots; return queries ``[T, heads, D]``."""
        heads = apply_scales(qkv, self._dtype).view(len(slots), -1, layer.head_size)
        query, key, value = torch.split(heads, [layer.heads, layer.kv_heads, layer.kv_heads], 1)
        query, key = apply_rotary_pos_emb(layer.q_norm(query), layer.k_norm(key), *rotary)
        for part, scale, rows in zip(cache[:2], cache.scales_of_parts(), (key, value), strict=True):
            _store(part, scale, slots, rows)
        rotated: torch.Tensor = query
        return rotated


def _store(cache: torch.Tensor, scale: torch.Tensor | None, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Write keys or values to their slots: quantised with a scale per head, or saturated to the range of float8."""
    if scale is not None:
        values, factors = quantize_rows(values, cache.dtype)
        scale.index_copy_(1, slots, factors[..., 0].T)
    if cache.dtype == torch.float8_e4m3fn:
        most = torch.finfo(cache.dtype).max
        stored = values.clamp(-most, most).to(cache.dtype)
        cache.view(torch.uint8).index_copy_(0, slots, stored.view(torch.uint8))  # not every device supports float8
    else:
        cache.index_copy_(0, slots, values)


class _KernelOps(_TorchOps):
    """Triton kernels, on the weights of plain norms."""

    def __init__(self, dtype: torch.dtype) -> None:
        from panscan.model import layer_kernels  # needs Triton

        super().__init__(dtype)
        self._kernels = layer_kernels

    def norm(self, hidden: torch.Tensor, norm: Any, input_dtype: torch.dtype | None) -> Rows:
        return self._kernels.rms_norm(hidden, norm.weight, norm.eps, input_dtype)

    def add_norms(
        self, hidden: torch.Tensor, part: Product, part_norm: Any, next_norm: Any, input_dtype: torch.dtype | None
    ) -> tuple[torch.Tensor, Rows]:
        return self._kernels.add_rms_norms(hidden, part, part_norm.weight, next_norm.weight, part_norm.eps, input_dtype)

    def activate(self, layer: _Layer, gate_up: Product) -> Rows:
        return self._kernels.gelu_product(gate_up, self._dtype, layer.down.input_dtype)

    def rotate_and_store(
        self,
        layer: _Layer,
        qkv: Product,
        rotary: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        cache: LayerCache,
    ) -> torch.Tensor:
        norm = layer.q_norm
        return self._kernels.rotate_and_store(
            qkv, norm.weight, layer.k_norm.weight, norm.eps, *rotary, slots, cache, layer.heads
        )
