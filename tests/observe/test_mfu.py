"""Device peaks by name, and utilisation by hand (no peak, no number)."""

import pytest

from observe import mfu

KNOWN = {
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989.5e12,
    "NVIDIA H100 PCIe": 756.5e12,
    "NVIDIA H100 NVL": 835.5e12,
    "NVIDIA GH200 480GB": 989.5e12,
    "NVIDIA H200": 989.5e12,
    "NVIDIA H200 NVL": 835.5e12,
    "NVIDIA H20": 148e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L40S": 366.5e12,
    "NVIDIA L4": 121e12,
    "NVIDIA A10": 125e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "NVIDIA RTX 6000 Ada Generation": 364.2e12,
    "AMD Instinct MI300X": 1307.4e12,
}
# close to a known name, and another chip, or a part of one
UNKNOWN = (
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
    "NVIDIA H100",
    "NVIDIA A1000",
    "NVIDIA A100X",
    "NVIDIA L400",
    "Tesla T4",
    "Tesla V100-SXM2-16GB",
    "Intel(R) Xeon(R) CPU",
    "cpu",
    "",
    None,
)


@pytest.mark.parametrize("name", KNOWN)
def test_known_device(name):
    assert mfu.device_peak(name) == KNOWN[name]


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_device_has_no_peak(name):
    assert mfu.device_peak(name) is None


def test_utilisation_by_hand():
    # 10,000 tokens/s x 6 GFLOP a token = 60 TFLOP/s of 120
    assert mfu.utilisation(10_000, 6e9, 120e12) == pytest.approx(0.5)


def test_unknown_stays_unknown():
    assert mfu.utilisation(10_000, None, 120e12) is None
    assert mfu.utilisation(10_000, 6e9, None) is None


def test_the_convention_says_what_is_counted():
    for word in ("head included", "causal attention counted at half", "recomputation counted as 0", "bf16"):
        assert word in mfu.CONVENTION
