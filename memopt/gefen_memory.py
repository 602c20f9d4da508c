"""What steps of Gefen allocate beside parameters, gradients and state, in bytes: upper bounds."""

from collections.abc import Callable, Sequence
from types import ModuleType

from kernels import vectors
from memopt import layout, partition
from memopt.gefen_learning import grouped
from memopt.gefen_options import GefenOptions
from memopt.gefen_state import Entry

# of fp64 and fp32 vectors of columns that a step has at a time, by entry: sums, their mean, c before and after, factors
COLUMN_BYTES = 128
# fp32 copies of a matrix that a new period takes at a time
REPARTITION_BYTES = 6 * 4


def transient_bytes(entries: Sequence[Entry], backend_of: Callable[[Entry], ModuleType]) -> int:
    """Bytes of any step: the kernels' own, columns, vectors laid together, copies, the buffers of the gather."""
    matrices = [entry for entry in entries if entry.is_matrix]
    by_backend = grouped(matrices, backend_of).items()
    kernel = max((backend.workspace_bytes(list(map(Entry.alone, part))) for backend, part in by_backend), default=0)
    columns = COLUMN_BYTES * sum(entry.columns for entry in matrices if entry.factored)
    flat = vectors.workspace_bytes([entry.local["m"] for entry in entries if not entry.is_matrix])
    copies = sum(entry.copied_bytes() for entry in entries)
    gather = layout.gather_bytes([entry.placed for entry in entries])
    return columns + copies + max(kernel, flat, gather)


def periodic_bytes(
    entries: Sequence[Entry], backend_of: Callable[[Entry], ModuleType], options: GefenOptions, final: bool
) -> int:
    """Bytes of steps that measure or change periods or codebook; ``final``: no period is undecided."""
    matrices = [entry for entry in entries if entry.is_matrix]
    owned = [len(entry.local["v"]) * entry.columns for entry in matrices]
    learned = options.partition in partition.LEARNED
    search = max(map(partition.transient_bytes, (entry.columns for entry in matrices)), default=0) if learned else 0
    # a matrix whose period changes is whole in fp32 for a moment, momentum and second moment
    changes = learned and (options.refresh or not final)
    change = REPARTITION_BYTES * max(owned, default=0) if changes else 0
    histograms = [
        backend.histogram_bytes(list(map(Entry.alone, part)))
        for backend, part in grouped([entry for entry in matrices if entry.coded], backend_of).items()
    ]
    return transient_bytes(entries, backend_of) + int(max(search, change, *histograms, 0))
