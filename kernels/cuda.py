"""Gefen's kernels in Triton, for NVIDIA GPUs: one pass over memory, and one launch for all matrices of a kind.

A launch reads its matrices from a table of addresses, so that a model of 24 layers is a handful of launches. Floating
point is that of ``kernels.reference``, without fused multiply-add: codes and scales are meant to be the same bits. The
order of the sum of a block's squares differs, and with it the last digits of ``v`` and the parameter; it depends on the
block's length, the types and the alignment of the matrix, not on its rows or on the other matrices.

Nothing is tuned at run time, since the kernels write in place.

Legend: N blocks in a tile, E entries of a tile for each: the block padded to a power of two, or a chunk of a long one.
"""

# the bodies of kernels are triton's language, not python's
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import contextlib
import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.gefen import CELLS, HALF_CELLS, Codebook, Gauges, Matrix, Rule
from kernels.reference import TINY

# entries of a tile of short blocks: 16 for each thread of 4 warps
TILE = 2048
ENTRIES_A_WARP = 512
# entries that a program works through, tile after tile, so that fetching the codebook is a small part of its traffic
PROGRAM = 8192
# longest block that is held in registers; longer ones are read twice, in chunks
LONGEST_HELD = 16384
CHUNK = 4096
# matrices of one launch: every program searches their table
LAUNCH = 256
# of column_sums: rows that one program adds up, and the tiles that it reads
ROWS = 1024
TILE_ROWS, TILE_COLUMNS = 16, 128
# copies of the histogram, so that programs that count the same cell at the same time rarely meet
HISTOGRAMS = 64
# no fused multiply-add. no pipelining through shared memory either: tiles of other programs fill the gaps
OPTIONS = {"enable_fp_fusion": False, "num_stages": 1}
# tables of addresses that are kept, of 80 bytes a matrix
TABLES = 64
# lengths of the codebook's tensors, padded
LEVELS, CELLS_PADDED = 256, CELLS + 1

_LAUNCH, _HISTOGRAMS = tl.constexpr(LAUNCH), tl.constexpr(HISTOGRAMS)
_LEVELS, _CELLS, _CELLS_PADDED = tl.constexpr(LEVELS), tl.constexpr(CELLS), tl.constexpr(CELLS_PADDED)
_HALF_CELLS, _CENTRE = tl.constexpr(float(HALF_CELLS)), tl.constexpr(HALF_CELLS + 0.5)
_TILE_ROWS, _TILE_COLUMNS = tl.constexpr(TILE_ROWS), tl.constexpr(TILE_COLUMNS)
_TINY, _INFINITY = tl.constexpr(TINY), tl.constexpr(float("inf"))

# rows of a table, whose columns are matrices. row 0 counts the programs up to and with each
_PARAM, _GRAD, _MOMENTUM, _FACTOR, _INVERSE, _V, _SCALE, _BLOCKS, _BLOCKS_A_ROW = map(tl.constexpr, range(1, 10))
# the same for column_sums
_SOURCE, _SUMS, _HEIGHT, _WIDTH = map(tl.constexpr, range(1, 5))

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float64: tl.float64}
# of a table, with the programs of each matrix in place of row 0
_Columns = list[tuple[int, ...]]


@triton.jit
def _find(table, num_matrices):
    """The column of this program's matrix, and how many programs of that matrix come before it."""
    place = tl.arange(0, _LAUNCH)
    ends = tl.load(table + place, mask=place < num_matrices, other=2**62)
    number = tl.program_id(0).to(tl.int64)
    before = ends <= number
    return table + tl.sum(before.to(tl.int32)), (number - tl.max(tl.where(before, ends, 0))).to(tl.int32)


