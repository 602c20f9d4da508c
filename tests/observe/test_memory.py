"""Resident memory follows what the process holds; what a CPU does not have is None."""

import torch

from observe import memory

CPU = torch.device("cpu")


def test_resident_set_follows_an_allocation():
    before = memory.memory_usage(CPU)
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    during = memory.memory_usage(CPU)
    del block
    after = memory.memory_usage(CPU)
    assert 60 * 2**20 < during["process_now"] - before["process_now"] < 80 * 2**20
    assert during["process_peak"] >= during["process_now"]
    assert after["process_now"] < during["process_now"]
    # the kernel counts pages in batches
    assert after["process_peak"] > during["process_peak"] - 2**20


def test_a_cpu_has_no_device_memory():
    usage = memory.memory_usage(CPU)
    assert [usage[key] for key in usage if key.startswith("device_")] == [None] * 4


def test_without_proc_the_peak_is_still_known(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "absent")
    usage = memory.memory_usage(CPU)
    assert usage["process_now"] is None
    assert usage["process_peak"] > 10 * 2**20


def test_headline_is_the_device_where_there_is_one():
    assert memory.headline({"process_peak": 5, "device_peak_reserved": 7}) == 7
    assert memory.headline({"process_peak": 5, "device_peak_reserved": None}) == 5
    assert memory.headline({}) is None
