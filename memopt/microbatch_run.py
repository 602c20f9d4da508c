"""The microbatch of a run, step by step: one that was set, or the controller's with its meters and votes.

Both are asked before every step what it runs, and told afterwards how it went. The one that was set does nothing else.
The other votes, where a decision is due, in one all-reduce over all ranks of the default process group.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor, nn

from conf.checks import ConfigError
from conf.schema import Config
from memopt import layout
from memopt.ledger import AllocatorMeter, TrackerMeter, can_reserve, foreign_bytes
from memopt.microbatch import Candidate, Controller, Limits, Sample, Settings, candidates
from memopt.sharded import StateOptimizer

GIB = 2**30
POLICIES = ("full", "selective", "none")
"""Of activation checkpointing, those that keep least first."""
COMPILED_SIZES = 3
TRAINING = ("training", "updating")
"""What a run was doing when memory ran out, if the microbatch is to blame."""
RATES = ("lr", "weight_decay", "decay", "betas", "eps")
"""Numbers of an optimizer that memory and speed do not depend on."""


class Microbatch(Protocol):
    """What the trainer asks."""

    @property
    def candidate(self) -> Candidate:
        """What the last ``choose`` said."""

    @property
    def settled(self) -> bool:
        """Whether nothing is being searched at the moment."""
        ...

    def choose(self) -> bool:
        """Decide what the next step runs; whether its memory must be followed by tensors. May be collective."""
        ...

    def gauges(self) -> dict[str, Any]:
        """For the record of a step: what the search is at, and how much of the memory is in use."""
        ...

    def watch(self) -> AbstractContextManager[None]:
        """Around the work of the step."""
        ...

    def record(self, seconds: float, disturbed: bool, peak_bytes: int | None) -> None:
        """How the step went on this rank: wall time, whether anything else took some of it, its measured peak."""

    def rule_out(self) -> bool:
        """The present candidate has run out of memory; whether the step can be made again, now with another one."""
        ...

    def attempt(self, step: int, doing: str) -> dict[str, Any] | None:
        """What is written down if memory runs out in ``step`` while the run was ``doing`` that, so that the next start
        avoids it; None where that would do the same again."""
        ...

    def state(self) -> dict[str, Any] | None:
        """Plain values for a checkpoint."""
        ...

    def throughput(self) -> dict[str, Any]:
        """For the summary: tokens/s at the microbatch of the start and at the settled one."""
        ...


class FixedMicrobatch:
    """A microbatch that was set. No collective, no measurement, no decision."""

    settled = True

    def __init__(self, candidate: Candidate) -> None:
        self.candidate = candidate

    def choose(self) -> bool:
        return False

    def gauges(self) -> dict[str, Any]:
        return {}

    def watch(self) -> AbstractContextManager[None]:
        return nullcontext()

    def record(self, seconds: float, disturbed: bool, peak_bytes: int | None) -> None:
        pass

    def rule_out(self) -> bool:
        return False

    def attempt(self, step: int, doing: str) -> dict[str, Any] | None:
        return None

    def state(self) -> dict[str, Any] | None:
        return None

    def throughput(self) -> dict[str, Any]:
        return {}


class AutomaticMicrobatch:
    """The fastest microbatch that fits, found while the run goes on (``microbatch=auto``).

    Args:
        config: of the run.
        model: sharded; its parameters are what is resident besides the optimizer's state.
        optimizer: with its state allocated.
        device: whose memory is meant.
        step: optimizer steps done before.
        tell: records an event (kind, step, values): every decision that changes something.
        switch: is given the policy of activation checkpointing where the run chooses that too.
        whole_gradients: whether gradients are summed unsharded until the last microbatch of a step reduces them.
        recovers: whether a step in which memory ran out can be made again in this process.

    Raises:
        ConfigError: the model mixes rows; what ``memory.replay`` names has no decisions.
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        optimizer: StateOptimizer,
        device: torch.device,
        step: int,
        tell: Callable[..., None],
        switch: Callable[[str], None],
        whole_gradients: bool,
        recovers: bool,
    ) -> None:
        refuse_coupled_rows(model)
        self._controller = _build_controller(config, device, step)
        self._optimizer, self._model, self._device = optimizer, model, device
        self._whole_gradients, self._recovers = whole_gradients, recovers
        budget = config.memory.budget_gib
        self._budget_bytes = None if budget is None else int(budget * GIB)
        self._tell, self._switch, self._start = tell, switch, step
        # where the policy was set, nothing is there to be switched
        self._policy = None if config.activation_checkpoint == "auto" else config.activation_checkpoint
        self._allocator = AllocatorMeter(device) if device.type == "cuda" else None
        self._was_final = optimizer.state_is_final
        self._first = self._controller.candidate

    @property
    def candidate(self) -> Candidate:
        return self._controller.candidate

    @property
    def settled(self) -> bool:
        return self._controller.settled

    def choose(self) -> bool:
        """Raises ``memopt.microbatch.DoesNotFitError`` on every rank if not even the smallest fits on some."""
        while self._controller.due():
            self._decide()
        plan = self._controller.plan()
        if plan.candidate.policy != self._policy:
            self._policy = plan.candidate.policy
            self._switch(self._policy)
        return plan.measure and self._allocator is None

    def gauges(self) -> dict[str, Any]:
        use = self._controller.use
        return {
            "microbatch_phase": self._controller.phase,
            "memory_utilisation": use and use.utilisation,
            "memory_headroom_bytes": use and int(use.budget - use.need),
        }

    def watch(self) -> AbstractContextManager[None]:
        if self._allocator is not None:
            self._allocator.begin()
        return nullcontext()

    def record(self, seconds: float, disturbed: bool, peak_bytes: int | None) -> None:
        reserved, retries = None, 0
        if self._allocator is not None:
            peak_bytes, reserved, retries = self._allocator.end()
        self._controller.record(Sample(seconds, peak_bytes, reserved, retries, disturbed, self._was_final))
        if self._optimizer.state_is_final != self._was_final:
            self._was_final = self._optimizer.state_is_final
            self._controller.memory_changed("the optimizer's state has its final size")

    def rule_out(self) -> bool:
        if not self._recovers:
            return False
        before = self.candidate
        self._controller.rule_out(before)
        self._decide()
        return self.candidate != before

    def attempt(self, step: int, doing: str) -> dict[str, Any] | None:
        if doing not in TRAINING:
            return None
        one = dataclasses.asdict(self.candidate)
        return {"step": step, "doing": doing, **one, "fingerprint": self._controller.state()["fingerprint"]}

    def resume(self, saved: Mapping[str, Any] | None, reports: Sequence[Mapping[str, Any]]) -> None:
        """Go on from what a checkpoint holds; the same on all ranks.

        Args:
            saved: of ``state``; None for a new run.
            reports: what has run out of memory in earlier starts. What did so in the same regime is ruled out.
        """
        if saved is not None and (changed := self._controller.load(saved)):
            self._tell("microbatch", self._start, reason="searched anew", changed=changed)
        for report in reports:
            one = Candidate(report["rows"], report["accumulation"], report["policy"])
            same = report["fingerprint"] == self._controller.state()["fingerprint"]
            if same and one in self._controller.candidates:
                self._controller.rule_out(one)

    def state(self) -> dict[str, Any] | None:
        return self._controller.state()

    def throughput(self) -> dict[str, Any]:
        first, now = self._first, self.candidate
        return {
            "first_microbatch": first.rows,
            "first_microbatch_tokens_per_second": self._controller.tokens_per_second(first),
            "microbatch_tokens_per_second": self._controller.tokens_per_second(now),
            "microbatch_settled": self._controller.settled,
        }

    def _decide(self) -> None:
        parts = self._resident()
        vector = torch.tensor(self._controller.vote(self._limits(parts)), dtype=torch.float64, device=self._device)
        torch.distributed.all_reduce(vector, torch.distributed.ReduceOp.MAX)
        decision = self._controller.decide(vector.tolist(), parts)
        if decision.notable:
            record = {key: value for key, value in decision.record.items() if key != "step"}
            self._tell("microbatch", decision.step, **record)

    def _resident(self) -> dict[str, int]:
        """Bytes of this rank by owner, those of gradients being there in a part of a step only."""
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        return {
            "parameters": storage_bytes([*self._model.parameters(), *self._model.buffers()]),
            "optimizer state": storage_bytes(held_by(self._optimizer)),
            "gradients": sum(_rows(parameter).numel() * parameter.element_size() for parameter in trained),
        }

    def _limits(self, parts: Mapping[str, int]) -> Limits:
        budget = self._budget_bytes
        reserve: Callable[[int], bool] | None = None
        if self._device.type == "cuda":
            total = torch.cuda.mem_get_info(self._device)[1]
            free = total - foreign_bytes(self._device)
            budget = free if budget is None else min(budget, free)
            reserve = self._reserve
        assert budget is not None, "a CPU has a budget"
        # state that is not there yet
        growth = max(0, self._optimizer.state_bytes() - parts["optimizer state"])
        step = max(self._optimizer.transient_bytes(), self._optimizer.periodic_bytes())
        floor = parts["parameters"] + parts["optimizer state"]
        gradients = parts["gradients"]
        if self._whole_gradients:
            # summed as every rank has them, until the last microbatch
            trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
            accumulated = sum(parameter.numel() * parameter.element_size() for parameter in trained)
        else:
            accumulated = gradients
        return Limits(
            budget,
            floor,
            optimizer_bytes=gradients + step + growth,
            gradients=(accumulated, accumulated),
            reserve=reserve,
        )

    def _reserve(self, size: int) -> bool:
        return can_reserve(self._device, size)


