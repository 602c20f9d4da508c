"""Background: the merged form has a B that is never stored and weights that change at every step, which no formula of
the paper names. It must be the plain algorithm: W + B P^T trained by torch's own optimizer on B, merged at the end of
every subspace. And nothing may depend on the number of ranks: each has its rows of gradients, weights and state."""

import math

import pytest
import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from memopt.projection import draw
from memopt.rso import RSO
from memopt.subspace import groups, two_path_linear
from tests.spawn import run_ranks

PROJECTED = {"first": 3, "second": 4}
STEPS, INTERVAL, SEED = 7, 3, 5
LR, DECAY = 0.02, 0.3


class Net(nn.Module):
    """Two layers to project, and of what stays dense a matrix, a norm and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(9, 13)
        self.second = nn.Linear(13, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.second(torch.tanh(self.first(x)))))


def build_dense() -> Net:
    torch.manual_seed(0)
    return Net().double()


def build(kind: str = "coordinate") -> Net:
    model = build_dense()
    for name, rank in PROJECTED.items():
        # each of its own rank
        RSO.convert(nn.ModuleDict({name: getattr(model, name)}), rank=rank, projection=kind)
    return model


def loss_of(model, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    inputs, targets = (torch.randn(8, size, generator=generator, dtype=torch.float64) for size in (9, 4))
    return (model(inputs) - targets).square().mean()


def rate(step: int) -> float:
    """A schedule that never repeats a value."""
    return LR / (1 + 0.1 * step)


def train(model: nn.Module, optimizer: RSO, first: int = 0, last: int = STEPS) -> list[float]:
    losses = []
    for step in range(first, last):
        optimizer.set_lr(rate(step))
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    named = {name: parameter for name, parameter in model.named_parameters() if not name.endswith("subspace")}
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in named.items()}


def matrix(kind: str, width: int, rank: int, name: str, index: int) -> Tensor:
    """P (in, r) in fp64 from its key alone."""
    values = draw(kind, width, rank, SEED, name, index)
    if values.dtype != torch.int64:
        return values.double()
    return math.sqrt(width / rank) * F.one_hot(values, width).t().double()


class TwoPath:
    """The algorithm as it is written: W stands still within a subspace, torch's AdamW trains B, then W <- W + B P^T."""

    def __init__(self, kind: str, *, reset=True, lr_scale=1.0, warmup=0, decayed=(*PROJECTED, "head")) -> None:
        self.kind, self.reset, self.lr_scale, self.warmup, self.decayed = kind, reset, lr_scale, warmup, decayed
        self.net = build()
        self.b = {name: torch.zeros_like(getattr(self.net, name).subspace) for name in PROJECTED}
        for b in self.b.values():
            b.requires_grad_()
        rest = {name: p for name, p in self.net.named_parameters() if p.requires_grad and "subspace" not in name}
        matrices = [p for name, p in rest.items() if name.removesuffix(".weight") in decayed]
        others = [p for name, p in rest.items() if name.removesuffix(".weight") not in decayed]
        adam = {"lr": LR, "betas": (0.9, 0.95), "eps": 1e-8}
        self.dense = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}], **adam
        )
        self.index, self.within = 0, 0
        self.start_subspace()

    def start_subspace(self) -> None:
        layers = {name: getattr(self.net, name) for name in PROJECTED}
        self.p = {
            name: matrix(self.kind, layer.in_features, PROJECTED[name], name, self.index)
            for name, layer in layers.items()
        }
        if self.index == 0 or self.reset:
            self.inner = torch.optim.AdamW(
                [{"params": [b], "weight_decay": DECAY if name in self.decayed else 0.0} for name, b in self.b.items()],
                betas=(0.9, 0.95),
                eps=1e-8,
            )

    def __call__(self, x: Tensor) -> Tensor:
        net = self.net
        x = torch.tanh(two_path_linear(x, net.first.weight, self.b["first"], self.p["first"], net.first.bias))
        return net.head(net.norm(two_path_linear(x, net.second.weight, self.b["second"], self.p["second"])))

    @torch.no_grad()
    def step(self, lr: float) -> None:
        rising = min(1.0, (self.within + 1) / self.warmup) if self.warmup else 1.0
        for group in self.dense.param_groups:
            group["lr"] = lr
        for group in self.inner.param_groups:
            group["lr"] = lr * self.lr_scale * rising
        self.dense.step()
        self.inner.step()
        # the decay of W + B P^T is that of W and that of B, which AdamW does
        for name in set(PROJECTED) & set(self.decayed):
            getattr(self.net, name).weight.mul_(1 - lr * self.lr_scale * rising * DECAY)
        self.within += 1
        if self.within == INTERVAL:
            for name, b in self.b.items():
                getattr(self.net, name).weight.copy_(self.weight(name))
                b.zero_()
            self.index, self.within = self.index + 1, 0
            self.start_subspace()

    def weight(self, name: str) -> Tensor:
        return getattr(self.net, name).weight + self.b[name] @ self.p[name].t()

    def train(self) -> tuple[list[float], dict[str, Tensor]]:
        losses = []
        for step in range(STEPS):
            self.dense.zero_grad()
            for b in self.b.values():
                b.grad = None
            loss = loss_of(self, step)
            loss.backward()
            self.step(rate(step))
            losses.append(loss.item())
        weights = weights_of(self.net)
        return losses, weights | {f"{name}.weight": self.weight(name).detach() for name in PROJECTED}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-9) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=rtol, msg=name)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], where: str = "") -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), f"{where} {name}"


