"""Canonical parameter names."""

import pytest
import torch
from torch import nn
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from models.names import canonical_name, named_parameters
from tests.models.shapes import ALL, GPT2, LLAMA3, batch, built


@pytest.mark.parametrize(
    ("wrapped", "canonical"),
    [
        ("layers.0.attention.wo.weight", "layers.0.attention.wo.weight"),
        ("layers.0._checkpoint_wrapped_module.attention.wo.weight", "layers.0.attention.wo.weight"),
        ("_orig_mod.layers.0.attention.wo.weight", "layers.0.attention.wo.weight"),
        ("module.layers.11._orig_mod._checkpoint_wrapped_module.ffn_norm.weight", "layers.11.ffn_norm.weight"),
    ],
)
def test_wrappers_are_stripped(wrapped: str, canonical: str):
    assert canonical_name(wrapped) == canonical


@pytest.mark.parametrize("policy", [FullAC, SelectiveAC])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("key", ["llama3", "gpt2"])
def test_names_do_not_depend_on_checkpointing_or_compile(key: str, policy: type, compiled: bool):
    plain, model = built(ALL[key]), built(ALL[key])
    policy.Config().build().apply(model)
    if compiled:
        for layer in model.layers.values():
            layer.compile(backend="eager")
    assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_parameters())
    assert list(named_parameters(model)) == list(named_parameters(plain)) == [n for n, _ in plain.named_parameters()]
    assert list(named_parameters(torch.compile(model, backend="eager"))) == list(named_parameters(plain))


def test_compiled_blocks_give_the_same_loss():
    for config in (LLAMA3, GPT2):
        plain, model = built(config), built(config)
        FullAC.Config().build().apply(model)
        for layer in model.layers.values():
            layer.compile(backend="aot_eager", fullgraph=True)
        expected, loss = plain(*batch()), model(*batch())
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        for name, parameter in named_parameters(model).items():
            torch.testing.assert_close(parameter.grad, named_parameters(plain)[name].grad, rtol=1e-4, atol=1e-5)


def test_a_tied_parameter_has_one_name():
    names = named_parameters(built(GPT2))
    assert "tok_embeddings.weight" in names and "lm_head.weight" not in names
    assert len({id(parameter) for parameter in names.values()}) == len(names)


def test_two_parameters_with_one_name_are_refused():
    model = nn.ModuleDict({"a": nn.Linear(2, 2)})
    model["a"].add_module("_orig_mod", nn.Linear(2, 2))
    with pytest.raises(ValueError, match="two parameters are called a.weight"):
        named_parameters(model)
