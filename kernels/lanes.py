"""Vectors of fp32 for numba kernels: ``LANES`` entries at a time, loaded from and stored to addresses.

numba's own loops are vectorised only while they are simple, and table lookups never are. Here each operation is one
instruction on an LLVM vector, so that decoding a momentum, moving it and finding its largest entry can share a loop.
They are plain IEEE operations, not contracted and not reordered: a lane holds what torch computes for its entry.

A table of 256 entries is looked up with byte permutations where the CPU has them (AVX-512 VBMI: 64 lookups in some ten
cycles), otherwise entry by entry. ``level_table`` and ``cell_table`` write the tables in the form that is looked up.

Addresses are int64. ``count`` is how many lanes are in memory: the others load as 0 and are not stored.
"""

# what numba compiles has no types of python's
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, no-any-return, attr-defined"

import inspect
import operator

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

from kernels.gefen import CELLS, HALF_CELLS

# what numba compiles for, which its environment variables can narrow
_FEATURES = set(cpu_target.target_context.codegen().magic_tuple()[2].split(","))
PERMUTES_BYTES = {"+avx512bw", "+avx512vbmi"} <= _FEATURES
"""Whether tables are looked up by byte permutations."""
LANES = 64 if PERMUTES_BYTES else 16
"""Entries of a vector."""
# lanes of the vectors that squares are folded in, and of the last one
FOLD = 16

_BYTE, _SHORT, _INT, _LONG = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOAT, _DOUBLE = ir.FloatType(), ir.DoubleType()


class _VectorType(types.Type):
    """``LANES`` entries in registers."""

    def __init__(self, name, element, count=LANES):
        super().__init__(name)
        self.element, self.count = element, count


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, vector):
        super().__init__(manager, vector, _vector(vector.element, vector.count))


_floats = _VectorType("Floats", _FLOAT)
_doubles = _VectorType("Doubles", _DOUBLE)
# four tables of 256 bytes in half of the registers, or their address
_table = _VectorType("Table", _BYTE, 1024) if PERMUTES_BYTES else types.int64


