"""Every byte is counted once, from its making to its end, and belongs to somebody.

Background: a ledger that is wrong by a few views or by one buffer of FSDP2 looks right, and a microbatch chosen by it
runs out of memory a day later. Small cases are counted by hand here, and a random program is compared with the storages
that are really alive. ``test_tracker_torch.py`` asks torch's own trackers, ``test_tracker_prediction.py`` compares
fake tensors with real ones on whole models of the trainer.
"""

import gc
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from memopt import codebook
from memopt.rso import RSO
from memopt.rules import build_rule
from memopt.tracker import MemoryTracker
from memopt.tracker_record import OWNERS, Moment, Record
from models.loss import LossHead

ROOT = Path(__file__).parents[2]
ADAMW = {"betas": (0.9, 0.95), "eps": 1e-8}


@pytest.fixture
def tracker() -> Iterator[MemoryTracker]:
    with MemoryTracker() as entered:
        yield entered


def held(moment: Moment) -> dict[str, int]:
    """Owners that have bytes."""
    return {owner: size for owner, size in moment.owners.items() if size}


def mlp(width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(3)])


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


def train_step(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer, tracker: MemoryTracker) -> None:
    with tracker.phase("forward"):
        loss = model(x).sum()
    with tracker.phase("backward"):
        loss.backward()
    del loss
    with tracker.phase("optimizer"):
        optimizer.step()
    optimizer.zero_grad()


# -- by hand


def test_a_linear_layer(tracker: MemoryTracker):
    """W (4, 3) and b (4,), x (5, 3), fp32. Two backward passes: the second adds to gradients that are there."""
    layer, x = nn.Linear(3, 4), torch.zeros(5, 3)
    tracker.own("parameters", layer.parameters())
    assert held(tracker.current) == {"parameters": 64, "other": 60}
    for before in (0, 64):
        with tracker.phase("forward"):
            loss = (y := layer(x)).sum()
            # y 5 x 4, loss
            assert held(tracker.current).get("gradients", 0) == before
            assert tracker.current.owners["activations"] == 80 + 4
        with tracker.phase("backward"):
            loss.backward()
        del loss, y
        assert held(tracker.current) == {"parameters": 64, "gradients": 64, "other": 60}
    # most is held when both gradients of the second pass are made and not yet added: root gradient, W 48, b 16
    most = {"parameters": 64, "gradients": 64, "activations": 84, "other": 60 + 4 + 48 + 16}
    assert held(tracker.peaks["backward", None]) == most
    assert held(tracker.peaks["forward", None]) == {"parameters": 64, "gradients": 64, "activations": 84, "other": 60}
    assert tracker.peak == tracker.peaks["backward", None]


def test_optimizer_state_and_its_temporaries(tracker: MemoryTracker):
    """AdamW over 100 fp32 values: two moments and a counter of 4 bytes stay; fused needs nothing more."""
    parameter = nn.Parameter(torch.zeros(100))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    tracker.own("parameters", [parameter])
    (parameter * 1).sum().backward()
    assert held(tracker.current) == {"parameters": 400, "gradients": 400}
    with tracker.phase("optimizer"):
        optimizer.step()
    tracker.own("optimizer_state", state_of(optimizer))
    assert held(tracker.current) == {"parameters": 400, "gradients": 400, "optimizer_state": 804}
    tracker.forget_peaks()
    with tracker.phase("optimizer"):
        optimizer.step()
    assert tracker.peak.total == 400 + 400 + 804
    optimizer.zero_grad()
    assert held(tracker.current) == {"parameters": 400, "optimizer_state": 804}


def test_views_writes_and_resizes(tracker: MemoryTracker):
    base = torch.empty(10)
    views = [base[1:], base.view(2, 5).t(), base.detach(), base.unflatten(0, (5, 2))]
    base.add_(1)
    torch.mul(base, 2, out=base)
    assert tracker.current.total == 40
    out = torch.empty(0)
    torch.add(base, 1, out=out)
    assert tracker.current.total == 80, "out= takes memory"
    out.untyped_storage().resize_(0)
    assert tracker.current.total == 40
    out.untyped_storage().resize_(400)
    assert (tracker.current.total, tracker.peak.total) == (440, 440)
    out.resize_(200)
    assert tracker.current.total == 840
    out.set_(base)
    assert tracker.current.total == 40, "the storage that it had is gone"
    del base, out
    assert tracker.current.total == 40
    del views
    assert tracker.current.total == 0 and tracker.peak.total == 840


