"""The loops of ``kernels.cpu``: what threads run, compiled by numba, over matrices in a table of addresses.

The order of operations is that of ``kernels.reference``, and so are the bits. Entries are worked on in vectors of
``kernels.lanes``; those beyond the last whole vector of a block in a vector that is not full.

Legend: p entries of a block; j the first entry of a vector.
"""

# what numba compiles has no types of python's
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from collections import namedtuple

import numpy as np
from numba import njit

from kernels.gefen import HALF_CELLS
from kernels.lanes import (
    FOLD,
    LANES,
    add_squares,
    clamp,
    decode,
    encode,
    fold_four,
    fold_last,
    fold_two,
    hold_table,
    keep,
    largest_lane,
    load,
    load_wide,
    max_abs,
    prefetch,
    read,
    splat,
    store,
    store_wide,
    write,
)
from kernels.reference import TINY

# a matrix: addresses, 0 for what it has not, and sizes
_ADDRESSES = ("param", "grad", "v", "codes", "scale", "momentum", "factor", "inverse")
MATRIX = np.dtype([(name, np.int64) for name in (*_ADDRESSES, "columns", "block", "param_bytes", "grad_bytes")])

# entries between what is worked on and what is asked of memory: about the time that memory takes to answer
AHEAD = 384

# addresses of a block's first entries, 0 for what it has not
_Block = namedtuple("_Block", "param grad codes momentum factor inverse param_bytes grad_bytes p")
_ZERO, _ONE, _TINY, _LEFT_ALONE = np.float32(0), np.float32(1), np.float32(TINY), np.float32(-1)
# not literals: numba would compile what it calls with one a second time
_ALL, _NONE, _FP32, _ONE_ROW, _FOUR_ROWS = (np.int64(x) for x in (LANES, 0, 4, 1, 4))

_compiled = njit(nogil=True, error_model="numpy")
_inlined = njit(nogil=True, error_model="numpy", forceinline=True)


def scratch_entries(longest: int) -> int:
    """fp32 entries of the scratch memory of ``step_rows`` and ``count_cells``, for blocks of up to ``longest``."""
    # a block's squares and then its momentum, with room for whole vectors
    return longest + LANES


@_compiled
def step_rows(table, ranges, numbers, quantised, level_table, cell_table, scratch):
    """The step on ranges of rows: (n, 3) int64, matrix, first row, row after the last.

    Args:
        table: ``MATRIX`` records.
        numbers: one record of ``Rule.numbers()`` in fp32.
        level_table, cell_table: addresses of the tables of ``kernels.lanes``.
        scratch: address of ``scratch_entries`` fp32.

    Returns:
        The largest update, and the number of blocks left alone.
    """
    rule = numbers[0]
    largest, left_alone = _ZERO, 0
    for index in range(len(ranges)):
        matrix = table[ranges[index, 0]]
        blocks = matrix.columns // matrix.block
        column = _NONE
        for number in range(ranges[index, 1] * blocks, ranges[index, 2] * blocks):
            block = _find_block(matrix, number, column)
            v, scale = matrix.v + 4 * number, matrix.scale + 4 * number
            update = _step_block(block, v, scale, rule, quantised, level_table, cell_table, scratch)
            if update < 0:
                left_alone += 1
            elif update > largest or update != update:
                largest = update
            column += block.p
            if column == matrix.columns:
                column = _NONE
    return largest, left_alone


@_compiled
def count_cells(table, ranges, scratch, counts):
    """Add the cells of ranges of rows to ``counts`` (CELLS,) int64, as ``kernels.reference.code_histogram``."""
    for index in range(len(ranges)):
        matrix = table[ranges[index, 0]]
        blocks = matrix.columns // matrix.block
        for number in range(ranges[index, 1] * blocks, ranges[index, 2] * blocks):
            block = _find_block(matrix, number, number % blocks * matrix.block)
            largest = splat(_ZERO)
            for j in range(0, block.p, LANES):
                count = min(_ALL, block.p - j)
                x = load(block.grad + block.grad_bytes * j, block.grad_bytes, count)
                if block.inverse:
                    x = x * load(block.inverse + 4 * j, _FP32, count)
                store(scratch + 4 * j, x, _FP32, _ALL)
                largest = max_abs(largest, x)
            scale = largest_lane(largest)
            if np.isfinite(scale) and scale >= _TINY:
                shrink = _ONE / scale
                for j in range(block.p):
                    x = read(scratch + 4 * j) * shrink
                    counts[np.uint64(x * np.float32(HALF_CELLS) + np.float32(HALF_CELLS + 0.5))] += 1


