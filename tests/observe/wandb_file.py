"""Reads the transaction log of an offline W&B run: blocks of 32 KiB, records with checksum, length and type."""

import json
from pathlib import Path
from typing import Any

BLOCK = 32768
FILE_HEADER = 7
HEADER = 7


def records(session: Path) -> list[Any]:
    """Every record of a session folder, in the order written."""
    from wandb.proto import wandb_internal_pb2

    (path,) = session.glob("*.wandb")
    data, place, part, found = path.read_bytes(), FILE_HEADER, b"", []
    assert data[:4] == b":W&B"
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        part += data[place + HEADER : place + HEADER + length]
        place += HEADER + length
        # 1: whole, 2: first, 3: middle, 4: last part of a record
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            found.append(record)
            part = b""
    return found


def history(session: Path) -> list[dict[str, Any]]:
    """The logged rows of a session, without the library's own columns."""
    rows = []
    for record in records(session):
        if record.WhichOneof("record_type") == "history":
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append({key: value for key, value in row.items() if not key.startswith("_")})
    return rows


def axes(session: Path) -> dict[str, str]:
    """Metric pattern -> the metric that it is drawn over."""
    metrics = [record.metric for record in records(session) if record.WhichOneof("record_type") == "metric"]
    return {metric.name or metric.glob_name: metric.step_metric for metric in metrics}


def run_id(session: Path) -> str:
    return next(record.run.run_id for record in records(session) if record.WhichOneof("record_type") == "run")