def test_what_was_made_before_counts_once_it_is_used_or_declared():
    used, declared, untouched = torch.ones(10), torch.ones(20), torch.ones(30)
    outs = [torch.ones(4), torch.ones(6)]
    with MemoryTracker() as tracker:
        tracker.own("parameters", [declared, declared[3:]])
        assert held(tracker.current) == {"parameters": 80}
        used.sum()
        assert held(tracker.current) == {"parameters": 80, "other": 40}
        # returns nothing
        torch.split_with_sizes_copy(used, [4, 6], out=outs)
        assert held(tracker.current) == {"parameters": 80, "other": 80}
        outs.clear()
        untouched.untyped_storage().resize_(8)
        assert held(tracker.current) == {"parameters": 80, "other": 48}
        del used
        assert held(tracker.current) == {"parameters": 80, "other": 8}


def test_blocks_as_cudas_allocator_gives_them():
    with MemoryTracker(block=512) as tracker:
        kept = [torch.empty(1), torch.empty(128), torch.empty(129), torch.empty(0)]
        assert tracker.current.total == 512 + 512 + 1024
    del kept


def test_other_devices_do_not_count(tracker: MemoryTracker):
    torch.empty(10, device="meta") + 1
    assert tracker.peak.total == 0


class _Kept(torch.autograd.Function):
    """Keeps a tensor as an attribute, which autograd does not know of, until its backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.kept = torch.zeros(1000)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.kept = None
        return grad


def test_attributes_of_a_function(tracker: MemoryTracker):
    x = torch.zeros(10, requires_grad=True)
    with tracker.phase("forward"):
        y = _Kept.apply(x)
    assert held(tracker.current) == {"activations": 4000 + 40, "other": 40}
    with tracker.phase("backward"):
        y.sum().backward()
    assert tracker.current.owners["activations"] == 40


def test_recomputation_is_activations_again(tracker: MemoryTracker):
    """Two layers of 8 x 8 on 16 rows: 512 bytes each output. Checkpointed, the inner one exists in backward only."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    x = torch.zeros(16, 8, requires_grad=True)
    tracker.own("parameters", model.parameters())
    with tracker.phase("forward"):
        y = checkpoint(model, x, use_reentrant=False)
    assert tracker.current.owners["activations"] == 512
    with tracker.phase("backward"):
        y.sum().backward()
    # y, and the outputs of the first layer and of tanh; early stop leaves the last one out
    assert max(point.owners["activations"] for point in tracker.timeline) == 3 * 512
    assert tracker.current.owners["activations"] == 512


def test_the_loss_head(tracker: MemoryTracker):
    """Width 8, vocabulary 50, 12 tokens, 6 at a time: its buffer of logits and both gradients belong to the loss."""
    head = LossHead(LossHead.Config(in_features=8, out_features=50, chunk=6))
    hidden, labels = torch.randn(12, 8, requires_grad=True), torch.zeros(12, dtype=torch.int64)
    tracker.own("parameters", head.parameters())
    tracker.mark_loss(head)
    with tracker.phase("forward"):
        loss = head(hidden, labels)
        # what backward is to hand over, and the loss
        assert tracker.current.owners["loss"] == 12 * 8 * 4 + 50 * 8 * 4 + 4
    assert tracker.peaks["forward", None].owners["loss"] >= 12 * 8 * 4 + 50 * 8 * 4 + 6 * 50 * 4
    with tracker.phase("backward"):
        loss.backward()
    assert tracker.current.owners["gradients"] == 50 * 8 * 4


def test_memory_saving_optimizers(tracker: MemoryTracker):
    """Gefen's bytes are its own count; a projected layer's B is one value, and a matrix only within the step."""
    weight = nn.Parameter(torch.randn(16, 400))
    gefen = build_rule("gefen", [{"named_parameters": {"w": weight}, "weight_decay": 0.0}], lr=0.1, **ADAMW)
    weight.grad = torch.randn(16, 400)
    gefen.step()
    tracker.own("optimizer_state", gefen.state_tensors().values())
    # the table that finds a code is made from the levels, and no part of a checkpoint
    assert tracker.current.owners["optimizer_state"] == gefen.state_bytes() - codebook.CELLS < 1.5 * 16 * 400

    model = nn.Sequential(nn.Linear(32, 64, bias=False))
    RSO.convert(model, rank=8, layers=["0"], projection="coordinate")
    rso = RSO(model, 0.01, inner="adamw", interval=100)
    rso.init_state()
    tracker.own("parameters", model.parameters())
    assert tracker.current.owners["parameters"] == 64 * 32 * 4 + 4
    with tracker.phase("forward"):
        loss = model(torch.ones(4, 32)).sum()
    # what backward needs of the input, (4, 8), and the sum
    assert tracker.current.owners["activations"] == 4 * 8 * 4 + 4
    with tracker.phase("backward"):
        loss.backward()
    assert tracker.current.owners["gradients"] == 64 * 8 * 4
    other = tracker.current.owners["other"]
    with tracker.phase("optimizer"):
        rso.step()
    assert tracker.peaks["optimizer", None].owners["other"] - other >= 64 * 8 * 4
    assert tracker.current.owners["parameters"] == 64 * 32 * 4 + 4


