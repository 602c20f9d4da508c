"""What RSO keeps and sends beside AdamW, to the byte: ``python -m bench.rso_memory``.

Activations: every storage that a Llama-3 block keeps for backward (saved-tensor hooks; parameters, the rotary table and
P apart), with the same attention and SwiGLU code for both. What RSO removes and adds must be what the formula says,
everything else must be the same, or this fails. fp32, r = in / 4.
State: bytes of optimizer state per parameter on the models' real shapes, from the real optimizer on the meta device,
one process, P and kept B counted.
Wire: bytes of every all-gather (output) and reduce-scatter (input) that FSDP calls in a step of a small Llama-3 on two
gloo ranks, counted where it calls them. They must be those of the formula: a unit gathers its weights in forward and
again in backward, reduces gradients of what is trained, and gathers nothing for B.
"""

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first DTensor imports it: here, or a second later in every rank
import torch.distributed
import torch.multiprocessing
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bench.machine import write_result
from conf.compose import load_config
from conf.schema import Config
from dist.parallel import apply_parallel, build_mesh
from memopt import subspace
from memopt.build import build_optimizer, prepare_model
from memopt.projection import Projection
from models.build import build_model
from models.decoder import LanguageModel
from models.init import init_weights
from models.names import named_parameters

SEQ_LEN, VOCABULARY = 512, 1024
SMALL = [f"model.vocab_size={VOCABULARY}", f"data.vocab_size={VOCABULARY}"]
ARMS = {
    "AdamW": ["optimizer=adamw"],
    "RSO, coordinate": ["optimizer=rso", "optimizer.projection=coordinate"],
    "RSO, haar": ["optimizer=rso", "optimizer.projection=haar"],
}
# (model, rank, wanted bytes per parameter of optimizer=rso_gefen)
STATES = (("llama3_60m", 128, 0.69), ("llama3_8b", 1024, 0.31))
RANKS = 2
# wanted: kept for backward over AdamW's; gathered and reduced for projected layers over AdamW's
ACTIVATION_TARGET, WIRE_TARGET = 0.85, 0.78
KEPT, PARAMETERS, ROTARY = "kept", "parameters", "rotary table"


class Naming(TorchFunctionMode):
    """Names storages by the calls that read and write them: ``input of w2``, ``silu``. Use around a forward pass."""

    def __init__(self, weights: dict[int, str]) -> None:
        super().__init__()
        self._weights = weights
        self._names: dict[int, list[str]] = {}
        # storage -> what an operation kept it as: the name of what has no other
        self._kept_by: dict[int, str] = {}
        # nothing that was named may be freed, or its address could get a second name
        self._alive: list[Tensor] = []
        self._calls: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called = func.__name__
        self._calls.append(called)
        result = func(*args, **(kwargs or {}))
        self._calls.pop()
        if func is F.linear:
            name = self._weights[id(args[1])]
            self._add(args[0], f"input of {name}")
            self._add(result, f"output of {name}")
        elif func is F.silu:
            self._add(result, "silu")
        elif func is F.rms_norm:
            self._add(args[0], "input of a norm")
        elif func is F.scaled_dot_product_attention:
            for part, tensor in zip(("q", "k", "v"), args[:3], strict=True):
                self._add(tensor, f"{part} of attention")
            self._add(result, "output of attention")
        elif called in ("index_select", "matmul", "__matmul__"):
            readers = [name for name in self._names.get(_storage(args[0]), ()) if name.startswith("input of w")]
            self._add(result, " ".join(["A of", *(name.removeprefix("input of ") for name in readers)]))
        return result

    def note_kept(self, tensor: Tensor, tokens: int) -> None:
        """An operation keeps ``tensor`` now."""
        self._alive.append(tensor)
        numbers = tensor.untyped_storage().nbytes() // tensor.element_size() // tokens
        self._kept_by.setdefault(
            _storage(tensor), f"{numbers} a token inside {self._calls[-1] if self._calls else '?'}"
        )

    def name(self, storage: int) -> str:
        """All names of a storage that is kept."""
        return ", ".join(self._names.get(storage) or [self._kept_by[storage]])

    def _add(self, tensor: Tensor, name: str) -> None:
        self._alive.append(tensor)
        names = self._names.setdefault(_storage(tensor), [])
        if name not in names:
            names.append(name)


