"""Background: without a GPU the Triton kernels can still be compiled, and run on CPU tensors by Triton's interpreter.
The interpreter needs ``TRITON_INTERPRET=1`` before Triton is imported, and other tests import Triton, through
torchtitan. So functions named ``check_*`` are tests of a second pytest, which ``test_under_the_interpreter`` starts.

The interpreter adds up in numpy's order and rounds every operation, as the compiled kernels do: codes, scales and fp32
momenta are the reference's bits, ``v`` and the parameter differ by a few units of the last digit.
"""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget

from kernels import cuda, reference
from kernels.gefen import Codebook, Gauges, Matrix, Rule
from tests.kernels.matrices import (
    RULE,
    assert_same_bits,
    clone_all,
    cut_rows,
    draw_codebook,
    draw_matrix,
    updated_tensors,
)

CODEBOOK = draw_codebook()
KERNELS = (cuda._step_kernel, cuda._long_step_kernel, cuda._histogram_kernel, cuda._column_sums_kernel)
BF16 = torch.bfloat16
# the interpreter's, about NaN in what is not stored
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
# longer than what is held in registers, and not a multiple of the chunk
LONG = cuda.LONGEST_HELD + 8
# a matrix each of what is compiled anew: types, momentum, factors, length of the block (several a tile, one a tile, not
# a multiple of 4, chunks), and more than one of some
MATRICES = {
    "fp32": dict(rows=5, columns=96, block=24),
    "fp32, more": dict(rows=40, columns=48, block=24, seed=1),
    "no rows": dict(rows=0, columns=96, block=24),
    "factored": dict(rows=40, columns=64, block=8, factored=True, zero_columns=(3, 17)),
    "row": dict(rows=11, columns=768, block=768, factored=True, zero_columns=(5,)),
    "odd": dict(rows=7, columns=99, block=33, factored=True),
    "long": dict(rows=2, columns=LONG, block=LONG, factored=True),
    "bf16": dict(rows=6, columns=96, block=48, param_dtype=BF16, factored=True),
    "bf16, fp32 gradient": dict(rows=6, columns=96, block=48, param_dtype=BF16, grad_dtype=torch.float32),
    "fp32 momentum": dict(rows=6, columns=96, block=24, coded=False),
    "fp32 momentum, factored": dict(rows=6, columns=96, block=24, coded=False, factored=True, zero_columns=(3,)),
    "fp32 momentum, long": dict(rows=1, columns=LONG, block=LONG, coded=False),
}


def test_under_the_interpreter():
    # the fixtures of all tests take longer to import than the checks take, and none is needed
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-o", "python_functions=check_*"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, __file__],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout[-20000:] + result.stderr[-2000:]


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """A GPU that only notes what is launched: ``compiler(capability)`` returns the list of (kernel, programs)."""
    launches: list[tuple[str, int]] = []

    def launcher(source, metadata):
        return lambda grid, *_: launches.append((metadata.name, grid))

    def put_in(capability: int) -> list:
        for kernel in KERNELS:
            kernel.device_caches.clear()
        driver = SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
            launcher_cls=launcher,
            utils=SimpleNamespace(
                get_device_properties=lambda device: {"max_shared_mem": 100_000},
                load_binary=lambda *_: (None, None, 0, 0, 1024),
            ),
        )
        monkeypatch.setattr(triton.runtime.driver, "_active", driver)
        return launches

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    yield put_in
    for kernel in KERNELS:
        kernel.device_caches.clear()


def compiled(kernel) -> list[str]:
    """PTX of what has been compiled of a kernel."""
    return [binary.asm["ptx"] for binary in kernel.device_caches[0][0].values()]