@_compiled
def sum_columns(table, ranges, sums):
    """Add the squared gradient of each range of rows to the fp64 sums at its address in ``sums``."""
    for index in range(len(ranges)):
        matrix, first, last = table[ranges[index, 0]], ranges[index, 1], ranges[index, 2]
        width = matrix.grad_bytes * matrix.columns
        # four rows that are far from each other: more of memory is on its way, and the sums are read and written once
        step = (last - first) // 4
        for row in range(first, first + step):
            address = matrix.grad + width * row
            _sum_rows(address, width * step, _FOUR_ROWS, matrix.grad_bytes, matrix.columns, sums[index])
        for row in range(first + 4 * step, last):
            _sum_rows(matrix.grad + width * row, width, _ONE_ROW, matrix.grad_bytes, matrix.columns, sums[index])


@_inlined
def _sum_rows(address, step, number, item_bytes, columns, sums):
    full = columns // LANES * LANES
    for j in range(0, full, LANES):
        _sum_lanes(address + item_bytes * j, step, number, item_bytes, _ALL, sums + 8 * j)
    if full < columns:
        _sum_lanes(address + item_bytes * full, step, number, item_bytes, columns - full, sums + 8 * full)


@_inlined
def _sum_lanes(address, step, number, item_bytes, count, sums):
    total = load_wide(sums, count)
    for row in range(number):
        total = add_squares(total, load(address + step * row, item_bytes, count))
    store_wide(sums, total, count)


@_inlined
def _find_block(matrix, number, column):
    first = number * matrix.block
    return _Block(
        matrix.param + matrix.param_bytes * first,
        matrix.grad + matrix.grad_bytes * first,
        matrix.codes + first if matrix.codes else 0,
        matrix.momentum + 4 * first if matrix.momentum else 0,
        matrix.factor + 4 * column if matrix.factor else 0,
        matrix.inverse + 4 * column if matrix.inverse else 0,
        matrix.param_bytes,
        matrix.grad_bytes,
        matrix.block,
    )


@_inlined
def _step_block(block, v, scale, rule, quantised, level_table, cell_table, u):
    """The largest update of the block, or a negative number if it was left alone.

    Addresses: ``v`` and ``scale`` of the block's own, ``u`` of scratch memory for what is coded, the scaled momentum.
    """
    total = _fold_squares(block, u)
    if not np.isfinite(total):
        return _LEFT_ALONE
    largest = _move_momentum(block, read(scale) if block.codes else _ONE, rule, level_table, u)
    average = read(v) * rule.beta2 + rule.gain2 * (total / np.float32(block.p))
    gain = rule.correction1 / (np.sqrt(average * rule.correction2) + rule.eps)
    shrink = _ONE / largest if largest >= _TINY else _ZERO
    if block.codes:
        # no code stands for what is not finite
        if not np.isfinite(largest):
            return _LEFT_ALONE
        kept = largest if largest >= _TINY else _ZERO
        write(scale, kept)
        if quantised:
            largest = _round_momentum(block, shrink, kept, level_table, cell_table, u)
    write(v, average)
    _move_param(block, gain, rule, u, shrink, cell_table, block.codes != 0 and not quantised)
    update = largest * gain
    # in this order a NaN stays, as in torch's clamp
    return rule.max_update if update > rule.max_update else update


@_inlined
def _fold_squares(block, squares):
    """Sum of the block's squared gradient: the upper half onto the lower, again and again."""
    length = block.p
    if length % 4 == 0:
        # two foldings at once
        length //= 4
        full = length // LANES * LANES
        for j in range(0, full, LANES):
            _add_four_squares(block, j, length, _ALL, squares)
        if full < length:
            _add_four_squares(block, full, length, length - full, squares)
    else:
        rest = length // 2
        length -= rest
        for j in range(0, length, LANES):
            lower, upper = min(length - j, _ALL), min(max(rest - j, _NONE), _ALL)
            x = load(block.grad + block.grad_bytes * j, block.grad_bytes, lower)
            y = load(block.grad + block.grad_bytes * (length + j), block.grad_bytes, upper)
            store(squares + 4 * j, x * x + y * y, _FP32, _ALL)
    while length > FOLD:
        if length % (4 * FOLD) == 0:
            length //= 4
            for j in range(0, length, FOLD):
                fold_four(squares + 4 * j, 4 * length)
        else:
            half = (length + 1) // 2
            for j in range(0, length - half, FOLD):
                fold_two(squares + 4 * j, 4 * half, length - half - j)
            length = half
    return fold_last(squares, length)


