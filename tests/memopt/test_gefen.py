"""Gefen as a library: what a user of ``torch.optim.AdamW`` does with an optimizer, on plain tensors in one process."""

import copy
import io

import pytest
import torch
from torch import nn

from memopt import Gefen
from memopt.gefen_options import GefenOptions

BETAS = (0.9, 0.95)


def named_parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "wide": (6, 48),
        "tall": (40, 8),
        "one": (1, 1),
        "prime": (5, 13),
        "vector": (7,),
        "scalar": (),
        "cube": (4, 3, 2, 2),
    }
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()}


def set_gradients(parameters: dict[str, nn.Parameter], step: int) -> None:
    """Gradients whose columns and rows differ in size, so that sharing a second moment is not exact."""
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters.values():
        grad = torch.randn(parameter.shape, generator=generator)
        if grad.ndim:
            grad = grad * torch.linspace(0.1, 2, len(grad)).view(-1, *[1] * (grad.ndim - 1))
        parameter.grad = (grad * 0.01).to(parameter.dtype)


def train(optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter], first: int, last: int) -> None:
    for step in range(first, last):
        set_gradients(parameters, step)
        optimizer.step()


def test_a_second_moment_per_entry_and_fp32_momentum_is_adamw():
    ours, theirs = named_parameters(), named_parameters()
    settings = {"lr": 0.01, "betas": BETAS, "weight_decay": 0.1}
    train(
        Gefen(ours.items(), partition="fixed", block=1, second_moment="block", momentum="fp32", **settings), ours, 0, 20
    )
    train(torch.optim.AdamW(theirs.values(), **settings), theirs, 0, 20)
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("block", [48, 12])
@pytest.mark.parametrize("factored", [False, True])
def test_the_formula_in_fp64(block: int, factored: bool):
    """v of a block times c_j / (mean of c over the block), by hand; momentum in fp32, so that nothing is rounded."""
    weight = named_parameters()["wide"]
    expected, lr, decay, eps = weight.detach().double(), 0.01, 0.1, 1e-8
    kind = "factored" if factored else "block"
    optimizer = Gefen(
        [weight], lr, BETAS, eps, decay, partition="fixed", block=block, second_moment=kind, momentum="fp32"
    )
    m, v, c = torch.zeros(6, 48), torch.zeros(6, 48 // block), torch.zeros(48)
    m, v, c = m.double(), v.double(), c.double()
    for step in range(1, 11):
        grads = {"wide": weight}
        set_gradients(grads, step)
        g = weight.grad.double()
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        v = BETAS[1] * v + (1 - BETAS[1]) * g.square().view(6, -1, block).mean(-1)
        c = BETAS[1] * c + (1 - BETAS[1]) * g.square().mean(0)
        shape = (
            c.view(-1, block) / c.view(-1, block).mean(1, keepdim=True) if factored else torch.ones(48 // block, block)
        )
        v_ij = (v[:, :, None] * shape).view(6, 48) / (1 - BETAS[1] ** step)
        root = v_ij.sqrt() + eps * (shape.sqrt().view(-1) if factored else 1)
        expected = expected * (1 - lr * decay) - lr * m / (1 - BETAS[0] ** step) / root
        optimizer.step()
    torch.testing.assert_close(weight.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("second_moment", ["block", "factored"])
def test_eight_bits_stay_near_fp32(second_moment: str):
    coded, exact = named_parameters(), named_parameters()
    start = copy.deepcopy(exact)
    for momentum, parameters in (("8bit", coded), ("fp32", exact)):
        train(Gefen(parameters.items(), 0.01, BETAS, second_moment=second_moment, momentum=momentum), parameters, 0, 30)
    for name in ("wide", "tall", "cube"):
        moved = (exact[name] - start[name]).abs().mean()
        assert (coded[name] - exact[name]).abs().mean() < 0.02 * moved, name
        assert not torch.equal(coded[name], exact[name])


def test_state_is_what_it_says_and_every_byte_is_counted():
    parameters = named_parameters()
    optimizer = Gefen(parameters.items())
    before = {name: parameter.clone() for name, parameter in parameters.items()}
    torch.manual_seed(3)
    expected_draw = torch.rand(1)
    torch.manual_seed(3)
    optimizer.init_state()
    assert torch.equal(torch.rand(1), expected_draw)
    assert all(torch.equal(parameter, before[name]) for name, parameter in parameters.items())
    assert optimizer.state_is_final
    predicted = optimizer.state_bytes()
    train(optimizer, parameters, 0, 2)
    held = {value.data_ptr(): value for state in optimizer.state.values() for value in state.values()}
    table = optimizer._codebooks[torch.device("cpu")].codes
    assert predicted == optimizer.state_bytes() == sum(tensor.nbytes for tensor in held.values()) + table.nbytes
    kinds = {key: value.dtype for key, value in optimizer.state[parameters["wide"]].items()}
    assert kinds == {
        "codes": torch.uint8, "scale": torch.float32, "v": torch.float32, "column": torch.float32,
        "levels": torch.float32, "period": torch.int64, "step": torch.int64,
    }  # fmt: skip
    assert optimizer.state[parameters["wide"]]["step"] == 2


def test_an_undecided_period_is_bounded_first_and_exact_later():
    parameters = {"matrix": nn.Parameter(torch.zeros(4, 768))}
    optimizer = Gefen(parameters.items(), partition="paper")
    assert not optimizer.state_is_final
    bound = optimizer.state_bytes()
    optimizer.step()
    parameters["matrix"].grad = torch.zeros(4, 768)
    optimizer.step()
    assert not optimizer.state_is_final, "a gradient of zeros decides nothing"
    assert not optimizer.state[parameters["matrix"]]["levels"].any()
    parameters["matrix"].grad = planted(4, 768, 24)
    optimizer.step()
    assert optimizer.state_is_final and optimizer.state[parameters["matrix"]]["period"] == 24
    assert optimizer.state_bytes() < bound
    assert optimizer.state[parameters["matrix"]]["v"].shape == (4, 32)
    assert optimizer.state[parameters["matrix"]]["levels"].any()


def planted(rows: int, columns: int, period: int) -> torch.Tensor:
    """Gradients of one size in each block of ``period``, neighbouring blocks differing."""
    generator = torch.Generator().manual_seed(5)
    sizes = 0.1 + torch.rand(rows, columns // period, generator=generator)
    signs = torch.randint(0, 2, (rows, columns), generator=generator) * 2 - 1
    return sizes.repeat_interleave(period, dim=1) * signs


@pytest.mark.parametrize("partition", ["row", "paper"])
def test_a_state_dict_goes_round_exactly(partition: str):
    """Codes must stay bytes: torch's own ``load_state_dict`` casts them to the parameter's type."""
    dtype = torch.bfloat16
    whole, half = named_parameters(dtype), named_parameters(dtype)
    settings = {"lr": 0.01, "betas": BETAS, "partition": partition}
    unbroken, first = Gefen(whole.items(), **settings), Gefen(half.items(), **settings)
    train(unbroken, whole, 0, 12)
    train(first, half, 0, 6)
    stream = io.BytesIO()
    torch.save(first.state_dict(), stream)
    stream.seek(0)
    second = Gefen(half.items(), lr=1.0, betas=(0.5, 0.5), partition=partition)
    second.load_state_dict(torch.load(stream, weights_only=True))
    assert second.param_groups[0]["betas"] == BETAS
    for parameter, state in first.state.items():
        for key, value in state.items():
            assert second.state[parameter][key].dtype == value.dtype
            assert torch.equal(second.state[parameter][key], value)
            assert second.state[parameter][key].data_ptr() != value.data_ptr()
    train(second, half, 6, 12)
    for name in whole:
        assert torch.equal(whole[name], half[name]), name
    assert second.state_bytes() == unbroken.state_bytes()


def test_a_state_that_does_not_fit_changes_nothing():
    parameters = named_parameters()
    optimizer = Gefen(parameters.items(), 0.01)
    train(optimizer, parameters, 0, 3)
    before = copy.deepcopy(optimizer.state_dict())
    for name, damage, message in (
        ("lacks", lambda state: state.pop("scale"), "wide lacks scale"),
        ("extra", lambda state: state.update(momentum=torch.zeros(6, 48)), "wide has momentum, which"),
        (
            "type",
            lambda state: state.update(codes=state["codes"].float()),
            r"wide has codes as \(6, 48\) torch.float32",
        ),
        ("shape", lambda state: state.update(v=torch.zeros(6, 5)), r"wide has v as \(6, 5\)"),
        ("period", lambda state: state.update(period=torch.tensor(7)), "wide"),
        ("no levels", lambda state: state.pop("levels"), "wide has no levels"),
        ("levels", lambda state: state.update(levels=torch.zeros(16)), r"wide has levels of shape \(16,\).*levels=256"),
    ):
        saved = copy.deepcopy(before)
        damage(saved["state"][0])
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(saved)
        after = optimizer.state_dict()
        for index, state in before["state"].items():
            assert all(torch.equal(after["state"][index][key], value) for key, value in state.items()), name
    saved = copy.deepcopy(before)
    saved["param_groups"][0]["params"] = [0, 1]
    with pytest.raises(ValueError, match="groups of"):
        optimizer.load_state_dict(saved)


def test_a_state_of_no_step_takes_back_to_the_start():
    parameters, fresh = named_parameters(), named_parameters()
    optimizer = Gefen(parameters.items(), 0.01)
    untrained = copy.deepcopy(optimizer.state_dict())
    train(optimizer, parameters, 0, 3)
    optimizer.load_state_dict(untrained)
    assert not optimizer.state
    for name, parameter in parameters.items():
        parameter.data.copy_(fresh[name])
    train(optimizer, parameters, 5, 7)
    expected = Gefen(fresh.items(), 0.01)
    train(expected, fresh, 5, 7)
    assert all(torch.equal(parameters[name], fresh[name]) for name in fresh)
    assert optimizer.state[parameters["wide"]]["step"] == 2


def test_schedulers_closures_groups_and_copies():
    parameters = named_parameters()
    matrices = [parameter for parameter in parameters.values() if parameter.ndim > 1]
    rest = [parameter for parameter in parameters.values() if parameter.ndim < 2]
    optimizer = Gefen([{"params": matrices, "weight_decay": 0.1}], lr=0.1)
    optimizer.add_param_group({"params": rest, "weight_decay": 0.0, "lr": 0.2})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum(parameter.square().sum() for parameter in parameters.values())
        loss.backward()
        return loss

    values = []
    for _ in range(4):
        values.append(optimizer.step(closure).item())
        scheduler.step()
    assert values == sorted(values, reverse=True)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1 / 16, 0.2 / 16]
    other, theirs = copy.deepcopy((optimizer, parameters))
    set_gradients(parameters, 0), set_gradients(theirs, 0)
    optimizer.step(), other.step()
    assert all(torch.equal(parameters[name], theirs[name]) for name in parameters)
    assert other.state[theirs["wide"]]["codes"].data_ptr() != optimizer.state[parameters["wide"]]["codes"].data_ptr()


def test_parameters_come_and_go():
    """No gradient: nothing moves, not even by decay. A parameter that is frozen for a while keeps its own state."""
    parameters = named_parameters()
    optimizer = Gefen(parameters.items(), 0.01, weight_decay=0.5)
    parameters["wide"].requires_grad_(False)
    optimizer.init_state()
    assert parameters["wide"] not in optimizer.state or not optimizer.state[parameters["wide"]]
    before = parameters["wide"].clone()
    for step in range(3):
        set_gradients(parameters, step)
        parameters["wide"].grad = None
        optimizer.step()
    assert torch.equal(parameters["wide"], before)
    parameters["wide"].requires_grad_(True)
    train(optimizer, parameters, 3, 5)
    assert optimizer.state[parameters["wide"]]["step"] == 2 and optimizer.state[parameters["tall"]]["step"] == 5
    first_codebook = optimizer.state[parameters["tall"]]["levels"]
    assert torch.equal(optimizer.state[parameters["wide"]]["levels"], first_codebook)


def test_a_tied_weight_is_one_parameter():
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20, bias=False))
    model[1].weight = model[0].weight
    optimizer = Gefen(model.named_parameters())
    model[1](model[0](torch.arange(5))).sum().backward()
    optimizer.step()
    assert len(optimizer.state) == 1 and optimizer.state[model[0].weight]["codes"].shape == (20, 16)


def test_zero_gradients_stay_zero_and_finite():
    """All-zero rows, columns and matrices; later the same weights do get gradients."""
    weight = nn.Parameter(torch.randn(6, 32))
    dead = nn.Parameter(torch.ones(4, 8))
    optimizer = Gefen([("weight", weight), ("dead", dead)], 0.01, weight_decay=0.0)
    start = weight.detach().clone()
    for step in range(40):
        generator = torch.Generator().manual_seed(step)
        weight.grad = torch.randn(6, 32, generator=generator)
        weight.grad[2] = 0
        weight.grad[:, 5] = 0
        dead.grad = torch.zeros(4, 8)
        optimizer.step()
    assert torch.equal(weight[2], start[2]) and torch.equal(weight[:, 5], start[:, 5])
    assert torch.equal(dead, torch.ones(4, 8))
    assert not optimizer.state[dead]["scale"].any()
    weight.grad, dead.grad = torch.ones(6, 32), torch.ones(4, 8)
    optimizer.step()
    assert weight.isfinite().all() and dead.isfinite().all()
    # the first gradient of an entry moves it by about lr, as Adam's does
    assert 0 < (dead - 1).abs().max() <= 0.011


@pytest.mark.parametrize(
    "settings", [{}, {"second_moment": "block"}, {"partition": "paper"}, {"partition": "peaks"}], ids=str
)
def test_gradients_of_rank_one_and_of_one_token(settings: dict):
    """A text of one repeated token: most rows of the embedding have no gradient, all others the same direction."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 16), nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 12))
    optimizer = Gefen(model.named_parameters(), 0.05, **settings)
    tokens, losses = torch.full((8,), 3), []
    for _ in range(10):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
    assert all(value.isfinite().all() for state in optimizer.state.values() for value in state.values())


@pytest.mark.parametrize("second_moment", ["block", "factored"])
def test_a_column_that_dies_does_not_blow_up(second_moment: str):
    """Its second moment fades away while a coded momentum cannot fade below a level: the update must not grow."""
    weight = nn.Parameter(torch.zeros(8, 64))
    optimizer = Gefen([weight], 1.0, BETAS, weight_decay=0.0, second_moment=second_moment)
    for step in range(2000):
        generator = torch.Generator().manual_seed(step)
        weight.grad = torch.randn(8, 64, generator=generator)
        if step > 20:
            weight.grad[:, 7] = 0
        before = weight.detach().clone()
        optimizer.step()
        moved = (weight - before)[:, 7].abs().max().item()
    assert moved < 0.2, moved


def test_blocks_that_are_not_finite_are_left_alone_and_counted():
    parameters = named_parameters()
    optimizer = Gefen(parameters.items(), 0.01)
    train(optimizer, parameters, 0, 3)
    optimizer.gauges()
    weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    states = copy.deepcopy(optimizer.state_dict()["state"])
    set_gradients(parameters, 3)
    parameters["wide"].grad[1, 4] = float("nan")
    parameters["tall"].grad[5, 0] = float("inf")
    parameters["vector"].grad[2] = float("nan")
    optimizer.step()
    assert torch.equal(parameters["wide"][1], weights["wide"][1])
    assert not torch.equal(parameters["wide"][2], weights["wide"][2])
    assert parameters["vector"][2] == weights["vector"][2] and parameters["vector"][1] != weights["vector"][1]
    for key in ("codes", "scale", "v"):
        assert torch.equal(optimizer.state[parameters["wide"]][key][1], states[0][key][1]), key
    assert all(value.isfinite().all() for state in optimizer.state.values() for value in state.values())
    assert optimizer.gauges()["nonfinite_blocks"] == 2
    assert optimizer.gauges()["nonfinite_blocks"] == 0


def test_the_largest_update_is_reported_and_can_be_cut():
    weight = nn.Parameter(torch.zeros(16, 16))
    for limit, reached in ((None, 4.0), (1.5, 1.5)):
        optimizer = Gefen([weight], 1.0, weight_decay=0.0, max_update=limit)
        weight.data.zero_()
        weight.grad = torch.eye(16)
        optimizer.step()
        # a diagonal gradient gives sqrt(n) times Adam's step
        assert weight.abs().max().item() == pytest.approx(reached, rel=1e-5)
        assert optimizer.gauges()["max_update"] == pytest.approx(reached, rel=1e-5)


def test_layouts_of_memory_do_not_matter():
    straight, turned = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.empty(8, 6).t())
    turned.data.copy_(straight.data)
    pair = Gefen([straight], 0.01), Gefen([turned], 0.01)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        grad = torch.randn(8, 6, generator=generator).t()
        straight.grad, turned.grad = grad.contiguous(), grad
        pair[0].step(), pair[1].step()
    assert not turned.is_contiguous() and torch.equal(straight, turned)


def test_weights_moved_to_other_memory_are_still_the_ones_trained():
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = Gefen([weight], 0.1)
    for _ in range(2):
        weight.data = weight.data.clone()
        weight.grad = torch.ones(4, 4)
        before = weight.detach().clone()
        optimizer.step()
        assert (weight < before).all()


def test_a_compiled_model_trains():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = Gefen(compiled.named_parameters(), 0.01)
    inputs = torch.randn(32, 8)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (compiled(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_periods_and_codebook_found_anew_keep_the_state():
    """At a refresh momentum and second moment of every entry stay what they were, up to a level of the codes."""
    weight = nn.Parameter(torch.zeros(6, 96))
    optimizer = Gefen([weight], 0.0, partition="paper", refresh=4, drift_interval=2, second_moment="block")
    for period in (24, 24, 24, 12):
        weight.grad = planted(6, 96, period)
        if period == 12:
            codes, scale, v, levels = (
                optimizer.state[weight][key].clone() for key in ("codes", "scale", "v", "levels")
            )
        optimizer.step()
    state = optimizer.state[weight]
    assert state["period"] == 12 and state["v"].shape == (6, 8)
    assert optimizer.gauges()["period_agreement"] == 0.0
    expected_v = 0.999 * v.repeat_interleave(2, 1) + 0.001 * weight.grad.square().view(6, 8, 12).mean(-1)
    torch.testing.assert_close(state["v"], expected_v)
    before = (levels[codes.int()].view(6, 4, 24) * scale[..., None]).view(6, 96)
    expected = 0.9 * before + 0.1 * weight.grad
    now = (state["levels"][state["codes"].int()].view(6, 8, 12) * state["scale"][..., None]).view(6, 96)
    assert (now - expected).abs().max() < 0.03 * expected.abs().max()


def test_drift_is_measured_but_not_acted_on():
    weight = nn.Parameter(torch.zeros(6, 96))
    optimizer = Gefen([weight], 0.0, partition="paper", drift_interval=2)
    for period, agreement in ((24, None), (24, 1.0), (12, 1.0), (12, 0.0)):
        weight.grad = planted(6, 96, period)
        optimizer.step()
        assert optimizer.gauges()["period_agreement"] == agreement
    assert optimizer.state[weight]["period"] == 24


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"lr": -1.0}, "lr=-1.0 must be a number >= 0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\) must be two numbers in \[0, 1\)"),
        ({"eps": -1e-8}, "eps=-1e-08"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"partition": "columns"}, "partition='columns' is not one of row"),
        ({"second_moment": "full"}, "second_moment='full' is not one of block, factored"),
        ({"momentum": "4bit"}, "momentum='4bit'"),
        ({"levels": 100}, "levels=100 is not a power of two"),
        ({"levels": 512}, "levels=512"),
        ({"partition": "fixed", "block": 5}, "block=5 does not divide the rows of wide, which have 48"),
        ({"partition": "fixed"}, "block"),
        ({"block": 4}, "block=4"),
        ({"max_update": 0.0}, "max_update=0.0"),
        ({"refresh": -1}, "refresh=-1"),
        ({"backend": "cuda"}, "backend='cuda'"),
    ],
)
def test_settings_that_cannot_work(settings: dict, message: str):
    weight = {"wide": nn.Parameter(torch.zeros(6, 48))}
    with pytest.raises(ValueError, match=message):
        Gefen(weight.items(), **settings)


def test_an_unknown_option_and_parameters_that_cannot_be_trained():
    with pytest.raises(TypeError, match="no option foreach; it has partition, block"):
        Gefen([nn.Parameter(torch.zeros(2, 2))], foreach=True)
    with pytest.raises(ValueError, match=r"ids is torch.int64"):
        Gefen([("ids", torch.zeros(2, 2, dtype=torch.int64))])
    table = nn.Embedding(6, 4, sparse=True)
    optimizer = Gefen(table.named_parameters())
    before = table.weight.detach().clone()
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="gradient of weight is sparse"):
        optimizer.step()
    assert torch.equal(table.weight, before) and not optimizer.state


def test_defaults_are_those_of_the_configuration():
    import dataclasses

    from conf.optimizers import GefenConfig

    ours = {field.name: field.default for field in dataclasses.fields(GefenOptions)}
    theirs = {field.name: field.default for field in dataclasses.fields(GefenConfig)}
    assert ours.items() <= theirs.items()
