"""Bytes of all tensors on one kind of device, by owner, at every moment: for real tensors and for fake ones.

    with MemoryTracker() as tracker:
        tracker.own("parameters", model.parameters())
        tracker.own("optimizer_state", optimizer.state_tensors().values())
        tracker.mark_loss(model.lm_head)
        with tracker.phase("forward"):
            loss = model(tokens, labels)
        with tracker.phase("backward"):
            loss.backward()
    tracker.peak.owners, tracker.peaks["backward", None].total

**What counts.** A storage counts once, with its ``nbytes``, however many views it has: from the operation that made
it, ``own``, or else the first operation that reads or writes it, until it is freed. ``UntypedStorage.resize_``, by
which FSDP2 frees and takes gathered parameters, is followed. Under a ``FakeTensorMode`` (enter it first) its tensors
count and no others. Not seen: what a kernel or a collective's backend takes and gives back within one operation,
tensors that nothing has touched since before, and memory that is no tensor's. Of real runs: gloo's threads let go of a
collective's buffers some microseconds after it, so that a peak can differ from run to run.

**Who owns it.** The first that applies, when the storage is made:

1. made by a collective, or by FSDP2 while it gathers or reduces: ``communication``. FSDP2's own copy of a gradient in
   the type of the reduction: ``gradients``;
2. made within ``attribute(owner)`` or a module given to ``mark_loss``: that owner;
3. made in the phase ``forward``, or by a module that runs again in the phase ``backward`` (activation checkpointing):
   ``activations``, also where it lives for one line only;
4. ``other``: gradients of activations, temporaries of a step, batches, and what was made unseen.

It changes hands when ``own`` says so, and when it is ``.grad`` of a parameter given to ``own`` (or of FSDP2's gathered
one): ``gradients`` from then on. What was ``activations`` or ``other`` and is written by a collective becomes
``communication``.

Tracking is for one process at a time, costs some microseconds an operation, and changes no number. torch's own
trackers (``torch.distributed._tools``) count only what operations return, need their modules' hooks, and allow one
forward per module; ``tests/memopt/test_tracker_torch.py`` says where they agree.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial, wraps
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

from memopt.tracker_record import OWNERS, Moment, Record

PARAMETERS, GRADIENTS, OPTIMIZER_STATE, ACTIVATIONS, LOSS, COMMUNICATION, OTHER = range(len(OWNERS))
# namespaces of operators that move data between ranks
COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "fsdp"}


class MemoryTracker:
    """Follow every storage on one kind of device. Enter it where the step runs; read it inside or afterwards.

    Args:
        device_type: "cpu" or "cuda"; of fake tensors the one they claim to be on.
        block: storages count in multiples of this many bytes, as CUDA's allocator gives 512; 1 is exact.
        points: length of the timeline at most.

    Raises:
        ValueError: ``block`` or ``points`` is too small.
    """

    def __init__(self, device_type: str = "cpu", *, block: int = 1, points: int = 2000) -> None:
        if block < 1:
            raise ValueError(f"block={block} bytes cannot hold a storage. Use 1, or 512 for CUDA's allocator.")
        self._device_type = device_type
        self._block = block
        self._record = Record(points)
        self._storages: dict[int, _Storage] = {}
        self._within: list[int] = []
        self._loss_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._watched: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._running: list[tuple[bool, str | None]] = []
        self._recomputing = 0
        self._waiting = 0
        self._owner = OTHER
        self._entered = False
        self._fake_mode: Any = None
        self._stack: ExitStack | None = None

    def __enter__(self) -> "MemoryTracker":
        if self._entered:
            raise RuntimeError(
                "this tracker was entered before. Make one for every use; other threads use on_this_thread()."
            )
        self._entered = True
        self._fake_mode = active_fake_mode()
        if self._fake_mode is not None:
            # gives collectives an implementation for fake tensors, for good
            from torch.distributed._tools import fake_collectives  # noqa: F401
        with ExitStack() as stack:
            # last out: finalisers of storages that live on must find nothing
            stack.callback(self._storages.clear)
            self._hooks: list[Any] = []
            self._hooked = WeakIdKeyDictionary()
            stack.callback(self._remove_hooks)
            stack.enter_context(_replaced(torch.UntypedStorage, "resize_", self._around_resize))
            for owner, place, name in (
                (COMMUNICATION, FSDPParamGroup, "unshard"),
                (COMMUNICATION, FSDPParamGroup, "wait_for_unshard"),
                (COMMUNICATION, _fsdp_param_group, "foreach_reduce"),
                (GRADIENTS, FSDPParam, "to_accumulated_grad_if_needed"),
            ):
                stack.enter_context(_replaced(place, name, partial(self._around, owner)))
            stack.enter_context(_replaced(FSDPParam, "init_unsharded_param", self._around_gathered))
            stack.enter_context(_replaced(torch.distributed.Work, "wait", self._around_wait))
            self._hooks += [
                register_module_forward_pre_hook(self._before_module),
                register_module_forward_hook(self._after_module, always_call=True),
            ]
            stack.enter_context(_Mode(self))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        assert self._stack is not None
        stack, self._stack = self._stack, None
        # what is held at the end stays to be read
        self._record.note()
        stack.__exit__(*error)

    @contextmanager
    def on_this_thread(self) -> Iterator[None]:
        """Track a thread that the caller started. Autograd's own threads are tracked without this."""
        with _Mode(self):
            yield

    def own(self, owner: str, tensors: Iterable[Tensor]) -> None:
        """Storages of ``tensors`` belong to ``owner`` from now on; those not seen so far count from now on.

        Gradients of what is given as ``parameters`` become ``gradients``. Tensors on other devices are left out. Call
        it again when storages were replaced, as by an optimizer's first step.

        Raises:
            ValueError: there is no such owner.
            RuntimeError: tracking has not begun, or is over.
        """
        index = _index(owner)
        if self._stack is None:
            raise RuntimeError("own() was called on a tracker that is not entered. Call it within the with block.")
        for tensor in tensors:
            self._give(index, tensor)
            if index == PARAMETERS and tensor.requires_grad and tensor.is_leaf:
                self._follow_grad(tensor)
        self._record.note()

    @contextmanager
    def attribute(self, owner: str) -> Iterator[None]:
        """What is made within the block belongs to ``owner``."""
        self._push(_index(owner))
        try:
            yield
        finally:
            self._pop()

    def mark_loss(self, module: nn.Module) -> None:
        """What ``module`` makes in its forward belongs to ``loss``."""
        self._loss_modules.add(module)

    def watch(self, name: str, module: nn.Module) -> None:
        """Open the marker ``name`` while ``module`` runs forward, and while gradients pass through it.

        The latter: from the gradient of its first output until that of its first positional input that needs one has
        been passed on (FSDP2's reduction of its gradients included), or else until the phase ends.
        ``peaks["backward", name]`` is then the most that was held in the backward of this module, its recomputation
        included.
        """
        self._watched[module] = name

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the step: "forward" and "backward" have a meaning for owners, others just a name. No nesting."""
        if self._record.phase is not None:
            raise RuntimeError(f"phase {name!r} was begun within {self._record.phase!r}. End that one first.")
        self._change_phase(name)
        try:
            yield
        finally:
            self._change_phase(None)

    @contextmanager
    def marker(self, name: str) -> Iterator[None]:
        """A stretch whose peak can be read as ``peaks[phase, name]``; it ends at the latest with its phase."""
        self._record.open_marker(name)
        try:
            yield
        finally:
            self._record.close_marker(name)

    def set_step(self, step: int) -> None:
        """The number of the step that begins, for the timeline."""
        self._record.set_step(step)

    @property
    def current(self) -> Moment:
        """Bytes held now, or when tracking ended."""
        return self._record.now()

    @property
    def peak(self) -> Moment:
        """The moment of most bytes since tracking began or ``forget_peaks``."""
        return self._record.peak

    @property
    def peaks(self) -> dict[tuple[str | None, str | None], Moment]:
        """(phase, marker) -> the moment of most bytes while both were open; (phase, None) for a whole phase."""
        return self._record.peaks

    @property
    def timeline(self) -> list[Moment]:
        """At most ``points`` moments in the order of time: the highest of each stretch."""
        return self._record.timeline

    def forget_peaks(self) -> None:
        """Peaks start anew at what is held now."""
        self._record.forget_peaks()

    def _see(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count what an operation has made, found, or resized."""
        self._meet_all(args, OTHER)
        if kwargs:
            self._meet_all(kwargs.values(), OTHER)
        if _moves_between_ranks(func):
            self._meet_all((result,), COMMUNICATION)
            self._written_by_collective((result,))
        elif isinstance(result, Tensor):
            self._meet(result, self._owner)
        elif result is not None:
            self._meet_all((result,), self._owner)
        self._record.note()

    def _meet_all(self, values: Iterable[Any], owner: int) -> None:
        for value in values:
            if isinstance(value, Tensor):
                self._meet(value, owner)
            elif isinstance(value, list | tuple):
                self._meet_all(value, owner)

    def _meet(self, tensor: Tensor, owner: int) -> "_Storage | None":
        """The entry of a tensor's storage; made for ``owner`` if there is none. None: it does not count."""
        if isinstance(tensor, FakeTensor):
            if tensor.fake_mode is not self._fake_mode:
                # DTensor tries operations out on fake tensors to learn their shapes
                return None
        elif self._fake_mode is not None:
            return None
        if tensor.device.type != self._device_type:
            return None
        return self._meet_storage(tensor.untyped_storage(), owner)

    def _meet_storage(self, storage: torch.UntypedStorage, owner: int) -> "_Storage":
        entry = self._storages.get(storage._cdata)
        size = -(-storage.nbytes() // self._block) * self._block
        if entry is None:
            entry = _Storage(storage, self._end)
            entry.key, entry.size, entry.owner = storage._cdata, size, owner
            self._storages[storage._cdata] = entry
            self._record.add(owner, size)
        elif entry.size != size:
            self._record.add(entry.owner, size - entry.size)
            entry.size = size
        return entry

    def _end(self, entry: "_Storage") -> None:
        """A storage is freed. May run between any two lines of other code."""
        if self._storages.pop(entry.key, None) is not None:
            self._record.add(entry.owner, -entry.size)

    def _give(self, owner: int, tensor: Tensor) -> None:
        for part in _plain(tensor):
            entry = self._meet(part, owner)
            if entry is not None and entry.owner != owner:
                self._record.move(entry.owner, owner, entry.size)
                entry.owner = owner

    def _written_by_collective(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, list | tuple):
                self._written_by_collective(value)
            elif isinstance(value, Tensor):
                entry = self._meet(value, COMMUNICATION)
                if entry is not None and entry.owner in (ACTIVATIONS, OTHER):
                    self._give(COMMUNICATION, value)

    def _push(self, owner: int) -> None:
        self._within.append(owner)
        self._choose_owner()

    def _pop(self) -> None:
        self._within.pop()
        self._choose_owner()

    def _choose_owner(self) -> None:
        phase = self._record.phase
        if self._within:
            self._owner = self._within[-1]
        elif phase == "forward" or (phase == "backward" and self._recomputing):
            self._owner = ACTIVATIONS
        else:
            self._owner = OTHER

    def _change_phase(self, name: str | None) -> None:
        self._record.set_phase(name)
        self._recomputing = 0
        self._choose_owner()

    def _follow_grad(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._give(GRADIENTS, parameter.grad)
        if parameter not in self._hooked:
            self._hooked[parameter] = None
            handle = parameter.register_post_accumulate_grad_hook(self._grad_is_there)  # type: ignore[no-untyped-call]
            self._hooks.append(handle)

    def _grad_is_there(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._give(GRADIENTS, parameter.grad)

    def _before_module(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        is_loss, name = module in self._loss_modules, self._watched.get(module)
        recomputed = self._record.phase == "backward"
        if is_loss:
            self._within.append(LOSS)
        if name is not None:
            self._record.open_marker(name)
            if not recomputed:
                self._on_gradient(args, partial(self._record.close_marker, name))
        self._recomputing += recomputed
        self._choose_owner()

    def _after_module(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module in self._loss_modules:
            self._within.pop()
        name = self._watched.get(module)
        if name is not None:
            self._record.close_marker(name)
        if self._recomputing:
            self._recomputing -= 1
        elif name is not None:
            outputs = output if isinstance(output, tuple) else (output,)
            self._on_gradient(outputs, partial(self._record.open_marker, name))
        self._choose_owner()

    def _on_gradient(self, values: Iterable[Any], action: Callable[[], None]) -> None:
        """Call ``action`` once when the gradient of the first tensor of ``values`` that needs one is complete."""
        tensor = next((value for value in values if isinstance(value, Tensor) and value.requires_grad), None)
        if tensor is None:
            return

        def act(gradient: Tensor) -> None:
            self._hooks.remove(handle)
            handle.remove()
            action()

        handle = tensor.register_hook(act)  # type: ignore[no-untyped-call]
        self._hooks.append(handle)

    def _remove_hooks(self) -> None:
        for handle in self._hooks:
            handle.remove()

    def _around(self, owner: int, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def within(*args: Any, **kwargs: Any) -> Any:
            self._push(owner)
            try:
                return original(*args, **kwargs)
            finally:
                self._pop()

        return within

    def _around_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def wait(*args: Any, **kwargs: Any) -> Any:
            # gloo moves results out of copies of its own here
            self._waiting += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._waiting -= 1

        return wait

    def _around_resize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            # a storage says "meta" if its tensors are fake, whatever they claim
            if storage.device.type == (self._device_type if self._fake_mode is None else "meta"):
                self._meet_storage(storage, self._owner)
                self._record.note()
            return result

        return resize_

    def _around_gathered(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def init_unsharded_param(shard: FSDPParam) -> None:
            original(shard)
            if shard._unsharded_param.requires_grad:
                self._follow_grad(shard._unsharded_param)

        return init_unsharded_param


class _Storage(weakref.ref[torch.UntypedStorage]):
    """A storage that counts; its finaliser is the tracker's."""

    __slots__ = ("key", "owner", "size")
    key: int
    size: int
    owner: int


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows every operation of the thread that it was entered on to a tracker."""

    def __init__(self, tracker: MemoryTracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracker = tracker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(_is_made_of_others, types)):
            # a DTensor, say: it comes back with the plain tensors that it is made of
            return NotImplemented
        if self._tracker._fake_mode is not None and func is torch.ops._c10d_functional.wait_tensor.default:
            # the fake one makes a new tensor, the real one does not
            return args[0]
        result = func(*args, **kwargs) if kwargs else func(*args)
        # fake tensors are asked for their device all the time
        if func is not torch.ops.prim.device.default and not self._tracker._waiting:
            self._tracker._see(func, args, kwargs, result)
        return result


@cache
def _is_made_of_others(kind: type) -> bool:
    plain = torch._C._disabled_torch_dispatch_impl
    return getattr(kind, "__torch_dispatch__", plain) is not plain and not issubclass(kind, FakeTensor)


@cache
def _moves_between_ranks(func: Any) -> bool:
    return func.namespace in COLLECTIVES


def _index(owner: str) -> int:
    if owner not in OWNERS:
        raise ValueError(f"there is no owner {owner!r}. Owners are {', '.join(OWNERS)}.")
    return OWNERS.index(owner)


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with memory of their own that a tensor is made of."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, name)
        if isinstance(part, Tensor):
            # a DTensor names its mesh too
            yield from _plain(part)


@contextmanager
def _replaced(place: Any, name: str, wrapper: Callable[[Any], Any]) -> Iterator[None]:
    """``place.name`` wrapped within the block, and then as if it had never been."""
    own = name in vars(place)
    original = getattr(place, name)
    setattr(place, name, wrapper(original))
    try:
        yield
    finally:
        if own:
            setattr(place, name, original)
        else:
            delattr(place, name)
