"""Background: an optimizer is used in ways its author did not think of: groups and state are edited, default types are
changed, a step is interrupted, a gradient is NaN in one row, a graph is kept. AdamW takes all of this, or says so."""

import _thread
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

from kernels import cpu
from memopt import Gefen


def stepped(optimizer: Gefen, steps: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(dtype)
        optimizer.step()


def made(*shapes: tuple[int, ...], **options) -> tuple[list[nn.Parameter], Gefen]:
    generator = torch.Generator().manual_seed(1)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float32)) for shape in shapes]
    return parameters, Gefen(parameters, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_changed_default_type_changes_nothing(dtype: torch.dtype):
    (expected,), optimizer = made((4, 4096))
    stepped(optimizer, 3)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        (parameter,), optimizer = made((4, 4096))
        stepped(optimizer, 3)
        optimizer.gauges()
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(parameter, expected)


def test_a_changed_default_device_changes_nothing():
    (expected, _), optimizer = made((4, 64), (3,))
    stepped(optimizer, 3)
    (parameter, _), optimizer = made((4, 64), (3,))
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for each in optimizer.param_groups[0]["params"]:
            each.grad = torch.randn(each.shape, generator=generator)
        with torch.device("meta"):
            optimizer.step()
    assert torch.equal(parameter, expected)


def test_state_that_is_moved_away_and_back_is_what_is_trained():
    (expected,), plain = made((6, 32))
    (parameter,), optimizer = made((6, 32))
    for each in (plain, optimizer):
        stepped(each, 2)
    for state in optimizer.state.values():
        state.update({key: value.clone() for key, value in state.items()})
    for each in (plain, optimizer):
        stepped(each, 2, seed=5)
    assert torch.equal(parameter, expected)
    for key, value in optimizer.state_dict()["state"][0].items():
        assert torch.equal(value, plain.state_dict()["state"][0][key]), key


def test_deleted_state_is_a_new_start():
    (parameter,), optimizer = made((6, 32))
    stepped(optimizer, 2)
    optimizer.state.clear()
    stepped(optimizer, 1, seed=5)
    assert int(optimizer.state_dict()["state"][0]["step"]) == 1


def test_groups_may_be_edited():
    (first, second), optimizer = made((4, 8), (4, 8))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 8))]})
    stepped(optimizer, 1)
    del optimizer.param_groups[1]
    late = nn.Parameter(torch.ones(3, 8))
    optimizer.param_groups[0]["params"].append(late)
    stepped(optimizer, 1)
    assert not torch.equal(late, torch.ones(3, 8)) and int(optimizer.state[late]["step"]) == 1


@pytest.mark.parametrize("group", [{"lr": None}, {"betas": 0.9}, {"weight_decay": None}, {"partition": "fixed"}])
def test_a_refused_group_leaves_nothing_behind(group):
    _, optimizer = made((4, 8))
    late = nn.Parameter(torch.ones(3, 8))
    with pytest.raises((TypeError, ValueError)):
        optimizer.add_param_group({"params": [late], **group})
    optimizer.add_param_group({"params": [late]})
    stepped(optimizer, 1)


