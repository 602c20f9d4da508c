"""What only a GPU can tell about Gefen's Triton kernels: that they compute what the reference does, and how fast.

    python -m bench.gpu_check kernels|optimizer|all

Needs one NVIDIA GPU with 40 GB, torch, Triton and, for ``optimizer``, numba. Of the project it imports only
``kernels``, ``memopt``, ``bench.machine`` and the matrices of the tests. Each section takes less than four minutes, and
is written to ``bench/results/gpu_check.json`` when it is done, beside what is there of the other. Without a GPU the
file says so, unless it has results of one.

``kernels``: every kind of matrix against the reference on the CPU, within the tolerances below; that results depend
neither on other rows nor on the run; entries beyond the 2^31st. Then the time of a step of whole models against
``torch.optim.AdamW(fused=True)`` and a copy on the device: medians of interleaved repeats, by CUDA events, queued so
that the host does not count. Traffic is what a step must at least read and write.
``optimizer``: ``memopt.gefen.Gefen`` on the GPU against the reference backend on the CPU, with the same gradients; its
memory against what it says; its whole step, also with the host's part, against AdamW's.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bench.machine import RESULTS, write_result
from kernels import reference
from kernels.gefen import Codebook, Gauges, Matrix
from tests.kernels.matrices import RULE, clone_all, cut_rows, draw_codebook, draw_matrix, updated_tensors

NAME = "gpu_check"
SECTION_SECONDS = 225
REPEATS = 15
BF16, FP32 = torch.bfloat16, torch.float32
# wanted of a step: share of the bandwidth of a copy
BANDWIDTH_SHARE = 0.70
# tolerances. codes may be a level apart in a few entries, if a compiler fuses what the reference rounds twice
CODES_THAT_DIFFER = 1e-3
RELATIVE = {"v": 1e-5, "scale": 1e-6, "momentum": 1e-6, "param": 1e-5}
BF16_DIGIT = 2.0**-7
# rows, columns, block
SHAPES = ((300, 768, 768), (70, 3072, 3072), (33, 2048, 2048), (17, 8192, 8192), (9, 16384, 16384), (3, 20000, 20000))
SHORT_SHAPES = ((64, 768, 8), (64, 768, 24), (64, 1024, 64), (64, 2048, 256), (32, 99, 33), (5, 50257, 29))


def shapes_of_gpt2(dim: int, layers: int, hidden: int, vocab: int, positions: int) -> list[tuple[int, int]]:
    """(rows, columns) of the matrices of a GPT-2 with a tied head."""
    layer = [(dim, dim)] * 4 + [(hidden, dim), (dim, hidden)]
    return layer * layers + [(vocab, dim), (positions, dim)]


def shapes_of_llama(dim: int, layers: int, kv_share: int, hidden: int, vocab: int) -> list[tuple[int, int]]:
    """(rows, columns) of the matrices of a Llama with a head of its own."""
    layer = [(dim, dim)] * 2 + [(dim // kv_share, dim)] * 2 + [(hidden, dim)] * 2 + [(dim, hidden)]
    return layer * layers + [(vocab, dim)] * 2


MODELS = {
    "gpt2_124m": shapes_of_gpt2(dim=768, layers=12, hidden=3072, vocab=50257, positions=1024),
    "llama3_1_5b": shapes_of_llama(dim=2048, layers=16, kv_share=4, hidden=8192, vocab=128256),
}


def check_kernels(deadline: float) -> dict[str, Any]:
    """The ``kernels`` section."""
    from kernels import cuda

    differences = {}
    for name, matrix in cases():
        # what is timed comes after and needs two minutes at the most
        if time.monotonic() < deadline - 120:
            differences[name] = attempt(compare, cuda, matrix, "quantised" in name)
            print(f"{name}: {differences[name]}", flush=True)
    checks = {
        check.__name__: attempt(check, cuda) for check in (rows_alone, leaves_alone, beyond_int32, sums_and_counts)
    }
    print(checks, flush=True)
    times, lengths = {}, {}
    for name, shapes in MODELS.items():
        for dtype in (FP32, BF16):
            if time.monotonic() < deadline - 30:
                times[f"{name} {label(dtype)}"] = attempt(time_model, cuda, shapes, dtype)
                print(name, label(dtype), times[f"{name} {label(dtype)}"], flush=True)
                torch.cuda.empty_cache()
    for length in (8, 64, 256, 768, 2048, 4096, 8192, 16384, 20480):
        for dtype in (FP32, BF16):
            if time.monotonic() < deadline - 10:
                shapes = [(2**27 // length, length)]
                found = attempt(time_model, cuda, shapes, dtype, True)
                lengths[f"{length} {label(dtype)}"] = found.get("share of copy", found)
    print("share of a copy's bandwidth by length of the block:", lengths, flush=True)
    results = {"differences": differences, "checks": checks, "times": times}
    good = all(entry.get("ok", True) for part in results.values() for entry in part.values())
    return {"ok": good, "wanted share of copy": BANDWIDTH_SHARE, **results, "share of copy by block length": lengths}


def attempt(check: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """The result of a check, or the error in its place."""
    try:
        found = check(*arguments)
        return found if isinstance(found, dict) else {"ok": bool(found)}
    except Exception as error:
        traceback.print_exc(limit=3)
        return {"ok": False, "error": f"{type(error).__name__}: {error}"[:500]}


def cases() -> Iterator[tuple[str, Matrix]]:
    """Name and matrix of every comparison."""
    for number, (rows, columns, block) in enumerate(SHAPES + SHORT_SHAPES):
        kinds: list[tuple[str, dict[str, Any]]] = [
            ("factored", dict(factored=True, zero_columns=(1, 7))),
            ("bf16 factored", dict(factored=True, param_dtype=BF16)),
        ]
        # every kind at some shape; each is compiled
        kinds += [
            [("block", {}), ("bf16, fp32 gradient", dict(param_dtype=BF16, grad_dtype=FP32))],
            [("fp32 momentum", dict(coded=False, factored=True)), ("bf16 fp32 momentum", dict(coded=False))],
            [("quantised factored", dict(factored=True))],
        ][number % 3]
        for kind, options in kinds:
            yield f"{rows} x {columns} / {block} {kind}", draw_matrix(rows, columns, block, seed=number, **options)


def compare(backend: Any, matrix: Matrix, quantised: bool) -> dict[str, Any]:
    """Largest differences to the reference after a step: relative to the largest value, codes in levels."""
    rule = replace(RULE, quantised_update=quantised)
    (ours,), gauges = clone_all([matrix], "cuda"), Gauges.zeros(torch.device("cuda"))
    (theirs,), expected = clone_all([matrix]), Gauges.zeros(torch.device("cpu"))
    backend.gefen_step([ours], on_gpu(draw_codebook()), rule, gauges)
    reference.gefen_step([theirs], draw_codebook(), rule, expected)
    found: dict[str, Any] = {}
    ok = abs(gauges.max_update.item() / expected.max_update.item() - 1) < 1e-4 and not gauges.nonfinite_blocks.item()
    wanted = updated_tensors(theirs)
    for name, value in updated_tensors(ours).items():
        if name == "codes":
            apart = (value.int() - wanted[name].int()).abs()
            found["codes that differ"] = (apart > 0).float().mean().item()
            found["levels apart"] = apart.max().item()
            ok &= found["levels apart"] <= 1 and found["codes that differ"] <= CODES_THAT_DIFFER
        else:
            apart = (value.double() - wanted[name].double()).abs()
            found[name] = (apart / wanted[name].double().abs().max()).max().item()
            ok &= found[name] <= (BF16_DIGIT if value.dtype == BF16 else RELATIVE[name])
    return {"ok": bool(ok), **{name: float(f"{value:.2e}") for name, value in found.items()}}


def rows_alone(backend: Any) -> bool:
    """Whether rows get the same bits alone as among others, and in a second run."""
    matrices = [draw_matrix(50, 768, 768, factored=True), draw_matrix(40, 2048, 256, param_dtype=BF16)]
    runs = [clone_all(matrices, "cuda") for _ in range(3)]
    runs_parts = [runs[0], runs[1], [cut_rows(matrix, at, at + 10) for matrix in runs[2] for at in range(0, 40, 10)]]
    runs_parts[2].append(cut_rows(runs[2][0], 40, 50))
    for matrices in runs_parts:
        backend.gefen_step(matrices, on_gpu(draw_codebook()), RULE, Gauges.zeros(torch.device("cuda")))
    states = [[updated_tensors(matrix) for matrix in run] for run in runs]
    return all(
        torch.equal(value, other[name])
        for state in states[1:]
        for one, other in zip(state, states[0], strict=True)
        for name, value in one.items()
    )


def leaves_alone(backend: Any) -> bool:
    """Whether blocks that are not finite stay as they are, and are counted."""
    for rows, columns, block in ((40, 768, 768), (40, 768, 8), (3, 20000, 20000)):
        (before, ours) = clone_all([draw_matrix(rows, columns, block)] * 2, "cuda")
        for row, value in enumerate((torch.nan, torch.inf, 1e30)):
            ours.grad[row, row] = value
        gauges = Gauges.zeros(torch.device("cuda"))
        backend.gefen_step([ours], on_gpu(draw_codebook()), RULE, gauges)
        same = torch.equal(ours.param[:3, :block], before.param[:3, :block])
        same &= torch.equal(ours.codes[:3, :block], before.codes[:3, :block])
        same &= torch.equal(ours.v[:3, 0], before.v[:3, 0]) and torch.equal(ours.scale[:3, 0], before.scale[:3, 0])
        if not same or gauges.nonfinite_blocks.item() != 3 or not ours.param.isfinite().all():
            return False
    return True


def beyond_int32(backend: Any) -> bool:
    """Whether the last rows of a matrix of more than 2^31 entries are updated as they are alone."""
    columns, rest = 4096, 6
    rows = 2**31 // columns + 2 * rest
    last = draw_matrix(rest, columns, columns, param_dtype=BF16)
    zeros = {name: value.new_zeros(rows, value.shape[1], device="cuda") for name, value in tensors_of(last).items()}
    for name, value in tensors_of(last).items():
        zeros[name][-rest:] = value
    whole, (alone,) = Matrix(**zeros), clone_all([last], "cuda")
    codebook = on_gpu(draw_codebook())
    for matrix in (whole, alone):
        backend.gefen_step([matrix], codebook, RULE, Gauges.zeros(torch.device("cuda")))
    same = [torch.equal(value[-rest:], tensors_of(alone)[name]) for name, value in tensors_of(whole).items()]
    sums = backend.column_sums([whole.grad])[0]
    torch.testing.assert_close(sums.cpu(), reference.column_sums([last.grad])[0], rtol=1e-13, atol=0)
    return all(same)


def sums_and_counts(backend: Any) -> bool:
    """Whether column sums and histogram are the reference's."""
    matrices = [draw_matrix(3000, 768, 768, factored=True), draw_matrix(30, 99, 33), draw_matrix(3, 20000, 20000)]
    matrices.append(draw_matrix(70, 2048, 2048, param_dtype=BF16))
    ours = clone_all(matrices, "cuda")
    for mine, expected in zip(
        backend.column_sums([matrix.grad for matrix in ours]),
        reference.column_sums([matrix.grad for matrix in matrices]),
        strict=True,
    ):
        torch.testing.assert_close(mine.cpu(), expected, rtol=1e-13, atol=0)
    return torch.equal(backend.code_histogram(ours).cpu(), reference.code_histogram(matrices))


