"""Sampling: repeatable, bounded by the context, and without traces in the model."""

import pytest
import torch

from models.sample import sample
from tests.models.shapes import GPT2_DROPOUT, LLAMA3, VOCAB, built


def test_seed_decides_and_global_state_is_kept():
    model = built(LLAMA3)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first, again, other = (sample(model, [1, 2], 20, seed=seed) for seed in (3, 3, 4))
    assert first == again != other
    assert len(first) == 20 and all(0 <= token < VOCAB for token in first)
    assert torch.equal(torch.get_rng_state(), state)


def test_greedy_takes_the_likeliest_token():
    model = built(LLAMA3)
    ids = [5, 6]
    for _ in range(6):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert sample(model, [5, 6], 6, temperature=0) == ids[2:]
    assert sample(model, [5, 6], 6, top_k=1, seed=9) == ids[2:]


def test_top_k_draws_from_the_k_likeliest_by_their_probabilities():
    model = built(LLAMA3)
    logits = model(torch.tensor([[5, 6]]))[0, -1] / 0.5
    allowed = logits.topk(3).indices
    drawn = torch.tensor([sample(model, [5, 6], 1, temperature=0.5, top_k=3, seed=seed)[0] for seed in range(400)])
    shares = torch.stack([(drawn == token).float().mean() for token in allowed])
    assert shares.sum() == 1
    # four standard errors
    torch.testing.assert_close(shares, logits[allowed].softmax(0).detach(), rtol=0, atol=4 * 0.5 / 20)


def test_only_the_context_is_in_view():
    model = built(LLAMA3, seq_len=8)
    long = list(range(20))
    assert sample(model, long, 12) == sample(model, long[-8:], 12)
    assert sample(model, long, 12, context=4) == sample(model, long[-4:], 12, context=4)
    assert sample(model, long, 12, context=100) == sample(model, long, 12)


def test_modes_and_gradients_are_left_alone():
    model = built(GPT2_DROPOUT)
    model.layers["1"].eval()
    modes = [module.training for module in model.modules()]
    # dropout is off: two draws agree
    assert sample(model, [1], 8) == sample(model, [1], 8)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(IndexError):
        sample(model, [VOCAB], 1)
    assert [module.training for module in model.modules()] == modes


def test_nothing_to_draw_is_an_empty_list():
    assert sample(built(LLAMA3), [1], 0) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_k": -1}, "top_k=-1"),
        ({"context": 0}, "context=0"),
    ],
)
def test_arguments_are_checked(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        sample(built(LLAMA3), **{"prompt_ids": [1], "num_tokens": 1, **arguments})


def test_rows_beyond_the_tokenizer_are_never_drawn():
    model = built(LLAMA3)
    assert max(sample(model, [1], 40, top_k=0)) >= 8
    assert max(sample(model, [1], 40, top_k=0, vocab_size=8)) < 8
    assert max(sample(model, [1], 40, temperature=0, vocab_size=8)) < 8
