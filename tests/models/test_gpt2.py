"""GPT-2 against the formulas written out in fp64."""

import math

import torch
from torch import Tensor

from models.decoder import LanguageModel
from tests.models.shapes import GPT2, GPT2_DROPOUT, batch, built, lively


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight + bias


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def reference(model: LanguageModel, tokens: Tensor) -> Tensor:
    """Logits (T, V) in fp64 of one sequence (T,)."""
    config, length = model.settings, len(tokens)
    w = {name: parameter.detach().double() for name, parameter in model.named_parameters()}

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[name + ".weight"].T + w[name + ".bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        return layer_norm(x, w[name + ".weight"], w[name + ".bias"], config.norm_eps)

    future = torch.ones(length, length).triu(1).bool()
    x = w["tok_embeddings.weight"][tokens] + w["tok_embeddings.positions.weight"][:length]
    for layer in range(config.layers):
        p = f"layers.{layer}."
        fused = linear(norm(x, p + "attention_norm"), p + "attention.qkv_linear.wqkv")
        # rows of the fused matrix: query, key and value of the first head, of the second, ...
        query, key, value = fused.view(length, config.heads, 3, -1).permute(2, 1, 0, 3)
        scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(future, float("-inf"))
        heads = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
        x = x + linear(heads, p + "attention.wo")
        y = gelu(linear(norm(x, p + "ffn_norm"), p + "feed_forward.w1"))
        x = x + linear(y, p + "feed_forward.w2")
    return norm(x, "norm") @ w["tok_embeddings.weight"].T


def test_logits_follow_the_formula():
    model, (tokens, _) = lively(built(GPT2)), batch(2)
    for row in range(2):
        torch.testing.assert_close(model(tokens)[row].double(), reference(model, tokens[row]), rtol=1e-4, atol=1e-4)


def test_position_table_has_every_position_of_the_context():
    model = built(GPT2, seq_len=24)
    assert model.context == 64 and model.tok_embeddings.positions.weight.shape == (64, 32)
    model(batch(1, 64)[0])


def test_dropout_falls_on_embedding_and_both_branches():
    model, (tokens, _) = built(GPT2_DROPOUT), batch(2)
    plain = built(GPT2)
    for places in (("tok_embeddings",), ("layers.0",), ("layers.1",)):
        for place in ("tok_embeddings", "layers.0", "layers.1"):
            model.get_submodule(place).dropout = 0.1 if place in places else 0.0
        assert not torch.equal(model(tokens), plain(tokens)), places
    for place in ("tok_embeddings", "layers.0", "layers.1"):
        model.get_submodule(place).dropout = 0.0
    assert torch.equal(model(tokens), plain(tokens))


def test_gelu_is_the_tanh_form():
    """The two forms differ by 5e-4 at most, which the logits do not show."""
    block = lively(built(GPT2)).layers["0"].feed_forward
    with torch.no_grad():
        block.w1.weight.zero_()
        block.w1.bias.copy_(torch.linspace(-4, 4, 40))
        block.w2.weight.copy_(torch.eye(32, 40))
        block.w2.bias.zero_()
    expected = gelu(torch.linspace(-4, 4, 40, dtype=torch.float64))[:32]
    torch.testing.assert_close(block(torch.zeros(1, 32))[0].double(), expected, rtol=0, atol=1e-6)
