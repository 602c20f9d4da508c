"""Model FLOPs utilisation: the peak of each device, and the convention by which a share of it is stated.

The peak is the maker's figure for dense bf16 matrix products with fp32 accumulation, without sparsity. A device that
is not in the table has no peak: MFU is then ``None`` ("n/a", null in JSON). No default is ever assumed, and a slice of
a GPU (MIG) is not the GPU.
"""

import re

CONVENTION = (
    "MFU = training FLOPs per token x tokens/s per device / dense bf16 peak of the device; FLOPs are matrix products "
    "only (2 per multiply-add, backward twice forward), head included, causal attention counted at half, embedding "
    "look-up and recomputation counted as 0"
)

# name as the driver reports it, maker's prefix removed (whole name) -> dense bf16 FLOP/s
_PEAKS: tuple[tuple[str, float], ...] = (
    # NVIDIA A100 data sheet (2021): 312 TFLOPS bf16; the A800 differs in NVLink only
    (r"A[18]00([- ].*)?", 312e12),
    # NVIDIA H100 data sheet (2023), sparse figures halved: SXM 1979, PCIe 1513, NVL 1671
    (r"H[18]00 80GB HBM[23]e?|H100 SXM.*", 989.5e12),
    (r"H100 PCIe", 756.5e12),
    (r"H100 NVL", 835.5e12),
    # NVIDIA GH200 data sheet: 1979 sparse; the whole name carries the size of the CPU memory ("GH200 480GB")
    (r"GH200( .*)?", 989.5e12),
    # NVIDIA H200 data sheet: SXM 1979, NVL 1671 sparse
    (r"H200( SXM.*)?", 989.5e12),
    (r"H200 NVL", 835.5e12),
    # NVIDIA H20 product brief: 148 dense
    (r"H20", 148e12),
    # NVIDIA DGX B200 data sheet: 36 PFLOPS sparse for 8 GPUs; GB200 NVL72: 360 PFLOPS sparse for 72
    (r"B200", 2250e12),
    (r"GB200", 2500e12),
    # NVIDIA L40S, L40 and L4 data sheets: 733, 362.1 and 242 sparse
    (r"L40S", 366.5e12),
    (r"L40", 181.05e12),
    (r"L4", 121e12),
    # NVIDIA A10 data sheet: 125 dense; A10G (AWS g5): 70 dense
    (r"A10", 125e12),
    (r"A10G", 70e12),
    # NVIDIA A30, A40 and RTX A6000 data sheets: 165, 149.7 and 154.8 dense
    (r"A30", 165e12),
    (r"A40", 149.7e12),
    (r"RTX A6000", 154.8e12),
    # NVIDIA Ada architecture paper, appendix: RTX 6000 Ada 364.2, RTX 4090 165.2, RTX 4080 97.5, fp32 accumulation
    (r"RTX 6000 Ada Generation", 364.2e12),
    (r"RTX 4090", 165.2e12),
    (r"RTX 4080", 97.5e12),
    # NVIDIA Ampere GA102 architecture paper, appendix: RTX 3090 71, fp32 accumulation
    (r"RTX 3090", 71e12),
    # NVIDIA RTX Blackwell architecture paper, appendix: RTX 5090 209.5, fp32 accumulation
    (r"RTX 5090", 209.5e12),
    # AMD Instinct data sheets, dense: MI300X and MI325X 1307.4, MI355X 2516.6, MI210 181, MI250X 383 for two devices
    (r"MI3(00|25)X( .*)?", 1307.4e12),
    (r"MI355X( .*)?", 2516.6e12),
    (r"MI210", 181e12),
    (r"MI250X.*", 191.5e12),
)


def device_peak(name: str | None) -> float | None:
    """Dense bf16 FLOP/s of the device of this name, as ``torch.cuda.get_device_name`` gives it; ``None`` if unknown."""
    if name is None:
        return None
    bare = re.sub(r"^((NVIDIA|AMD|Tesla|GeForce|Instinct)\s+)+", "", name.strip())
    if re.search(r"\bMIG\b", bare):
        return None
    return next((peak for pattern, peak in _PEAKS if re.fullmatch(pattern, bare)), None)


def utilisation(tokens_per_second_per_device: float, flops_per_token: float | None, peak: float | None) -> float | None:
    """Share of ``peak`` (FLOP/s) that the model's own FLOPs use; ``None`` where either is unknown."""
    if flops_per_token is None or peak is None:
        return None
    return tokens_per_second_per_device * flops_per_token / peak
