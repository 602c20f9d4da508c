"""Background: a projected layer must give the gradients of W + B P^T at B = 0, and is only worth its code if nothing of
the size of its input is kept for backward and nothing of the size of its weight is made there. A cache of A between
two layers gave wrong gradients under activation checkpointing; hence one autograd function for layers of one input."""

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from torchtitan.models.common.linear import Linear

from memopt import subspace
from memopt.projection import KINDS, Projection, draw_all
from memopt.subspace import SubspaceLinear, convert, groups, two_path_linear
from models.llama3 import SwiGLU

WIDTH, HIDDEN, RANK = 24, 40, 5
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class Fork(nn.Module):
    """``count`` layers of different widths that read one input."""

    reads_one_input = (("layer0", "layer1", "layer2"),)

    def __init__(self, count: int, bias: bool = True) -> None:
        super().__init__()
        self.count = count
        for k in range(count):
            self.add_module(f"layer{k}", nn.Linear(WIDTH, HIDDEN + k, bias=bias))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return subspace.together(x, *[getattr(self, f"layer{k}") for k in range(self.count)])


def swiglu() -> SwiGLU:
    torch.manual_seed(0)
    wide, back = (Linear.Config(in_features=n, out_features=m) for n, m in ((WIDTH, HIDDEN), (HIDDEN, WIDTH)))
    model = SwiGLU.Config(w1=wide, w2=back, w3=wide).build()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def redraw(model: nn.Module, index: int = 0) -> nn.Module:
    draw_all([(group.name, group.projection) for group in groups(model)], 0, index)
    return model


def converted(model: nn.Module, kind: str = "coordinate", rank: int | None = RANK, **options) -> nn.Module:
    convert(model, rank=rank, projection=kind, **options)
    return redraw(model)


def matrix(p: Projection) -> Tensor:
    """P in fp64."""
    return (p.dense() != 0).double() * p.scale if p.kind == "coordinate" else p.values.double()


def random_like(*tensors: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator) for tensor in tensors]


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Outputs and gradients by name, with another gradient for every output."""
    outputs = model(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, random_like(*outputs))
    found = {f"output {k}": output.detach() for k, output in enumerate(outputs)}
    found |= {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return found | ({} if x.grad is None else {"input": x.grad})


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **(tolerance or {"rtol": 0, "atol": 0}), msg=name)


def reference(model: Fork, x: Tensor, two_path: bool) -> dict[str, Tensor]:
    """The same by torch's own derivatives, with B as a leaf: of the two-path form, or of a dense W + B P^T."""
    layers = [getattr(model, f"layer{k}") for k in range(model.count)]
    p = matrix(layers[0].projection)
    x = x.detach().clone().requires_grad_(x.requires_grad)
    leaves, outputs = {}, []
    for k, layer in enumerate(layers):
        b = torch.zeros_like(layer.subspace, requires_grad=True)
        bias = None if layer.bias is None else layer.bias.detach().clone().requires_grad_(layer.bias.requires_grad)
        weight = layer.weight.detach()
        outputs.append(two_path_linear(x, weight, b, p, bias) if two_path else F.linear(x, weight + b @ p.t(), bias))
        leaves |= {f"layer{k}.subspace": b} | ({} if bias is None else {f"layer{k}.bias": bias})
    torch.autograd.backward(outputs, random_like(*outputs))
    found = {f"output {k}": output.detach() for k, output in enumerate(outputs)}
    found |= {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return found | ({} if x.grad is None else {"input": x.grad})


@pytest.mark.parametrize("shape", [(WIDTH,), (6, WIDTH), (2, 3, WIDTH)], ids=str)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_merged_form_is_the_two_path_form(kind: str, count: int, shape: tuple[int, ...]):
    torch.manual_seed(0)
    model = converted(Fork(count).double(), kind)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    found = gradients(model, x)
    for two_path in (True, False):
        assert_same(found, reference(model, x, two_path), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(0, WIDTH), (2, 0, WIDTH)], ids=str)
