"""torch's own trackers see the same peaks, and FSDP2's and collectives' buffers have the right owner.

Background: FSDP2 frees and takes the memory of gathered parameters behind the dispatcher's back, and what it gathers
and reduces in are tensors like any others. Differences to torch's trackers (2.13) that are meant: owners (they know no
communication outside FSDP2 and call an optimizer's temporaries state), and copies that gloo makes.
"""

import time

import pytest
import torch
import torch.distributed
from torch.distributed._functional_collectives import all_reduce
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from memopt.tracker import MemoryTracker
from memopt.tracker_record import Moment
from tests.memopt.test_tracker import held, mlp, state_of, train_step
from tests.spawn import run_ranks

CPU = torch.device("cpu")


def let_gloo_finish() -> None:
    """From here on, wait after every collective of this process until gloo's thread has let go of its buffers.

    It does so a moment after the collective is done, and until then they are held: a test would see it or not.
    """
    wait = torch.distributed.Work.wait

    def wait_longer(*args, **kwargs):
        result = wait(*args, **kwargs)
        time.sleep(0.005)
        return result

    torch.distributed.Work.wait = wait_longer


@pytest.mark.parametrize("foreach", [False, True])
def test_torchs_tracker_sees_the_same_peak(foreach: bool):
    model, x = mlp(), torch.randn(16, 64)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    with MemoryTracker() as first:
        train_step(model, x, optimizer, first)
    with MemoryTracker() as ours:
        ours.own("parameters", model.parameters())
        ours.own("optimizer_state", state_of(optimizer))
        ours.own("other", [x])
        train_step(model, x, optimizer, ours)
    theirs = MemTracker()
    theirs.track_external(model, optimizer, x)
    with theirs:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert ours.peak.total == theirs.get_tracker_snapshot("peak")[CPU]["Total"]


def fsdp_peaks(
    rank: int, world_size: int, mixed: bool, count_gloo: bool = False
) -> tuple[dict, Moment, dict[str, int]]:
    """Peaks of a second step of three layers under FSDP2, its end, and the peak that torch's tracker sees."""
    let_gloo_finish()
    # 62 rows on 3 ranks are uneven: shards are padded
    width = 62 if world_size == 3 else 64
    model, x = mlp(width), torch.randn(16, width)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    mesh = init_device_mesh("cpu", (world_size,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with MemoryTracker() as first:
        train_step(model, x, optimizer, first)
    if count_gloo:
        MemoryTracker._around_wait = lambda self, original: original
    with MemoryTracker() as ours:
        ours.own("parameters", model.parameters())
        ours.own("optimizer_state", state_of(optimizer))
        ours.own("other", [x])
        train_step(model, x, optimizer, ours)
        end = ours.current
    theirs = FSDPMemTracker(model, optimizer)
    theirs.track_inputs((x,))
    with theirs:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return ours.peaks, end, theirs.get_tracker_snapshot("peak")[CPU]


def most(peaks: dict) -> Moment:
    return max(peaks.values(), key=lambda moment: moment.total)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_torchs_fsdp_tracker_sees_the_same_peak(world_size: int):
    for peaks, _, theirs in run_ranks(world_size, fsdp_peaks, False):
        assert most(peaks).total == theirs["Total"]


def test_torchs_fsdp_tracker_counts_the_copies_of_gloo():
    """gloo reduces in a copy of its own. torch counts it from the moment that gloo reads results out of it."""
    for peaks, _, theirs in run_ranks(2, fsdp_peaks, True):
        assert most(peaks).total < theirs["Total"]
    for peaks, _, theirs in run_ranks(2, fsdp_peaks, True, True):
        assert most(peaks).total == theirs["Total"]


def test_owners_under_fsdp():
    """Three layers of 64 x 64 and 64 in fp32, 16,640 bytes each, halved on each of 2 ranks. Not counted by owner
    alone, but where the number is clear."""
    layer = (64 * 64 + 64) * 4
    for peaks, end, _ in run_ranks(2, fsdp_peaks, False):
        forward, backward = peaks["forward", None].owners, peaks["backward", None].owners
        assert held(end) == {"parameters": 3 * layer // 2, "optimizer_state": 3 * layer + 6 * 4, "other": 16 * 64 * 4}
        # one layer gathered and the buffers of its and the next one's gather
        assert forward["communication"] == 3 * layer and forward["gradients"] == 0
        # the gradient of the last layer is reduced. the one before is gathered, its gradients are made and laid into
        # the input of its reduction, and its output is held as well
        assert (backward["communication"], backward["gradients"]) == (3 * layer, layer // 2)
        assert peaks["optimizer", None].owners["gradients"] == 3 * layer // 2
        assert peaks["optimizer", None].owners["communication"] == 0


def waiting_gradients(rank: int, world_size: int, mixed: bool) -> list[dict[str, int]]:
    """Owners after a backward that is not reduced, a second one, and one that is."""
    let_gloo_finish()
    model = mlp()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    mesh = init_device_mesh("cpu", (world_size,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        module.set_force_sum_reduction_for_comms(True)
    moments = []
    with MemoryTracker() as tracker:
        tracker.own("parameters", model.parameters())
        for last in (False, False, True):
            model.set_requires_gradient_sync(last)
            model(torch.zeros(16, 64)).sum().backward()
            moments.append(held(tracker.current))
    return moments


@pytest.mark.parametrize("mixed", [False, True])
def test_gradients_that_wait_for_their_reduction(mixed: bool):
    """Whole on every rank and in fp32, also where they were made in bf16; then halved."""
    whole = 3 * (64 * 64 + 64) * 4
    for moments in run_ranks(2, waiting_gradients, mixed):
        waiting = {"parameters": whole // 2, "gradients": whole}
        assert moments == [waiting, waiting, {"parameters": whole // 2, "gradients": whole // 2}]


def collectives(rank: int, world_size: int) -> list[dict[str, int]]:
    """Owners after collectives, functional and not, into buffers, and over what has an owner."""
    moments = []
    with MemoryTracker() as tracker:
        mine, everybodys, parameter = torch.zeros(5), torch.zeros(5 * world_size), torch.zeros(100)
        tracker.own("parameters", [parameter])
        torch.distributed.all_gather_into_tensor(everybodys, mine)
        moments.append(held(tracker.current))
        torch.distributed.broadcast(parameter, 0)
        moments.append(held(tracker.current))
        group = torch.distributed.group.WORLD
        summed = all_reduce(mine, "sum", group) + 1
        # gloo's thread lets go of its result a moment later
        time.sleep(0.1)
        moments.append(held(tracker.current))
        del summed
    return moments


def test_what_a_collective_writes_is_communication():
    for first, second, third in run_ranks(2, collectives):
        assert first == second == {"parameters": 400, "communication": 40, "other": 20}
        # its result is gone with the sum that was made of it
        assert third == {"parameters": 400, "communication": 40, "other": 40}
