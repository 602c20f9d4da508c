"""Gefen (Benedek, Koren, Fried; arXiv 2606.13894): AdamW with one second moment per block and an 8-bit first moment.

About 1 byte of state per parameter instead of 8. The update of one matrix is ``kernels.reference.gefen_step``; here
are the decisions around it, which every rank takes alike from statistics that are summed over ranks first: the period
of each matrix (``memopt.partition``), the column factors, the codebook (``memopt.codebook``). State does not depend on
the number of ranks: blocks never cross a row, rows are never cut, and all sums over rows are fp64, rounded once.

``second_moment="factored"`` is not in the paper: the block's second moment is multiplied by a column factor, which
keeps the block's mean (Adafactor's factoring: Shazeer and Stern, arXiv 1804.04235). bench/README.md says what it wins.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields
from types import ModuleType
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh

import kernels
from kernels import vectors
from kernels.gefen import CELLS, Codebook, Gauges, Matrix, Rule
from memopt import codebook, gefen_learning, gefen_memory, layout, partition
from memopt.column_factor import column_factors, updated_columns
from memopt.gefen_learning import grouped
from memopt.gefen_options import GefenOptions, check_numbers
from memopt.gefen_state import Entry, check_agreement

_OPTIONS = tuple(field.name for field in fields(GefenOptions))
_COPIED = (
    "options",
    "_backend",
    "_process_group",
    "_replicas",
    "_entries",
    "_codebooks",
    "_gauges",
    "_learned",
    "_agreement",
)
# of one matrix: the column factor its codes were written with, and one over that of this step
_Factors = tuple[Tensor | None, Tensor | None]


class Gefen(torch.optim.Optimizer):
    """A drop-in for ``torch.optim.AdamW`` on plain tensors, under DDP, and on FSDP2's DTensors.

    Args:
        params: parameters, (name, parameter) pairs or groups of either, as for any torch optimizer; fp32 or bf16
            (other floating types take a slower path, in fp32 too), of any shape. DTensors are placed Shard(0),
            Replicate or both. Give parameters that a checkpoint holds names of their own.
        lr, betas, eps, weight_decay: as of AdamW; weight decay is decoupled.
        options: fields of ``GefenOptions`` by keyword. With ``partition`` paper or peaks the state has the shapes that
            the first gradient gives it: a fresh optimizer takes a saved one by ``load_state_dict`` or ``loading``, not
            by torch's helpers that allocate first and load then.
        process_group: ranks that hold copies of plain parameters (as under DDP): each keeps the state of a share of
            the rows and the updated rows are gathered. Without it every rank keeps all state. All ranks must step
            together, with gradients of the same parameters.
        backend: ``auto``, ``reference``, ``numba`` or ``triton`` (``kernels.choose``).

    Raises:
        TypeError: an option that does not exist.
        ValueError: an option or parameter that cannot work; the parameter is named.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        process_group: torch.distributed.ProcessGroup | None = None,
        backend: str = "auto",
        **options: Any,
    ) -> None:
        if unknown := sorted(options.keys() - set(_OPTIONS)):
            raise TypeError(f"Gefen has no option {', '.join(unknown)}; it has {', '.join(_OPTIONS)}.")
        self.options = GefenOptions(**options)
        self._backend = backend
        self._process_group = process_group
        self._replicas: dict[str, DeviceMesh] = {}
        self._entries: dict[Tensor, Entry] = {}
        self._codebooks: dict[torch.device, Codebook] = {}
        self._gauges: dict[tuple[torch.device, DeviceMesh | None], Gauges] = {}
        self._learned = False
        self._agreement: float | None = None
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; state for the new parameters is made at ``init_state`` or at their first step."""
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        try:
            check_numbers(self.param_groups[number])
            self._follow()
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step with the gradients that are there; parameters without one are left as they are, decay included.

        Collective where parameters are sharded or replicated. A block whose gradient is not finite is left alone.

        Args:
            closure: computes the loss anew and returns it.

        Raises:
            ValueError: a gradient is sparse; nothing has changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow()
        entries = list(self._entries.values())
        if self._process_group is not None:
            check_agreement(entries, self._process_group)
        active = [entry for entry in entries if entry.parameter.grad is not None]
        for entry in active:
            if entry.has_sparse_gradient:
                raise ValueError(f"the gradient of {entry.name} is sparse. Gefen takes dense ones: set sparse=False.")
        self._allocate(active)
        grads = {entry.parameter: entry.owned_gradient() for entry in active}
        for entry in active:
            entry.count_step()
        matrices = [entry for entry in active if entry.is_matrix and entry.columns]
        refresh = self._is_due(self.options.refresh, active)
        self._settle_periods(matrices, grads, refresh)
        factors = self._move_columns([entry for entry in matrices if entry.factored], grads)
        if refresh or not self._learned:
            self._learn_codebook([entry for entry in matrices if entry.coded], grads, factors)
        self._update(active, grads, factors)
        layout.gather_updates([entry.placed for entry in active])
        return loss

    def set_lr(self, lr: float) -> None:
        """The learning rate of the next step, of all groups."""
        for group in self.param_groups:
            group["lr"] = lr

    def init_state(self) -> None:
        """Allocate all state and compile the kernels now; parameters, counters and random state stay as they are."""
        self._follow()
        self._allocate([entry for entry in self._entries.values() if entry.parameter.requires_grad])

    def reset(self, names: Collection[str]) -> None:
        """Forget the moments and counters of the parameters of these names; periods and codebook stay."""
        chosen = set(names)
        for entry in self._entries.values():
            if entry.name in chosen:
                entry.clear()

    def state_tensors(self) -> dict[str, Tensor]:
        """Name -> live state tensor, ``<parameter>.<state>`` (``memopt.gefen_state``) and ``codebook.levels``.

        Raises:
            ValueError: two parameters have one name.
        """
        self.init_state()
        if repeated := {name for name, count in Counter(e.name for e in self._entries.values()).items() if count > 1}:
            raise ValueError(f"several parameters are called {sorted(repeated)[0]}. Give each a name of its own.")
        entries = [entry for entry in self._entries.values() if entry.state]
        tensors = {
            f"{entry.name}.{key}": value for entry in entries for key, value in entry.state.items() if key != "levels"
        }
        return tensors | self._levels()

    @contextmanager
    def loading(self, shapes: Mapping[str, Sequence[int]]) -> Iterator[dict[str, Tensor]]:
        """Tensors for a checkpoint to fill, as ``state_tensors``, with the periods of the checkpoint.

        Those whose shape fits are the live ones, so that a load which breaks off leaves a mixture: start anew then.

        Args:
            shapes: name -> global shape of the saved tensors: those of ``v`` tell the periods.

        Raises:
            ValueError: a period is not the one that ``partition`` and ``block`` ask for.
        """
        self.init_state()
        targets: dict[str, Tensor] = {}
        states: dict[Entry, dict[str, Tensor]] = {}
        for entry in self._entries.values():
            if not entry.state:
                continue
            states[entry] = entry.shaped_like(tuple(shapes.get(f"{entry.name}.v", ())), self.options)
            targets |= {f"{entry.name}.{key}": value for key, value in states[entry].items()}
        levels = {name: value.clone() for name, value in self._levels().items()}
        yield targets | levels
        for entry, state in states.items():
            entry.install(state)
        for device in self._codebooks:
            self._set_levels(device, levels["codebook.levels"])

    def state_bytes(self) -> int:
        """Bytes of state that this rank holds, every tensor counted.

        While a period is undecided (``state_is_final``), what the smallest period would need: an upper bound.
        """
        self.init_state()
        books = sum(book.levels.nbytes + book.codes.nbytes for book in self._codebooks.values())
        return books + sum(entry.num_bytes() for entry in self._entries.values() if entry.state)

    def held_tensors(self) -> list[Tensor]:
        """The tables of codes that follow from the codebooks."""
        return [book.codes for book in self._codebooks.values()]

    def transient_bytes(self) -> int:
        """Bytes that a step allocates beyond parameters, gradients and state, and frees again: an upper bound.

        The kernels' own, columns in fp64, vectors laid together, copies of what is not contiguous, and the buffers
        of the gather.
        """
        self.init_state()
        return gefen_memory.transient_bytes(self._held(), self._backend_of)

    def periodic_bytes(self) -> int:
        """The same for the first step and those that measure or change periods or codebook."""
        self.init_state()
        return gefen_memory.periodic_bytes(self._held(), self._backend_of, self.options, self.state_is_final)

    @property
    def state_is_final(self) -> bool:
        """Whether every period is decided, so that ``state_bytes`` is exact and stays (without ``refresh``)."""
        self.init_state()
        return all(entry.period or not entry.is_matrix or not entry.columns for entry in self._entries.values())

    def notes(self) -> list[dict[str, Any]]:
        """Nothing to say."""
        return []

    def gauges(self) -> dict[str, float | None]:
        """What happened since the last call, over all ranks; collective.

        ``max_update``: largest absolute entry of the update, before the learning rate. ``nonfinite_blocks``: blocks
        left alone. ``period_agreement``: share of the matrices whose period was found again when it was last
        measured, None if it was not.
        """
        largest, blocks = 0.0, 0.0
        for (_, mesh), gauges in self._gauges.items():
            found = torch.cat([gauges.max_update, gauges.nonfinite_blocks.float()])
            layout.sum_over_owners(found[1:], mesh)
            layout.sum_over_owners(found[:1], mesh, torch.distributed.ReduceOp.MAX)
            largest, blocks = max(largest, found[0].item()), blocks + found[1].item()
            gauges.max_update.zero_()
            gauges.nonfinite_blocks.zero_()
        return {"max_update": largest, "nonfinite_blocks": blocks, "period_agreement": self._agreement}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, except that no tensor changes its type, and that nothing changes unless everything fits.

        Raises:
            ValueError: groups or state do not fit these parameters and options; the parameter is named.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        saved_groups = state_dict["param_groups"]
        sizes = [[len(group["params"]) for group in groups] for groups in (saved_groups, self.param_groups)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"the saved state has groups of {sizes[0]} parameters, this optimizer of {sizes[1]}.")
        states, levels = {}, None
        for saved, group in zip(saved_groups, self.param_groups, strict=True):
            for index, parameter in zip(saved["params"], group["params"], strict=True):
                if kept := state_dict["state"].get(index):
                    entry = self._entries[parameter]
                    states[entry] = entry.adopt(kept, self.options)
                    if entry.is_matrix and entry.coded:
                        levels = self._checked_levels(entry.name, kept.get("levels"))
        for saved, group in zip(saved_groups, self.param_groups, strict=True):
            group.update(deepcopy({key: value for key, value in saved.items() if key not in ("params", "param_names")}))
        for entry in self._entries.values():
            if entry not in states:
                # as if it had never been trained, which is what was saved
                entry.forget()
                self.state.pop(entry.parameter, None)
        self._allocate(list(states))
        for entry, state in states.items():
            entry.install(state)
        if levels is None:
            levels = torch.zeros(self.options.levels, dtype=torch.float32, device="cpu")
        for device in self._codebooks:
            self._set_levels(device, levels)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        if any(entry.mesh is not None for entry in self._entries.values()):
            raise TypeError(
                "a Gefen of sharded state cannot be copied. Make a new one and load this one's state_dict()."
            )
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _COPIED}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._entries = {entry.parameter: entry for entry in self._entries.values()}

    def _follow(self) -> None:
        """Take up what has been done to groups and state, which are the user's to change as with any optimizer."""
        entries: dict[Tensor, Entry] = {}
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names") or ()
            for place, parameter in enumerate(group["params"]):
                name = names[place] if place < len(names) else f"parameter {place} of group {number}"
                entry = self._entries.get(parameter) or self._entry(name, parameter)
                entry.follow(self.state.get(parameter))
                entries[parameter] = entry
        self._entries = entries

    def _mesh_of(self, device_type: str) -> DeviceMesh | None:
        if self._process_group is None:
            return None
        if device_type not in self._replicas:
            self._replicas[device_type] = DeviceMesh.from_group(self._process_group, device_type)
        return self._replicas[device_type]

    def _held(self) -> list[Entry]:
        return [entry for entry in self._entries.values() if entry.state]

    def _entry(self, name: str, parameter: Tensor) -> Entry:
        if not parameter.is_floating_point():
            raise ValueError(f"{name} is {parameter.dtype}. Gefen trains floating tensors: leave it out.")
        if problem := layout.placement_problem(parameter):
            raise ValueError(f"{name} {problem}.")
        # refuses a backend that cannot run here
        kernels.choose(self._backend, parameter.device, {parameter.dtype})
        options = self.options
        factored, coded = options.second_moment == "factored", options.momentum == "8bit"
        entry = Entry(parameter, name, factored, coded, self._mesh_of(parameter.device.type))
        if entry.is_matrix and options.partition == "fixed":
            partition.check_block(options.block, entry.columns, name)
        return entry

    def _allocate(self, entries: Sequence[Entry]) -> None:
        fresh = [entry for entry in entries if not entry.state]
        for entry in fresh:
            period = entry.known_period(self.options.partition, self.options.block)
            state = entry.allocate(period)
            if entry.is_matrix:
                state["period"].fill_(period)
                if entry.coded:
                    # in every parameter's state, so that no tool that keeps state by parameter can lose it
                    state["levels"] = self._codebook(entry.device).levels
            entry.install(state)
            self.state[entry.parameter] = entry.state
        matrices = [entry for entry in fresh if entry.is_matrix]
        for backend, members in grouped(matrices, self._backend_of).items():
            backend.prepare([entry.alone() for entry in members])
        if any(entry.coded for entry in matrices):
            codebook.prepare()

    def _settle_periods(self, entries: Sequence[Entry], grads: Mapping[Tensor, Tensor], refresh: bool) -> None:
        """Decide periods that are open; measure the others, and change them where a refresh is due."""
        if self.options.partition not in partition.LEARNED:
            return
        measured = refresh or self._is_due(self.options.drift_interval, entries)
        asked = [entry for entry in entries if measured or not entry.period]
        found = gefen_learning.found_periods(self.options.partition, asked, grads)
        known = [(entry, period) for entry, period in zip(asked, found, strict=True) if period is not None]
        found_again = [entry.period == period for entry, period in known if entry.period]
        if found_again:
            self._agreement = sum(found_again) / len(found_again)
        for entry, period in known:
            if entry.period == period or (entry.period and not refresh):
                continue
            if entry.step == 1:
                # nothing is to be carried over
                entry.set_period(period)
            else:
                gefen_learning.repartition(entry, period, self._codebook(entry.device))

    def _move_columns(self, entries: Sequence[Entry], grads: Mapping[Tensor, Tensor]) -> dict[Tensor, _Factors]:
        """Average this step's column means into ``column``; the factors that codes have and will have."""
        numbers = {p: (group["betas"][1], group["eps"]) for group in self.param_groups for p in group["params"]}
        found: dict[Tensor, _Factors] = {}
        # matrices of one period stand together: their factors are computed at once
        ordered = sorted(entries, key=lambda entry: entry.period)
        for (mesh, (beta2, eps)), members in grouped(ordered, lambda e: (e.mesh, numbers[e.parameter])).items():
            sums: dict[Tensor, Tensor] = {}
            for backend, part in grouped(members, self._backend_of).items():
                parts = backend.column_sums([grads[entry.parameter] for entry in part])
                sums |= {entry.parameter: values for entry, values in zip(part, parts, strict=True)}
            means = layout.sum_over_owners(torch.cat([sums[entry.parameter] for entry in members]), mesh)
            lengths = [entry.columns for entry in members]
            torch._foreach_div_(list(torch.split(means, lengths)), [float(entry.rows) for entry in members])
            columns = [entry.local["column"] for entry in members]
            before = torch.cat(columns)
            after = updated_columns(before, means, lengths, beta2, eps)
            torch._foreach_copy_(columns, list(torch.split(after, lengths)))
            periods = [entry.period or entry.columns for entry in members]
            factors, inverses = column_factors(torch.cat([before, after]), 2 * lengths, 2 * periods)
            held, inverse = factors[: len(before)], inverses[len(before) :]
            for entry, old, new in zip(members, torch.split(held, lengths), torch.split(inverse, lengths), strict=True):
                found[entry.parameter] = (old if entry.coded else None, new)
        return found

    def _learn_codebook(
        self, entries: Sequence[Entry], grads: Mapping[Tensor, Tensor], factors: Mapping[Tensor, _Factors]
    ) -> None:
        """Learn the levels from this gradient, unless it is all zero; codes that exist are rewritten."""
        pieces = [(entry, self._backend_of(entry), self._matrix(entry, grads, factors)) for entry in entries]
        counts = gefen_learning.counted_cells(pieces)
        if not counts.any():
            return
        levels = codebook.optimal_levels(counts, self.options.levels, self.options.zero_level)
        for device, old in list(self._codebooks.items()):
            before = Codebook(old.levels.clone(), old.codes)
            self._set_levels(device, levels)
            for entry in self._entries.values():
                if self.options.refresh and "codes" in entry.local and entry.device == device:
                    gefen_learning.recode(entry.local["codes"], before, self._codebooks[device])

    def _update(
        self, active: Sequence[Entry], grads: Mapping[Tensor, Tensor], factors: Mapping[Tensor, _Factors]
    ) -> None:
        groups = {p: index for index, group in enumerate(self.param_groups) for p in group["params"]}
        for (index, step), members in grouped(active, lambda entry: (groups[entry.parameter], entry.step)).items():
            rule = self._rule(self.param_groups[index], step)
            for (device, mesh), part in grouped(members, lambda entry: (entry.device, entry.mesh)).items():
                gauges = self._gauges.setdefault((device, mesh), Gauges.zeros(device))
                matrices = [entry for entry in part if entry.is_matrix and entry.columns]
                for backend, chosen in grouped(matrices, self._backend_of).items():
                    pieces = [self._matrix(entry, grads, factors) for entry in chosen]
                    backend.gefen_step(pieces, self._codebook(device), rule, gauges)
                    # kernels write past autograd, which must still notice that a saved weight has changed
                    increment_version([piece.param for piece in pieces])
                    for entry, piece in zip(chosen, pieces, strict=True):
                        entry.store(piece.param)
                flat = [entry for entry in part if not entry.is_matrix]
                owned, chosen_grads = [entry.owned() for entry in flat], [grads[entry.parameter] for entry in flat]
                first, second = ([entry.local[key] for entry in flat] for key in ("m", "v"))
                vectors.adam_step(owned, chosen_grads, first, second, rule, gauges)
                for entry, values in zip(flat, owned, strict=True):
                    entry.store(values)

    def _rule(self, group: Mapping[str, Any], step: int) -> Rule:
        return Rule(
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=step,
            max_update=math.inf if self.options.max_update is None else self.options.max_update,
            quantised_update=self.options.update == "quantised",
        )

    def _matrix(self, entry: Entry, grads: Mapping[Tensor, Tensor], factors: Mapping[Tensor, _Factors]) -> Matrix:
        return entry.as_matrix(entry.owned(), grads[entry.parameter], factors.get(entry.parameter, (None, None)))

    def _backend_of(self, entry: Entry) -> ModuleType:
        grad = entry.parameter.grad
        dtypes = {entry.parameter.dtype, entry.parameter.dtype if grad is None else grad.dtype}
        return kernels.choose(self._backend, entry.device, dtypes)

    def _codebook(self, device: torch.device) -> Codebook:
        if device not in self._codebooks:
            levels = torch.zeros(self.options.levels, dtype=torch.float32, device=device)
            # all zeros: not learned yet
            self._codebooks[device] = Codebook(levels, torch.zeros(CELLS, dtype=torch.uint8, device=device))
        return self._codebooks[device]

    def _levels(self) -> dict[str, Tensor]:
        # equal on all devices
        return dict(zip(["codebook.levels"], (book.levels for book in self._codebooks.values()), strict=False))

    def _checked_levels(self, name: str, levels: Any) -> Tensor:
        if not isinstance(levels, Tensor) or levels.shape != (self.options.levels,) or levels.dtype != torch.float32:
            found = "no levels" if levels is None else f"levels of shape {tuple(levels.shape)} {levels.dtype}"
            raise ValueError(
                f"the saved state of {name} has {found}, which its codes are read with; this optimizer has "
                f"levels={self.options.levels}. Load a state made with the same levels."
            )
        return levels

    def _set_levels(self, device: torch.device, levels: Tensor) -> None:
        book = self._codebooks[device]
        book.levels.copy_(levels)
        book.codes.copy_(codebook.build_codebook(book.levels).codes)
        self._learned = bool(book.levels.any())

    def _is_due(self, interval: int, entries: Sequence[Entry]) -> bool:
        step = max((entry.step for entry in entries), default=0)
        return interval > 0 and step > 1 and step % interval == 0
