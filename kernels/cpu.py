"""Gefen's kernels for the CPU: the bits of ``kernels.reference``, in one pass over memory.

``kernels.loops`` has what is computed; here the rows of all matrices of a call are cut into pieces, which threads take
in turn. A piece is one call that does not hold python's lock, and what it computes does not depend on the cut, so
neither does it on the number of threads. numba's own threads are not used: they survive neither a fork nor calls from
several threads of python.

The loops read a table of addresses, the same for matrices of all types, so that there is one signature to compile.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels import loops
from kernels.gefen import CELLS, Codebook, Gauges, Matrix, Rule
from kernels.lanes import cell_table, level_table

# entries of a piece: 0.1 ms of work and more, several times what handing it out takes
PIECE = 2**18
# pieces that each thread gets, so that none waits long for another
PIECES_A_THREAD = 8
# entries that column_sums adds up before it adds to a total
SUMMED = 2**20

_FP32 = (torch.float32,)
_FLOATS = (torch.float32, torch.bfloat16)
_Array = npt.NDArray[Any]


@torch.no_grad()
def gefen_step(matrices: Sequence[Matrix], codebook: Codebook, rule: Rule, gauges: Gauges) -> None:
    """One step on each matrix, in place, as ``kernels.reference.gefen_step``; runs on torch's number of threads."""
    table, pieces, longest = _plan(matrices)
    # torch's memory begins at multiples of 64 bytes: no load of a vector straddles two cache lines
    levels = torch.from_numpy(level_table(codebook.levels.numpy())).clone()
    cells = torch.from_numpy(cell_table(codebook.codes.numpy())).clone()
    numbers = rule.numbers()
    rounded = np.array([tuple(numbers.values())], [(name, np.float32) for name in numbers])
    largest, left_alone = np.zeros(len(pieces), np.float32), np.zeros(len(pieces), np.int64)

    def run(index: int) -> None:
        scratch = _scratch(longest)
        tables = levels.data_ptr(), cells.data_ptr(), scratch.data_ptr()
        found = loops.step_rows(table, pieces[index], rounded, rule.quantised_update, *tables)
        largest[index], left_alone[index] = found

    _run_all(run, len(pieces))
    if pieces:
        gauges.max_update.copy_(torch.maximum(gauges.max_update, gauges.max_update.new_tensor(float(largest.max()))))
        gauges.nonfinite_blocks.add_(int(left_alone.sum()))


@torch.no_grad()
def code_histogram(matrices: Sequence[Matrix]) -> Tensor:
    """Count the cells of first-step momenta, as ``kernels.reference.code_histogram``: (CELLS,) int64."""
    table, pieces, longest = _plan(matrices)
    counts, lock = np.zeros(CELLS, np.int64), threading.Lock()

    def run(index: int) -> None:
        scratch, found = _scratch(longest), np.zeros(CELLS, np.int64)
        loops.count_cells(table, pieces[index], scratch.data_ptr(), found)
        with lock:
            np.add(counts, found, out=counts)

    _run_all(run, len(pieces))
    return torch.from_numpy(counts)


@torch.no_grad()
def column_sums(grads: Sequence[Tensor]) -> list[Tensor]:
    """Sum over rows of the squared gradient: (R, C) fp32 or bf16 each -> (C,) fp64 each.

    Squares are exact, and added up in an order that depends on the shape of the gradient alone.
    """
    table = np.zeros(len(grads), loops.MATRIX)
    shapes = [grad.shape for grad in grads]
    for row, grad, shape in zip(table, grads, shapes, strict=True):
        address = _address(grad, shape, _FLOATS)
        row["grad"], row["grad_bytes"], row["columns"] = address, grad.itemsize, shape[1]
    ranges = _cut(shapes, SUMMED)
    widths = table["columns"][ranges[:, 0]]
    parts = torch.zeros(int(widths.sum()), dtype=torch.float64, device="cpu")
    addresses = parts.data_ptr() + 8 * (np.cumsum(widths) - widths)
    pieces = _group(ranges, table["columns"], _piece_entries(shapes))
    firsts = np.cumsum([0, *map(len, pieces)])

    def run(index: int) -> None:
        loops.sum_columns(table, pieces[index], addresses[firsts[index] : firsts[index + 1]])

    _run_all(run, len(pieces))
    sums: dict[int, Tensor] = {}
    for index, part in zip(ranges[:, 0].tolist(), torch.split(parts, widths.tolist()), strict=True):
        sums[index] = sums[index] + part if index in sums else part
    # one without rows has no part
    return [sums[n] if n in sums else parts.new_zeros(shape[1]) for n, shape in enumerate(shapes)]


def prepare(matrices: Sequence[Matrix]) -> None:
    """Compile what a step runs, once a process: the same for matrices of all types."""
    if matrices:
        _compile()


