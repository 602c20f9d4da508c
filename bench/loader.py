"""How fast the loader alone delivers batches: ``python -m bench.loader``.

One process: the consumer's thread and the reading thread. The tokens are synthetic and in the page cache (a file of
64 M tokens is written and read once before the clock starts). Every batch is taken and one value of it is read. The
same conversion without order, threads and batches (one sequential pass that widens the file to int64) is timed beside
it, alternating, and so is the gather of the same windows without the thread. The table shows medians.
"""

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.machine import write_result
from data.loader import Loader
from data.samples import TokenDataset
from data.shards import ShardWriter, TokenFiles

TOKENS = 1 << 26
REPEATS = 5
TARGET = 50e6
# (vocabulary, seq_len, global batch)
CASES = [(4096, 1024, 64), (4096, 2048, 64), (4096, 1024, 512), (128256, 1024, 64)]


def write_tokens(folder: Path, vocab_size: int) -> TokenFiles:
    """A split of ``TOKENS`` random ids in four shards, read once."""
    rng = np.random.default_rng(0)
    writer = ShardWriter(folder, vocab_size, "none", TOKENS // 4)
    for _ in range(16):
        ids = rng.integers(0, vocab_size, TOKENS // 16)
        writer.append(ids, np.array([ids.size]))
    writer.close({})
    files = TokenFiles.open(folder)
    files.verify()
    return files


def loader_rate(dataset: TokenDataset, global_batch: int) -> tuple[float, float]:
    """Tokens/s over about half the data, and the seconds waited per batch."""
    batches = max(8, TOKENS // 2 // (global_batch * dataset.seq_len))
    loader = Loader(dataset, global_batch, rank=0, world_size=1)
    waited = 0.0
    start = time.perf_counter()
    for _ in range(batches):
        batch = next(loader)
        assert int(batch.labels[-1, -1]) >= 0
        waited += loader.wait_seconds
    seconds = time.perf_counter() - start
    loader.close()
    return batches * global_batch * dataset.seq_len / seconds, waited / batches


def gather_rate(dataset: TokenDataset, global_batch: int) -> float:
    """Tokens/s of building the same batches in the caller's thread, ids given."""
    batches = max(8, TOKENS // 2 // (global_batch * dataset.seq_len))
    ids = dataset.order.sample_ids(0, batches * global_batch).reshape(batches, global_batch)
    start = time.perf_counter()
    for index, row in enumerate(ids):
        dataset.batch(row, index)
    return batches * global_batch * dataset.seq_len / (time.perf_counter() - start)


def sequential_rate(files: TokenFiles) -> float:
    """Tokens/s of widening the first shards to int64 in one buffer: the least that any loader does."""
    out = np.empty(1 << 16, np.int64)
    start = time.perf_counter()
    for position in range(0, TOKENS // 2, out.size):
        out[:] = files.window(position, out.size)
    return TOKENS // 2 / (time.perf_counter() - start)


def main() -> None:
    """Run every case, print the table, write ``bench/results/loader.json``."""
    console = Console()
    table = Table("vocab", "dtype", "seq_len", "batch", "loader M tok/s", "gather M tok/s", "widen M tok/s", "wait ms")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        splits = {vocab: write_tokens(Path(folder) / str(vocab), vocab) for vocab, _, _ in CASES}
        for vocab, seq_len, batch in CASES:
            dataset = TokenDataset([splits[vocab]], seq_len)
            runs = [
                (*loader_rate(dataset, batch), gather_rate(dataset, batch), sequential_rate(splits[vocab]))
                for _ in range(REPEATS)
            ]
            loader, wait, gather, widen = (statistics.median(values) for values in zip(*runs, strict=True))
            dtype = splits[vocab].sidecar["dtype"]
            table.add_row(
                f"{vocab}", dtype, f"{seq_len}", f"{batch}", *(f"{rate / 1e6:.0f}" for rate in (loader, gather, widen)),
                f"{wait * 1e3:.2f}",
            )  # fmt: skip
            rows.append(
                {
                    "vocab_size": vocab,
                    "dtype": dtype,
                    "seq_len": seq_len,
                    "global_batch": batch,
                    "loader_tokens_per_second": loader,
                    "loader_tokens_per_second_all": [run[0] for run in runs],
                    "gather_tokens_per_second": gather,
                    "sequential_widening_tokens_per_second": widen,
                    "wait_seconds_per_batch": wait,
                    "ratio_to_target": loader / TARGET,
                }
            )
    console.print(table)
    path = write_result("loader", {"tokens": TOKENS, "repeats": REPEATS, "target": TARGET, "cases": rows})
    console.print(f"target {TARGET / 1e6:.0f} M tokens/s; written to {path}")


if __name__ == "__main__":
    main()