# -- against what is alive


@pytest.mark.parametrize("seed", range(4))
def test_a_random_program(tracker: MemoryTracker, seed: int):
    source = random.Random(seed)
    tensors: list[Tensor] = []
    # what exists already takes the collector a tenth of a second
    gc.freeze()
    for _ in range(300):
        some = source.choice(tensors) if tensors else None
        action = source.randrange(8)
        if some is None or action == 0:
            tensors.append(torch.zeros(source.randrange(50)))
        elif action == 1:
            tensors.append(some[: source.randrange(50)])
        elif action == 2:
            tensors += torch._foreach_add([some, some], 1.0)
        elif action == 3:
            tensors.append(torch.cat([some, some.to(torch.uint8)]))
        elif action == 4:
            some.mul_(2)
        elif action == 5:
            # a cycle, which only the garbage collector ends
            cycle = [some + 1]
            cycle.append(cycle)
        elif len(tensors) > 5:
            tensors.pop(source.randrange(len(tensors)))
        if source.random() < 0.2:
            with tracker.attribute(source.choice(OWNERS)):
                tensors.append(torch.zeros(7))
            tracker.own(source.choice(OWNERS), [source.choice(tensors)])
        some = cycle = None
        if action == 5:
            gc.collect()
        alive = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
        assert tracker.current.total == sum(alive.values())
    gc.unfreeze()
    assert all(size >= 0 for point in tracker.timeline for size in point.owners.values())


# -- markers, phases, timeline


def test_markers_of_a_module(tracker: MemoryTracker):
    model = mlp(16)
    x = torch.zeros(4, 16)
    tracker.own("parameters", model.parameters())
    for name, block in model.named_children():
        tracker.watch(name, block)
    for _ in range(2):
        with tracker.phase("forward"):
            loss = model(x).sum()
        with tracker.phase("backward"):
            loss.backward()
        del loss
    peaks = tracker.peaks
    parts = [peaks["forward", name].total for name in "012"]
    # every block adds what its relu keeps, 4 x 16; the output of the layer before is freed
    assert [later - earlier for earlier, later in zip(parts, parts[1:], strict=False)] == [256, 256]
    for name in "012":
        assert peaks["backward", name].total <= peaks["backward", None].total
    assert peaks["backward", "0"].owners["activations"] < peaks["backward", "2"].owners["activations"]
    with tracker.marker("by hand"):
        kept = torch.zeros(10**6)
    torch.zeros(2 * 10**6)
    assert tracker.peaks[None, "by hand"].total == (most := tracker.current.total)
    with tracker.marker("from above"):
        del kept
        torch.zeros(1)
    assert tracker.peaks[None, "from above"].total == most


def test_a_timeline_is_thinned_and_keeps_its_highest_points():
    with MemoryTracker(points=50) as tracker:
        kept = []
        for step in range(100):
            tracker.set_step(step)
            with tracker.phase("forward"):
                kept.append(torch.zeros(1))
                if step == 37:
                    torch.zeros(5000)
                for _ in range(20):
                    torch.zeros(10)
    line = tracker.timeline
    assert 20 < len(line) <= 50
    assert [point.step for point in line] == sorted(point.step for point in line)
    assert max(line, key=lambda point: point.total) == tracker.peak
    assert (tracker.peak.step, tracker.peak.phase, tracker.peak.total) == (37, "forward", 38 * 4 + 20000)
    assert tracker.current.total == 400
    del kept


# -- it leaves nothing behind


class _Patched:
    """Everything of torch that tracking touches."""

    def __init__(self, model: nn.Module) -> None:
        group = _fsdp_param_group.FSDPParamGroup
        self.seen = [
            torch.UntypedStorage.resize_, torch.distributed.Work.wait,
            group.unshard, group.wait_for_unshard, _fsdp_param_group.foreach_reduce,
            _fsdp_param.FSDPParam.init_unsharded_param, _fsdp_param.FSDPParam.to_accumulated_grad_if_needed,
            dict(torch_module._global_forward_hooks), dict(torch_module._global_forward_pre_hooks),
            dict(torch_module._global_forward_hooks_always_called), _get_current_dispatch_mode_stack(),
            "resize_" in vars(torch.UntypedStorage),
            [dict(parameter._post_accumulate_grad_hooks or {}) for parameter in model.parameters()],
        ]  # fmt: skip