@pytest.mark.parametrize("kind", ["haar", "coordinate", "gaussian"])
@pytest.mark.parametrize(
    "options",
    [{}, {"reset": False}, {"lr_scale": 0.35}, {"warmup": 2}, {"warmup": 5, "lr_scale": 2.0, "reset": False}],
    ids=str,
)
def test_it_is_the_two_path_algorithm(kind: str, options: dict):
    model = build(kind)
    losses = train(model, RSO(model, LR, DECAY, interval=INTERVAL, seed=SEED, **options))
    expected_losses, expected = TwoPath(kind, **options).train()
    assert losses == pytest.approx(expected_losses, rel=1e-9)
    assert_close(weights_of(model), expected)


def test_what_is_decayed():
    model = build()
    decayed = ("second", "norm")
    names = {f"{name}.weight" for name in decayed}
    train(model, RSO(model, LR, DECAY, interval=INTERVAL, seed=SEED, decayed=names))
    assert_close(weights_of(model), TwoPath("coordinate", decayed=decayed).train()[1])


@pytest.mark.parametrize("kind", ["haar", "coordinate"])
def test_sgd_inside_descends_along_the_projected_gradient(kind: str):
    """W <- (1 - lr decay) W - lr G P P^T with the dense gradient G; the moments of a momentum start anew."""
    model, plain = build(kind), build_dense()
    optimizer = RSO(model, LR, DECAY, inner="sgd", interval=INTERVAL, seed=SEED, options={"sgd": {"momentum": 0.5}})
    momentum: dict[str, Tensor] = {}
    for step in range(STEPS):
        train(model, optimizer, step, step + 1)
        found = weights_of(model)
        plain.zero_grad()
        loss_of(plain, step).backward()
        for name, parameter in plain.named_parameters():
            layer = name.removesuffix(".weight")
            if layer not in PROJECTED:
                # trains by AdamW
                parameter.data.copy_(found[name])
                continue
            p = matrix(kind, parameter.shape[1], PROJECTED[layer], layer, step // INTERVAL)
            moved = parameter.grad @ p
            momentum[layer] = moved if step % INTERVAL == 0 else 0.5 * momentum[layer] + moved
            parameter.data.mul_(1 - rate(step) * DECAY).sub_(rate(step) * momentum[layer] @ p.t())
        assert_close(found, weights_of(plain))


def test_what_is_frozen_stays():
    model = build()
    model.head.requires_grad_(False)
    model.first.bias.requires_grad_(False)
    model.second.subspace.requires_grad_(False)
    before = weights_of(model)
    train(model, RSO(model, LR, DECAY, interval=INTERVAL))
    frozen = {"head.weight", "head.bias", "first.bias", "second.weight"}
    after = weights_of(model)
    assert {name for name, value in after.items() if torch.equal(value, before[name])} == frozen


def test_a_layer_that_was_frozen_before_is_not_trained():
    model = build_dense()
    model.first.requires_grad_(False)
    RSO.convert(model, rank=3)
    before = weights_of(model)
    train(model, RSO(model, LR, DECAY, interval=INTERVAL))
    after = weights_of(model)
    assert torch.equal(after["first.weight"], before["first.weight"])
    assert not torch.equal(after["second.weight"], before["second.weight"])


@pytest.mark.parametrize("rule", ["adamw", "gefen", "sgd"])
def test_what_has_no_gradient_is_left_alone(rule: str):
    model = build().float()
    optimizer = RSO(model, LR, DECAY, inner=rule, dense="adamw" if rule == "sgd" else rule, interval=2)
    before = weights_of(model)
    idle = {"second.subspace", "head.weight"}
    for step in range(3):
        set_gradients(model, step, idle)
        optimizer.step()
    after = weights_of(model)
    unchanged = {name for name, value in after.items() if torch.equal(value, before[name])}
    assert unchanged == {"second.weight", "head.weight"}


def set_gradients(model: nn.Module, step: int, idle: frozenset[str] | set[str] = frozenset()) -> None:
    """The same full gradients whatever the layout; none for ``idle``."""
    generator = torch.Generator().manual_seed(step)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            grad = torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements)
            parameter.grad = None if name in idle else grad