def kept_by_block(model: str, overrides: list[str], sequences: int) -> dict[str, Any]:
    """Bytes of each storage that the first block keeps for backward, by name; and those of parameters and P."""
    config = load_config([f"model={model}", "model.layers=1", *SMALL, *overrides])
    whole = build_small(config)
    block = whole.layers["0"]
    naming = Naming({id(parameter): name.split(".")[-2] for name, parameter in block.named_parameters()})
    held = {_storage(parameter): PARAMETERS for parameter in whole.parameters()}
    held |= {_storage(buffer): ROTARY for buffer in whole.buffers()}
    kinds: dict[str, dict[int, int]] = {KEPT: {}, PARAMETERS: {}, ROTARY: {}}

    def pack(tensor: Tensor) -> Tensor:
        naming.note_kept(tensor, sequences * SEQ_LEN)
        key = _storage(tensor)
        kinds[held.get(key, KEPT)][key] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(sequences, SEQ_LEN, config.model.dim, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), naming:
        block(x, None, None)
    return {
        "tensors": Counter((naming.name(key), size) for key, size in kinds[KEPT].items()),
        **{kind: sum(sizes.values()) for kind, sizes in kinds.items()},
        "P": sum(group.projection.nbytes() for group in subspace.groups(whole)),
    }


def build_small(config: Config) -> LanguageModel:
    """The model on the CPU with the layers that the optimizer needs."""
    model = build_model(config.model, SEQ_LEN, "cpu", recompute_swiglu=config.train.recompute_swiglu)
    prepare_model(config.optimizer, model, torch.float32)
    init_weights(model, 0, torch.device("cpu"))
    return model