def test_nothing_stays_patched_after_an_error():
    if "resize_" in vars(torch.UntypedStorage):
        # torch's own tracker leaves it there
        del torch.UntypedStorage.resize_
    model, x = mlp(8), torch.zeros(2, 8, requires_grad=True)
    before = _Patched(model).seen
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), MemoryTracker() as tracker:
        during = _Patched(model).seen
        tracker.own("parameters", model.parameters())
        tracker.watch("model", model)
        with tracker.phase("forward"):
            model(x)
            model(torch.zeros(2, 7))
    assert _Patched(model).seen == before
    assert not any(old == new for old, new in zip(before[:-1], during[:-1], strict=True))
    assert not x._backward_hooks
    # what it counted can be read, and does not move any more
    total = tracker.current.total
    del model, x
    gc.collect()
    assert tracker.current.total == total > 0


def test_it_changes_no_number_and_keeps_nothing_alive():
    gradients = []
    for tracked in (False, True):
        model, x = mlp(16), torch.ones(4, 16)
        if not tracked:
            checkpoint(model, x, use_reentrant=False).sum().backward()
        else:
            with MemoryTracker() as tracker:
                tracker.own("parameters", model.parameters())
                tracker.watch("first", model[0])
                tracker.mark_loss(model[2])
                loss = checkpoint(model, x, use_reentrant=False).sum()
                loss.backward()
                ends = [weakref.ref(value) for value in (model, loss, model[0][0].weight.grad)]
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))
    del model, loss, gradients
    gc.collect()
    assert [end() for end in ends] == [None] * 3


def test_backward_on_a_thread_of_the_caller(tracker: MemoryTracker):
    parameter = nn.Parameter(torch.zeros(100))
    tracker.own("parameters", [parameter])
    loss = (parameter * 2).sum()

    def backward() -> None:
        with tracker.on_this_thread():
            loss.backward()

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert tracker.current.owners["gradients"] == 400


NESTED = """
import threading, torch
from memopt.tracker import MemoryTracker

class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, depth):
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.depth:
            with torch.enable_grad():
                Nested.apply(grad.detach().requires_grad_(), ctx.depth - 1).sum().backward()
        else:
            assert threading.current_thread() is not threading.main_thread()
            torch.zeros(10**6)
        return grad, None

with MemoryTracker() as tracker:
    Nested.apply(torch.zeros(1, requires_grad=True), 70).sum().backward()
assert 4 * 10**6 < tracker.peak.total < 4 * 10**6 + 10**4, tracker.peak
"""


def test_autograds_own_threads_are_tracked():
    """A backward within a backward: autograd moves the 60th to a thread of its own. In a process of its own, because
    forked ones could not run a backward afterwards."""
    subprocess.run([sys.executable, "-c", NESTED], cwd=ROOT, check=True, timeout=60)


# -- fake tensors


def test_fake_tensors_count_as_real_ones():
    def bytes_of_a_step() -> tuple[Moment, int]:
        with MemoryTracker() as tracker:
            model = mlp(32)
            tracker.own("parameters", model.parameters())
            optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
            train_step(model, torch.zeros(4, 32), optimizer, tracker)
            train_step(model, torch.zeros(4, 32), optimizer, tracker)
            return tracker.peak, tracker.current.total

    real = bytes_of_a_step()
    with FakeTensorMode():
        assert bytes_of_a_step() == real


def test_real_tensors_do_not_count_among_fake_ones():
    with FakeTensorMode(allow_non_fake_inputs=True), MemoryTracker() as tracker:
        with torch._subclasses.fake_tensor.unset_fake_temporarily():
            torch.zeros(100) + 1
        assert tracker.peak.total == 0
    with MemoryTracker() as tracker:
        with FakeTensorMode():
            torch.zeros(100) + 1
        assert tracker.peak.total == 0


def test_misuse_is_refused(tracker: MemoryTracker):
    with pytest.raises(ValueError, match="no owner 'weights'. Owners are parameters, gradients"):
        tracker.own("weights", [])
    with pytest.raises(ValueError, match="block=0 bytes"):
        MemoryTracker(block=0)
    with pytest.raises(ValueError, match="points=1 keeps no timeline"):
        Record(1)
    with pytest.raises(RuntimeError, match="Call it within the with block"):
        MemoryTracker().own("other", [])
    with pytest.raises(RuntimeError, match="this tracker was entered before"):
        tracker.__enter__()
    with tracker.phase("forward"), pytest.raises(RuntimeError, match="'backward' was begun within 'forward'"):
        with tracker.phase("backward"):
            pass