def projections_of(model: nn.Module) -> list[Tensor]:
    return [group.projection.values.clone() for group in groups(model)]


def test_a_subspace_changes_at_steps_only():
    """Gradients of several backward passes add up in one subspace, also at the end of an interval."""
    model, whole = build(), build()
    optimizer, other = (RSO(each, LR, DECAY, interval=2) for each in (model, whole))
    seen = [projections_of(model)]
    for step in range(4):
        optimizer.zero_grad()
        for microbatch in range(3):
            loss_of(model, 3 * step + microbatch).backward()
            assert all(torch.equal(a, b) for a, b in zip(projections_of(model), seen[-1], strict=True))
        optimizer.step()
        seen.append(projections_of(model))
        other.zero_grad()
        sum(loss_of(whole, 3 * step + microbatch) for microbatch in range(3)).backward()
        other.step()
    changed = [
        any(not torch.equal(a, b) for a, b in zip(*pair, strict=True)) for pair in zip(seen, seen[1:], strict=False)
    ]
    assert changed == [False, True, False, True]
    assert_close(weights_of(model), weights_of(whole))


LAYOUTS = [(2, (2,)), (2, (2, 1)), (3, (3,)), (3, (3, 1)), (4, (4,)), (4, (2, 2)), (4, (4, 1))]
# torch's rules round what is left over of 16 entries differently, so that their rows have 16
VARIANTS = {
    "adamw": (16, {"warmup": 2, "lr_scale": 0.5}),
    "keep": (16, {"reset": False, "inner": "sgd", "options": {"sgd": {"momentum": 0.9}}}),
    "gefen": (3, {"inner": "gefen", "dense": "gefen"}),
    "gefen in adamw": (16, {"inner": "gefen"}),
    "odd": (3, {"weight_decay": 0.0}),
}