def test_no_tokens_at_all(shape: tuple[int, ...]):
    """As a layer meets that few tokens, or none, are routed to."""
    model = converted(Fork(2).double())
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert_same(gradients(model, x), reference(model, x, True))


@pytest.mark.parametrize("case", ["no bias", "frozen bias", "frozen input", "frozen subspace", "not contiguous"])
def test_what_needs_no_gradient_gets_none(case: str):
    torch.manual_seed(0)
    model = converted(Fork(2, bias=case != "no bias").double(), "haar")
    x = torch.randn(3, 4, WIDTH, dtype=torch.float64, requires_grad=case != "frozen input")
    if case == "frozen bias":
        model.layer0.bias.requires_grad_(False)
    if case == "not contiguous":
        x = torch.randn(4, WIDTH, 3, dtype=torch.float64).permute(2, 0, 1).requires_grad_()
    expected = reference(model, x, True)
    if case == "frozen subspace":
        model.layer0.subspace.requires_grad_(False)
        del expected["layer0.subspace"]
    assert_same(gradients(model, x), expected, rtol=1e-12, atol=1e-12)


def test_an_output_that_is_not_used_adds_nothing():
    torch.manual_seed(0)
    model = converted(Fork(3).double())
    x = torch.randn(6, WIDTH, dtype=torch.float64, requires_grad=True)
    model(x)[1].sum().backward()
    torch.testing.assert_close(x.grad, model.layer1.weight.sum(0).expand(6, -1), rtol=1e-12, atol=1e-12)
    assert model.layer0.subspace.grad is None or not model.layer0.subspace.grad.any()
    assert model.layer1.subspace.grad.any()


def saved_for_backward(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Tensors that are kept until backward, each storage once, without parameters."""
    known = {parameter.data_ptr() for parameter in model.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in known:
            saved.setdefault(tensor.data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return list(saved.values())


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_r_numbers_a_token_are_saved(kind: str, count: int):
    model = converted(Fork(count), kind)
    x = torch.randn(7, 9, WIDTH, requires_grad=True)
    saved = saved_for_backward(model, x)
    assert [tensor.shape for tensor in saved] == [(7, 9, RANK)]
    assert sum(tensor.nbytes for tensor in saved) == 7 * 9 * RANK * 4
    # whatever else holds it: the memory that is kept is no larger than what is asked of it
    assert saved[0].untyped_storage().nbytes() == saved[0].nbytes


def test_a_swiglu_saves_one_a_for_gate_and_up():
    tokens = 21
    x = torch.randn(3, 7, WIDTH, requires_grad=True)
    dense = sum(tensor.nbytes for tensor in saved_for_backward(swiglu(), x))
    # the input, gate, silu(gate), up and their product
    assert dense == 4 * tokens * (WIDTH + 4 * HIDDEN)
    model = converted(swiglu(), rank=None)
    assert [list(group.layers) for group in groups(model)] == [["w1", "w3"], ["w2"]]
    assert model.w1.projection is model.w3.projection and model.w1.projection is not model.w2.projection
    saved = saved_for_backward(model, x)
    assert sum(tensor.nbytes for tensor in saved) == 4 * tokens * (WIDTH // 4 + 3 * HIDDEN + HIDDEN // 4)
    assert not any(tensor.shape[-1] == WIDTH for tensor in saved)


@pytest.mark.parametrize("patterns", [("w1",), ("w3",), ("w1", "w2"), ("w1", "w3")], ids=str)
def test_a_swiglu_may_be_projected_in_part(patterns: tuple[str, ...]):
    x = torch.randn(6, WIDTH, requires_grad=True)
    expected = gradients(swiglu(), x)
    input_grad, x.grad = x.grad, None
    model = converted(swiglu(), "haar", layers=patterns)
    found = gradients(model, x)
    torch.testing.assert_close(found["output 0"], expected["output 0"])
    torch.testing.assert_close(found["input"], input_grad)
    for name in ("w1", "w2", "w3"):
        layer = getattr(model, name)
        if name in patterns:
            projected = expected[f"{name}.weight"] @ layer.projection.dense()
            torch.testing.assert_close(found[f"{name}.subspace"], projected, rtol=1e-4, atol=1e-4)
        else:
            torch.testing.assert_close(found[f"{name}.weight"], expected[f"{name}.weight"])


class NoDenseGradient(TorchDispatchMode):
    """Fails on a new tensor of the shape of one of the weights, either way round."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        weights = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
        self.sizes = {weight.numel() for weight in weights}
        self.known = {weight.data_ptr() for weight in weights}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, Tensor) and tensor.numel() in self.sizes and tensor.data_ptr() not in self.known:
                raise AssertionError(f"{func} made {tuple(tensor.shape)}")
        return output