def level_table(levels: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """The table that ``decode`` reads: levels (k,) fp32, k <= 256 -> bytes."""
    padded = np.zeros(256, np.float32)
    padded[: len(levels)] = levels
    as_bytes = padded.view(np.uint8)
    return as_bytes.reshape(256, 4).T.ravel() if PERMUTES_BYTES else as_bytes


def cell_table(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The table that ``encode`` reads: the code of every cell (CELLS,), at most 256 runs of equal codes -> bytes."""
    padded = np.append(codes, codes[-1:])
    if not PERMUTES_BYTES:
        return padded
    # the run of a cell is that of the first of its 16 neighbours, and one more for each bit up to its own
    starts = np.append(False, padded[1:] != padded[:-1])
    runs = np.cumsum(starts).reshape(256, 16)
    assert runs[-1, -1] < 256
    bits = (starts.reshape(256, 16)[:, 1:] << np.arange(1, 16)).sum(1)
    code_of_run = np.zeros(256, np.uint8)
    code_of_run[runs.ravel()] = padded
    return np.concatenate([runs[:, 0], bits & 255, bits >> 8, code_of_run]).astype(np.uint8)


def _operation(result, **arguments):
    """A numba function from one of an LLVM builder and LLVM values; the keywords are numba's types of these."""

    def decorate(emit):
        def typed(context, *_):
            def generate(context, builder, signature, values):
                value = emit(builder, *values)
                return context.get_dummy_value() if result is types.void else value

            return result(*arguments.values()), generate

        names = ["context", *arguments]
        typed.__signature__ = inspect.Signature(
            [inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY) for n in names]
        )
        typed.__name__ = typed.__qualname__ = emit.__name__
        typed.__doc__ = emit.__doc__
        return intrinsic(typed)

    return decorate


@_operation(types.float32, address=types.int64)
def read(builder, address):
    """One fp32."""
    return builder.load(builder.inttoptr(address, _FLOAT.as_pointer()))


@_operation(types.void, address=types.int64, value=types.float32)
def write(builder, address, value):
    """Store one fp32."""
    builder.store(value, builder.inttoptr(address, _FLOAT.as_pointer()))


@_operation(_floats, value=types.float32)
def splat(builder, value):
    """The same in every lane."""
    return _splat(builder, value)


@_operation(_floats, address=types.int64, item_bytes=types.int64, count=types.int64)
def load(builder, address, item_bytes, count):
    """Entries of 4 bytes, fp32, or of 2, bf16."""

    def widen():
        wide = builder.zext(_load(builder, address, _SHORT, count), _vector(_INT))
        return builder.bitcast(builder.shl(wide, _splat(builder, _INT(16))), _vector(_FLOAT))

    narrow = builder.icmp_signed("==", item_bytes, _LONG(2))
    return _either(builder, narrow, widen, lambda: _load(builder, address, _FLOAT, count))


@_operation(types.void, address=types.int64, x=_floats, item_bytes=types.int64, count=types.int64)
def store(builder, address, x, item_bytes, count):
    """Entries of 4 bytes, fp32, or of 2, bf16: rounded, to even where two are equally near; NaN stays NaN."""

    def round_to_even():
        bits = builder.bitcast(x, _vector(_INT))
        sixteen = _splat(builder, _INT(16))
        odd = builder.and_(builder.lshr(bits, sixteen), _splat(builder, _INT(1)))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, _splat(builder, _INT(0x7FFF)))), sixteen)
        return builder.select(builder.fcmp_unordered("uno", x, x), _splat(builder, _INT(0x7FC0)), rounded)

    with builder.if_else(builder.icmp_signed("==", item_bytes, _LONG(2))) as (narrow, wide):
        with narrow:
            _store(builder, address, builder.trunc(round_to_even(), _vector(_SHORT)), count)
        with wide:
            _store(builder, address, x, count)


@_operation(types.void, address=types.int64, item_bytes=types.int64)
def prefetch(builder, address, item_bytes):
    """Ask memory for as many entries of 1, 2 or 4 bytes as a vector has; no address is wrong."""
    for size in (1, 2, 4):
        with builder.if_then(builder.icmp_signed(">=", item_bytes, _LONG(size))):
            # the bytes beyond those of the next smaller size
            for line in range(size * LANES // 2 if size > 1 else 0, size * LANES, 64):
                pointer = builder.inttoptr(builder.add(address, _LONG(line)), cgutils.voidptr_t)
                # to read, into the first cache, data
                _call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, _INT(0), _INT(3), _INT(1)])


@_operation(_floats, x=_floats, limit=_floats)
def clamp(builder, x, limit):
    """``x`` between -limit and limit; NaN stays NaN."""
    x = builder.select(builder.fcmp_ordered(">", x, limit), limit, x)
    lower = builder.fneg(limit)
    return builder.select(builder.fcmp_ordered("<", x, lower), lower, x)


@_operation(_floats, x=_floats, count=types.int64)
def keep(builder, x, count):
    """``x`` in the first ``count`` lanes, 0 in the others."""
    return builder.select(_mask(builder, count), x, ir.Constant(x.type, None))


@_operation(_floats, x=_floats, y=_floats)
def max_abs(builder, x, y):
    """The larger of x >= 0 and |y|; NaN counts as larger than infinity."""
    # floats of one sign are ordered as their bits
    bits = builder.and_(builder.bitcast(y, _vector(_INT)), _splat(builder, _INT(0x7FFFFFFF)))
    largest = _call(builder, f"llvm.umax.v{LANES}i32", bits.type, [builder.bitcast(x, bits.type), bits])
    return builder.bitcast(largest, x.type)