@pytest.mark.parametrize("option", [{"levels": 256.0}, {"refresh": 1.5}, {"max_update": "1"}])
def test_options_of_a_wrong_type(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        made((4, 8), **option)


def test_a_block_left_alone_keeps_its_momentum():
    """The column factor that its codes are relative to must not move either."""
    (parameter,), optimizer = made((6, 64))
    stepped(optimizer, 5)
    state, levels = optimizer.state[parameter], optimizer.state[parameter]["levels"]
    before, column = levels[state["codes"][0].int()] * state["scale"][0], state["column"].clone()
    grad = torch.randn(6, 64, generator=torch.Generator().manual_seed(9))
    grad[:, :8] *= 100
    grad[0, 40] = float("nan")
    parameter.grad = grad
    optimizer.step()
    assert torch.equal(levels[state["codes"][0].int()] * state["scale"][0], before)
    assert torch.equal(state["column"], column)
    assert optimizer.gauges()["nonfinite_blocks"] == 1


@pytest.mark.parametrize("partition", ["paper", "peaks"])
def test_a_period_found_late_keeps_what_was_learned(partition: str):
    """A NaN in one row leaves the period open; the other rows train on."""
    (parameter,), optimizer = made((6, 96), partition=partition, second_moment="block")
    generator = torch.Generator().manual_seed(0)
    for step in range(21):
        grad = 1.5 * torch.randn(6, 96, generator=generator).sign() * (1 + torch.arange(96) % 12 == 0).float().add(1)
        if step < 20:
            grad[0, 0] = float("nan")
        parameter.grad = grad
        optimizer.step()
        if step == 19:
            kept = optimizer.state[parameter]["v"][1].mean().item()
            assert optimizer.state[parameter]["period"] == 0
    assert optimizer.state[parameter]["period"] > 0
    assert optimizer.state[parameter]["v"][1].mean().item() > 0.8 * kept
    assert optimizer.state[parameter]["scale"][1].max() > 0


@pytest.mark.parametrize("second_moment", ["factored", "block"])
def test_eps_holds_back_a_column_without_a_gradient_to_speak_of(second_moment: str):
    """AdamW moves it by 8e-5 of the learning rate a step: its gradient is far below eps."""
    parameter = nn.Parameter(torch.zeros(32, 64))
    optimizer = Gefen([parameter], lr=1e-3, weight_decay=0.0, second_moment=second_moment)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        parameter.grad = 1e-2 * torch.randn(32, 64, generator=generator)
        parameter.grad[:, 0] *= 1e-11
        optimizer.step()
    moved = parameter.detach().square().mean(0).sqrt() / 1e-3
    assert moved[0] < 1e-3 and moved[1:].min() > 1


def test_autograd_notices_that_weights_have_changed():
    weights, optimizer = made((8, 8), (8, 8))
    loss = (torch.ones(2, 8) @ weights[0] @ weights[1]).square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_step_works_while_the_interpreter_ends():
    code = """
import threading, time, torch
from memopt import Gefen
torch.set_num_threads(2)
p = torch.nn.Parameter(torch.ones(2048, 512)); o = Gefen([p]); o.init_state()
def work():
    time.sleep(0.5)
    p.grad = torch.ones_like(p); o.step(); print("stepped", float(p[0, 0]) != 1.0, flush=True)
threading.Thread(target=work).start()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "stepped True" in result.stdout, result.stderr


def test_an_interrupt_leaves_no_thread_at_work(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    running, begun = [], threading.Event()

    def piece(index: int) -> None:
        begun.set()
        running.append(index)
        time.sleep(0.05)
        running.remove(index)
        if threading.current_thread() is threading.main_thread():
            _thread.interrupt_main()

    # a job in the background of a shell has it ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            cpu._run_all(piece, 100)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not running
    time.sleep(0.15)
    assert not running


def test_torch_compile_leaves_the_step_as_it_is():
    (expected,), plain = made((6, 32))
    (parameter,), optimizer = made((6, 32))
    stepped(plain, 1)
    parameter.grad = expected.grad.clone()
    torch.compile(optimizer.step, backend="eager")()
    assert torch.equal(parameter, expected)


def test_names_that_repeat_cannot_be_saved():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = Gefen(
        [{"params": list(first.named_parameters())}, {"params": list(second.named_parameters()), "lr": 0.1}]
    )
    with pytest.raises(ValueError, match=r"called bias\. Give each a name of its own"):
        optimizer.state_tensors()


def test_a_load_that_breaks_off_leaves_the_levels_and_their_table():
    (parameter,), optimizer = made((6, 32))
    stepped(optimizer, 1)
    levels = optimizer.state[parameter]["levels"].clone()
    shapes = {name: tuple(tensor.shape) for name, tensor in optimizer.state_tensors().items()}
    with pytest.raises(OSError), optimizer.loading(shapes) as state:
        state["codebook.levels"].fill_(1.0)
        raise OSError
    assert torch.equal(optimizer.state[parameter]["levels"], levels)


def test_state_of_another_partition_is_refused():
    fixed = made((6, 32), partition="fixed", block=16)[1]
    stepped(fixed, 1)
    row = made((6, 32))[1]
    match = r"has blocks of 16 entries, partition=row.*blocks of 32\. Set what it was made with"
    with pytest.raises(ValueError, match=match):
        row.load_state_dict(fixed.state_dict())
    shapes = {name: tuple(tensor.shape) for name, tensor in fixed.state_tensors().items()}
    with pytest.raises(ValueError, match=match), row.loading(shapes):
        pass