@pytest.mark.parametrize("kind", KINDS)
def test_no_dense_gradient_ever_exists(kind: str):
    # no other tensor has as many entries as a weight
    x = torch.randn(7, WIDTH, requires_grad=True)
    for model in (converted(Fork(3), kind), converted(swiglu(), kind, rank=3)):
        outputs = model(x)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        with NoDenseGradient(model):
            torch.autograd.backward(outputs, random_like(*outputs))
        assert all(layer.subspace.grad.any() for layer in model.modules() if isinstance(layer, SubspaceLinear))
    dense = Fork(1)
    (output,) = dense(x)
    with pytest.raises(AssertionError, match="made"), NoDenseGradient(dense):
        output.backward(*random_like(output))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_activation_checkpointing_changes_no_bit(kind: str, reentrant: bool):
    def run(recomputed: bool) -> dict[str, Tensor]:
        model = converted(nn.Sequential(swiglu(), swiglu()), kind)
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(2)).requires_grad_()
        output = x
        for block in model:
            output = checkpoint(block, output, use_reentrant=reentrant) if recomputed else block(output)
        output.backward(*random_like(output))
        found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
        return found | {"output": output.detach(), "input": x.grad}

    assert_same(run(True), run(False))


@pytest.mark.parametrize("kind", ["haar", "coordinate"])
def test_autocast_computes_in_its_type_and_keeps_the_types_of_the_parameters(kind: str):
    torch.manual_seed(0)
    model = converted(Fork(2), kind)
    x = torch.randn(6, WIDTH, requires_grad=True)
    full = gradients(model, x)
    model.zero_grad()
    x.grad = None
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(x)
        expected = [F.linear(x, layer.weight, layer.bias) for layer in (model.layer0, model.layer1)]
        saved = saved_for_backward(model, x)
    assert all(torch.equal(output, wanted) for output, wanted in zip(outputs, expected, strict=True))
    assert [(tensor.shape, tensor.dtype) for tensor in saved] == [((6, RANK), torch.bfloat16)]
    torch.autograd.backward(outputs, [grad.bfloat16() for grad in random_like(*(each.float() for each in outputs))])
    for name, parameter in [*model.named_parameters(), ("input", x)]:
        if parameter.requires_grad:
            assert parameter.grad.dtype == torch.float32
            error = (parameter.grad - full[name]).norm() / full[name].norm()
            assert 0 < error < 0.01, name


@pytest.mark.parametrize("kind", ["haar", "coordinate"])
def test_a_new_subspace_needs_no_new_compilation(kind: str):
    torch._dynamo.reset()
    model = converted(swiglu(), kind)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    seen = []
    for index in range(3):
        redraw(model, index)
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(index)).requires_grad_()
        expected = gradients(model, x)
        model.zero_grad()
        x.grad = None
        found = gradients(compiled, x)
        model.zero_grad()
        assert_same({name.removeprefix("_orig_mod."): value for name, value in found.items()}, expected, **CLOSE)
        seen.append(expected["w1.subspace"])
    assert counter.frame_count == 1
    # the subspaces did differ
    assert not torch.allclose(seen[0], seen[1])