def time_model(
    backend: Any, shapes: Sequence[tuple[int, int]], dtype: torch.dtype, only_step: bool = False
) -> dict[str, Any]:
    """Seconds on the GPU of a step of all matrices, a row a block and with column factors, and what it moves."""
    matrices = [random_matrix(rows, columns, dtype) for rows, columns in shapes]
    codebook, gauges = on_gpu(draw_codebook()), Gauges.zeros(torch.device("cuda"))
    moved = sum(traffic(matrix) for matrix in matrices)
    source = torch.empty(min(moved // 2, 2**32), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    runs: dict[str, Callable[[], Any]] = {
        "step": lambda: backend.gefen_step(matrices, codebook, RULE, gauges),
        "copy": lambda: target.copy_(source),
    }
    if not only_step:
        params = [nn.Parameter(matrix.param) for matrix in matrices]
        for param, matrix in zip(params, matrices, strict=True):
            param.grad = matrix.grad
        adamw = torch.optim.AdamW(params, lr=1e-4, fused=True)
        grads = [matrix.grad for matrix in matrices]
        runs |= {"column sums": lambda: backend.column_sums(grads), "AdamW": adamw.step}
    seconds = gpu_seconds(runs)
    bandwidth = {"step": moved / seconds["step"], "copy": 2 * source.nbytes / seconds["copy"]}
    return {
        "entries": sum(matrix.param.numel() for matrix in matrices),
        "seconds": seconds,
        "bytes moved": moved,
        "GB/s": {name: round(value / 1e9) for name, value in bandwidth.items()},
        "share of copy": round(bandwidth["step"] / bandwidth["copy"], 3),
        "AdamW over step": round(seconds["AdamW"] / seconds["step"], 3) if "AdamW" in seconds else None,
    }


def random_matrix(rows: int, columns: int, dtype: torch.dtype) -> Matrix:
    """A matrix made on the GPU: 8-bit momentum, a row a block, column factors."""
    shape = (rows, columns)
    factor = torch.rand(columns, device="cuda") + 0.5
    return Matrix(
        param=torch.randn(shape, device="cuda", dtype=dtype).mul_(0.02),
        grad=torch.randn(shape, device="cuda", dtype=dtype).mul_(1e-3),
        v=torch.full((rows, 1), 1e-6, device="cuda"),
        codes=torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda"),
        scale=torch.full((rows, 1), 1e-3, device="cuda"),
        factor=factor,
        inverse=1 / factor,
    )


def traffic(matrix: Matrix) -> int:
    """Bytes that a step must read and write."""
    return matrix.grad.nbytes + sum(2 * value.nbytes for value in (matrix.param, matrix.codes, matrix.v, matrix.scale))


def gpu_seconds(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median seconds of each run on the GPU; repeats are interleaved."""
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runs}
    for repeat in range(REPEATS + 2):
        for name, run in runs.items():
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            # some 30 ms in which the host fills the queue
            torch.cuda._sleep(50_000_000)
            pair[0].record()
            run()
            pair[1].record()
            # the first rounds compile and warm up
            if repeat > 1:
                events[name].append(pair)
        torch.cuda.synchronize()
    return {
        name: statistics.median(start.elapsed_time(end) for start, end in pairs) / 1000
        for name, pairs in events.items()
    }


def tensors_of(matrix: Matrix) -> dict[str, Tensor]:
    return {name: value for name, value in vars(matrix).items() if value is not None}


def on_gpu(codebook: Codebook) -> Codebook:
    return Codebook(codebook.levels.cuda(), codebook.codes.cuda())


def label(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_optimizer(deadline: float) -> dict[str, Any]:
    """The ``optimizer`` section."""
    variants: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
        "default": (FP32, {}),
        "bf16": (BF16, {}),
        "block": (FP32, dict(second_moment="block")),
        "fp32 momentum": (FP32, dict(momentum="fp32")),
        "period of the paper, quantised update": (FP32, dict(partition="paper", update="quantised")),
    }
    twins = {}
    for name, (dtype, options) in variants.items():
        if time.monotonic() < deadline - 90:
            twins[name] = attempt(train_twins, dtype, options)
            print(name, twins[name], flush=True)
    steps = {}
    for name, shapes in MODELS.items():
        for dtype in (FP32, BF16):
            if time.monotonic() < deadline - 30:
                steps[f"{name} {label(dtype)}"] = attempt(time_optimizer, shapes, dtype)
                print(name, label(dtype), steps[f"{name} {label(dtype)}"], flush=True)
                torch.cuda.empty_cache()
    good = all(entry.get("ok", True) for part in (twins, steps) for entry in part.values())
    return {"ok": good, "twins": twins, "steps": steps}


def build_model() -> nn.Module:
    """A transformer of 0.7 M parameters for tokens below 1000."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)]
    return nn.Sequential(nn.Embedding(1000, 128), *layers, nn.LayerNorm(128), nn.Linear(128, 1000, bias=False))


def train_twins(dtype: torch.dtype, options: dict[str, Any], steps: int = 20) -> dict[str, Any]:
    """Train on the GPU while a twin on the CPU, with the reference's kernels, takes the same gradients.

    Returns the largest difference of a parameter in units of ``lr``, the share of codes that differ, and the losses.
    """
    from memopt.gefen import Gefen

    lr = 1e-3
    model, twin = build_model().to("cuda", dtype), build_model().to(dtype)
    ours = Gefen(model.named_parameters(), lr=lr, betas=(0.9, 0.95), **options)
    theirs = Gefen(twin.named_parameters(), lr=lr, betas=(0.9, 0.95), backend="reference", **options)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 1000, (8, 64), generator=generator).cuda()
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.roll(-1, 1).flatten())
        loss.backward()
        losses.append(loss.item())
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            other.grad = one.grad.cpu()
        ours.step()
        theirs.step()
        model.zero_grad()
    apart = [
        (one.detach().cpu().double() - other.detach().double()).abs().max().item()
        for one, other in zip(model.parameters(), twin.parameters(), strict=True)
    ]
    state, other = ours.state_tensors(), theirs.state_tensors()
    codes = [(state[name].cpu() != other[name]).float().mean().item() for name in state if name.endswith(".codes")]
    # an update is of the size of lr, and one of a code that differs a part of that. digits of a bf16 parameter are more
    limit = 0.2 * lr if dtype == FP32 else 2 * BF16_DIGIT * max(p.abs().max().item() for p in twin.parameters())
    return {
        "ok": max(apart) <= limit and max(codes, default=0.0) <= 0.01 and losses[-1] < losses[0],
        "largest difference over lr": max(apart) / lr,
        "codes that differ": max(codes, default=0.0),
        "loss": [losses[0], losses[-1]],
    }