@_inlined
def _add_four_squares(block, j, quarter, count, squares):
    address, step = block.grad + block.grad_bytes * j, block.grad_bytes * quarter
    x = load(address, block.grad_bytes, count)
    y = load(address + 2 * step, block.grad_bytes, count)
    lower = x * x + y * y
    x = load(address + step, block.grad_bytes, count)
    y = load(address + 3 * step, block.grad_bytes, count)
    store(squares + 4 * j, lower + (x * x + y * y), _FP32, _ALL)


@_inlined
def _move_momentum(block, scale, rule, level_table, u):
    """Average the gradient into the momentum and write what is coded to ``u``; the largest of it."""
    numbers, table = (splat(scale), splat(rule.beta1), splat(rule.gain1)), hold_table(level_table)
    largest = splat(_ZERO)
    full = block.p // LANES * LANES
    for j in range(0, full, LANES):
        largest = _move_lanes(block, j, _ALL, numbers, table, u, largest)
    if full < block.p:
        largest = _move_lanes(block, full, block.p - full, numbers, table, u, largest)
    return largest_lane(largest)


@_inlined
def _move_lanes(block, j, count, numbers, table, u, largest):
    scale, beta1, gain1 = numbers
    if block.codes:
        prefetch(block.codes + j + AHEAD, 1)
        m = decode(block.codes + j, count, table) * scale
        if block.factor:
            m = m * load(block.factor + 4 * j, _FP32, count)
    else:
        m = load(block.momentum + 4 * j, _FP32, count)
    # what the next loop reads; the gradient is in cache, since its squares have been added up
    prefetch(block.param + block.param_bytes * j, block.param_bytes)
    m = m * beta1 + gain1 * load(block.grad + block.grad_bytes * j, block.grad_bytes, count)
    if not block.codes:
        store(block.momentum + 4 * j, m, _FP32, count)
    if block.inverse:
        m = m * load(block.inverse + 4 * j, _FP32, count)
    m = keep(m, count)
    store(u + 4 * j, m, _FP32, _ALL)
    return max_abs(largest, m)


@_inlined
def _move_param(block, gain, rule, u, shrink, cell_table, coding):
    """Update the parameter by ``u``, and code that if asked."""
    numbers = (splat(gain), splat(rule.max_update), splat(rule.decay), splat(rule.lr), splat(shrink))
    table = hold_table(cell_table)
    limited = rule.max_update < np.inf
    full = block.p // LANES * LANES
    for j in range(0, full, LANES):
        _move_param_lanes(block, j, _ALL, numbers, limited, u, table, coding)
    if full < block.p:
        _move_param_lanes(block, full, block.p - full, numbers, limited, u, table, coding)


@_inlined
def _move_param_lanes(block, j, count, numbers, limited, u, table, coding):
    gain, max_update, decay, lr, shrink = numbers
    x = load(u + 4 * j, _FP32, _ALL)
    update = x * gain
    if limited:
        update = clamp(update, max_update)
    # of the next block, which begins with its squares
    prefetch(block.grad + block.grad_bytes * (j + block.p), block.grad_bytes)
    address = block.param + block.param_bytes * j
    param = load(address, block.param_bytes, count)
    store(address, param * decay - lr * update, block.param_bytes, count)
    if coding:
        encode(x * shrink, table, block.codes + j, count)


@_inlined
def _round_momentum(block, shrink, scale, level_table, cell_table, u):
    """Code ``u``, and make it what its codes stand for; the largest of it."""
    shrinks, scales, largest = splat(shrink), splat(scale), splat(_ZERO)
    levels, cells = hold_table(level_table), hold_table(cell_table)
    for j in range(0, block.p, LANES):
        count = min(_ALL, block.p - j)
        codes = block.codes + j
        encode(load(u + 4 * j, _FP32, _ALL) * shrinks, cells, codes, count)
        x = keep(decode(codes, count, levels) * scales, count)
        store(u + 4 * j, x, _FP32, _ALL)
        largest = max_abs(largest, x)
    return largest_lane(largest)
