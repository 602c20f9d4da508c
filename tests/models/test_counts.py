"""Parameter and FLOP counts: against the model itself, against hand counts, against torch's own counter."""

import re
from pathlib import Path

import pytest
from torch.utils.flop_counter import FlopCounterMode

from conf.compose import load_config
from conf.schema import ModelConfig
from models.build import build_model
from models.counts import count_parameters, flops_per_token
from tests.models.shapes import ALL, batch, built

FOLDER = Path(__file__).parents[2] / "conf" / "model"
CHOICES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
SHAPES = {
    "llama3_debug", "llama3_20m", "llama3_60m", "llama3_130m", "llama3_350m", "llama3_1b", "llama3_1_5b", "llama3_8b",
    "llama3_70b", "gpt2_debug", "gpt2_124m", "gpt2_355m", "gpt2_774m", "gpt2_1_5b",
}  # fmt: skip


def test_every_shape_is_there():
    assert set(CHOICES) >= SHAPES


@pytest.mark.parametrize("choice", CHOICES)
def test_count_is_exact_for_every_shape(choice: str):
    config = load_config([f"model={choice}"]).model
    model = build_model(config, 64, "cpu")
    assert config.name == choice
    held = sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters(config) == held
    stated = re.search(r"^# Parameters: ([\d,]+)$", (FOLDER / f"{choice}.yaml").read_text(), re.MULTILINE)
    assert stated and int(stated[1].replace(",", "")) == held


@pytest.mark.parametrize(
    ("choice", "published"),
    # GaLore's 60M to 1B; Llama 3 8B and 70B; GPT-2's four sizes, from their model cards and papers
    [
        ("llama3_60m", 58.07e6), ("llama3_130m", 134.11e6), ("llama3_350m", 367.97e6), ("llama3_1b", 1339.08e6),
        ("llama3_8b", 8.03e9), ("llama3_70b", 70.55e9), ("gpt2_124m", 124.44e6), ("gpt2_355m", 354.82e6),
        ("gpt2_774m", 774.03e6), ("gpt2_1_5b", 1557.61e6),
    ],
)  # fmt: skip
def test_count_is_the_published_one(choice: str, published: float):
    assert count_parameters(load_config([f"model={choice}"]).model) == pytest.approx(published, rel=1e-3)


def test_debug_shapes_have_four_to_six_million_parameters():
    for choice in ("llama3_debug", "gpt2_debug"):
        assert 4e6 < count_parameters(load_config([f"model={choice}"]).model) < 6e6


# by hand for dim 64, 2 layers, 8 heads of 8, hidden 100, vocabulary 50, forward:
# qkv 2*64*(64 + 2*8*kv), out 2*64*64, feed-forward 3*2*64*100, head 2*64*50, attention 2 * (2 * T * 64) / 2
@pytest.mark.parametrize(("kv_heads", "qkv"), [(None, 24576), (8, 24576), (2, 12288), (1, 10240)])
@pytest.mark.parametrize(("seq_len", "attention"), [(32, 4096), (4096, 524288)])
def test_flops_by_hand(kv_heads: int | None, qkv: int, seq_len: int, attention: int):
    config = ModelConfig(dim=64, layers=2, heads=8, kv_heads=kv_heads, hidden=100, vocab_size=50, max_seq_len=4096)
    forward = 2 * (qkv + 8192 + 38400 + attention) + 6400
    assert flops_per_token(config, seq_len) == 3 * forward


def test_flops_of_gpt2_by_hand():
    config = ModelConfig(
        family="gpt2", dim=64, layers=2, heads=8, hidden=100, vocab_size=50, max_seq_len=4096, tied=True
    )
    # qkv 24576, out 8192, feed-forward 2 * 2*64*100 = 25600, attention at 32 tokens 4096, tied head 6400
    assert flops_per_token(config, 32) == 3 * (2 * (24576 + 8192 + 25600 + 4096) + 6400)


@pytest.mark.parametrize("key", ["llama3", "llama3_tied", "gpt2"])
def test_flops_agree_with_torchs_counter(key: str):
    """torch counts the matrix products that really run, but neither CPU attention nor the head's ``addmm_``."""
    config, (tokens, labels) = ALL[key], batch()
    model = built(config)
    with FlopCounterMode(display=False) as counter:
        model(tokens, labels).backward()
    head_weight = 2 * config.dim * config.vocab_size
    attention = 3 * config.layers * 2 * tokens.shape[1] * config.dim
    counted = counter.get_total_flops() // tokens.numel()
    assert flops_per_token(config, tokens.shape[1]) == counted + head_weight + attention
