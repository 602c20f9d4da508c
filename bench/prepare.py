"""What ``data.prepare`` adds to the tokenizer: ``python -m bench.prepare``.

One process on one core, Python's standard library, a SentencePiece model of 4,096 entries trained on it. ``raw`` is one
call of SentencePiece on the texts in memory; ``units`` is what a worker of ``data.prepare`` does with the same
documents (read the files, decode, hash, encode, convert, check, write the parts); ``whole`` is ``prepare`` with one
worker and the tokenizer given, from listing the files to the finished folder. The three alternate; the table shows
medians, of wall time and of CPU time (which other load on the machine changes less).
"""

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import sentencepiece
from rich.console import Console
from rich.table import Table

from bench.machine import write_result
from conf.schema import DataConfig
from data.documents import Counts, list_inputs, plan_units, read_unit
from data.encode import encode_unit
from data.prepare import prepare
from data.tokenizer import SentencePieceTokenizer, train_sentencepiece

VOCAB = 4096
REPEATS = 5
TARGET = 0.8


def main() -> None:
    """Measure, print the table, write ``bench/results/prepare.json``."""
    console = Console()
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    config = DataConfig(kind="stdlib", workers=1, add_eos=True)
    units = plan_units(list_inputs(config))
    texts = [text for unit in units for text in read_unit(unit, config, Counts())]
    start = time.perf_counter()
    model = train_sentencepiece(texts, VOCAB)
    train_seconds = time.perf_counter() - start
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokens = sum(map(len, processor.encode(texts, out_type=int, num_threads=1)))
    seconds: dict[str, list[float]] = {"raw": [], "units": [], "whole": []}
    cpu_seconds: dict[str, list[float]] = {"raw": [], "units": [], "whole": []}
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = SentencePieceTokenizer(Path(scratch) / "tokenizer.model", model)
        tokenizer.save(Path(scratch))
        for _ in range(REPEATS):
            start, cpu_start = time.perf_counter(), time.process_time()
            processor.encode(texts, out_type=int, num_threads=1)
            seconds["raw"].append(time.perf_counter() - start)
            cpu_seconds["raw"].append(time.process_time() - cpu_start)

            parts = Path(scratch) / "parts"
            parts.mkdir()
            start, cpu_start = time.perf_counter(), time.process_time()
            for unit in units:
                encode_unit(unit, config, tokenizer, parts)
            seconds["units"].append(time.perf_counter() - start)
            cpu_seconds["units"].append(time.process_time() - cpu_start)
            shutil.rmtree(parts)

            made = Path(scratch) / "made"
            start, cpu_start = time.perf_counter(), time.process_time()
            prepare(DataConfig(kind="stdlib", workers=1, dir=str(made), tokenizer=str(tokenizer.path)))
            seconds["whole"].append(time.perf_counter() - start)
            cpu_seconds["whole"].append(time.process_time() - cpu_start)
            shutil.rmtree(made)
    os.sched_setaffinity(0, cores)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    cpu = {name: statistics.median(values) for name, values in cpu_seconds.items()}
    table = Table("what", "seconds", "M tokens/s", "of raw", "CPU seconds", "of raw (CPU)")
    for name, median in medians.items():
        table.add_row(
            name, f"{median:.2f}", f"{tokens / median / 1e6:.2f}", f"{medians['raw'] / median:.2f}", f"{cpu[name]:.2f}",
            f"{cpu['raw'] / cpu[name]:.2f}",
        )  # fmt: skip
    console.print(table)
    console.print(f"training the tokenizer on {sum(unit.size for unit in units) / 1e6:.1f} MB: {train_seconds:.1f} s")
    content = {
        "tokens": tokens,
        "repeats": REPEATS,
        "target": TARGET,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "ratio_units_cpu": cpu["raw"] / cpu["units"],
        "ratio_units": medians["raw"] / medians["units"],
        "ratio_whole": medians["raw"] / medians["whole"],
        "tokenizer_training_seconds": train_seconds,
    }
    console.print(f"target {TARGET} (units); written to {write_result('prepare', content)}")


if __name__ == "__main__":
    main()