def train_given(
    variant: str, kind: str = "coordinate", mesh=None, idle: frozenset[str] = frozenset()
) -> dict[str, Tensor]:
    """Weights and state after five steps with given gradients, the second subspace unfinished; whole tensors."""
    torch.manual_seed(0)
    rank, options = VARIANTS[variant]
    # rows at 4 ranks: 5 are uneven, 3 and 1 leave ranks without any
    model = nn.ModuleDict(
        {
            "uneven": nn.Linear(20, 5, bias=False),
            "empty": nn.Linear(18, 3, bias=False),
            "single": nn.Linear(23, 1, bias=False),
            "dense": nn.Linear(16, 12, bias=False),
        }
    )
    RSO.convert(model, rank=rank, projection=kind, layers=["uneven", "empty", "single"])
    if mesh is not None:
        for layer in model.values():
            fully_shard(layer, mesh=mesh)
    optimizer = RSO(model, LR, interval=3, **{"weight_decay": DECAY, **options})
    for step in range(5):
        set_gradients(model, step, idle if step == 1 else frozenset())
        optimizer.step()
        optimizer.zero_grad()
    state = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
        for name, tensor in optimizer.state_tensors().items()
    }
    return weights_of(model) | state


def train_sharded(rank: int, world_size: int, mesh_shape: tuple[int, ...], runs: list[tuple]):
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    return [train_given(variant, kind, mesh, idle) for variant, kind, idle in runs]


@pytest.mark.parametrize("world_size, mesh_shape", LAYOUTS)
def test_weights_and_state_do_not_depend_on_the_ranks(world_size: int, mesh_shape: tuple[int, ...]):
    runs = [(variant, "coordinate", frozenset()) for variant in VARIANTS if variant != "odd"]
    expected = [train_given(variant, kind) for variant, kind, _ in runs]
    for rank, found in enumerate(run_ranks(world_size, train_sharded, mesh_shape, runs)):
        for (variant, *_), result, wanted in zip(runs, found, expected, strict=True):
            assert_same(result, wanted, f"{variant}, rank {rank}:")
    assert all(wanted["rso.outer"] == 1 and wanted["rso.steps"] == 2 for wanted in expected)


@pytest.mark.parametrize("world_size, mesh_shape", [(3, (3,)), (4, (2, 2))])
def test_what_rounds_differently_on_ranks(world_size: int, mesh_shape: tuple[int, ...]):
    """A matrix product depends on its number of rows in the last bits, torch's AdamW on its number of entries."""
    runs = [("adamw", "haar", frozenset()), ("adamw", "gaussian", frozenset()), ("odd", "coordinate", frozenset())]
    expected = [train_given(variant, kind) for variant, kind, _ in runs]
    for found in run_ranks(world_size, train_sharded, mesh_shape, runs):
        for result, wanted in zip(found, expected, strict=True):
            assert_close(result, wanted, rtol=1e-6)


@pytest.mark.parametrize("world_size, mesh_shape", [(2, (2,)), (2, (2, 1)), (4, (2, 2))])
@pytest.mark.parametrize("variant", ["adamw", "gefen"])
def test_a_step_without_some_gradients_on_ranks(variant: str, world_size: int, mesh_shape: tuple[int, ...]):
    idle = frozenset({"empty.subspace", "dense.weight"})
    expected = train_given(variant, idle=idle)
    assert not torch.equal(expected["empty.weight"], train_given(variant)["empty.weight"])
    for rank, found in enumerate(run_ranks(world_size, train_sharded, mesh_shape, [(variant, "coordinate", idle)])):
        assert_same(found[0], expected, f"rank {rank}:")


def test_the_variants_are_told_apart():
    """The comparisons above mean something only if they train differently."""
    results = [train_given(variant)["uneven.weight"] for variant in VARIANTS]
    assert len({tuple(result.flatten().tolist()) for result in results}) == len(VARIANTS)


def load(optimizer: RSO, state: dict[str, Tensor]) -> None:
    with optimizer.loading({name: tuple(tensor.shape) for name, tensor in state.items()}) as targets:
        assert targets.keys() == state.keys()
        for name, target in targets.items():
            target.copy_(state[name])


