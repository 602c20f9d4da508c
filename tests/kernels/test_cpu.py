"""Background: the CPU backend is for speed, so every shape, type and option takes a path of its own through its loops:
whole vectors, the vector that is not full, one or two foldings at a time. All must give the reference's bits."""

import itertools
import math
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from kernels import cpu, lanes, loops, reference
from kernels.gefen import Codebook, Gauges, Matrix, Rule
from tests.kernels.matrices import (
    RULE,
    assert_same_bits,
    clone,
    clone_all,
    codebook_of,
    cut_rows,
    draw_codebook,
    draw_matrix,
)

CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32
CODEBOOK = draw_codebook()
# rows, columns, entries of a block
SHAPES = [
    (1, 1, 1), (3, 5, 1), (5, 96, 8), (3, 34, 17), (2, 63, 63), (4, 64, 64), (3, 65, 65), (2, 129, 129), (0, 8, 8),
    (1, 256, 256), (2, 1000, 200), (3, 512, 512), (2, 1023, 1023), (2, 1376, 688), (1, 4100, 4100),
]  # fmt: skip
# the loops have one signature, compiled once
COMPILED = (loops.step_rows, loops.count_cells, loops.sum_columns)


def check_step(matrices: Sequence[Matrix], rule: Rule = RULE, codebook: Codebook = CODEBOOK, message: str = "") -> None:
    """A step of both backends on copies, compared bit by bit."""
    ours, theirs = clone_all(matrices), clone_all(matrices)
    gauges = [Gauges.zeros(CPU) for _ in range(2)]
    cpu.gefen_step(ours, codebook, rule, gauges[0])
    reference.gefen_step(theirs, codebook, rule, gauges[1])
    for index, (actual, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert_same_bits(actual, expected, f"{message} matrix {index}")
    assert torch.equal(gauges[0].max_update, gauges[1].max_update), message
    assert torch.equal(gauges[0].nonfinite_blocks, gauges[1].nonfinite_blocks), message


def draw_kinds(rows: int, columns: int, block: int) -> Iterator[Matrix]:
    """A matrix of this shape for each combination of types, momentum and factors."""
    types = [(FP32, FP32), (BF16, BF16), (BF16, FP32), (FP32, BF16)]
    for (param, grad), coded, factored in itertools.product(types, (True, False), (True, False)):
        options = dict(param_dtype=param, grad_dtype=grad, coded=coded, factored=factored)
        yield draw_matrix(rows, columns, block, zero_columns=(0,) if factored else (), **options)


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts torch's number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_kind_of_matrix_has_the_bits_of_the_reference(shape: tuple[int, int, int]):
    kinds = list(draw_kinds(*shape))
    for quantised, max_update in itertools.product((False, True), (math.inf, 0.5)):
        rule = replace(RULE, quantised_update=quantised, max_update=max_update)
        check_step(kinds, rule, message=f"quantised={quantised}, max_update={max_update}")


@pytest.mark.parametrize("kind", ["factor only", "inverse only"])
def test_either_factor_may_be_missing(kind: str):
    matrix = draw_matrix(3, 70, 70, factored=True)
    check_step([replace(matrix, inverse=None) if kind == "factor only" else replace(matrix, factor=None)])


# finite sums of squares, sums beyond fp32, products below its smallest number, and what is not a number
@pytest.mark.parametrize("value", [0.0, 1e-30, 1e-42, 1e15, 1e18, 1e19, 1e30, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("everywhere", [True, False])
def test_gradients_of_any_size(value: float, everywhere: bool):
    matrices = list(draw_kinds(4, 132, 66))
    for matrix in matrices:
        # the vector that is full and the one that is not, and a block that is as it was
        matrix.grad[0, :66] = value if everywhere else matrix.grad[0, :66]
        matrix.grad[1, 3] = matrix.grad[2, 130] = value
    check_step(matrices)


def test_state_of_any_size():
    for scale, v in itertools.product((0.0, 1e-42, 1e-20, 1e20), (0.0, 1e-42, 1e-20, 1e30)):
        matrices = list(draw_kinds(2, 70, 70))
        for matrix in matrices:
            matrix.v.fill_(v)
            if matrix.scale is not None:
                matrix.scale.fill_(scale)
        check_step(matrices, message=f"scale={scale}, v={v}")


@pytest.mark.parametrize("quantised", [False, True])
def test_momenta_below_the_smallest_scale(quantised: bool):
    matrices = [matrix for matrix in draw_kinds(2, 70, 70) if matrix.scale is not None]
    for matrix, value in itertools.product(matrices, (1e-45, 1e-40, 1e-38, 2e-38)):
        matrix.grad.fill_(value)
        matrix.scale.fill_(value)
        check_step([matrix], replace(RULE, quantised_update=quantised), message=str(value))


def test_a_momentum_that_has_no_codes_is_left_alone():
    matrix = draw_matrix(2, 70, 70, factored=True)
    matrix.scale[0] = math.inf
    after, gauges = clone(matrix), Gauges.zeros(CPU)
    cpu.gefen_step([after], CODEBOOK, RULE, gauges)
    assert_same_bits(cut_rows(after, 0, 1), cut_rows(matrix, 0, 1))
    assert not torch.equal(after.param[1], matrix.param[1])
    assert gauges.nonfinite_blocks.item() == 1 and gauges.max_update.isfinite()


def test_the_first_steps():
    """From zeros, with a codebook that is not learned yet and then with one that is."""
    matrices = [draw_matrix(3, 96, 48), draw_matrix(3, 96, 48, coded=False, factored=True)]
    for matrix in matrices:
        for state in (matrix.v, matrix.codes, matrix.scale, matrix.momentum):
            if state is not None:
                state.zero_()
    check_step(matrices, replace(RULE, step=1), Codebook(torch.zeros(256), torch.zeros_like(CODEBOOK.codes)))
    ours, theirs = clone_all(matrices), clone_all(matrices)
    for number in range(1, 6):
        for backend, trained in ((cpu, ours), (reference, theirs)):
            backend.gefen_step(trained, CODEBOOK, replace(RULE, step=number), Gauges.zeros(CPU))
    for actual, expected in zip(ours, theirs, strict=True):
        assert_same_bits(actual, expected)


def test_rules_of_any_kind():
    matrices = list(draw_kinds(2, 70, 35))
    for change in (
        {"lr": 0.0}, {"lr": 1e3}, {"beta1": 0.0}, {"beta2": 0.0}, {"beta1": 0.999, "beta2": 0.9999, "step": 100000},
        {"eps": 1e-3}, {"weight_decay": 0.0}, {"max_update": 1e-6},
    ):  # fmt: skip
        check_step(matrices, replace(RULE, **change), message=str(change))


def codebooks() -> dict[str, Codebook]:
    generator = torch.Generator().manual_seed(0)
    uneven = torch.rand(254, generator=generator).pow(9).sort().values
    return {
        "two levels": codebook_of(torch.tensor([-1.0, 1.0])),
        "three levels": codebook_of(torch.tensor([-1.0, 0.0, 1.0])),
        "16 levels": draw_codebook(16),
        "level at 0": draw_codebook(255),
        "dense about 0": draw_codebook(256, bend=12.0),
        "even": codebook_of(torch.linspace(-1, 1, 256)),
        # many levels in one cell, of which all but one have no cell
        "crowded": codebook_of(torch.cat([torch.tensor([-1.0]), uneven, torch.tensor([1.0])])),
        "twice each": codebook_of(torch.linspace(-1, 1, 128).repeat_interleave(2)),
    }


@pytest.mark.parametrize("name", codebooks())
def test_codebooks_of_any_kind(name: str):
    codebook = codebooks()[name]
    levels = len(codebook.levels)
    wide = draw_matrix(1, 4096, 4096, levels=levels)
    # every cell, and its edges
    wide.grad[0] = torch.linspace(-1, 1, 4096)
    wide.scale.zero_()
    matrices = [wide, draw_matrix(3, 130, 65, levels=levels), draw_matrix(3, 130, 65, levels=levels, factored=True)]
    for quantised in (False, True):
        check_step(matrices, replace(RULE, quantised_update=quantised), codebook)


def test_rows_of_a_larger_matrix():
    """Rows that begin anywhere in memory, and whose neighbours must not change."""
    for whole in draw_kinds(5, 33, 11):
        before = clone(whole)
        piece = cut_rows(whole, 1, 4)
        check_step([piece])
        cpu.gefen_step([piece], CODEBOOK, RULE, Gauges.zeros(CPU))
        for rows in ((0, 1), (4, 5)):
            assert_same_bits(cut_rows(whole, *rows), cut_rows(before, *rows))


def test_gauges_keep_what_they_have():
    matrix = draw_matrix(2, 8, 8)
    gauges = Gauges(torch.tensor([1e9]), torch.tensor([7]))
    cpu.gefen_step([], CODEBOOK, RULE, gauges)
    cpu.gefen_step([clone(matrix)], CODEBOOK, RULE, gauges)
    assert gauges.max_update.item() == 1e9 and gauges.nonfinite_blocks.item() == 7


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch, threads: None) -> list[Matrix]:
    """Matrices that are cut into many pieces, some of several matrices."""
    monkeypatch.setattr(cpu, "PIECE", 500)
    monkeypatch.setattr(cpu, "SUMMED", 2000)
    shapes = [(40, 96, 96), (1, 7, 7), (0, 4, 4), (300, 10, 5), (3, 2000, 1000)]
    return [draw_matrix(*shape, seed=seed, factored=seed % 2 == 0) for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize("number", [1, 2, 3, 8])
def test_threads_change_nothing(small_pieces: list[Matrix], number: int):
    torch.set_num_threads(number)
    small_pieces[3].grad[7, 2] = math.nan
    _, pieces, _ = cpu._plan(small_pieces)
    assert len(pieces) >= 4 and max(len(piece) for piece in pieces) > 1
    check_step(small_pieces)
    assert torch.equal(cpu.code_histogram(small_pieces), reference.code_histogram(small_pieces))


def test_every_row_is_in_one_piece(small_pieces: list[Matrix]):
    _, pieces, _ = cpu._plan(small_pieces)
    rows = [(index, row) for piece in pieces for index, first, last in piece.tolist() for row in range(first, last)]
    filled = [matrix for matrix in small_pieces if matrix.param.numel()]
    assert rows == [(index, row) for index, matrix in enumerate(filled) for row in range(len(matrix.param))]


def test_column_sums(small_pieces: list[Matrix]):
    for dtype in (FP32, BF16):
        grads = [matrix.grad.to(dtype) for matrix in small_pieces]
        expected = reference.column_sums(grads)
        found = []
        for number in (1, 3):
            torch.set_num_threads(number)
            found.append(cpu.column_sums(grads))
        for one, several, exact in zip(*found, expected, strict=True):
            torch.testing.assert_close(one, exact, rtol=1e-14, atol=0)
            assert torch.equal(one, several)
    assert cpu.column_sums([]) == []


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cells_are_counted(shape: tuple[int, int, int]):
    matrices = list(draw_kinds(*shape))
    for matrix in matrices[1:]:
        matrix.grad[:1, :1] = math.nan
        matrix.grad[1:2] = 0
        matrix.grad[2:3, -1:] = math.inf
    assert torch.equal(cpu.code_histogram(matrices), reference.code_histogram(matrices))


def test_several_threads_of_python_at_once(small_pieces: list[Matrix]):
    torch.set_num_threads(3)
    with ThreadPoolExecutor(4) as executor:
        for future in [executor.submit(check_step, small_pieces) for _ in range(12)]:
            future.result()


def test_what_other_threads_do_is_waited_for(threads: None):
    torch.set_num_threads(3)
    barrier, done = threading.Barrier(3), []

    def run(index: int) -> None:
        # each thread has one
        barrier.wait(30)
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.05)
        done.append(index)

    cpu._run_all(run, 3)
    assert sorted(done) == [0, 1, 2]


def test_an_error_of_another_thread_is_raised(threads: None):
    torch.set_num_threads(2)
    barrier = threading.Barrier(2)

    def run(index: int) -> None:
        barrier.wait(30)
        if threading.current_thread() is not threading.main_thread():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cpu._run_all(run, 2)


def test_a_fork_has_threads_of_its_own(small_pieces: list[Matrix]):
    torch.set_num_threads(3)
    expected = clone_all(small_pieces)
    cpu.gefen_step(expected, CODEBOOK, RULE, Gauges.zeros(CPU))

    def step_in_child() -> None:
        cpu.gefen_step(small_pieces, CODEBOOK, RULE, Gauges.zeros(CPU))
        for actual, matrix in zip(small_pieces, expected, strict=True):
            assert_same_bits(actual, matrix)
        assert threading.active_count() > 1

    child = multiprocessing.get_context("fork").Process(target=step_in_child)
    child.start()
    child.join(30)
    alive = child.is_alive()
    if alive:
        child.kill()
    assert not alive and child.exitcode == 0


@pytest.mark.parametrize("change", ["dtype", "shape", "not contiguous"])
def test_what_the_loops_cannot_see_is_checked(change: str):
    matrix = draw_matrix(4, 6, 3)
    wrong = {
        "dtype": replace(matrix, v=matrix.v.double()),
        "shape": replace(matrix, scale=matrix.scale[:3]),
        "not contiguous": replace(matrix, grad=matrix.grad.t().contiguous().t()),
    }[change]
    with pytest.raises(AssertionError):
        cpu.gefen_step([wrong], CODEBOOK, RULE, Gauges.zeros(CPU))


@pytest.mark.parametrize("backend", [cpu, reference])
@pytest.mark.parametrize("block", [1, 8, 512])
def test_workspace_is_an_upper_bound(backend, block: int):
    matrices = [draw_matrix(300, 512, block, param_dtype=BF16, factored=True), draw_matrix(8, 512, block, coded=False)]
    rule = replace(RULE, quantised_update=True)

    def peak(run) -> int:
        run()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            run()
        held, largest = 0, 0
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        for event in sorted(events, key=lambda event: event.start_ns()):
            held += event.nbytes()
            largest = max(largest, held)
        return largest

    stepped = peak(lambda: backend.gefen_step(matrices, CODEBOOK, rule, Gauges.zeros(CPU)))
    summed = peak(lambda: backend.column_sums([matrix.grad for matrix in matrices]))
    counted = peak(lambda: backend.code_histogram(matrices))
    assert 0 < max(stepped, summed) <= backend.workspace_bytes(matrices)
    assert 0 < counted <= backend.histogram_bytes(matrices)
    if backend is cpu:
        assert backend.workspace_bytes(matrices) < matrices[0].param.nbytes


def run_in_a_process(script: str, **environment: str) -> None:
    subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"OMP_NUM_THREADS": "1", **environment},
        cwd=Path(__file__).parents[2],
        check=True,
        timeout=120,
    )


def test_nothing_is_compiled_after_prepare():
    """On a CPU without byte permutations, so that its paths are compared too."""
    script = """
from tests.kernels import test_cpu as this
assert not this.lanes.PERMUTES_BYTES
assert [len(loop.signatures) for loop in this.COMPILED] == [0, 0, 0]
this.cpu.prepare([])
assert [len(loop.signatures) for loop in this.COMPILED] == [0, 0, 0]
this.cpu.prepare([this.draw_matrix(2, 4, 4)])
assert [len(loop.signatures) for loop in this.COMPILED] == [1, 1, 1]
for shape in this.SHAPES[::3]:
    this.test_every_kind_of_matrix_has_the_bits_of_the_reference(shape)
    this.test_cells_are_counted(shape)
for name in this.codebooks():
    this.test_codebooks_of_any_kind(name)
assert [len(loop.signatures) for loop in this.COMPILED] == [1, 1, 1]
"""
    run_in_a_process(script, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="no list of what the CPU can do")
def test_the_widest_path_of_this_cpu_is_taken():
    flags = set(Path("/proc/cpuinfo").read_text().split())
    assert lanes.PERMUTES_BYTES == ({"avx512bw", "avx512vbmi"} <= flags)
