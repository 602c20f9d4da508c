"""Rules on a single key, and the error that breaking one is."""

import math


class ConfigError(ValueError):
    """A setting that cannot work. The message states the value, the rule and the fix."""


def choice(key: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is not one of ``allowed``."""
    if value not in allowed:
        raise ConfigError(f"{key}={value} is not one of {', '.join(allowed)}. Set {key} to one of these.")


def at_least(key: str, value: float | None, low: float) -> None:
    """Refuse a number below ``low`` or not finite; None is no number and passes."""
    if value is not None and not (math.isfinite(value) and value >= low):
        raise ConfigError(f"{key}={value} must be a number >= {low:g}. Set {key} to {low:g} or more.")


def above(key: str, value: float | None, low: float) -> None:
    """Refuse a number that is not above ``low``, or not finite; None is no number and passes."""
    if value is not None and not (math.isfinite(value) and value > low):
        raise ConfigError(f"{key}={value} must be a number > {low:g}. Set {key} to a value above {low:g}.")


def at_most(key: str, value: float, high: int) -> None:
    """Refuse a number above ``high``."""
    if value > high:
        raise ConfigError(f"{key}={value} must be a number <= {high}. Set {key} to {high} or less.")


def share(key: str, value: float) -> None:
    """Refuse a number outside [0, 1]."""
    if not 0 <= value <= 1:
        raise ConfigError(f"{key}={value} must lie between 0 and 1. Set {key} to a share such as 0.1.")
