"""GPT-2 (Radford et al. 2019) in torchtitan's protocol, so that the code which shards Llama-3 shards it too.

Decided here: learned positions live inside ``tok_embeddings``, so that they are gathered with the token table and not
by a collective of their own; dropout falls on the embedding and on the two residual branches, not on the attention
weights (``ModelConfig.dropout``); queries, keys and values are one matrix whose rows are ordered head by head
(torchtitan's order, not the three blocks of the original ``c_attn``). Parameters carry the names of their Llama-3
counterparts.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.models.common.attention import FusedQKVLinear, GQAttention, ScaledDotProductAttention
from torchtitan.models.common.decoder import Decoder, TransformerBlock
from torchtitan.models.common.embedding import Embedding
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import LayerNorm
from torchtitan.protocols.module import Module

from conf.schema import ModelConfig
from models.decoder import LanguageModel, build_head


class TokenAndPosition(Embedding):
    """Token table (V, D) as ``weight``, position table (P, D) as ``positions.weight``, and dropout on their sum."""

    @dataclass(kw_only=True, slots=True)
    class Config(Embedding.Config):
        positions: Embedding.Config
        dropout: float

    def __init__(self, config: Config):
        super().__init__(config)
        self.positions = config.positions.build()
        self.dropout = config.dropout

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed ``tokens`` (B, T) at positions 0..T-1: (B, T, D)."""
        position = torch.arange(tokens.shape[1], device=tokens.device)
        return F.dropout(super().forward(tokens) + self.positions(position), self.dropout, self.training)


class NoRotary(Module):
    """Takes the place of the rotary embedding: positions were added to the tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config):
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return both unchanged."""
        return query, key


class GELUFeedForward(Module):
    """``w2(gelu(w1(x)))`` with biases and the tanh form of GELU, as in the released weights."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        w1: Linear.Config
        w2: Linear.Config

    def __init__(self, config: Config):
        super().__init__()
        self.w1 = config.w1.build()
        self.w2 = config.w2.build()

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        return self.w2(F.gelu(self.w1(x), approximate="tanh"))


class GPT2Block(TransformerBlock):
    """Pre-norm block; dropout on what each branch adds to the residual stream."""

    @dataclass(kw_only=True, slots=True)
    class Config(TransformerBlock.Config):
        dropout: float

    def __init__(self, config: Config):
        super().__init__()
        self.attention = config.attention.build()
        self.feed_forward = config.feed_forward.build()
        self.attention_norm = config.attention_norm.build()
        self.ffn_norm = config.ffn_norm.build()
        self.dropout = config.dropout

    def forward(self, x: Tensor, attention_masks: None, positions: Tensor | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D). The signature is torchtitan's; ``positions`` were used by the embedding."""
        x = x + F.dropout(self.attention(self.attention_norm(x), attention_masks), self.dropout, self.training)
        return x + F.dropout(self.feed_forward(self.ffn_norm(x)), self.dropout, self.training)


class GPT2(LanguageModel):
    """GPT-2 with the call of ``models.decoder.LanguageModel``."""

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        pass


def build_gpt2(config: ModelConfig, loss_chunk: int) -> GPT2:
    """The model with its whole position table (``config.max_seq_len``), on the current default device."""
    return GPT2.Config(
        dim=config.dim,
        vocab_size=config.vocab_size,
        enable_weight_tying=config.tied,
        tok_embeddings=TokenAndPosition.Config(
            num_embeddings=config.vocab_size,
            embedding_dim=config.dim,
            positions=Embedding.Config(num_embeddings=config.max_seq_len, embedding_dim=config.dim),
            dropout=config.dropout,
        ),
        norm=_norm(config),
        lm_head=build_head(config, loss_chunk),
        layers=[_block(config) for _ in range(config.layers)],
    ).build()


def _block(config: ModelConfig) -> GPT2Block.Config:
    head_dim = config.dim // config.heads
    return GPT2Block.Config(
        dropout=config.dropout,
        attention_norm=_norm(config),
        ffn_norm=_norm(config),
        attention=GQAttention.Config(
            n_heads=config.heads,
            dim=config.dim,
            qkv_linear=FusedQKVLinear.Config(
                head_dim=head_dim,
                n_heads=config.heads,
                n_kv_heads=config.heads,
                wqkv=_linear(config.dim, 3 * config.dim),
            ),
            wo=_linear(config.dim, config.dim),
            inner_attention=ScaledDotProductAttention.Config(),
            rope=NoRotary.Config(),
        ),
        feed_forward=GELUFeedForward.Config(
            w1=_linear(config.dim, config.hidden), w2=_linear(config.hidden, config.dim)
        ),
    )


def _linear(in_features: int, out_features: int) -> Linear.Config:
    return Linear.Config(in_features=in_features, out_features=out_features, bias=True)


def _norm(config: ModelConfig) -> LayerNorm.Config:
    return LayerNorm.Config(normalized_shape=config.dim, eps=config.norm_eps)