def refuse_coupled_rows(model: nn.Module) -> None:
    """Refuse a module whose result for one row depends on other rows: another microbatch would be another training.

    Batch normalisation is known; any other module declares it with an attribute ``couples_rows = True``.

    Raises:
        ConfigError: there is one; the message names it.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) or getattr(module, "couples_rows", False):
            raise ConfigError(
                f"{name} ({type(module).__name__}) mixes the rows of a microbatch: microbatch=auto would change "
                "what is trained. Set microbatch to a number, or replace the module (RMSNorm, LayerNorm)."
            )


def set_microbatch(config: Config, rows: int, world_size: int) -> FixedMicrobatch:
    """At most ``rows`` sequences a forward pass, cut as evenly as the rank's batch can be."""
    batch = config.train.global_batch // world_size
    accumulation = math.ceil(batch / rows)
    return FixedMicrobatch(Candidate(math.ceil(batch / accumulation), accumulation, config.activation_checkpoint))


def _build_controller(config: Config, device: torch.device, step: int) -> Controller:
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    batch, memory, compiled = config.train.global_batch // world_size, config.memory, config.train.compile
    chosen = config.activation_checkpoint
    sizes = candidates(
        batch,
        min(memory.min_microbatch, batch),
        memory.max_microbatch,
        # compiled code has one size or sizes that divide a batch
        divisors_only=compiled,
        policies=POLICIES if chosen == "auto" else (chosen,),
    )
    settings = Settings(
        tokens_per_step=config.train.global_batch * config.train.seq_len,
        total_steps=config.train.steps,
        margin=memory.margin,
        headroom_bytes=int(memory.headroom_gib * GIB),
        free_meter=device.type == "cuda",
        max_sizes=COMPILED_SIZES if compiled else None,
        entry_ratio=float(config.model.layers) if chosen == "auto" else None,
    )
    replay = None if memory.replay is None else read_decisions(Path(memory.replay))
    return Controller(
        sizes, settings, rank, world_size, _fingerprint(config, device, world_size), step=step, replay=replay
    )


