"""Llama-3: torchtitan's modules, put together for any width, depth, head count and device.

Decided here: one fused matrix for queries, keys and values; causal attention without a mask runs on torch's
``scaled_dot_product_attention`` on every device, attention within documents on flex attention (torchtitan's
``get_attention_config`` offers no choice that runs on CPU); the rotary table covers the sequence length of the run
instead of torchtitan's 131,072 positions, and all layers share it (a table per layer is 64 MiB at 8B and 4,096
positions).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torchtitan.models.common.attention import (
    FlexAttention,
    FusedQKVLinear,
    GQAttention,
    ScaledDotProductAttention,
)
from torchtitan.models.common.embedding import Embedding
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import ComplexRoPE
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock

from conf.schema import ModelConfig
from models.decoder import LanguageModel, build_head


class Llama3(LanguageModel, Llama3Model):
    """Llama-3 with the call of ``models.decoder.LanguageModel``."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        pass

    def __init__(self, config: Config):
        super().__init__(config)
        attentions = [layer.attention for layer in self.layers.values()]
        for attention in attentions[1:]:
            attention.rope = attentions[0].rope


class SwiGLU(FeedForward):
    """``w2(silu(w1(x)) * w3(x))``; an optimizer may have ``w1`` and ``w3`` read their input together."""

    reads_one_input = (("w1", "w3"),)

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        recompute: bool = False
        """Keep only the outputs of ``w1`` and ``w3`` for backward, and what ``w2`` keeps of its input."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.recompute = config.recompute

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        read = getattr(self.w1, "together", None)
        gate, up = read(x, (self.w1, self.w3)) if read else (self.w1(x), self.w3(x))
        return self.w2(_GatedProduct.apply(gate, up) if self.recompute else F.silu(gate) * up)


class _GatedProduct(torch.autograd.Function):
    """silu(gate) * up, of which the inputs alone are kept."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_up = grad * F.silu(gate)
        return torch.ops.aten.silu_backward(grad * up, gate), grad_up


def build_llama3(
    config: ModelConfig, seq_len: int, document_mask: bool, loss_chunk: int, recompute_swiglu: bool = False
) -> Llama3:
    """The model for inputs of up to ``seq_len`` tokens, on the current default device."""
    inner = FlexAttention.Config() if document_mask else ScaledDotProductAttention.Config()
    # initial values are no part of torchtitan's description here: models.init has the rule
    return Llama3.Config(
        dim=config.dim,
        vocab_size=config.vocab_size,
        enable_weight_tying=config.tied,
        tok_embeddings=Embedding.Config(num_embeddings=config.vocab_size, embedding_dim=config.dim),
        norm=_norm(config),
        lm_head=build_head(config, loss_chunk),
        layers=[_block(config, seq_len, inner, recompute_swiglu) for _ in range(config.layers)],
    ).build()


def _block(
    config: ModelConfig,
    seq_len: int,
    inner: FlexAttention.Config | ScaledDotProductAttention.Config,
    recompute_swiglu: bool,
) -> Llama3TransformerBlock.Config:
    head_dim = config.dim // config.heads
    kv_heads = config.kv_heads or config.heads
    return Llama3TransformerBlock.Config(
        attention_norm=_norm(config),
        ffn_norm=_norm(config),
        attention=GQAttention.Config(
            n_heads=config.heads,
            n_kv_heads=kv_heads,
            dim=config.dim,
            qkv_linear=FusedQKVLinear.Config(
                head_dim=head_dim,
                n_heads=config.heads,
                n_kv_heads=kv_heads,
                wqkv=_linear(config.dim, (config.heads + 2 * kv_heads) * head_dim),
            ),
            wo=_linear(config.dim, config.dim),
            inner_attention=inner,
            rope=ComplexRoPE.Config(
                dim=head_dim, max_seq_len=seq_len, theta=config.rope_theta, scaling=config.rope_scaling
            ),
        ),
        feed_forward=SwiGLU.Config(
            w1=_linear(config.dim, config.hidden),
            w2=_linear(config.hidden, config.dim),
            w3=_linear(config.dim, config.hidden),
            recompute=recompute_swiglu,
        ),
    )


def _linear(in_features: int, out_features: int) -> Linear.Config:
    return Linear.Config(in_features=in_features, out_features=out_features)


def _norm(config: ModelConfig) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=config.dim, eps=config.norm_eps)