@_operation(types.float32, x=_floats)
def largest_lane(builder, x):
    """The largest of entries >= 0; NaN if there is one."""
    bits = builder.bitcast(x, _vector(_INT))
    return builder.bitcast(_call(builder, f"llvm.vector.reduce.umax.v{LANES}i32", _INT, [bits]), _FLOAT)


@_operation(_doubles, address=types.int64, count=types.int64)
def load_wide(builder, address, count):
    """fp64 entries."""
    return _load(builder, address, _DOUBLE, count)


@_operation(types.void, address=types.int64, x=_doubles, count=types.int64)
def store_wide(builder, address, x, count):
    """fp64 entries."""
    _store(builder, address, x, count)


@_operation(_doubles, total=_doubles, x=_floats)
def add_squares(builder, total, x):
    """Add x * x in fp64: fused or not, the bits are the same, since the square of an fp32 is exact there."""
    wide = builder.fpext(x, _vector(_DOUBLE))
    return _call(builder, f"llvm.fmuladd.v{LANES}f64", wide.type, [wide, wide, total])


@_operation(types.void, address=types.int64, step=types.int64, count=types.int64)
def fold_two(builder, address, step, count):
    """Add to ``FOLD`` fp32 entries the first ``count`` of those ``step`` bytes on."""
    y = _load(builder, builder.add(address, step), _FLOAT, count, FOLD)
    _store(builder, address, builder.fadd(_load(builder, address, _FLOAT, None, FOLD), y), None, FOLD)


@_operation(types.void, address=types.int64, step=types.int64)
def fold_four(builder, address, step):
    """Two foldings of ``FOLD`` fp32 entries at once: (0 + 2) + (1 + 3), in steps of ``step`` bytes."""
    parts = [_load(builder, builder.add(address, builder.mul(step, _LONG(k))), _FLOAT, None, FOLD) for k in range(4)]
    sums = [builder.fadd(lower, upper) for lower, upper in zip(parts[:2], parts[2:], strict=True)]
    _store(builder, address, builder.fadd(*sums), None, FOLD)


@_operation(types.float32, address=types.int64, length=types.int64)
def fold_last(builder, address, length):
    """Sum of ``length`` in [1, FOLD] fp32 entries, the upper half folded onto the lower again and again."""
    x = _load(builder, address, _FLOAT, None, FOLD)
    first = builder.extract_element(x, _INT(0))
    end = builder.append_basic_block("folded")
    with builder.goto_block(end):
        total = builder.phi(_FLOAT)
    total.add_incoming(first, builder.block)
    choice = builder.switch(length, end)
    for case in range(2, FOLD + 1):
        block = builder.append_basic_block(f"fold{case}")
        choice.add_case(_LONG(case), block)
        with builder.goto_block(block):
            folded, n = x, case
            while n > 1:
                half = (n + 1) // 2
                upper = [half + lane if half + lane < n else FOLD for lane in range(FOLD)]
                zeros = ir.Constant(x.type, None)
                folded = builder.fadd(folded, builder.shuffle_vector(folded, zeros, _constant(_INT, upper)))
                n = half
            total.add_incoming(builder.extract_element(folded, _INT(0)), block)
            builder.branch(end)
    builder.position_at_end(end)
    return total


@_operation(_table, address=types.int64)
def hold_table(builder, address):
    """A table of ``level_table`` or ``cell_table`` for a loop of look-ups."""
    return _load(builder, address, _BYTE, None, 1024) if PERMUTES_BYTES else address


@_operation(_floats, codes=types.int64, count=types.int64, table=_table)
def decode(builder, codes, count, table):
    """Levels of the codes at an address, by a ``level_table``."""
    loaded = _load(builder, codes, _BYTE, count)
    if not PERMUTES_BYTES:
        return _gather(builder, loaded, table, _FLOAT)
    # unpacking interleaves within quarters of a register: each quarter gets the codes of its quarter of the results
    loaded = _swap_quarters(builder, loaded)
    planes = [_lookup(builder, loaded, table, 256 * plane) for plane in range(4)]
    parts = []
    for upper in (0, 1):
        low = builder.bitcast(_unpack(builder, planes[0], planes[1], upper), _vector(_SHORT, 32))
        high = builder.bitcast(_unpack(builder, planes[2], planes[3], upper), _vector(_SHORT, 32))
        parts += [builder.bitcast(_unpack(builder, low, high, half), _vector(_FLOAT, 16)) for half in (0, 1)]
    return _join(builder, parts)


