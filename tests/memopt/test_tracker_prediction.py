"""What the tracker sees of fake tensors is what it sees of real ones, to the byte, on the trainer's own models.

Background: a prediction runs the training step on fake tensors under a fake process group, for a world that is not
there. It is worth as much as this equality. How to do it, in order (``memopt.plan`` builds on it):

1. The mesh, and the one of the state (``memopt.layout.state_mesh``), are made before the fake mode: they read tensors.
2. The model is built on the meta device before it, too, and gets fake memory inside, parameter by parameter:
   ``to_empty`` refuses to swap fake parameters, ``init_weights`` to draw into them.
3. Conversion, sharding, the optimizer and the step are the trainer's, within the fake mode. A rule that draws or
   measures on the host (gefen, rso) cannot run; its state comes from formulas.
4. What reads a value (``int(count)``, a norm) is left out of the step.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from conf import compose
from dist import parallel
from memopt import layout, subspace, virtual
from memopt.build import build_optimizer, prepare_model
from memopt.tracker import MemoryTracker
from memopt.tracker_record import Moment
from models.build import build_model
from models.init import init_weights
from models.names import named_parameters
from tests.memopt.test_tracker_torch import let_gloo_finish
from tests.spawn import run_apart, run_ranks

MODEL = ["train.seq_len=64", "train.loss_chunk=50", "microbatch=2"]
ROWS = 2
CASES = {
    "fsdp": [],
    "ddp": ["parallel=ddp"],
    "reduce_last": ["parallel.reduce=last"],
    "bf16": ["train.precision=bf16"],
    "recomputed": ["activation_checkpoint=full", "train.recompute_swiglu=true"],
    "gpt2": ["model=gpt2_debug"],
    "sgd": ["optimizer=sgd"],
    "rso": ["optimizer=rso"],
}
Peaks = dict[tuple[str | None, str | None], Moment]


def give_fake_memory(model: nn.Module) -> None:
    """Replace parameters and buffers on the meta device by fake ones on the CPU. Within a fake mode."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for name, old in slots.items():
                if old is None:
                    continue
                if id(old) not in made:
                    new = torch.empty(old.shape, dtype=old.dtype)
                    made[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
                # tied weights stay one
                slots[name] = made[id(old)]


def peaks_of_steps(rank: int, world_size: int, overrides: list[str], fake: bool) -> tuple[Peaks, Moment]:
    """Peaks of two steps of two microbatches, as the trainer takes them, and what is held after them."""
    if not fake:
        let_gloo_finish()
    total = 2 * ROWS * world_size
    config = compose.load_config([*MODEL, f"train.global_batch={total}", *overrides], world_size)
    settings, device = config.train, torch.device("cpu")
    dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
    mesh = parallel.build_mesh(config.parallel, world_size, "cpu")
    layout.state_mesh(mesh)
    model = build_model(config.model, settings.seq_len, "cpu", False, settings.loss_chunk, settings.recompute_swiglu)
    with FakeTensorMode() if fake else nullcontext():
        if fake:
            give_fake_memory(model)
        prepare_model(config.optimizer, model, dtype)
        checkpointing = config.activation_checkpoint
        parallel.apply_parallel(
            model, mesh, config.parallel, compute_dtype=dtype, activation_checkpoint=checkpointing
        )  # fmt: skip
        if not fake:
            init_weights(model, 0, device)
        groups = subspace.groups(model)
        for group in groups:
            # what RSO does when it is made; it also draws, which fake tensors cannot
            group.projection.move(device)
        virtual.release(model, [layer.subspace for group in groups for layer in group.layers.values()])
        optimizer = None if groups else build_optimizer(config.optimizer, named_parameters(model), model)
        with MemoryTracker() as tracker:
            tracker.own("parameters", model.parameters())
            if optimizer is not None:
                optimizer.init_state()
                tracker.own("optimizer_state", optimizer.state_tensors().values())
            tracker.mark_loss(model.lm_head)
            for name, block in model.layers.items():
                tracker.watch(f"layers.{name}", block)
            batch = torch.zeros(ROWS, settings.seq_len, dtype=torch.int64)
            for step in range(2):
                tracker.set_step(step)
                take_step(tracker, model, batch, parallel.reduces_every_microbatch(config.parallel))
                with tracker.phase("optimizer"):
                    if optimizer is not None:
                        optimizer.step()
                model.zero_grad()
            return tracker.peaks, tracker.current


def take_step(tracker: MemoryTracker, model: nn.Module, batch: Tensor, every: bool) -> None:
    for last in (False, True):
        with parallel.gradient_sync(model, last=last, every=every):
            with tracker.phase("forward"):
                loss = model(batch, batch)
            with tracker.marker("between"):
                pass
            with tracker.phase("backward"):
                (loss / batch.numel()).backward()


def predicted(world_size: int, overrides: list[str]) -> tuple[Peaks, Moment]:
    return run_apart(_predicted, world_size, overrides)


def _predicted(world_size: int, overrides: list[str]) -> tuple[Peaks, Moment]:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        return peaks_of_steps(0, world_size, overrides, fake=True)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_fake_is_real_to_the_byte(case: str, world_size: int):
    """Every peak by phase and block with every owner in it, and what is left at the end."""
    fake_peaks, fake_end = predicted(world_size, CASES[case])
    real_peaks, real_end = run_ranks(world_size, peaks_of_steps, CASES[case], False)[0]
    assert fake_peaks == real_peaks
    assert fake_end == real_end
    phases = {"forward", "backward"}
    assert {(phase, f"layers.{block}") for phase in phases for block in range(2)} <= fake_peaks.keys()
    assert fake_peaks["backward", None].owners["gradients"] > 0


def test_a_world_that_is_not_there():
    """64 ranks hold a 64th each of parameters and state; activations are those of one rank's rows."""
    one, many = predicted(1, []), predicted(64, [])
    for owner in ("parameters", "optimizer_state"):
        # shards are padded; counters are whole
        assert many[1].owners[owner] == pytest.approx(one[1].owners[owner] / 64, rel=0.01)
    forward = [peaks[None, "between"].owners["activations"] for peaks, _ in (one, many)]
    assert forward[0] == forward[1] > 0
    assert many[0]["forward", None].owners["communication"] > 0 == one[0]["forward", None].owners["communication"]
