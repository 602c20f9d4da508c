"""The keys of the plan command, ``plan.*``, and the devices that it knows.

Imports no torch: a wrong key answers at once.

A run does not read these keys; every other key of the command line is the run's. A device is a file of
``conf/device/``; what it lacks is unknown and stays so.
"""

import dataclasses
import difflib
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from conf import compose
from conf.checks import ConfigError

PREFIX = "plan."
OPTIMIZERS = ("adamw", "sgd", "gefen", "rso", "rso_gefen")
"""Those that a plan compares where it is not told otherwise, beside the one of the run."""
DEVICES = Path(compose.__file__).parent / "device"
GPU = "h100-80gb"
"""The device of a plan that names none, unless the run is one on a CPU."""
DOCUMENTATION = {
    "world": "Ranks of the planned run, one a device.",
    "device": f"What they run on: a file of conf/device/. Default {GPU}, and cpu for run.device=cpu.",
    "optimizers": "Optimizers to compare, with commas between them; that of the run is always one of them.",
    "dir": "Folder of plan.json and plan.png. Default outputs/plan/<model>-<world>x<device>.",
    "check": "Compare the extension from few blocks with a trace of all of them, once.",
}


@dataclass(frozen=True)
class PlanSettings:
    """What ``plan.*`` says."""

    world: int = 1
    device: str | None = None
    optimizers: tuple[str, ...] = OPTIMIZERS
    dir: str | None = None
    check: bool = True


@dataclass(frozen=True)
class Device:
    """Figures of one device of ``conf/device/``; None is unknown."""

    name: str
    device_type: str
    """"cpu" or "cuda"."""
    driver_name: str | None
    """What the driver calls it; ``observe.mfu`` has the peak of that name."""
    memory_gib: float | None
    """GiB that a process can have."""
    memory_bandwidth: float | None
    """Bytes/s of its memory."""
    attainable: float | None
    """Share of the peak that large matrix products reach."""
    devices_per_node: int
    """Devices that ``link_bandwidth`` joins."""
    link_bandwidth: float | None
    """Bytes/s each way between devices of a node."""
    network_bandwidth: float | None
    """Bytes/s each way of a device's own adapter to other nodes."""


def split_overrides(arguments: Sequence[str]) -> tuple[PlanSettings, list[str]]:
    """The settings of ``plan.*`` and the other arguments.

    Raises:
        ConfigError: a key that there is not, or a value that it cannot have.
    """
    own = [text for text in arguments if text.startswith(PREFIX)]
    found: dict[str, Any] = {}
    for text in own:
        key, equals, value = text.removeprefix(PREFIX).partition("=")
        if key not in DOCUMENTATION:
            close = difflib.get_close_matches(key, DOCUMENTATION, 1, 0.5)
            hint = f"Did you mean {PREFIX}{close[0]}?" if close else "--help lists the keys."
            raise ConfigError(f"{PREFIX}{key}: there is no such key here. {hint}")
        if not equals or not value:
            raise ConfigError(f"{text} has no value. Write {PREFIX}{key}=<value>; --help lists the keys.")
        found[key] = _read(key, value)
    return PlanSettings(**found), [text for text in arguments if not text.startswith(PREFIX)]


def load_device(name: str) -> Device:
    """The device of that name.

    Raises:
        ConfigError: there is none, or its file lacks a key or has a wrong value.
    """
    known = sorted(path.stem for path in DEVICES.glob("*.yaml"))
    if name not in known:
        raise ConfigError(
            f"plan.device={name}: there is no such device. Choose one of {', '.join(known)}, "
            "or add a file to conf/device."
        )
    content = yaml.safe_load((DEVICES / f"{name}.yaml").read_text("utf-8"))
    fields = {field.name for field in dataclasses.fields(Device)} - {"name"}
    if not isinstance(content, dict) or content.keys() != fields:
        wrong = sorted(fields ^ set(content if isinstance(content, dict) else ()))
        raise ConfigError(f"conf/device/{name}.yaml must have the keys of the other files; it differs in {wrong}.")
    device = Device(name=name, **content)
    for field in ("memory_gib", "memory_bandwidth", "attainable", "link_bandwidth", "network_bandwidth"):
        value = getattr(device, field)
        if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
            raise ConfigError(f"conf/device/{name}.yaml: {field}={value} must be a number > 0, or null if unknown.")
    if device.device_type not in ("cpu", "cuda") or device.devices_per_node < 1:
        raise ConfigError(f"conf/device/{name}.yaml: device_type is cpu or cuda, devices_per_node at least 1.")
    return device


def nodes_of(world: int, device: Device) -> int:
    """Nodes that ``world`` ranks fill.

    Raises:
        ConfigError: they do not fill them.
    """
    each = device.devices_per_node
    if world > each and world % each:
        below, above = world // each * each, (world // each + 1) * each
        raise ConfigError(
            f"plan.world={world} is not a multiple of the {each} devices of a node ({device.name}). "
            f"Set it to {below} or {above}."
        )
    return max(1, world // each)


def help_text(command: str) -> str:
    """The keys of the plan, then those of the run."""
    lines = ["Keys of the plan alone:"]
    defaults = vars(PlanSettings()) | {"optimizers": ",".join(OPTIMIZERS)}
    for key, text in DOCUMENTATION.items():
        shown = "null" if defaults[key] is None else str(defaults[key]).lower()
        lines.append(f"  {PREFIX}{key} (default {shown})")
        lines += textwrap.wrap(text, 112, initial_indent="      ", subsequent_indent="      ")
    devices = ", ".join(sorted(path.stem for path in DEVICES.glob("*.yaml")))
    lines += [f"  devices: {devices}", "", "Every key of the run (train.py) too:", ""]
    return "\n".join(lines) + compose.help_text(command)


def _read(key: str, value: str) -> Any:
    if key == "world":
        if not value.isdecimal() or int(value) < 1:
            raise ConfigError(f"plan.world={value} must be a whole number >= 1. Set for example plan.world=64.")
        return int(value)
    if key == "check":
        if value not in ("true", "false"):
            raise ConfigError(f"plan.check={value} must be true or false. Set for example plan.check=true.")
        return value == "true"
    if key == "optimizers":
        names = tuple(dict.fromkeys(value.strip("[]").replace(" ", "").split(",")))
        known = sorted(path.stem for path in (DEVICES.parent / "optimizer").glob("*.yaml"))
        if unknown := [name for name in names if name not in known]:
            raise ConfigError(
                f"plan.optimizers={value}: there is no optimizer {unknown[0]!r}. Choose among {', '.join(known)}."
            )
        return names
    return value