def expected_change(model: str, tokens: int) -> tuple[Counter[tuple[str, int]], Counter[tuple[str, int]]]:
    """(removed, added) by the formula: inputs of projected layers, but what attention keeps anyway; r numbers a token.

    (name, bytes) of each tensor.
    """
    config = load_config([f"model={model}"]).model
    groups = {"wqkv": config.dim, "wo": config.dim, "w1 w3": config.dim, "w2": config.hidden}
    removed = {
        ", ".join(f"input of {name}" for name in names.split()): 4 * tokens * width
        for names, width in groups.items()
        if names != "wo"
    }
    added = {f"A of {names}": 4 * tokens * -(-width // 4) for names, width in groups.items()}
    return Counter(removed.items()), Counter(added.items())


def compare_activations(console: Console, model: str, sequences: int) -> dict[str, Any]:
    """Print what each arm keeps of one block; fails if the change is not that of the formula."""
    found = {arm: kept_by_block(model, overrides, sequences) for arm, overrides in ARMS.items()}
    dense = found["AdamW"]
    removed, added = expected_change(model, sequences * SEQ_LEN)
    title = f"{model}, one block, {sequences} x {SEQ_LEN} tokens: bytes kept for backward"
    table = Table("", *ARMS, title=title, title_justify="left")
    for name, size in dict.fromkeys(key for arm in found.values() for key in arm["tensors"]):
        counts = [arm["tensors"][name, size] for arm in found.values()]
        label = f"{max(counts)} x {name}" if max(counts) > 1 else name
        table.add_row(label, *[f"{size * count:,}" if count else "" for count in counts])
    table.add_section()
    for part in ("kept", "parameters", "rotary table", "P"):
        table.add_row(part, *[f"{arm[part]:,}" for arm in found.values()])
    console.print(table)
    rows: dict[str, Any] = {}
    for name, arm in found.items():
        ratio = arm["kept"] / dense["kept"]
        rows[name] = {**arm, "tensors": [[*key, count] for key, count in arm["tensors"].items()], "over_adamw": ratio}
        if name == "AdamW":
            continue
        gone, new = dense["tensors"] - arm["tensors"], arm["tensors"] - dense["tensors"]
        assert gone == removed and new == added, f"removed {gone}, added {new}; wanted {removed} and {added}"
        change = sum(size for _, size in added) - sum(size for _, size in removed)
        assert arm["kept"] - dense["kept"] == change
        verdict = _verdict(ratio, ACTIVATION_TARGET)
        console.print(f"{name}: {ratio:.4f} of AdamW's ({verdict}); {change:+,} bytes, those of the formula")
    for name in ("AdamW", "RSO, coordinate"):
        kept = kept_by_block(model, [*ARMS[name], "train.recompute_swiglu=true"], sequences)["kept"]
        rows[f"{name}, recompute_swiglu"] = {"kept": kept, "over_adamw": kept / dense["kept"]}
        console.print(
            f"{name}, train.recompute_swiglu=true: {kept:,} bytes, {kept / dense['kept']:.4f} of AdamW's without"
        )
    return rows


def count_state(model: str, optimizer: str, rank: int) -> dict[str, float]:
    """Bytes of state per parameter, and of its parts; ``haar`` is the whole with P of that kind."""
    config = load_config([f"model={model}", f"optimizer={optimizer}", f"optimizer.rank={rank}"])
    whole = build_model(config.model, 256, "cpu")
    prepare_model(config.optimizer, whole, torch.float32)
    named = named_parameters(whole)
    built = build_optimizer(config.optimizer, named, whole)
    assert built.state_is_final and all(parameter.is_meta for parameter in named.values())
    parameters = sum(parameter.numel() for name, parameter in named.items() if not subspace.is_subspace(name))
    projections = [group.projection for group in subspace.groups(whole)]
    parts = {"moments of B": 0, "B of probed layers": 0, "rest": 0}
    for name, tensor in built.state_tensors().items():
        inner = f".{subspace.B_NAME}." in name
        kept = inner and name.endswith(".value")
        parts["B of probed layers" if kept else "moments of B" if inner else "rest"] += tensor.nbytes
    parts["P"] = sum(p.nbytes() for p in projections)
    haar = sum(Projection("haar", p.width, p.rank, torch.device("meta")).nbytes() for p in projections)
    total = built.state_bytes()
    # codebook and the like
    parts["rest"] += total - sum(parts.values())
    return {
        "parameters": parameters,
        "total": total / parameters,
        "haar": (total - parts["P"] + haar) / parameters,
        **{part: held / parameters for part, held in parts.items()},
    }


def compare_states(console: Console) -> dict[str, Any]:
    """Print bytes of state per parameter of both inner rules."""
    columns = ("total", "moments of B", "B of probed layers", "P", "rest", "haar")
    table = Table("bytes of state per parameter", *columns, "", title="coordinate; haar: the total with such P")
    rows: dict[str, Any] = {}
    for model, rank, target in STATES:
        for optimizer in ("rso", "rso_gefen"):
            row = count_state(model, optimizer, rank)
            wanted = target if optimizer == "rso_gefen" else None
            rows[f"{model}, {optimizer}, rank {rank}"] = {**row, "target": wanted}
            label = f"{model}, r {rank}, {optimizer}"
            verdict = "" if wanted is None else _verdict(row["total"], wanted)
            table.add_row(label, *[f"{row[column]:.4f}" for column in columns], verdict)
    console.print(table)
    return rows


def count_wire(rank: int, settings: list[str], folder: str) -> None:
    """One rank: a step under FSDP after one that warms up; rank 0 writes (collective, bytes) -> calls."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", RANKS)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    config = load_config(settings, RANKS)
    model = build_model(config.model, SEQ_LEN, "cpu")
    prepare_model(config.optimizer, model, torch.float32)
    mesh = build_mesh(config.parallel, RANKS, "cpu")
    apply_parallel(model, mesh, config.parallel, compute_dtype=torch.float32)
    init_weights(model, 0, torch.device("cpu"))
    optimizer = build_optimizer(config.optimizer, named_parameters(model), model)
    tokens = torch.randint(VOCABULARY, (1, SEQ_LEN + 1), generator=torch.Generator().manual_seed(rank))
    calls: Counter[tuple[str, int]] = Counter()
    for name, counted in (("all_gather_single", 0), ("reduce_scatter_single", 1)):
        original = getattr(torch.distributed, name)
        setattr(torch.distributed, name, partial(_count, calls, name, counted, original))
    for _ in range(2):
        calls.clear()
        (model(tokens[:, :-1], tokens[:, 1:]) / SEQ_LEN).backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        torch.save(calls, f"{folder}/calls")
    torch.distributed.destroy_process_group()


def _count(
    calls: Counter[tuple[str, int]], name: str, counted: int, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call ``original``; its output is argument 0, its input 1."""
    tensor = args[counted] if len(args) > counted else kwargs[("output", "input")[counted]]
    calls[(name, tensor.nbytes)] += 1
    return original(*args, **kwargs)


def expected_wire(config: Config, projected: bool) -> tuple[Counter[tuple[str, int]], dict[str, int]]:
    """The calls of a step by the formula; and of the projected layers, bytes gathered and reduced.

    Units of FSDP are the embedding, each block, and the last norm with the head, which stays gathered in between.
    """
    m = config.model
    kv = (m.kv_heads or m.heads) * (m.dim // m.heads)
    shapes = ((m.dim + 2 * kv, m.dim), (m.dim, m.dim), (m.hidden, m.dim), (m.hidden, m.dim), (m.dim, m.hidden))
    weights = 4 * sum(rows * width for rows, width in shapes)
    gradients = 4 * sum(rows * -(-width // 4) for rows, width in shapes) if projected else weights
    norms, table = 4 * 2 * m.dim, 4 * m.vocab_size * m.dim
    calls: Counter[tuple[str, int]] = Counter()
    for gathered, reduced, gathers, units in (
        (table, table, 2, 1),
        (weights + norms, gradients + norms, 2, m.layers),
        (table + 4 * m.dim, table + 4 * m.dim, 1, 1),
    ):
        calls[("all_gather_single", gathered)] += gathers * units
        calls[("reduce_scatter_single", reduced)] += units
    return calls, {"gathered": 2 * weights * m.layers, "reduced": gradients * m.layers}


def compare_wire(console: Console) -> dict[str, Any]:
    """Print bytes that a step gathers and reduces; fails if a call is not that of the formula."""
    settings = ["model=llama3_60m", "model.layers=2", *SMALL, f"train.seq_len={SEQ_LEN}", "parallel=fsdp"]
    columns = ("gathered", "reduced", "projected: gathered", "reduced", "reduced, ratio", "both, ratio", "step, ratio")
    table = Table("bytes of a step", *columns, title=f"llama3_60m with 2 blocks, FSDP on {RANKS} ranks, fp32")
    rows: dict[str, Any] = {}
    for arm, overrides in ARMS.items():
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.start_processes(
                count_wire, args=([*settings, *overrides], folder), nprocs=RANKS, start_method="fork"
            )
            calls = torch.load(Path(folder) / "calls", weights_only=False)
        wanted, projected = expected_wire(load_config([*settings, *overrides], RANKS), arm != "AdamW")
        assert calls == wanted, f"{arm}: {dict(calls)}; by the formula {dict(wanted)}"
        sums = {
            part: sum(size * count for (name, size), count in calls.items() if name.startswith(prefix))
            for part, prefix in (("gathered", "all_gather"), ("reduced", "reduce_scatter"))
        }
        dense = rows["AdamW"]["projected"] if rows else projected
        ratios = {
            "reduced": projected["reduced"] / dense["reduced"],
            "both": sum(projected.values()) / sum(dense.values()),
            "whole step": sum(sums.values()) / (sum(rows["AdamW"]["step"].values()) if rows else sum(sums.values())),
        }
        rows[arm] = {"step": sums, "projected": projected, "over_adamw": ratios}
        shown = (sums["gathered"], sums["reduced"], projected["gathered"], projected["reduced"])
        table.add_row(arm, *[f"{each:,}" for each in shown], *[f"{ratio:.4f}" for ratio in ratios.values()])
    verdict = _verdict(max(row["over_adamw"]["both"] for arm, row in rows.items() if arm != "AdamW"), WIRE_TARGET)
    console.print(table, f"every call is that of the formula; both, ratio: {verdict}")
    return rows


def _verdict(value: float, wanted: float) -> str:
    return f"wanted <= {wanted}: {'met' if value <= wanted else 'missed'}"


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def main() -> None:
    """Print the tables, write ``bench/results/rso_memory.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--models", nargs="+", default=["llama3_60m", "llama3_350m"], help="whose blocks: 512 and 1024")
    parser.add_argument("--sequences", type=int, default=2, help=f"of {SEQ_LEN} tokens")
    arguments = parser.parse_args()
    console = Console(width=150)
    # before anything starts threads: ranks are forked
    wire = compare_wire(console)
    activations = {model: compare_activations(console, model, arguments.sequences) for model in arguments.models}
    states = compare_states(console)
    targets = {"activations": ACTIVATION_TARGET, "wire": WIRE_TARGET}
    content = {"activations": activations, "bytes_per_parameter": states, "wire": wire, "targets": targets}
    console.print(f"written to {write_result('rso_memory', content)}")


if __name__ == "__main__":
    main()
