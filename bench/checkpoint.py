"""How long an asynchronous save stalls training, as a share of a synchronous save of the same state.

    python -m bench.checkpoint            # 60 M parameters and two moments in fp32, 2 gloo processes
    python -m bench.checkpoint --rounds 9 --parameters 20000000 --ranks 1

Synchronous and asynchronous saves alternate in one run, each of the same tensors into a fresh folder of the same
disk, one thread a process. The stall is the time that ``Checkpointer.save`` blocks, the largest over the ranks; the
background write has ended before the next save starts, as it has in training. The first asynchronous save is stated
apart. The result must be <= 0.20.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed
import torch.multiprocessing
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from bench.machine import write_result
from dist import agree
from dist.checkpoint import Checkpointer

LIMIT = 0.20
# shapes of a transformer block of width 768 and of its embedding, repeated until there are enough parameters
SHAPES = ((32000, 768), (768, 768), (768, 768), (2048, 768), (2048, 768), (768, 2048), (768,))


def build_state(num_parameters: int) -> dict[str, torch.Tensor]:
    """Sharded fp32 parameters with two moments each, as DTensors of random values."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    rank, world_size = mesh.get_local_rank(), mesh.size()
    state: dict[str, torch.Tensor] = {}
    held = index = 0
    while held < num_parameters:
        shape = torch.Size(SHAPES[0] if index == 0 else SHAPES[1 + (index - 1) % (len(SHAPES) - 1)])
        rows = len(torch.arange(shape[0]).chunk(world_size)[rank])
        for part in ("weight", "exp_avg", "exp_avg_sq"):
            local = torch.randn(rows, *shape[1:])
            stride = torch.empty(shape, device="meta").stride()
            state[f"layers.{index}.{part}"] = DTensor.from_local(local, mesh, [Shard(0)], shape=shape, stride=stride)
        held += shape.numel()
        index += 1
    return state


def measure(rank: int, options: argparse.Namespace, scratch: str) -> None:
    """One rank: alternate the two kinds of save; rank 0 writes the seconds of each to ``scratch``."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{scratch}/store", options.ranks)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    state = build_state(options.parameters)
    savers = {
        kind: Checkpointer(Path(scratch) / kind, keep=1, async_save=kind == "async") for kind in ("sync", "async")
    }
    # as the trainer does at its start; what it takes in the background is long over at the first save of a run
    savers["async"].reserve(state)
    savers["async"].wait()
    seconds: dict[str, list[float]] = {"sync": [], "async": [], "background": []}
    for step in range(1, options.rounds + 2):
        for kind, saver in savers.items():
            torch.distributed.barrier()
            started = time.perf_counter()
            seconds[kind].append(max(agree.gather(saver.save(step, state, {"step": step}))))
            if kind == "async":
                saver.wait()
                seconds["background"].append(max(agree.gather(time.perf_counter() - started)))
    for saver in savers.values():
        saver.close()
    if rank == 0:
        size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        Path(scratch, "seconds.json").write_text(json.dumps({"seconds": seconds, "bytes": size}))
    torch.distributed.destroy_process_group()


def main() -> None:
    """Run the benchmark, print the ratio and write ``bench/results/checkpoint.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=60_000_000, help="parameters of the model")
    parser.add_argument("--ranks", type=int, default=2, help="gloo processes")
    parser.add_argument("--rounds", type=int, default=7, help="saves of each kind, after one warm-up of each")
    parser.add_argument("--folder", default=None, help="disk to write to; default the system's temporary folder")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        torch.multiprocessing.spawn(measure, args=(options, scratch), nprocs=options.ranks)
        measured = json.loads(Path(scratch, "seconds.json").read_text())
    seconds = measured["seconds"]
    medians = {kind: statistics.median(values[1:]) for kind, values in seconds.items()}
    result = {
        "stall_ratio": medians["async"] / medians["sync"],
        "limit": LIMIT,
        "sync_seconds": medians["sync"],
        "stall_seconds": medians["async"],
        "background_seconds": medians["background"],
        "first_stall_seconds": seconds["async"][0],
        "all_seconds": seconds,
        "state_bytes": measured["bytes"],
        "ranks": options.ranks,
        "rounds": options.rounds,
    }
    write_result("checkpoint", result)
    verdict = "within" if result["stall_ratio"] <= LIMIT else "ABOVE"
    Console().print(
        f"state of {measured['bytes'] / 2**20:.0f} MiB on {options.ranks} ranks: "
        f"synchronous save {medians['sync']:.2f} s, asynchronous stall {medians['async']:.3f} s "
        f"(first {seconds['async'][0]:.3f} s), written after {medians['background']:.2f} s\n"
        f"stall / synchronous save = {result['stall_ratio']:.3f} ({verdict} the limit of {LIMIT:.2f})"
    )


if __name__ == "__main__":
    main()
