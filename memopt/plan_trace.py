"""Peaks of a training step that does not run: of a model of few blocks, on fake tensors, in a world that is not there.

Decided here: what is traced. The trainer's own model, wrapping and passes run under a ``FakeTensorMode`` and a fake
process group, as rank 0 sees them; ``memopt.tracker`` counts. Two models of few blocks are enough: what blocks hold
grows by the same bytes with each of them, so that every peak is extended linearly in blocks, marker by marker (the
first and the last two blocks, embedding, last norm, head, forward and backward), and the largest is the peak.

Left out, because it needs values or has formulas (``memopt.plan_state``): the optimizer, its state and its step. A
trace computes in the types of the target device, but on CPU tensors: kernels and communication libraries of a GPU
allocate for themselves what nobody sees here.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from conf.schema import Config
from dist import parallel
from memopt import layout, subspace, virtual
from memopt.build import prepare_model
from memopt.tracker import MemoryTracker
from memopt.tracker_record import Moment
from models.build import build_model
from models.decoder import LanguageModel

FEW, MORE = 4, 5
"""Blocks of the two models: from four on the first two and the last two differ."""
CUDA_BLOCK = 512
"""Bytes in which CUDA's allocator gives memory."""
Places = dict[str, dict[str, int]]
"""Where a peak is -> owner -> bytes."""
PERSISTENT = "between steps"
"""The place that is no peak: what is held when no step runs, optimizer state left out."""


@dataclass(frozen=True)
class Shape:
    """What a step runs, as far as memory is concerned."""

    rows: int
    """Sequences of the largest microbatch."""
    batch: int
    """Sequences of a rank in a step."""

    @property
    def microbatches(self) -> int:
        """Microbatches that a trace runs: gradients of earlier ones are there in the second, which is the last."""
        return 1 if self.rows >= self.batch else 2


@contextmanager
def fake_world(world_size: int) -> Iterator[None]:
    """A default process group of ``world_size`` ranks, of which this process is rank 0 and the others do not exist.

    Raises:
        RuntimeError: there is a process group already.
    """
    if torch.distributed.is_initialized():
        raise RuntimeError("a plan needs a process group of its own. Make it before the run joins its group.")
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


class Tracer:
    """Peaks of steps of one configuration, by shape and policy; each is traced once. Within ``fake_world``.

    Args:
        config: of the run; its optimizer decides which layers are projected.
        mesh: of all ranks, on "cpu".
        device_type: of the target, "cpu" or "cuda".
    """

    def __init__(self, config: Config, mesh: DeviceMesh, device_type: str) -> None:
        self._config, self._mesh, self._device_type = config, mesh, device_type
        self.dtype = compute_type(config, device_type)
        self._models: dict[tuple[str, int], _FakeModel] = {}
        self._known: dict[tuple[str, Shape], Places] = {}

    def places(self, policy: str, shape: Shape) -> Places:
        """Place -> owner -> bytes of the whole model, optimizer state left out; ``PERSISTENT`` among them.

        Args:
            policy: activation checkpointing: none, selective or full.
            shape: the rows of the step.
        """
        if (policy, shape) not in self._known:
            depth = self._config.model.layers
            if depth <= MORE:
                found = self._trace(policy, depth, shape)
            else:
                few, more = (self._trace(policy, layers, shape) for layers in (FEW, MORE))
                found = {place: _extend(few[place], more[place], depth) for place in few.keys() & more.keys()}
            self._known[policy, shape] = found
        return self._known[policy, shape]

    def whole(self, policy: str, shape: Shape) -> Places:
        """``places`` from a trace of every block, to compare with."""
        return self._trace(policy, self._config.model.layers, shape)

    def _trace(self, policy: str, layers: int, shape: Shape) -> Places:
        if (policy, layers) not in self._models:
            self._models[policy, layers] = _FakeModel(self._config, self._mesh, policy, layers, self.dtype)
        block = CUDA_BLOCK if self._device_type == "cuda" else 1
        return self._models[policy, layers].trace(shape, block)


def compute_type(config: Config, device_type: str) -> torch.dtype:
    """The type that forward and backward compute in on the target."""
    low = config.train.precision == "bf16" or (config.train.precision == "auto" and device_type == "cuda")
    return torch.bfloat16 if low else torch.float32