@pytest.mark.parametrize("no_gradient", [torch.no_grad, torch.inference_mode])
def test_without_gradients_no_a_is_computed(no_gradient):
    model = converted(Fork(2), "haar")
    x = torch.randn(6, WIDTH)
    with FlopCounterMode(display=False) as trained:
        outputs = model(x)
    with no_gradient(), FlopCounterMode(display=False) as evaluated:
        same = model(x)
    assert evaluated.get_total_flops() == 2 * 6 * WIDTH * (HIDDEN + HIDDEN + 1)
    assert trained.get_total_flops() == evaluated.get_total_flops() + 2 * 6 * WIDTH * RANK
    assert all(torch.equal(output, other) for output, other in zip(outputs, same, strict=True))


class Decoder(nn.Module):
    """Names and ties as language models have them."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, WIDTH)
        self.layers = nn.ModuleList([Fork(2) for _ in range(2)])
        self.output = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.unembed = nn.Linear(WIDTH, 30, bias=False)
        self.lm_head = nn.Linear(WIDTH, 30, bias=False)
        if tied:
            self.unembed.weight = self.embed.weight


def projected(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, SubspaceLinear)]


IN_LAYERS = [f"layers.{k}.layer{n}" for k in range(2) for n in range(2)]


@pytest.mark.parametrize(
    "patterns, expected",
    [
        ((), [*IN_LAYERS, "unembed"]),
        (("layers.*",), IN_LAYERS),
        (("layers.*.layer1", "layers.0.*"), [*IN_LAYERS[:2], IN_LAYERS[3]]),
        (("lm_head", "layers.1.layer0"), [IN_LAYERS[2], "lm_head"]),
    ],
    ids=str,
)
def test_which_layers_are_chosen(patterns: tuple[str, ...], expected: list[str]):
    model = Decoder()
    assert convert(model, rank=RANK, layers=patterns) == []
    assert projected(model) == expected
    assert {name for group in groups(model) for name in group.layers} == set(expected)


def test_heads_of_a_block_and_tied_weights():
    tied = Decoder(tied=True)
    convert(tied, rank=RANK)
    assert projected(tied) == IN_LAYERS
    # the output of an attention is called as a head is
    nested = nn.ModuleDict({"block": Decoder()})
    convert(nested, rank=RANK)
    assert projected(nested)[-3:] == ["block.output", "block.unembed", "block.lm_head"]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"layers": ["block.*"]}, "'block.\\*' of projected layers matches no module"),
        ({"layers": ["layers.*", "blocks"]}, "'blocks' of projected layers matches no module"),
        ({"layers": ["norm"]}, "'norm' of projected layers matches LayerNorm modules only"),
        ({"layers": ["unembed"]}, "embed.weight and unembed.weight are one tied weight"),
        ({"layers": ["*"]}, "cannot be projected: .* are one tied weight"),
        ({"rank": 0}, "rank=0 must be a whole number"),
        ({"rank": -3}, "rank=-3 must be a whole number"),
        ({"rank": 2.5}, "rank=2.5 must be a whole number"),
        ({"rank": "8"}, "rank='8' must be a whole number"),
        ({"rank": True}, "rank=True must be a whole number"),
        ({"projection": "wavelet"}, "projection='wavelet' is not one of"),
    ],
    ids=str,
)
def test_settings_that_cannot_work(options: dict, words: str):
    model = Decoder(tied=True)
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=words):
        convert(model, **options)
    assert projected(model) == [] and dict(model.named_parameters()).keys() == before.keys()
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_type_that_steps_cannot_be_merged_into_changes_nothing():
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, 8).half())
    with pytest.raises(ValueError, match="1.weight is torch.float16"):
        convert(model, rank=RANK)
    assert projected(model) == [] and model[0].weight.requires_grad


def test_a_model_is_converted_once():
    model = Decoder()
    convert(model, layers=["layers.0.*"])
    with pytest.raises(ValueError, match="layers.0.layer0 is a projected layer already. Convert a model once"):
        convert(model, layers=["layers.1.*"])
    assert projected(model) == IN_LAYERS[:2]


def test_rank_and_layers_that_stay_dense():
    model = nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 3), nn.Linear(1, 7))
    assert convert(model) == ["2"]
    # a quarter of the width, rounded up
    assert [group.projection.rank for group in groups(model)] == [3, 1]
    model = nn.ModuleDict({"fork": Fork(2), "narrow": nn.Linear(8, 3), "wide": nn.Linear(50, 3)})
    assert convert(model, rank=WIDTH) == ["fork.layer0", "fork.layer1", "narrow"]
    assert projected(model) == ["wide"] and model.fork.layer0.weight.requires_grad
    for rank, dense in ((7, []), (8, ["0"])):
        assert convert(nn.Sequential(nn.Linear(8, 3)), rank=rank) == dense


class Labelled(nn.Linear):
    """A linear layer of another library."""

    label = "mine"


def test_a_converted_module_is_the_one_it_was():
    layer = Labelled(WIDTH, HIDDEN, dtype=torch.bfloat16)
    model = nn.Sequential(layer, nn.Tanh())
    called = []
    layer.register_forward_pre_hook(lambda *_: called.append("before"))
    layer.register_forward_hook(lambda *_: called.append("after"))
    layer.register_full_backward_hook(lambda *_: called.append("backward"))
    weight, bias, values = layer.weight, layer.bias, layer.weight.detach().clone()
    state = model.state_dict()
    converted(model, "haar", dtype=torch.bfloat16)
    assert model[0] is layer and isinstance(layer, Labelled) and isinstance(layer, nn.Linear) and layer.label == "mine"
    assert layer.weight is weight and layer.bias is bias and torch.equal(layer.weight, values)
    assert not weight.requires_grad and bias.requires_grad
    assert list(model.state_dict()) == list(state)
    assert layer.subspace.shape == (HIDDEN, RANK) and layer.subspace.dtype == torch.bfloat16
    assert not layer.subspace.any() and layer.subspace.requires_grad
    assert layer.projection.values.dtype == torch.bfloat16
    model(torch.randn(3, WIDTH, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    assert called == ["before", "after", "backward"]


def test_layers_with_their_own_inputs_have_their_own_projections():
    model = converted(nn.ModuleDict({"a": nn.Linear(WIDTH, 8), "b": nn.Linear(WIDTH, 8), "fork": Fork(3)}))
    assert [list(group.layers) for group in groups(model)] == [["a"], ["b"], [f"fork.layer{k}" for k in range(3)]]
    assert [group.name for group in groups(model)] == ["a", "b", "fork.layer0"]
    assert not torch.equal(model.a.projection.values, model.b.projection.values)
    # read together, they keep one A each
    x = torch.randn(6, WIDTH)
    outputs = subspace.together(x, model.a, model.b)
    grads = random_like(*outputs)
    torch.autograd.backward(outputs, grads)
    for layer, output, grad in zip((model.a, model.b), outputs, grads, strict=True):
        assert torch.equal(output, layer(x))
        torch.testing.assert_close(layer.subspace.grad, grad.t() @ x @ layer.projection.dense())


def test_a_layer_that_is_read_without_being_called_trains():
    """torch's attention multiplies by the weight of its output layer itself, so that B of that layer has no gradient
    and W none either: it must stay dense."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(WIDTH, 2, HIDDEN, dropout=0.0)
    converted(model)
    model(torch.randn(5, 2, WIDTH)).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    assert model.linear1.subspace.grad.any()


class Doubled(nn.Linear):
    """A linear layer that is more than one."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_a_layer_of_its_own_forward_keeps_its_values():
    model = nn.Sequential(Doubled(WIDTH, 8), nn.Linear(8, 8))
    x = torch.randn(6, WIDTH)
    before = model(x)
    convert(model, rank=RANK)
    assert torch.equal(model(x), before)


def test_a_weight_that_is_computed_is_not_chosen():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 8)), nn.Linear(8, 8))
    convert(model, rank=RANK)
    assert projected(model) == ["1"]
