"""What torchtitan 0.3.0 must be told before the rest of it is imported; import this module before any of it.

Decided here: torchtitan's device type on a machine without an accelerator, and where its log lines go. Nothing else in
this project sets either. torchtitan's modules copy both names when they are imported, so that a later change would
reach only some of them. A folder that uses torchtitan imports this module in its ``__init__.py``, which runs first
whatever the order of imports in its files.
"""

import logging
import sys

import torch

# torchtitan logs to the root logger, where its lines could not be told from ours; its modules import this name
import torchtitan.tools.logging

_COPIES = ("torchtitan.distributed.parallel_dims", "torchtitan.distributed.utils", "torchtitan.models.common.decoder")
_early = [name for name in _COPIES if name in sys.modules]
if _early:
    raise ImportError(f"{_early[0]} was imported before conf.titan. Import conf.titan first.")

torchtitan.tools.logging.logger = logging.getLogger("torchtitan")

import torchtitan.tools.utils  # noqa: E402

if not torch.accelerator.is_available():
    # torchtitan 0.3.0 falls back to "cuda" here, and asks a CUDA device that is not there for its properties
    torchtitan.tools.utils.device_type = "cpu"
    torchtitan.tools.utils.device_module = torch.get_device_module("cpu")

DEVICE_TYPE: str = torchtitan.tools.utils.device_type
"""The device type torchtitan works with: ``cpu``, or that of the machine's accelerator."""

logging.getLogger("torchtitan").setLevel(logging.WARNING)