@pytest.mark.parametrize("capability", [80, 90])
def test_compiles_for_gpus(compiler, capability):
    launches = compiler(capability)
    model = [draw_matrix(16, 768, 768, factored=True, seed=layer) for layer in range(24)]
    cuda.prepare(model)
    assert not launches and len(compiled(cuda._step_kernel)) == 1
    cuda.gefen_step(model, CODEBOOK, RULE, Gauges.zeros("cpu"))
    cuda.column_sums([matrix.grad for matrix in model])
    # one launch for all layers, of what prepare has compiled
    assert launches == [("_step_kernel", 24 * 2), ("_column_sums_kernel", 24 * 6)]
    (step,), (sums,) = compiled(cuda._step_kernel), compiled(cuda._column_sums_kernel)
    # every operation is rounded, as in the reference
    assert not re.search(r"\bfma\.|\.ftz|\.approx", step)
    # gradient, parameter and both factors are read 16 bytes at a time, and codes 4
    assert step.count("ld.global.v4.b32") >= 4 and "ld.global.b8" not in step and "st.global.b8" not in step
    assert "ld.global.v4.b32" in sums


def test_every_kind_compiles(compiler):
    launches = compiler(90)
    matrices = [
        draw_matrix(4, 32, 8, param_dtype=BF16),
        draw_matrix(1, LONG, LONG),
        draw_matrix(4, 99, 33, coded=False),
    ]
    cuda.gefen_step(matrices, CODEBOOK, replace(RULE, quantised_update=True), Gauges.zeros("cpu"))
    cuda.code_histogram(matrices)
    assert [name for name, _ in launches] == ["_step_kernel", "_long_step_kernel", "_step_kernel"] + 3 * [
        "_histogram_kernel"
    ]