def meta_model(config: Config, mesh: DeviceMesh, policy: str, dtype: torch.dtype, fake: Any = None) -> LanguageModel:
    """The model of ``config``, sharded for rank 0, without memory; or with fake memory within the mode ``fake``."""
    settings = config.train
    model = build_model(config.model, settings.seq_len, "cpu", False, settings.loss_chunk, settings.recompute_swiglu)
    with nullcontext() if fake is None else fake:
        if fake is not None:
            _give_fake_memory(model)
        prepare_model(config.optimizer, model, dtype)
        parallel.apply_parallel(model, mesh, config.parallel, compute_dtype=dtype, activation_checkpoint=policy)
        groups = subspace.groups(model)
        for group in groups:
            # what RSO does when it is made
            group.projection.move(torch.device("cpu" if fake is not None else "meta"))
        virtual.release(model, [layer.subspace for group in groups for layer in group.layers.values()])
    return model


class _FakeModel:
    """A model of some blocks on fake tensors; it can be traced several times."""

    def __init__(self, config: Config, mesh: DeviceMesh, policy: str, layers: int, dtype: torch.dtype) -> None:
        self._mode = FakeTensorMode()
        model_config = dataclasses.replace(config.model, layers=layers)
        config = dataclasses.replace(config, model=model_config)
        self._config, self._layers = config, layers
        self._model = meta_model(config, mesh, policy, dtype, self._mode)

    def trace(self, shape: Shape, block: int) -> Places:
        with self._mode, MemoryTracker(block=block, points=2) as tracker:
            model = self._model
            tracker.own("parameters", [*model.parameters(), *model.buffers()])
            tracker.own("optimizer_state", [group.projection.values for group in subspace.groups(model)])
            for name, module in self._markers().items():
                tracker.watch(name, module)
            tracker.mark_loss(model.lm_head)
            every = parallel.reduces_every_microbatch(self._config.parallel)
            tokens, labels = (torch.zeros(shape.batch, self._config.train.seq_len, dtype=torch.int64) for _ in range(2))
            tracker.own("other", [tokens, labels])
            summed = torch.zeros((), dtype=torch.float64)
            held = tracker.current
            tracker.forget_peaks()
            for index in range(shape.microbatches):
                rows = slice(index * shape.rows, (index + 1) * shape.rows)
                # the last one may be smaller in the run; here it stands for all that come after the first
                inputs, targets = (_rows(values, rows, shape.rows) for values in (tokens, labels))
                last = index == shape.microbatches - 1
                with parallel.gradient_sync(model, last=last, every=every):
                    with tracker.phase("forward"):
                        loss = model(inputs, targets)
                    with tracker.phase("backward"):
                        (loss / shape.batch).backward()
                summed += loss.detach()
                del loss
            with tracker.phase("optimizer"):
                pass
            found = {_place(*key): dict(moment.owners) for key, moment in tracker.peaks.items() if key[0] is not None}
            found[PERSISTENT] = dict(held.owners)
            model.zero_grad()
        return found

    def _markers(self) -> dict[str, nn.Module]:
        model = self._model
        blocks = list(model.layers.values())
        named = {"embedding": model.tok_embeddings, "norm": model.norm, "head": model.lm_head}
        for index, block in enumerate(blocks):
            if self._layers <= MORE and self._layers >= FEW:
                names = {0: "first block", 1: "second block", self._layers - 2: "last block but one"}
                names[self._layers - 1] = "last block"
                if index in names:
                    named[names[index]] = block
            else:
                named[f"block {index}"] = block
        return named


def largest(places: Places) -> tuple[str, dict[str, int]]:
    """The place with most bytes, and its owners."""
    peaks = {place: owners for place, owners in places.items() if place != PERSISTENT}
    # of a phase and a marker within it, the marker says more
    return max(peaks.items(), key=lambda item: (sum(item[1].values()), len(item[0])))


def total(owners: dict[str, int]) -> int:
    """Bytes of all owners together."""
    return sum(owners.values())


def _place(phase: str | None, marker: str | None) -> str:
    assert phase is not None
    return phase if marker is None else f"{phase} of {marker}"


def _rows(values: Tensor, rows: slice, count: int) -> Tensor:
    part = values[rows]
    return part if len(part) == count else values[:count]


def _extend(few: dict[str, int], more: dict[str, int], depth: int) -> dict[str, int]:
    """Bytes by owner of ``depth`` blocks from those of ``FEW`` and ``MORE``."""
    steps = (depth - FEW) // (MORE - FEW)
    return {owner: few[owner] + steps * (more[owner] - few[owner]) for owner in few}


def _give_fake_memory(model: nn.Module) -> None:
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
                slots[name] = made[id(old)]  # type: ignore[assignment]


def build_mesh(config: Config, world_size: int) -> DeviceMesh:
    """The mesh of the run and, known from then on, that of its state. Before any fake mode: both read tensors."""
    mesh = parallel.build_mesh(config.parallel, world_size, "cpu")
    layout.state_mesh(mesh)
    return mesh


__all__ = ["FEW", "MORE", "PERSISTENT", "Moment", "Places", "Sequence", "Shape", "Tracer"]