@_operation(types.void, x=_floats, table=_table, codes=types.int64, count=types.int64)
def encode(builder, x, table, codes, count):
    """Store the codes of the cells of x in [-1, 1], by a ``cell_table``."""
    scaled = builder.fmul(x, _splat(builder, _FLOAT(float(HALF_CELLS))))
    # the conversion truncates
    cells = builder.fptosi(builder.fadd(scaled, _splat(builder, _FLOAT(HALF_CELLS + 0.5))), _vector(_INT))
    if not PERMUTES_BYTES:
        # no cell is beyond the table, whatever x was
        inside = builder.and_(cells, _splat(builder, _INT(CELLS)))
        return _store(builder, codes, _gather(builder, inside, table, _BYTE), count)
    coarse, fine = _split_cells(builder, cells)
    run = _lookup(builder, coarse, table, 0)
    for part in (0, 1):
        # the lower four bits count: the table is there four times
        up_to = _constant(_BYTE, [(2 << cell) - 1 >> 8 * part & 255 for cell in range(16)] * 4)
        passed = _call(builder, "llvm.x86.avx512.permvar.qi.512", fine.type, [up_to, fine])
        starts = builder.and_(_lookup(builder, coarse, table, 256 * (1 + part)), passed)
        run = builder.add(run, _call(builder, "llvm.ctpop.v64i8", run.type, [starts]))
    _store(builder, codes, _lookup(builder, run, table, 768), count)


def _define(operation, instruction, vector):
    """Give numba an operator between two vectors."""

    @infer_global(operation)
    class Template(AbstractTemplate):
        def generic(self, operands, keywords):
            return signature(vector, *operands) if operands == (vector, vector) else None

    @lower_builtin(operation, vector, vector)
    def _(context, builder, signature, operands):
        return getattr(builder, instruction)(*operands)


_define(operator.mul, "fmul", _floats)
_define(operator.add, "fadd", _floats)
_define(operator.sub, "fsub", _floats)


def _vector(element, count=LANES):
    return ir.VectorType(element, count)


def _constant(element, values):
    return ir.Constant(_vector(element, len(values)), list(values))


def _splat(builder, value, count=LANES):
    if isinstance(value, ir.Constant):
        return _constant(value.type, [value.constant] * count)
    single = builder.insert_element(ir.Constant(_vector(value.type, count), ir.Undefined), value, _INT(0))
    return builder.shuffle_vector(single, single, _constant(_INT, [0] * count))


def _call(builder, name, result, arguments):
    function = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), arguments)


def _either(builder, condition, first, second):
    with builder.if_else(condition) as (then, otherwise):
        with then:
            values = [(first(), builder.block)]
        with otherwise:
            values.append((second(), builder.block))
    chosen = builder.phi(values[0][0].type)
    for value, block in values:
        chosen.add_incoming(value, block)
    return chosen


def _mask(builder, count, lanes=LANES):
    count = builder.trunc(count, _INT)
    return builder.icmp_unsigned("<", _constant(_INT, range(lanes)), _splat(builder, count, lanes))


def _load(builder, address, element, count, lanes=LANES):
    vector = _vector(element, lanes)
    pointer = builder.inttoptr(address, vector.as_pointer())
    if count is None:
        return builder.load(pointer, align=1)
    name = f"llvm.masked.load.v{lanes}{_short_name(element)}.p0"
    arguments = [pointer, _INT(1), _mask(builder, count, lanes), ir.Constant(vector, None)]
    return _call(builder, name, vector, arguments)