@pytest.fixture(autouse=True)
def rounding(monkeypatch):
    """The interpreter cuts off digits from fp32 to bf16 (Triton 3.7), where GPUs round to the nearest."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cut = InterpreterBuilder.create_fp_trunc

    def round_to_nearest(self, source, target):
        if target.scalar != tl.bfloat16:
            return cut(self, source, target)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16)
        return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), target.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_fp_trunc", round_to_nearest)


def draw_all(names=tuple(MATRICES)) -> list[Matrix]:
    return [draw_matrix(**MATRICES[name]) for name in names]


def step(backend, matrices: list[Matrix], rule: Rule = RULE, codebook: Codebook = CODEBOOK) -> Gauges:
    gauges = Gauges.zeros("cpu")
    backend.gefen_step(matrices, codebook, rule, gauges)
    return gauges


def assert_follows(actual: Matrix, expected: Matrix, message: str = "") -> None:
    theirs = updated_tensors(expected)
    for name, value in updated_tensors(actual).items():
        if name in ("codes", "scale", "momentum"):
            assert torch.equal(value, theirs[name]), f"{message} {name}"
        elif value.dtype == BF16:
            # the last digits of v decide what is rounded up: one unit, of few
            torch.testing.assert_close(value, theirs[name], rtol=2**-7, atol=0, msg=f"{message} {name}")
            assert (value != theirs[name]).float().mean() < 0.02, f"{message} {name}"
        else:
            torch.testing.assert_close(value, theirs[name], rtol=1e-6, atol=1e-8, msg=f"{message} {name}")


@pytest.mark.parametrize("changes", [{}, {"quantised_update": True}, {"max_update": 0.5}, {"step": 1}])
def check_step_follows_the_reference(changes):
    rule = replace(RULE, **changes)
    before, ours, theirs = draw_all(), draw_all(), draw_all()
    mine, expected = step(cuda, ours, rule), step(reference, theirs, rule)
    for name, old, actual, wanted in zip(MATRICES, before, ours, theirs, strict=True):
        assert_follows(actual, wanted, name)
        assert name == "no rows" or not torch.equal(actual.param, old.param)
    torch.testing.assert_close(mine.max_update, expected.max_update, rtol=1e-6, atol=0)
    assert mine.nonfinite_blocks.item() == 0


def check_few_levels():
    for levels in (2, 16):
        ours, theirs = ([draw_matrix(6, 96, 24, levels=levels)] for _ in range(2))
        for backend, matrices in ((cuda, ours), (reference, theirs)):
            step(backend, matrices, codebook=draw_codebook(levels))
        assert_follows(ours[0], theirs[0])


def exact(matrix: Matrix, rule: Rule) -> dict[str, Tensor]:
    """The step in fp64: ``param``, ``v``, momentum ``m`` and ``scale`` after it, and ``u`` (R, B, p) that is coded."""
    number = rule.numbers()
    rows, columns = matrix.param.shape
    shape = (*matrix.v.shape, -1)
    g = matrix.grad.double()
    if matrix.codes is None:
        m = matrix.momentum.double()
    else:
        m = (CODEBOOK.levels.double()[matrix.codes.long()].view(shape) * matrix.scale.double()[..., None]).view(
            rows, -1
        )
        m = m if matrix.factor is None else m * matrix.factor
    m = number["beta1"] * m + number["gain1"] * g
    u = (m if matrix.inverse is None else m * matrix.inverse).view(shape)
    v = number["beta2"] * matrix.v.double() + number["gain2"] * g.square().view(shape).mean(-1)
    update = number["correction1"] * u / ((number["correction2"] * v).sqrt() + number["eps"])[..., None]
    param = matrix.param.double() * number["decay"] - number["lr"] * update.view(rows, columns)
    return {"param": param, "v": v, "u": u, "m": m, "scale": u.abs().amax(-1)}


@pytest.mark.parametrize("name", ["fp32", "factored", "row", "odd", "long", "fp32 momentum, factored"])
def check_step_against_fp64(name):
    matrix = draw_all([name])[0]
    wanted = exact(matrix, RULE)
    step(cuda, [matrix])
    torch.testing.assert_close(matrix.param.double(), wanted["param"], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(matrix.v.double(), wanted["v"], rtol=1e-6, atol=0)
    if matrix.codes is None:
        torch.testing.assert_close(matrix.momentum.double(), wanted["m"], rtol=1e-6, atol=1e-10)
        return
    torch.testing.assert_close(matrix.scale.double(), wanted["scale"], rtol=1e-6, atol=0)
    levels = CODEBOOK.levels.double()
    kept = levels[matrix.codes.long()].view(wanted["u"].shape)
    nearest = (wanted["u"] / wanted["scale"][..., None]).flatten()
    error = (nearest[:, None] - levels).abs().amin(1).view(kept.shape)
    # a cell is as wide as 1 / 2047, and its code is right at its centre
    assert ((kept - nearest.view(kept.shape)).abs() <= error + 1 / 2047).all()


def check_results_do_not_depend_on_the_company():
    """A matrix alone, among others, and in pieces of rows: the same bits."""
    names = ("fp32", "fp32, more", "row", "odd", "long", "bf16")
    together, alone, pieces = (draw_all(names) for _ in range(3))
    step(cuda, together)
    for matrix in alone:
        step(cuda, [matrix])
    halves = [(matrix, len(matrix.param) // 2) for matrix in pieces]
    step(cuda, [cut_rows(matrix, 0, half) for matrix, half in halves])
    step(cuda, [cut_rows(matrix, half, len(matrix.param)) for matrix, half in halves])
    for name, expected, *others in zip(names, together, alone, pieces, strict=True):
        for other in others:
            assert_same_bits(other, expected, name)


def check_more_matrices_than_a_launch_takes(monkeypatch):
    monkeypatch.setattr(cuda, "LAUNCH", 2)
    ours, theirs = ([draw_matrix(rows, 96, 24, seed=rows) for rows in range(1, 6)] for _ in range(2))
    step(cuda, ours)
    step(reference, theirs)
    for actual, expected in zip(ours, theirs, strict=True):
        assert_follows(actual, expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("name", ["fp32", "row", "long", "fp32 momentum", "bf16"])
def check_blocks_that_are_not_finite_are_left_alone(name, value):
    before, ours, theirs = (draw_all([name])[0] for _ in range(3))
    block = before.grad.shape[1] // before.v.shape[1]
    places = [(0, 0), (len(before.grad) - 1, before.grad.shape[1] - 1)]
    for matrix in (ours, theirs):
        for place in places:
            matrix.grad[place] = value
    mine, expected = step(cuda, [ours]), step(reference, [theirs])
    assert_follows(ours, theirs)
    for row, column in places:
        there = slice(column // block * block, column // block * block + block)
        for key, old in updated_tensors(before).items():
            part = (row, there) if old.shape[1] == before.grad.shape[1] else (row, column // block)
            assert torch.equal(updated_tensors(ours)[key][part], old[part]), key
    assert mine.nonfinite_blocks.item() == expected.nonfinite_blocks.item() == 2
    torch.testing.assert_close(mine.max_update, expected.max_update, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["fp32", "long"])
@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-45])
def check_blocks_of_zeros_and_of_next_to_nothing(name, size):
    ours, theirs = (draw_all([name])[0] for _ in range(2))
    for matrix in (ours, theirs):
        matrix.grad.fill_(size)
        matrix.scale[0].zero_()
    step(cuda, [ours])
    step(reference, [theirs])
    assert_follows(ours, theirs)
    assert ours.param.isfinite().all() and (ours.scale[0] == 0).all() and (ours.scale[1:] > 0).all()


def check_nothing_to_do():
    gauges = step(cuda, [])
    step(cuda, draw_all(["no rows"]))
    assert gauges.max_update.item() == 0


def check_gauges_are_raised_only():
    gauges = Gauges(torch.tensor([1e6]), torch.tensor([7]))
    matrix = draw_all(["fp32"])[0]
    matrix.grad[0, 0] = torch.nan
    cuda.gefen_step([matrix], CODEBOOK, RULE, gauges)
    assert gauges.max_update.item() == 1e6 and gauges.nonfinite_blocks.item() == 8


@pytest.mark.parametrize("name", ["row", "bf16", "fp32 momentum"])
def check_matrices_at_odd_addresses(name):
    """Views that begin one entry into their memory, as a shard of a flat buffer can."""

    def shift(matrix: Matrix) -> Matrix:
        def moved(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)

        return Matrix(**{key: moved(value) for key, value in vars(matrix).items()})

    ours, theirs = draw_all([name]), draw_all([name])
    shifted = [shift(ours[0])]
    assert cuda._alignment(4, [shifted[0].param]) == 1
    step(cuda, shifted)
    step(reference, theirs)
    assert_follows(shifted[0], theirs[0])


def check_a_new_gradient_at_a_new_address():
    """Tables of addresses are kept from step to step."""
    ours, theirs = (draw_all(["fp32", "bf16"]) for _ in range(2))
    for count in range(2):
        for matrices in (ours, theirs):
            matrices[:] = [replace(matrix, grad=matrix.grad * (-1) ** count) for matrix in matrices]
        step(cuda, ours, replace(RULE, step=count + 1))
        step(reference, theirs, replace(RULE, step=count + 1))
        hits = cuda._table.cache_info().hits
        step(cuda, clones := clone_all(ours))
        step(cuda, clones)
        assert cuda._table.cache_info().hits == hits + 2
    for actual, expected in zip(ours, theirs, strict=True):
        assert_follows(actual, expected)


def check_column_sums(monkeypatch):
    monkeypatch.setattr(cuda, "ROWS", 64)
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 30), (cuda.ROWS, 256), (2 * cuda.ROWS + 100, 132), (0, 7), (3, 1)]
    for dtype in (torch.float32, BF16):
        grads = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        grads.append(torch.randn(21, generator=generator).to(dtype)[1:].view(5, 4))
        sums = cuda.column_sums(grads)
        for mine, expected in zip(sums, reference.column_sums(grads), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-14, atol=0)
        again = cuda.column_sums([grads[2]])[0]
        assert torch.equal(again, sums[2])


def check_code_histogram():
    matrices = draw_all()
    faults = draw_matrix(6, 96, 24, seed=3)
    faults.grad[0] = 0.0
    faults.grad[1, 30] = torch.nan
    faults.grad[2, 30] = torch.inf
    faults.grad[3, 24:48] = 1e-39
    counts = cuda.code_histogram([*matrices, faults])
    assert torch.equal(counts, reference.code_histogram([*matrices, faults]))
    assert counts.sum() == sum(matrix.grad.numel() for matrix in matrices) + (96 * 6 - 96 - 3 * 24)
