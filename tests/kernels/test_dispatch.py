"""Which backend runs where, what is said when one cannot, and that all have the same functions."""

import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernels
from kernels import cpu, cuda, reference

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
CPU, CUDA, META = (torch.device(kind) for kind in ("cpu", "cuda", "meta"))


@pytest.fixture(autouse=True)
def forget_choices():
    """The choice is remembered; each test makes it anew."""
    kernels._choose.cache_clear()
    yield
    kernels._choose.cache_clear()


@pytest.mark.parametrize(
    "backend, device, dtypes, module",
    [
        ("auto", CPU, [FP32], cpu),
        ("auto", CPU, [BF16, FP32], cpu),
        ("auto", CPU, [FP64], reference),
        ("auto", CPU, [FP32, torch.float16], reference),
        ("auto", torch.device("cuda", 1), [BF16], cuda),
        ("auto", CUDA, [FP64, FP32], reference),
        ("auto", META, [FP32], reference),
        ("reference", CPU, [FP32], reference),
        ("reference", CUDA, [FP64], reference),
        ("numba", CPU, [FP32], cpu),
        ("triton", CUDA, [FP32, BF16], cuda),
    ],
    ids=str,
)
def test_what_is_chosen(backend, device, dtypes, module):
    assert kernels.choose(backend, device, dtypes) is module
    assert kernels.choose(backend, device, iter(dtypes)) is module


@pytest.mark.parametrize(
    "backend, device, dtypes, message",
    [
        ("cuda", CPU, [FP32], r"backend='cuda' is not one of auto, reference, numba, triton\. Set auto"),
        ("numba", CUDA, [FP32], r"backend=numba runs on cpu only, and these parameters are on cuda\. Set backend=auto"),
        (
            "triton",
            CPU,
            [FP32],
            r"backend=triton runs on cuda only, and these parameters are on cpu\. Set backend=auto",
        ),
        ("numba", CPU, [FP32, FP64], r"backend=numba takes float32 and bfloat16 only, and .* are float64\. Set"),
        ("triton", CUDA, [FP64, torch.float16], r"backend=triton takes .* are float16, float64\. Set backend=auto or"),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused(backend, device, dtypes, message):
    with pytest.raises(ValueError, match=message):
        kernels.choose(backend, device, dtypes)


def test_without_a_compiler_only_auto_goes_on(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert kernels.choose("auto", CPU, [FP32]) is kernels.choose("auto", CUDA, [FP32]) is reference
    with pytest.raises(ValueError, match=r"backend=numba needs the package numba, which is not installed\. Set"):
        kernels.choose("numba", CPU, [FP32])


@pytest.mark.parametrize("backend", [cpu, cuda])
def test_backends_have_the_functions_of_the_reference(backend):
    def functions(module):
        members = inspect.getmembers(module, inspect.isfunction)
        return {name: f for name, f in members if f.__module__ == module.__name__ and not name.startswith("_")}

    expected, found = functions(reference), functions(backend)
    assert {"gefen_step", "code_histogram", "column_sums", "prepare", "workspace_bytes"} <= expected.keys()
    assert expected.keys() <= found.keys()
    for name, function in expected.items():
        assert inspect.signature(found[name]) == inspect.signature(function), name


def test_compilers_are_imported_when_they_are_chosen():
    script = """
import sys, torch, kernels, kernels.reference
compilers = {"numba", "llvmlite", "kernels.cpu", "kernels.cuda"}
assert not compilers & sys.modules.keys(), compilers & sys.modules.keys()
kernels.choose("auto", torch.device("cpu"), [torch.float64])
kernels.choose("auto", torch.device("meta"), [torch.float32])
assert not compilers & sys.modules.keys()
kernels.choose("auto", torch.device("cpu"), [torch.float32])
assert {"numba", "kernels.cpu"} <= sys.modules.keys() and "kernels.cuda" not in sys.modules
"""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=Path(__file__).parents[2], check=True, timeout=120
    )
