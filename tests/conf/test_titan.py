"""torchtitan's device type and log lines, in processes of their own: both are decided when it is first imported."""

import subprocess
import sys

import torch


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_device_type_reaches_every_copy():
    result = run(
        "import conf.titan\n"
        "import torchtitan.distributed.parallel_dims as a\n"
        "import torchtitan.distributed.utils as b\n"
        "import torchtitan.tools.utils as c\n"
        "print({conf.titan.DEVICE_TYPE, a.device_type, b.device_type, c.device_type})\n"
        "print(b.device_module.__name__)\n"
        "from torchtitan.distributed.fsdp import logger\n"
        "import logging\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "logger.info('applied')\n"
        "logger.warning('careful')\n"
    )
    accelerator = torch.accelerator.current_accelerator()
    expected = accelerator.type if accelerator else "cpu"
    assert result.stdout.splitlines() == [str({expected}), f"torch.{expected}"], result.stderr
    assert "careful" in result.stderr and "applied" not in result.stderr


def test_late_import_is_refused():
    result = run("import torchtitan.distributed.utils\nimport conf.titan")
    assert result.returncode != 0
    assert "was imported before conf.titan. Import conf.titan first." in result.stderr