def workspace_bytes(matrices: Sequence[Matrix]) -> int:
    """Bytes that ``gefen_step`` and ``column_sums`` allocate beyond their arguments, an upper bound."""
    shapes = [matrix.param.shape for matrix in matrices]
    # of column_sums: the result, and a sum for each range of rows
    sums = sum(8 * columns * (2 + 2 * rows * columns // SUMMED) for rows, columns in shapes)
    return _planned_bytes(shapes) + sums


def histogram_bytes(matrices: Sequence[Matrix]) -> int:
    """Bytes that ``code_histogram`` allocates beyond its arguments, an upper bound."""
    return _planned_bytes([matrix.param.shape for matrix in matrices]) + (torch.get_num_threads() + 1) * 8 * CELLS


def _planned_bytes(shapes: Sequence[torch.Size]) -> int:
    """Of scratch memory, the codebook's tables, and the table and pieces of the matrices."""
    longest = max((columns for _, columns in shapes), default=0)
    # a range of rows has more than half of PIECE entries, or ends its matrix
    ranges = sum(1 + 2 * rows * columns // PIECE for rows, columns in shapes)
    return torch.get_num_threads() * 4 * loops.scratch_entries(longest) + 2**14 + 512 * ranges


@functools.cache
def _compile() -> None:
    def zeros(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(1, 1, dtype=dtype, device="cpu")

    matrix = Matrix(zeros(), zeros(), zeros(), zeros(torch.uint8), zeros())
    book = Codebook(zeros()[0], torch.zeros(CELLS, dtype=torch.uint8, device="cpu"))
    rule = Rule(lr=0.0, beta1=0.0, beta2=0.0, eps=1.0, weight_decay=0.0, step=1)
    gefen_step([matrix], book, rule, Gauges.zeros(torch.device("cpu")))
    code_histogram([matrix])
    column_sums([matrix.grad])


def _plan(matrices: Sequence[Matrix]) -> tuple[_Array, list[_Array], int]:
    """The table of the matrices, the pieces of their rows, and the entries of the longest block."""
    matrices = [matrix for matrix in matrices if matrix.param.numel()]
    table = np.array([_describe(matrix) for matrix in matrices], loops.MATRIX)
    shapes = [matrix.param.shape for matrix in matrices]
    entries = _piece_entries(shapes)
    return table, _group(_cut(shapes, entries), table["columns"], entries), int(table["block"].max(initial=0))


def _piece_entries(shapes: Sequence[torch.Size]) -> int:
    entries = sum(shape.numel() for shape in shapes)
    return max(PIECE, entries // (PIECES_A_THREAD * torch.get_num_threads()))


def _describe(matrix: Matrix) -> tuple[int, ...]:
    """A record of the table. Types and sizes are checked here, since the loops cannot."""
    shape, blocks = matrix.param.shape, matrix.v.shape
    assert blocks[0] == shape[0] and shape[1] % blocks[1] == 0
    codes = scale = momentum = 0
    if matrix.codes is None:
        momentum = _address(matrix.momentum, shape)
    else:
        codes, scale = _address(matrix.codes, shape, (torch.uint8,)), _address(matrix.scale, blocks)
    return (
        _address(matrix.param, shape, _FLOATS),
        _address(matrix.grad, shape, _FLOATS),
        _address(matrix.v, blocks),
        codes,
        scale,
        momentum,
        _address(matrix.factor, shape[1:]) if matrix.factor is not None else 0,
        _address(matrix.inverse, shape[1:]) if matrix.inverse is not None else 0,
        shape[1],
        shape[1] // blocks[1],
        matrix.param.itemsize,
        matrix.grad.itemsize,
    )


def _address(tensor: Tensor | None, shape: torch.Size, dtypes: tuple[torch.dtype, ...] = _FP32) -> int:
    assert tensor is not None and tensor.shape == shape and tensor.dtype in dtypes
    assert tensor.is_cpu and tensor.is_contiguous()
    return tensor.data_ptr()


def _cut(shapes: Sequence[torch.Size], entries: int) -> _Array:
    """Ranges of rows of so many entries at most, or one row: (n, 3) shape, first row, row after the last."""
    ranges = []
    for index, (rows, columns) in enumerate(shapes):
        step = max(1, entries // max(1, columns))
        ranges += [(index, first, min(first + step, rows)) for first in range(0, rows, step)]
    return np.array(ranges, np.int64).reshape(-1, 3)


def _group(ranges: _Array, columns: _Array, entries: int) -> list[_Array]:
    """Neighbouring ranges together until they have so many entries."""
    ends = np.cumsum((ranges[:, 2] - ranges[:, 1]) * columns[ranges[:, 0]])
    # a piece ends before the range that reaches a multiple of it
    (lasts,) = np.nonzero(np.diff(ends // entries))
    return [piece for piece in np.split(ranges, lasts + 1) if len(piece)]


def _scratch(longest: int) -> Tensor:
    return torch.empty(loops.scratch_entries(longest), dtype=torch.float32, device="cpu")


def _run_all(run: Callable[[int], Any], count: int) -> None:
    """Call ``run`` on 0 to ``count`` - 1, each once, on torch's number of threads; this thread is one of them.

    Returns, or raises what was raised here, when no thread works on memory of the call any more.
    """
    # next() on a range is one step under python's lock, so threads can share it
    queue = iter(range(count))

    def work() -> None:
        for index in queue:
            run(index)

    others: list[Future[None]] = []
    with contextlib.suppress(RuntimeError):
        # refused while the interpreter ends, when this thread does it all
        others += [_pool(os.getpid()).submit(work) for _ in range(min(torch.get_num_threads(), count) - 1)]
    try:
        work()
    finally:
        # after an interrupt the others are left nothing more to begin
        for _ in queue:
            pass
        for other in others:
            # one that has not begun would find nothing to do
            if not other.cancel():
                other.result()


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    # by process: a fork has none of its parent's threads
    return ThreadPoolExecutor(os.cpu_count(), "gefen")