def read_decisions(path: Path) -> list[dict[str, Any]]:
    """The decisions on the microbatch in the ``events.jsonl`` of a run that were in force: of what came after the step
    that a later start resumed, none were.

    Raises:
        ConfigError: there is no such file, or no decision in it.
    """
    decisions: list[dict[str, Any]] = []
    before: list[dict[str, Any]] = []
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(
            f"memory.replay={path} cannot be read ({error.strerror}). Name the events.jsonl of a run."
        ) from None
    for record in map(json.loads, filter(None, lines)):
        if record.get("kind") == "start":
            before, decisions = decisions, []
        elif record.get("kind") == "resume":
            decisions = [decision for decision in before if decision["step"] < record["step"]]
        elif record.get("kind") == "microbatch" and "rows" in record:
            decisions.append(record)
    if not decisions:
        raise ConfigError(
            f"memory.replay={path} has no decision on the microbatch. Name the events.jsonl of a run that made some."
        )
    return decisions


def _fingerprint(config: Config, device: torch.device, world_size: int) -> dict[str, Any]:
    """Everything that changes what a microbatch needs or how fast it is; ``budget``, what fits."""
    train, name = config.train, device.type
    return {
        "budget": [config.memory.budget_gib, config.memory.margin, config.memory.headroom_gib],
        "model": dataclasses.asdict(config.model),
        "optimizer": {key: value for key, value in dataclasses.asdict(config.optimizer).items() if key not in RATES},
        "parallel": dataclasses.asdict(config.parallel),
        "train": [
            train.seq_len,
            train.global_batch,
            train.precision,
            train.compile,
            train.loss_chunk,
            train.recompute_swiglu,
        ],
        "activation_checkpoint": config.activation_checkpoint,
        "world_size": world_size,
        "device": torch.cuda.get_device_name(device) if name == "cuda" else name,
        "torch": torch.__version__,
    }


def held_by(optimizer: StateOptimizer) -> list[Tensor]:
    """All tensors that an optimizer keeps between steps."""
    return [*optimizer.state_tensors().values(), *optimizer.held_tensors()]


def meter_of(model: nn.Module, optimizer: StateOptimizer, device: torch.device, loss: nn.Module) -> TrackerMeter:
    """The meter that follows the tensors of a run; ``loss`` is the module whose forward makes the loss."""

    def parameters() -> Iterable[Tensor]:
        return [*model.parameters(), *model.buffers()]

    return TrackerMeter(device, parameters, lambda: held_by(optimizer), loss)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of ``tensors`` on this rank, each once."""
    storages = {}
    for tensor in tensors:
        storage = _rows(tensor).untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _rows(tensor: Tensor) -> Tensor:
    return layout.local_rows(tensor.detach())