@triton.jit
def _pointer(matrix, num_matrices, FIELD: tl.constexpr, TYPE: tl.constexpr, ALIGN: tl.constexpr):
    address = tl.load(matrix + FIELD * num_matrices)
    # an address shows nothing of its alignment: without this, every load would be an entry wide
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)), ALIGN * (TYPE.primitive_bitwidth // 8))


@triton.jit
def _count(matrix, num_matrices, FIELD: tl.constexpr):
    return tl.load(matrix + FIELD * num_matrices).to(tl.int32)


@triton.jit
def _pointers(matrix, num_matrices, PARAM: tl.constexpr, GRAD: tl.constexpr, CODED: tl.constexpr, ALIGN: tl.constexpr):
    return (
        _pointer(matrix, num_matrices, _PARAM, PARAM, ALIGN),
        _pointer(matrix, num_matrices, _GRAD, GRAD, ALIGN),
        _pointer(matrix, num_matrices, _MOMENTUM, tl.uint8 if CODED else tl.float32, ALIGN),
        _pointer(matrix, num_matrices, _FACTOR, tl.float32, ALIGN),
        _pointer(matrix, num_matrices, _INVERSE, tl.float32, ALIGN),
        _pointer(matrix, num_matrices, _V, tl.float32, 1),
        _pointer(matrix, num_matrices, _SCALE, tl.float32, 1),
    )


@triton.jit
def _look_up(values, places):
    """values (K,), places (N, E) -> (N, E). Through shared memory, where scattered reads collide less."""
    N: tl.constexpr = places.shape[0]
    E: tl.constexpr = places.shape[1]
    return tl.reshape(tl.gather(values, tl.reshape(places.to(tl.int32), (N * E,)), 0), (N, E))


@triton.jit
def _cell(shrunk):
    cell = (shrunk * _HALF_CELLS + _CENTRE).to(tl.int32)
    # NaN, whose result is not stored, must not reach beyond the table
    return tl.minimum(tl.maximum(cell, 0), _CELLS - 1)


@triton.jit
def _reciprocal(largest):
    alive = largest >= _TINY
    return tl.where(alive, tl.div_rn(1.0, tl.where(alive, largest, 1.0)), 0.0)


@triton.jit
def _momentum(
    pointers, codebook, scale, start, column, entry, mask, beta1, gain1,
    CODED: tl.constexpr, FACTOR: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """The gradient, the new momentum, and what is coded of it: (N, E) each, 0 where masked."""
    _, grad, momentum, factor, inverse, _, _ = pointers
    g = tl.load(grad + start + entry, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(momentum + start + entry, mask=mask, other=0)
    # the column factors are in the cache, and registers are short: they are not read ahead
    if CODED:
        m = _look_up(codebook[0], m) * scale[:, None]
        if FACTOR:
            m = m * tl.load(factor + column + entry, mask=mask, other=0.0)
    # what is masked has a code, and with it a level
    m = tl.where(mask, m * beta1 + gain1 * g, 0.0)
    u = m
    if INVERSE:
        u = m * tl.load(inverse + column + entry, mask=mask, other=0.0)
    return g, m, u


@triton.jit
def _update_blocks(
    pointers, block, there, v, squares, largest, beta2, gain2, correction1, correction2, eps,
    LENGTH: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """Write ``v`` and ``scale``. Returns whether a block is updated, its scale, one over that, its gain: (N,) each."""
    # false for NaN too
    updated = there & (squares < _INFINITY)
    v = v * beta2 + gain2 * tl.div_rn(squares, float(LENGTH))
    tl.store(pointers[5] + block, v, mask=updated)
    scale = tl.where(largest >= _TINY, largest, 0.0)
    if CODED:
        tl.store(pointers[6] + block, scale, mask=updated)
    return updated, scale, _reciprocal(largest), tl.div_rn(correction1, tl.sqrt_rn(v * correction2) + eps)


@triton.jit
def _write(
    pointers, codebook, m, u, scale, shrink, gain, start, entry, mask, decay, lr, max_update,
    CODED: tl.constexpr, QUANTISED: tl.constexpr,
):  # fmt: skip
    """Write momentum and parameter of a tile; returns the u that the update was made from, (N, E)."""
    param, _, momentum, _, _, _, _ = pointers
    if CODED:
        codes = _look_up(codebook[1], _cell(u * shrink[:, None]))
        tl.store(momentum + start + entry, codes, mask=mask)
        if QUANTISED:
            u = _look_up(codebook[0], codes) * scale[:, None]
    else:
        tl.store(momentum + start + entry, m, mask=mask)
    update = tl.minimum(u * gain[:, None], max_update, propagate_nan=tl.PropagateNan.ALL)
    update = tl.maximum(update, -max_update, propagate_nan=tl.PropagateNan.ALL)
    # not read before it is needed: the registers decide how many tiles are in flight
    old = tl.load(param + start + entry, mask=mask, other=0.0).to(tl.float32)
    tl.store(param + start + entry, (old * decay - lr * update).to(param.dtype.element_ty), mask=mask)
    return u


@triton.jit
def _raise_gauges(max_update_ptr, nonfinite_ptr, reach, nonfinite):
    # floats that are not negative are in the order of their bits
    bits = tl.max(reach).to(tl.int32, bitcast=True)
    tl.atomic_max(max_update_ptr, bits, mask=bits > 0, sem="relaxed")
    count = tl.sum(nonfinite).to(tl.int64)
    tl.atomic_add(nonfinite_ptr, count, mask=count > 0, sem="relaxed")


@triton.jit(do_not_specialize=["num_matrices"])
def _step_kernel(
    table, num_matrices, levels_ptr, codes_ptr, max_update_ptr, nonfinite_ptr,
    beta1, gain1, beta2, gain2, correction1, correction2, eps, decay, lr, max_update,
    PARAM: tl.constexpr, GRAD: tl.constexpr, CODED: tl.constexpr, FACTOR: tl.constexpr, INVERSE: tl.constexpr,
    QUANTISED: tl.constexpr, LENGTH: tl.constexpr, ALIGN: tl.constexpr,
    N: tl.constexpr, E: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    matrix, program = _find(table, num_matrices)
    pointers = _pointers(matrix, num_matrices, PARAM, GRAD, CODED, ALIGN)
    num_blocks = _count(matrix, num_matrices, _BLOCKS)
    blocks_a_row = _count(matrix, num_matrices, _BLOCKS_A_ROW)
    codebook = (tl.load(levels_ptr + tl.arange(0, _LEVELS)), tl.load(codes_ptr + tl.arange(0, _CELLS_PADDED)))
    entry = tl.arange(0, E)[None, :]
    reach = tl.zeros((N,), tl.float32)
    nonfinite = tl.zeros((N,), tl.int32)
    for tile in range(TILES):
        block = (program * TILES + tile) * N + tl.arange(0, N)
        there = block < num_blocks
        mask = there[:, None] & (entry < LENGTH)
        start = block.to(tl.int64)[:, None] * LENGTH
        column = (block % blocks_a_row)[:, None] * LENGTH
        v = tl.load(pointers[5] + block, mask=there, other=0.0)
        scale = tl.load(pointers[6] + block, mask=there & CODED, other=0.0)
        g, m, u = _momentum(pointers, codebook, scale, start, column, entry, mask, beta1, gain1, CODED, FACTOR, INVERSE)
        squares = tl.sum(g * g, 1)
        largest = tl.max(tl.abs(u), 1)
        updated, scale, shrink, gain = _update_blocks(
            pointers, block, there, v, squares, largest, beta2, gain2, correction1, correction2, eps, LENGTH, CODED
        )  # fmt: skip
        u = _write(
            pointers, codebook, m, u, scale, shrink, gain, start, entry, mask & updated[:, None],
            decay, lr, max_update, CODED, QUANTISED,
        )  # fmt: skip
        if QUANTISED:
            largest = tl.max(tl.abs(u), 1)
        reach = tl.maximum(reach, tl.where(updated, tl.minimum(largest * gain, max_update), 0.0))
        nonfinite += (there & (updated == 0)).to(tl.int32)
    _raise_gauges(max_update_ptr, nonfinite_ptr, reach, nonfinite)


@triton.jit(do_not_specialize=["num_matrices"])
def _long_step_kernel(
    table, num_matrices, levels_ptr, codes_ptr, max_update_ptr, nonfinite_ptr,
    beta1, gain1, beta2, gain2, correction1, correction2, eps, decay, lr, max_update,
    PARAM: tl.constexpr, GRAD: tl.constexpr, CODED: tl.constexpr, FACTOR: tl.constexpr, INVERSE: tl.constexpr,
    QUANTISED: tl.constexpr, LENGTH: tl.constexpr, ALIGN: tl.constexpr,
    N: tl.constexpr, E: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The same for one block, in chunks, twice: N and TILES are 1."""
    matrix, program = _find(table, num_matrices)
    pointers = _pointers(matrix, num_matrices, PARAM, GRAD, CODED, ALIGN)
    codebook = (tl.load(levels_ptr + tl.arange(0, _LEVELS)), tl.load(codes_ptr + tl.arange(0, _CELLS_PADDED)))
    block = program + tl.arange(0, N)
    there = block >= 0
    start = block.to(tl.int64)[:, None] * LENGTH
    column = (block % _count(matrix, num_matrices, _BLOCKS_A_ROW))[:, None] * LENGTH
    v = tl.load(pointers[5] + block, mask=there, other=0.0)
    scale = tl.load(pointers[6] + block, mask=there & CODED, other=0.0)
    squares = tl.zeros((N, E), tl.float32)
    largest = tl.zeros((N, E), tl.float32)
    for first in range(0, LENGTH, E):
        entry = first + tl.arange(0, E)[None, :]
        mask = entry < LENGTH
        g, m, u = _momentum(pointers, codebook, scale, start, column, entry, mask, beta1, gain1, CODED, FACTOR, INVERSE)
        squares += g * g
        largest = tl.maximum(largest, tl.abs(u))
    updated, new_scale, shrink, gain = _update_blocks(
        pointers, block, there, v, tl.sum(squares, 1), tl.max(largest, 1), beta2, gain2, correction1, correction2,
        eps, LENGTH, CODED,
    )  # fmt: skip
    largest = tl.zeros((N, E), tl.float32)
    for first in range(0, LENGTH, E):
        entry = first + tl.arange(0, E)[None, :]
        mask = entry < LENGTH
        g, m, u = _momentum(pointers, codebook, scale, start, column, entry, mask, beta1, gain1, CODED, FACTOR, INVERSE)
        u = _write(
            pointers, codebook, m, u, new_scale, shrink, gain, start, entry, mask & updated[:, None],
            decay, lr, max_update, CODED, QUANTISED,
        )  # fmt: skip
        largest = tl.maximum(largest, tl.abs(u))
    reach = tl.where(updated, tl.minimum(tl.max(largest, 1) * gain, max_update), 0.0)
    _raise_gauges(max_update_ptr, nonfinite_ptr, reach, (updated == 0).to(tl.int32))


@triton.jit
def _first_momentum(grad, inverse, start, column, entry, mask, INVERSE: tl.constexpr):
    u = tl.load(grad + start + entry, mask=mask, other=0.0).to(tl.float32)
    if INVERSE:
        u = u * tl.load(inverse + column + entry, mask=mask, other=0.0)
    return u


@triton.jit(do_not_specialize=["num_matrices"])
def _histogram_kernel(
    table, num_matrices, counts,
    GRAD: tl.constexpr, INVERSE: tl.constexpr, LENGTH: tl.constexpr, ALIGN: tl.constexpr,
    N: tl.constexpr, E: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    matrix, program = _find(table, num_matrices)
    grad = _pointer(matrix, num_matrices, _GRAD, GRAD, ALIGN)
    inverse = _pointer(matrix, num_matrices, _INVERSE, tl.float32, ALIGN)
    counts += (tl.program_id(0) % _HISTOGRAMS) * _CELLS
    for tile in range(TILES):
        block = (program * TILES + tile) * N + tl.arange(0, N)
        there = (block < _count(matrix, num_matrices, _BLOCKS))[:, None]
        start = block.to(tl.int64)[:, None] * LENGTH
        column = (block % _count(matrix, num_matrices, _BLOCKS_A_ROW))[:, None] * LENGTH
        sizes = tl.zeros((N, E), tl.float32)
        for first in range(0, LENGTH, E):
            entry = first + tl.arange(0, E)[None, :]
            u = _first_momentum(grad, inverse, start, column, entry, there & (entry < LENGTH), INVERSE)
            # a maximum passes over NaN
            sizes = tl.maximum(sizes, tl.where(u == u, tl.abs(u), _INFINITY))
        largest = tl.max(sizes, 1)
        shrink = _reciprocal(largest)[:, None]
        chosen = there & ((largest >= _TINY) & (largest < _INFINITY))[:, None]
        for first in range(0, LENGTH, E):
            entry = first + tl.arange(0, E)[None, :]
            mask = chosen & (entry < LENGTH)
            cell = _cell(_first_momentum(grad, inverse, start, column, entry, mask, INVERSE) * shrink)
            tl.atomic_add(counts + cell, tl.full((N, E), 1, tl.int64), mask=mask, sem="relaxed")


@triton.jit(do_not_specialize=["num_matrices", "rows"])
def _column_sums_kernel(table, num_matrices, rows, SOURCE: tl.constexpr, SQUARE: tl.constexpr, ALIGN: tl.constexpr):
    """(height, width), squared if SQUARE -> sums of ``rows`` rows at a time, (height / rows, width) fp64."""
    matrix, program = _find(table, num_matrices)
    source = _pointer(matrix, num_matrices, _SOURCE, SOURCE, ALIGN)
    sums = _pointer(matrix, num_matrices, _SUMS, tl.float64, ALIGN)
    # the compiler sees that it is a multiple
    width = _count(matrix, num_matrices, _WIDTH) // ALIGN * ALIGN
    strips = tl.cdiv(width, _TILE_COLUMNS)
    part = program // strips
    column = (program % strips) * _TILE_COLUMNS + tl.arange(0, _TILE_COLUMNS)
    total = tl.zeros((_TILE_ROWS, _TILE_COLUMNS), tl.float64)
    stop = tl.minimum(part * rows + rows, _count(matrix, num_matrices, _HEIGHT))
    for first in range(part * rows, stop, _TILE_ROWS):
        row = first + tl.arange(0, _TILE_ROWS)
        mask = (row < stop)[:, None] & (column < width)[None, :]
        x = tl.load(source + row.to(tl.int64)[:, None] * width + column[None, :], mask=mask, other=0.0).to(tl.float64)
        if SQUARE:
            x = x * x
        total += x
    tl.store(sums + part.to(tl.int64) * width + column, tl.sum(total, 0), mask=column < width)


@functools.cache
def _tile(length: int) -> dict[str, int]:
    """N, E, TILES and warps: by the block's length alone, so that the order of its sum is too."""
    if length > LONGEST_HELD:
        return {"N": 1, "E": CHUNK, "TILES": 1, "num_warps": CHUNK // ENTRIES_A_WARP}
    entries = triton.next_power_of_2(length)
    blocks = max(1, TILE // entries)
    tile = blocks * entries
    return {"N": blocks, "E": entries, "TILES": max(1, PROGRAM // tile), "num_warps": tile // ENTRIES_A_WARP}


@dataclass(frozen=True)
class _Kind:
    """What is compiled in: matrices of one kind share a launch."""

    param: torch.dtype
    grad: torch.dtype
    coded: bool
    factor: bool
    inverse: bool
    length: int
    align: int
    """Entries that the length and every address of the matrix are a multiple of."""

    @property
    def step_kernel(self) -> Any:
        return _long_step_kernel if self.length > LONGEST_HELD else _step_kernel

    def constants(self) -> dict[str, Any]:
        """Constants of the histogram, a part of those of the step."""
        given = {"GRAD": _TYPES[self.grad], "INVERSE": self.inverse, "LENGTH": self.length, "ALIGN": self.align}
        return given | _tile(self.length)

    def step_constants(self, quantised_update: bool) -> dict[str, Any]:
        constants = self.constants() | {
            "PARAM": _TYPES[self.param],
            "CODED": self.coded,
            "FACTOR": self.factor and self.coded,
            "QUANTISED": quantised_update and self.coded,
        }
        # as few registers a thread as do without memory in their place (ptxas for sm_90): more tiles in flight
        if self.align > 1 and self.length > TILE // 8:
            constants["maxnreg"] = 64 if TILE < self.length <= LONGEST_HELD else 80
        return constants


def gefen_step(matrices: Sequence[Matrix], codebook: Codebook, rule: Rule, gauges: Gauges) -> None:
    """``kernels.reference.gefen_step`` for fp32 and bf16 matrices of one GPU, of fewer than 2^30 blocks each."""
    # padded, which wide loads need
    levels = F.pad(codebook.levels, (0, LEVELS - len(codebook.levels)))
    codes = F.pad(codebook.codes, (0, CELLS_PADDED - CELLS))
    arguments = (levels, codes, gauges.max_update.view(torch.int32), gauges.nonfinite_blocks)
    for kind, columns in _by_kind(matrices).items():
        constants = kind.step_constants(rule.quantised_update)
        _launch(kind.step_kernel, codes.device, columns, *arguments, *map(float, rule.numbers().values()), **constants)


def code_histogram(matrices: Sequence[Matrix]) -> Tensor:
    """``kernels.reference.code_histogram``."""
    device = matrices[0].grad.device
    counts = torch.zeros(HISTOGRAMS, CELLS, dtype=torch.int64, device=device)
    first = [Matrix(matrix.grad, matrix.grad, matrix.v, inverse=matrix.inverse) for matrix in matrices]
    for kind, columns in _by_kind(first).items():
        _launch(_histogram_kernel, device, columns, counts, **kind.constants())
    return counts.sum(0)


def column_sums(grads: Sequence[Tensor]) -> list[Tensor]:
    """``kernels.reference.column_sums``. Their order depends on the gradient's shape and alignment."""
    widths = [grad.shape[1] for grad in grads]
    sums = torch.zeros(sum(widths), dtype=torch.float64, device=grads[0].device).split(widths)
    parts = [
        total.new_empty(triton.cdiv(len(grad), ROWS), len(total)) if len(grad) > ROWS else total[None]
        for grad, total in zip(grads, sums, strict=True)
    ]
    _sum_columns(list(zip(grads, parts, strict=True)), ROWS, square=True)
    # all parts of a sum at once
    _sum_columns([pair for pair in zip(parts, sums, strict=True) if len(pair[0]) > 1], 2**30, square=False)
    return list(sums)


def prepare(matrices: Sequence[Matrix]) -> None:
    """Compile what a step on such matrices will run, with the exact update; reads types and addresses only."""
    for kind, columns in _by_kind(matrices).items():
        types = (torch.int64, len(columns), torch.float32, torch.uint8, torch.int32, torch.int64)
        kind.step_kernel.warmup(*types, *[0.5] * 10, grid=(1,), **kind.step_constants(False), **OPTIONS)


def workspace_bytes(matrices: Sequence[Matrix]) -> int:
    """Bytes that ``gefen_step`` and ``column_sums`` allocate beyond their arguments, an upper bound."""
    sums = sum(8 * matrix.grad.shape[1] * (2 + len(matrix.grad) // ROWS) for matrix in matrices)
    return sums + len(matrices) * TABLES * 80 + 4 * LEVELS + CELLS_PADDED


def histogram_bytes(matrices: Sequence[Matrix]) -> int:
    """Bytes that ``code_histogram`` allocates beyond its arguments, an upper bound."""
    return 8 * CELLS * (HISTOGRAMS + 1) + len(matrices) * TABLES * 80


def _by_kind(matrices: Sequence[Matrix]) -> dict[_Kind, _Columns]:
    """Matrices that are not empty, as columns of a table: number of programs, addresses, blocks, blocks a row."""
    kinds: dict[_Kind, _Columns] = {}
    for matrix in matrices:
        if not matrix.grad.numel():
            continue
        momentum = matrix.momentum if matrix.codes is None else matrix.codes
        entries = (matrix.param, matrix.grad, momentum, matrix.factor, matrix.inverse)
        tensors = (*entries, matrix.v, matrix.scale)
        blocks, blocks_a_row = matrix.v.numel(), matrix.v.shape[1]
        assert blocks < 2**30 and all(tensor is None or tensor.is_contiguous() for tensor in tensors)
        length = matrix.grad.shape[1] // blocks_a_row
        types = (matrix.param.dtype, matrix.grad.dtype)
        given = (matrix.codes is not None, matrix.factor is not None, matrix.inverse is not None)
        kind = _Kind(*types, *given, length, _alignment(length, entries))
        programs = -(-blocks // (_tile(length)["N"] * _tile(length)["TILES"]))
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        kinds.setdefault(kind, []).append((programs, *addresses, blocks, blocks_a_row))
    return kinds


def _sum_columns(pairs: Sequence[tuple[Tensor, Tensor]], rows: int, *, square: bool) -> None:
    """Sums of ``rows`` rows at a time: (R, C) sources, into (R / rows, C) fp64 targets."""
    kinds: dict[tuple[torch.dtype, int], _Columns] = {}
    for source, target in pairs:
        height, width = source.shape
        programs = triton.cdiv(height, rows) * triton.cdiv(width, TILE_COLUMNS)
        if programs:
            columns = kinds.setdefault((source.dtype, _alignment(width, (source, target))), [])
            columns.append((programs, source.data_ptr(), target.data_ptr(), height, width))
    for (dtype, align), columns in kinds.items():
        constants = {"SOURCE": _TYPES[dtype], "SQUARE": square, "ALIGN": align, "num_warps": 4}
        _launch(_column_sums_kernel, pairs[0][0].device, columns, rows, **constants)


def _alignment(length: int, tensors: Iterable[Tensor | None]) -> int:
    """4 if every ``length`` entries of each tensor begin at a multiple of 4 entries, otherwise 1."""
    # 4 entries of fp32 are the widest load. wider ones of the narrower types would ask for another layout of the tile
    return 4 if length % 4 == 0 and all(t is None or t.data_ptr() % (4 * t.itemsize) == 0 for t in tensors) else 1


def _launch(kernel: Any, device: torch.device, columns: _Columns, *arguments: Any, **constants: Any) -> None:
    """Run ``kernel(table, num_matrices, *arguments)``; each column starts with the number of its programs."""
    for start in range(0, len(columns), LAUNCH):
        part = columns[start : start + LAUNCH]
        ends = tuple(itertools.accumulate(column[0] for column in part))
        table = _table(device, (ends, *itertools.islice(zip(*part, strict=True), 1, None)))
        # triton launches on the current device; its interpreter has none
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            kernel[(ends[-1],)](table, len(part), *arguments, **constants, **OPTIONS)


# gradients often lie where they lay a step before. a table depends on nothing but its key
@functools.lru_cache(maxsize=TABLES)
def _table(device: torch.device, rows: tuple[tuple[int, ...], ...]) -> Tensor:
    table = torch.tensor(rows, dtype=torch.int64, device="cpu")
    # pinned, so that the copy does not wait for the kernels before it
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