@pytest.mark.parametrize("through", ["loading", "state_dict"])
@pytest.mark.parametrize("kind, rule", [("haar", "adamw"), ("coordinate", "gefen"), ("gaussian", "gefen")])
def test_a_resume_within_a_subspace_changes_no_bit(kind: str, rule: str, through: str):
    def fresh() -> tuple[nn.Module, RSO]:
        model = build(kind)
        return model, RSO(model, LR, DECAY, inner=rule, dense=rule, interval=INTERVAL, seed=SEED, warmup=3)

    model, optimizer = fresh()
    train(model, optimizer, 0, 5)
    saved = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    assert saved["rso.outer"] == 1 and saved["rso.steps"] == 2
    # nothing of P but its key
    assert saved["rso.key"].shape == (3,)
    assert not any(value.shape[:1] == (9,) for value in saved.values() if value.ndim)
    whole, weights, used = optimizer.state_dict(), weights_of(model), projections_of(model)
    train(model, optimizer, 5, 8)

    again, other = fresh()
    again.load_state_dict(weights, strict=False)
    if through == "loading":
        load(other, saved)
    else:
        other.load_state_dict(whole)
    assert all(torch.equal(a, b) for a, b in zip(projections_of(again), used, strict=True))
    train(again, other, 5, 8)
    assert_same(weights_of(again), weights_of(model))
    assert_same(other.state_tensors(), optimizer.state_tensors())


def test_a_scheduler_of_torch_sets_the_rates():
    model, other = build(), build()
    options = {"interval": INTERVAL, "lr_scale": 0.5, "warmup": 2}
    optimizer = RSO(model, LR, DECAY, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step) / LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        scheduler.step()
    train(other, RSO(other, LR, DECAY, **options))
    assert_close(weights_of(model), weights_of(other))


@pytest.mark.parametrize(
    "kind, options, words",
    [
        ("haar", {}, "of projection=coordinate, seed=0, .* this run's of projection=haar, seed=0"),
        ("coordinate", {"seed": 1}, "seed=0, .* this run's of projection=coordinate, seed=1"),
    ],
)
def test_the_state_of_other_subspaces_is_refused(kind: str, options: dict, words: str):
    model = build()
    optimizer = RSO(model, LR)
    train(model, optimizer, 0, 2)
    saved = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    other = build(kind)
    with pytest.raises(ValueError, match=words):
        load(RSO(other, LR, **options), saved)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"interval": 0}, "interval=0 must be a whole number of steps from 1"),
        ({"lr_scale": 0.0}, "lr_scale=0.0 must be above 0"),
        ({"warmup": -1}, "warmup=-1 must be >= 0"),
        ({"inner": "adam"}, "inner='adam'"),
        ({"dense": "adam"}, "dense='adam'"),
    ],
    ids=str,
)
def test_settings_that_cannot_work(options: dict, words: str):
    with pytest.raises(ValueError, match=words):
        RSO(build(), **options)


def test_a_model_without_projected_layers():
    with pytest.raises(ValueError, match=r"Call RSO.convert\(model\) before RSO\(model\)"):
        RSO(Net())


def test_the_library_offers_it():
    from memopt import RSO as offered

    assert offered is RSO


def test_parts_of_a_model_that_are_converted_alone_all_train():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(9, 9)) for _ in range(2)])
    for part in model:
        RSO.convert(part, rank=3)
    optimizer = RSO(model, LR)
    before = weights_of(model)
    model(torch.randn(5, 9)).square().sum().backward()
    optimizer.step()
    assert not [name for name, value in weights_of(model).items() if torch.equal(value, before[name])]


def test_a_model_of_projected_layers_alone():
    for inner in ("adamw", "sgd", "gefen"):
        model = nn.Sequential(nn.Linear(9, 4, bias=False))
        RSO.convert(model, rank=3)
        optimizer = RSO(model, LR, inner=inner)
        before = model[0].weight.clone()
        model(torch.randn(5, 9)).square().sum().backward()
        optimizer.step()
        assert not torch.equal(model[0].weight, before)