def _store(builder, address, x, count, lanes=LANES):
    pointer = builder.inttoptr(address, x.type.as_pointer())
    if count is None:
        return builder.store(x, pointer, align=1)
    name = f"llvm.masked.store.v{lanes}{_short_name(x.type.element)}.p0"
    _call(builder, name, ir.VoidType(), [x, pointer, _INT(1), _mask(builder, count, lanes)])


def _short_name(element):
    return {_FLOAT: "f32", _DOUBLE: "f64"}.get(element) or str(element)


def _gather(builder, indices, table, element):
    """One load a lane."""
    pointer = builder.inttoptr(table, element.as_pointer())
    result = ir.Constant(_vector(element), ir.Undefined)
    for lane in range(LANES):
        index = builder.zext(builder.extract_element(indices, _INT(lane)), _LONG)
        result = builder.insert_element(result, builder.load(builder.gep(pointer, [index])), _INT(lane))
    return result


def _lookup(builder, indices, table, offset):
    """Bytes of a table of 256, at ``offset`` in the table's bytes."""
    quarters = [
        builder.shuffle_vector(table, table, _constant(_INT, range(start, start + 64)))
        for start in range(offset, offset + 256, 64)
    ]
    # an index of a permutation has 7 bits; the sign is the eighth
    low, high = (
        _call(builder, "llvm.x86.avx512.vpermi2var.qi.512", indices.type, [first, indices, second])
        for first, second in (quarters[:2], quarters[2:])
    )
    return builder.select(builder.icmp_signed("<", indices, ir.Constant(indices.type, None)), high, low)


def _split_cells(builder, cells):
    """Bytes of the upper 8 of 12 bits, and bytes whose lower half is the lower 4 bits."""
    quarters = [builder.shuffle_vector(cells, cells, _constant(_INT, range(16 * k, 16 * k + 16))) for k in range(4)]
    # quarter by quarter of a register: four cells of the first, four of the second
    fields = _constant(_BYTE, [4, 20, 36, 52, 0, 16, 32, 48] * 8)
    split = []
    for pair in (quarters[:2], quarters[2:]):
        words = _call(builder, "llvm.x86.avx512.packusdw.512", _vector(_SHORT, 32), pair)
        taken = [fields, builder.bitcast(words, fields.type)]
        split.append(_call(builder, "llvm.x86.avx512.pmultishift.qb.512", fields.type, taken))
    first, second = (builder.bitcast(part, _vector(_INT, 16)) for part in split)
    # in groups of four cells: upper bits of the first, lower bits of the first, upper bits of the second ...
    order = [16 * (k // 8) + 4 * (k % 4) + 2 * (k // 4 % 2) for k in range(16)]
    upper = builder.shuffle_vector(first, second, _constant(_INT, order))
    lower = builder.shuffle_vector(first, second, _constant(_INT, [place + 1 for place in order]))
    return builder.bitcast(upper, fields.type), builder.bitcast(lower, fields.type)


def _swap_quarters(builder, x):
    """Of each 16 bytes of 64, the k-th four become the k-th quarter's."""
    words = builder.bitcast(x, _vector(_INT, 16))
    order = [4 * (word % 4) + word // 4 for word in range(16)]
    return builder.bitcast(builder.shuffle_vector(words, words, _constant(_INT, order)), x.type)


def _unpack(builder, x, y, upper):
    """Interleave the lower or upper halves of x and y within each quarter."""
    count = x.type.count
    quarter, half = count // 4, count // 8
    order = []
    for first in range(upper * half, count, quarter):
        for lane in range(first, first + half):
            order += [lane, count + lane]
    return builder.shuffle_vector(x, y, _constant(_INT, order))


def _join(builder, parts):
    """Four vectors end to end."""
    while len(parts) > 1:
        count = 2 * parts[0].type.count
        order = _constant(_INT, range(count))
        parts = [builder.shuffle_vector(x, y, order) for x, y in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
