"""Signals that ask a run to stop: noted here, acted on where all ranks look together.

A handler only notes; the train loop asks ``requested`` once a step and lets all ranks decide (``train.train_step``,
``agree.any_rank``). A launcher may deliver the same signal twice, so a second one changes nothing: SIGKILL ends what
does not stop by itself. Imports no torch, so that the handlers stand before that takes its seconds.
"""

import signal
from types import FrameType

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

_received: list[str] = []


def note_stop_signals() -> None:
    """From now on, ``STOPPING`` signals are noted instead of ending this process; for the main thread."""
    for number in STOPPING:
        signal.signal(number, _note)


def requested() -> bool:
    """Whether this process was asked to stop."""
    return bool(_received)


def received() -> list[str]:
    """Names of the signals that have come, in their order."""
    return list(_received)


def _note(number: int, frame: FrameType | None) -> None:
    _received.append(signal.Signals(number).name)