def time_optimizer(shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> dict[str, Any]:
    """Bytes and seconds of whole steps, the host's work included, of Gefen and of AdamW; norms are left out."""
    from memopt.gefen import Gefen

    params = [nn.Parameter(torch.randn(shape, device="cuda", dtype=dtype).mul_(0.02)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param).mul_(1e-3)
    found: dict[str, Any] = {}
    optimizers: dict[str, torch.optim.Optimizer] = {}
    for name, build in (("Gefen", Gefen), ("AdamW", lambda params, lr: torch.optim.AdamW(params, lr=lr, fused=True))):
        optimizer = optimizers[name] = build(params, lr=1e-4)
        start = torch.cuda.memory_allocated()
        if name == "Gefen":
            optimizer.init_state()
            said = [optimizer.state_bytes(), optimizer.periodic_bytes(), optimizer.transient_bytes()]
            found["bytes said"] = dict(zip(("state", "first step", "step"), said, strict=True))
            found["state allocated"] = torch.cuda.memory_allocated() - start
        peaks = []
        for _ in range(3):
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            optimizer.step()
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated() - before)
        found[name] = {"held": torch.cuda.memory_allocated() - start, "first peak": peaks[0], "peak": peaks[-1]}
    said = found["bytes said"]
    # the allocator rounds every tensor up to 512 bytes; period and step are on the CPU
    slack = 1024 * 8 * len(params)
    within = found["state allocated"] <= said["state"] + slack and found["Gefen"]["peak"] <= said["step"] + slack
    found["ok"] = bool(within and found["Gefen"]["first peak"] <= said["first step"] + slack)
    found["bytes a parameter"] = round(said["state"] / sum(param.numel() for param in params), 4)
    runs = {name: optimizer.step for name, optimizer in optimizers.items()}
    found["seconds on the GPU"] = gpu_seconds(runs)
    found["seconds with the host"] = host_seconds(runs)
    return found


def host_seconds(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median seconds of each run from an idle GPU to an idle GPU; repeats are interleaved."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(REPEATS):
        for name, run in runs.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


SECTIONS: dict[str, Callable[[float], dict[str, Any]]] = {"kernels": check_kernels, "optimizer": check_optimizer}


def describe_gpu() -> dict[str, Any]:
    """Name, memory, driver and versions."""
    import triton

    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.strip() or None
    except OSError:
        driver = None
    return {
        "name": properties.name,
        "capability": list(torch.cuda.get_device_capability(0)),
        "memory": properties.total_memory,
        "driver": driver,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def earlier_sections() -> dict[str, Any]:
    path = RESULTS / f"{NAME}.json"
    return json.loads(path.read_text("utf-8")).get("sections", {}) if path.exists() else {}


def main() -> int:
    """Run the sections, write each when it is done; 1 if something was not within tolerance."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("sections", choices=(*SECTIONS, "all"), nargs="?", default="all")
    chosen = parser.parse_args().sections
    sections = earlier_sections()
    if not torch.cuda.is_available():
        reason = "no CUDA device: needs one NVIDIA GPU"
        print(f"not run: {reason}")
        if not sections:
            write_result(NAME, {"status": "not run", "reason": reason})
        return 0
    torch.set_num_threads(8)
    gpu = describe_gpu()
    print(gpu)
    good = True
    for name in SECTIONS if chosen == "all" else (chosen,):
        start = time.monotonic()
        found = attempt(SECTIONS[name], start + SECTION_SECONDS)
        sections[name] = {"gpu": gpu, "seconds": round(time.monotonic() - start), **found}
        print(f"{name}: {'ok' if found['ok'] else 'NOT OK'}, {sections[name]['seconds']} s", flush=True)
        # all is printed: a file that cannot be written must not keep the next section from being run
        attempt(write_result, NAME, {"status": "run", "sections": sections})
        torch.cuda.empty_cache()
        good &= found["ok"]
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
