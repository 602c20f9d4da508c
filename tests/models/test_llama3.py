"""Llama-3 against the formulas written out in fp64, and attention within documents."""

import pytest
import torch
import torch.nn.functional as F
import torchtitan.models.common.decoder
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torchtitan.models.common.attention import FlexAttention

from conf.checks import ConfigError
from conf.schema import ModelConfig
from models.build import build_model
from models.decoder import LanguageModel
from models.init import init_weights
from models.loss import IGNORE
from tests.models.shapes import ALL, CPU, GPT2, LLAMA3, LLAMA3_TIED, VOCAB, batch, built, lively


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, theta: float, scale=lambda frequency: frequency) -> Tensor:
    """Turn the pairs (2i, 2i + 1) of each head, x (T, heads, width), by position times theta**(-2i / width)."""
    width = x.shape[-1]
    frequency = scale(theta ** (-torch.arange(0, width, 2).double() / width))
    angle = torch.outer(torch.arange(x.shape[0]).double(), frequency)[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()
    return torch.stack(turned, -1).flatten(-2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one head: (T, width) each."""
    scores = (q @ k.T / q.shape[1] ** 0.5).masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), float("-inf"))
    return scores.softmax(-1) @ v


def reference(model: LanguageModel, tokens: Tensor, scale=lambda frequency: frequency) -> Tensor:
    """Logits (T, V) in fp64 of one sequence (T,)."""
    config = model.settings
    w = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    width, kv_heads = config.dim // config.heads, config.kv_heads
    group = config.heads // kv_heads
    x = w["tok_embeddings.weight"][tokens]
    for layer in range(config.layers):
        p = f"layers.{layer}."
        y = rms(x, w[p + "attention_norm.weight"], config.norm_eps)
        # rows of the fused matrix: for each key/value head its query heads, then key, then value
        fused = (y @ w[p + "attention.qkv_linear.wqkv.weight"].T).view(len(x), kv_heads, group + 2, width)
        queries = rotate(fused[:, :, :group].reshape(len(x), config.heads, width), config.rope_theta, scale)
        keys = rotate(fused[:, :, group], config.rope_theta, scale)
        heads = [attend(queries[:, h], keys[:, h // group], fused[:, h // group, -1]) for h in range(config.heads)]
        x = x + torch.cat(heads, -1) @ w[p + "attention.wo.weight"].T
        y = rms(x, w[p + "ffn_norm.weight"], config.norm_eps)
        gate, up = (y @ w[p + f"feed_forward.{name}.weight"].T for name in ("w1", "w3"))
        x = x + (gate * torch.sigmoid(gate) * up) @ w[p + "feed_forward.w2.weight"].T
    head = w["tok_embeddings.weight" if config.tied else "lm_head.weight"]
    return rms(x, w["norm.weight"], config.norm_eps) @ head.T


@pytest.mark.parametrize("config", [LLAMA3, LLAMA3_TIED], ids=["grouped", "tied"])
def test_logits_follow_the_formula(config: ModelConfig):
    model, (tokens, _) = lively(built(config)), batch(2)
    for row in range(2):
        torch.testing.assert_close(model(tokens)[row].double(), reference(model, tokens[row]), rtol=1e-4, atol=1e-4)


def test_rope_scaling_stretches_long_waves():
    """Llama 3.1: waves longer than 8192 tokens are stretched by 8, those shorter than 2048 stay, smooth between."""

    def scale(frequency: Tensor) -> Tensor:
        wave = 2 * torch.pi / frequency
        share = ((8192 / wave - 1) / 3).clamp(0, 1)
        return (1 - share) * frequency / 8 + share * frequency

    config = ModelConfig(dim=32, layers=1, heads=1, kv_heads=1, hidden=40, vocab_size=VOCAB, rope_scaling="llama")
    model, (tokens, _) = lively(built(config, seq_len=512)), batch(1, 512)
    actual = model(tokens)[0].double()
    torch.testing.assert_close(actual, reference(model, tokens[0], scale), rtol=1e-4, atol=1e-4)
    assert (actual - reference(model, tokens[0])).abs().max() > 0.1


@pytest.mark.parametrize("key", ["llama3", "llama3_tied", "gpt2"])
def test_loss_and_gradients_are_those_of_the_logits(key: str):
    model, (tokens, labels) = built(ALL[key]), batch()
    loss = model(tokens, labels)
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    plain = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORE)
    plain.backward()
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("key", ["llama3", "gpt2"])
def test_no_token_sees_the_next(key: str):
    model, (tokens, _) = built(ALL[key]), batch(1)
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % VOCAB
    difference = (model(tokens) - model(changed)).abs().amax(-1)[0]
    assert not difference[:10].any() and difference[10:].all()


def test_last_only_is_the_last_row():
    model, (tokens, _) = built(LLAMA3), batch(3)
    torch.testing.assert_close(model(tokens, last_only=True), model(tokens)[:, -1:], rtol=1e-5, atol=1e-6)


def test_rope_table_is_as_long_as_the_run_and_held_once():
    buffers = dict(built(LLAMA3).named_buffers())
    assert list(buffers) == ["layers.0.attention.rope.cache"] and len(buffers["layers.0.attention.rope.cache"]) == 24


def masked_model(monkeypatch: pytest.MonkeyPatch) -> LanguageModel:
    """The model that CUDA would run, on the CPU: flex attention and its mask run uncompiled."""
    monkeypatch.setattr(FlexAttention, "_compiled_flex_attn", staticmethod(flex_attention))
    monkeypatch.setattr(torchtitan.models.common.decoder, "create_attention_mask", create_block_mask)
    model = build_model(LLAMA3, 64, "cuda", document_mask=True)
    init_weights(model, 0, CPU)
    return lively(model)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()  # flex attention has no backward pass on CPU
@pytest.mark.parametrize("rows", [1, 2])
def test_documents_do_not_see_each_other(monkeypatch: pytest.MonkeyPatch, rows: int):
    """Two documents of 10 tokens and the start of a third in 32 positions; another first document changes nothing."""
    model, (tokens, _) = masked_model(monkeypatch), batch(rows, 32)
    positions = torch.cat([torch.arange(10), torch.arange(10), torch.arange(12)]).expand(rows, 32)
    changed = tokens.clone()
    changed[:, :10] = (changed[:, :10] + 1) % VOCAB
    logits, other = model(tokens, positions=positions), model(changed, positions=positions)
    assert torch.equal(logits[:, 10:], other[:, 10:]) and not torch.equal(logits[:, :10], other[:, :10])
    # a document in a pack is the document alone
    plain = lively(built(LLAMA3, seq_len=64))
    torch.testing.assert_close(logits[:, 10:20], plain(tokens[:, 10:20]), rtol=1e-4, atol=1e-5)


def test_without_the_mask_attention_runs_on():
    model, (tokens, _) = built(LLAMA3, seq_len=32), batch(1, 32)
    changed = tokens.clone()
    changed[:, :10] = (changed[:, :10] + 1) % VOCAB
    assert (model(tokens)[:, 10:] - model(changed)[:, 10:]).abs().amax(-1).all()


def test_positions_are_wanted_exactly_with_the_mask(monkeypatch: pytest.MonkeyPatch):
    tokens, _ = batch(1)
    with pytest.raises(ValueError, match="positions were given, but the model was built with document_mask=False"):
        built(LLAMA3)(tokens, positions=torch.arange(24)[None])
    with pytest.raises(ValueError, match="positions are missing"):
        masked_model(monkeypatch)(tokens)


@pytest.mark.parametrize(("config", "device_type"), [(LLAMA3, "cpu"), (GPT2, "cuda")])
def test_document_mask_is_refused_where_attention_has_none(config: ModelConfig, device_type: str):
    with pytest.raises(ConfigError, match="document_mask=true needs flex attention .*Set data.document_mask=false"):
        build_model(config, 24, device_type, document_mask=True)


def test_input_longer_than_the_model_is_refused():
    with pytest.raises(ValueError, match="the input has 25 tokens, the model was built for 24"):
        built(LLAMA3)(batch(1, 25)[0])
    with pytest.raises(ConfigError, match="train.seq_len=65 is longer than model.max_seq_len=64"):
        build_model(GPT2, 65, "cpu")


def test_a_recomputed_swiglu_keeps_less_and_gives_the_same_bits():
    plain, lean = (built(LLAMA3) for _ in range(2))
    for layer in lean.layers.values():
        layer.feed_forward.recompute = True
    kept = []
    for model in (plain, lean):
        saved: dict[int, int] = {}

        def note(tensor: Tensor, saved=saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = model(*batch())
        kept.append(sum(saved.values()))
        loss.backward()
    hidden = batch()[0].numel() * LLAMA3.hidden * 4
    # silu's output; the product is kept by w2
    assert kept[0] - kept[1] == len(plain.layers) * hidden
    for first, second in zip(plain.parameters(), lean.parameters(), strict=True):
        assert torch.equal(first.grad, second.grad)


def test_the_setting_reaches_every_block():
    model = build_model(LLAMA3, 16, "cpu", recompute_swiglu=True)
    assert all(layer.feed_forward.recompute for layer in model.layers.values())
