"""Initial weights: their distribution, and that they do not depend on how the model is held."""

import re

import numpy as np
import pytest
import torch
from torch import nn

from conf.schema import ModelConfig
from models.build import build_model
from models.init import BLOCK_ELEMENTS, Constant, Normal, block_rows, draw_rows, init_weights, initial_values
from models.names import named_parameters
from tests.models.shapes import ALL, CPU, GPT2, LLAMA3, batch, built

# wide enough for statistics, and several blocks of rows per matrix
WIDE = ModelConfig(dim=256, layers=3, heads=4, hidden=704, vocab_size=4099, max_seq_len=64)
WIDE_GPT2 = ModelConfig(
    family="gpt2", dim=256, layers=3, heads=4, hidden=1024, vocab_size=4099, max_seq_len=64, tied=True
)


@pytest.mark.parametrize("key", list(ALL))
def test_seed_decides(key: str):
    first, again, other = (named_parameters(built(ALL[key], seed)) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = [name for name in first if isinstance(initial_values(ALL[key], name), Normal)]
    assert drawn and not any(torch.equal(first[name], other[name]) for name in drawn)


def test_number_of_threads_does_not_matter():
    expected = named_parameters(built(WIDE))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        actual = named_parameters(built(WIDE))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_global_random_state_is_not_used():
    torch.manual_seed(0)
    np.random.seed(0)
    expected = named_parameters(built(LLAMA3))
    torch.manual_seed(1)
    np.random.seed(1)
    state = torch.get_rng_state()
    actual = named_parameters(built(LLAMA3))
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_second_call_gives_the_same_weights_again():
    model = built(LLAMA3)
    expected = {name: parameter.detach().clone() for name, parameter in named_parameters(model).items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    init_weights(model, 0, CPU)
    assert all(torch.equal(parameter, expected[name]) for name, parameter in named_parameters(model).items())


@pytest.mark.parametrize("config", [WIDE, WIDE_GPT2], ids=["llama3", "gpt2"])
def test_weights_are_independent_normals(config: ModelConfig):
    columns = []
    for name, parameter in named_parameters(built(config)).items():
        match initial_values(config, name):
            case Constant(value):
                assert parameter.unique().tolist() == [value], name
            case Normal(std, cutoff):
                values = parameter.detach().double() / std
                # five standard errors; the cut at three deviations takes 2.7 % off the variance
                assert abs(values.mean()) < 5 / values.numel() ** 0.5, name
                spread = 1.0 if cutoff == float("inf") else 0.9733
                assert abs(values.var() - spread) < 5 * (2 / values.numel()) ** 0.5, name
                assert values.abs().max() <= cutoff
                columns.append(values.flatten()[:16384])
    # no two matrices, and no two blocks of one matrix, share their draws
    blocks = torch.stack(columns)
    correlation = torch.corrcoef(blocks) - torch.eye(len(columns))
    assert correlation.abs().max() < 6 / 16384**0.5
    rows = block_rows((4099, 256))
    assert rows * 256 == BLOCK_ELEMENTS
    first, second = (draw_rows(Normal(1.0), (4099, 256), 0, "x", block) for block in (0, 1))
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 6 / BLOCK_ELEMENTS**0.5


def test_standard_deviations_follow_the_rule():
    llama = {name: initial_values(WIDE, name) for name in named_parameters(built(WIDE))}
    assert llama["tok_embeddings.weight"] == Normal(0.02)
    assert llama["lm_head.weight"] == Normal(256**-0.5, cutoff=3.0)
    assert llama["layers.0.attention.wo.weight"] == Normal(0.02 / 2**0.5)
    assert llama["layers.2.feed_forward.w2.weight"] == Normal(0.02 / 6**0.5)
    assert llama["layers.2.feed_forward.w1.weight"] == Normal(0.02)
    gpt2 = {name: initial_values(WIDE_GPT2, name) for name in named_parameters(built(WIDE_GPT2))}
    assert gpt2["layers.0.attention.wo.weight"] == gpt2["layers.2.feed_forward.w2.weight"] == Normal(0.02 / 6**0.5)
    assert gpt2["tok_embeddings.positions.weight"] == Normal(0.02)


@pytest.mark.parametrize("config", [WIDE, WIDE_GPT2], ids=["llama3", "gpt2"])
def test_first_loss_is_that_of_guessing(config: ModelConfig):
    model = built(config)
    tokens, labels = batch()
    loss = model(tokens, labels) / (labels >= 0).sum()
    # logits of deviation one add half a nat to log V
    assert np.log(4099) - 0.1 < loss.item() < np.log(4099) + 0.7


def test_rope_table_is_fp32_and_exact():
    """A table built on the meta device and filled by ``to_empty`` holds whatever the allocator had."""
    model = built(LLAMA3)
    cache = model.layers["1"].attention.rope.cache
    angle = torch.outer(torch.arange(24.0).double(), 500000.0 ** (-torch.arange(0, 8, 2).double() / 8))
    assert cache.dtype == torch.complex64 and cache.shape == (24, 4)
    torch.testing.assert_close(cache, torch.polar(torch.ones_like(angle), angle).to(torch.complex64), rtol=0, atol=2e-6)


def test_parameter_without_a_rule_is_fatal():
    model = build_model(LLAMA3, 24, "cpu")
    model.layers["1"].register_parameter("gate", nn.Parameter(torch.empty(3, device="meta")))
    with pytest.raises(ValueError, match=re.escape("layers.1.gate has no rule")):
        init_weights(model, 0, CPU)


def test_buffer_that_is_not_rebuilt_is_fatal():
    model = build_model(GPT2, 24, "cpu")
    model.layers["0"].register_buffer("mask", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(ValueError, match=re.escape("layers.0.mask (torch.float32 on cpu) was not rebuilt")):
        init_weights(model, 0, CPU)
    model = build_model(LLAMA3, 24, "cpu")
    rope = model.layers["0"].attention.rope
    build = rope._precompute_cache
    rope._precompute_cache = lambda: build().to(torch.complex32)
    with pytest.raises(ValueError, match="rope.cache .*complex32.* was not rebuilt in fp32"):
        init_weights(model, 0, CPU)


def test_every_parameter_is_written(monkeypatch: pytest.MonkeyPatch):
    """Memory that ``to_empty`` leaves is poisoned, so that a parameter that is skipped shows."""
    empty = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: empty(*args, **kwargs).fill_(float("nan")))
    for config in ALL.values():
        model = built(config)
        tensors = [*model.parameters(), *model.buffers()]
        assert all(tensor.isfinite().all() for tensor in tensors if not tensor.is_complex())
