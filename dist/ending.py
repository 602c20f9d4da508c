"""How a process of a run ends after an error: the first cause is printed once, and every rank leaves with one status.

It ends without tidying up: collectives, background threads and exit handlers of a rank whose peers are gone may never
return, and what is on disk is complete at any moment (``dist.checkpoint``).
"""

import contextlib
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from conf.checks import ConfigError
from dist import agree, env, out_of_memory, run_folder
from dist.watch import HangError

# a launcher ends all processes when the first one leaves: the one that prints must be it. without a launcher rank 0
# serves the store in which its peers look who prints: it must not leave before they have
QUIET_RANK_SECONDS = 1.5


def fail(
    error: BaseException,
    folder: Path | None,
    started: bool,
    attempt: dict[str, Any] | None = None,
) -> NoReturn:
    """Report ``error`` on the one rank that was first to fail, note it in ``status.json`` and leave.

    Memory that has run out is written down with ``attempt``, which says what was tried (step, microbatch), so that the
    next start does not try it again: then all ranks leave with ``out_of_memory.RESTART_STATUS``. Without ``attempt``
    nothing would be different the next time, and it is a failure as any other.

    Call it in the entry point's ``except`` block, before the process group is destroyed. ``folder`` is the run folder,
    None while there is none. A start that was refused (``ConfigError`` before the run ``started``) says nothing about
    the run that is there: its status stays.
    """
    out = out_of_memory.is_out_of_memory(error)
    status = out_of_memory.RESTART_STATUS if out and attempt is not None else agree.FAILED
    # an agreed error is on every rank, and needs no store, which ends with the rank that serves it
    told_here = env.rank() == 0 if isinstance(error, agree.AgreedError) else agree.report_failure(error, status=status)
    if told_here:
        _print(f"error: {_describe(error)}")
        if folder is not None and (started or not isinstance(error, ConfigError)):
            try:
                if out and attempt is not None:
                    out_of_memory.add_report(folder, {**attempt, "rank": env.rank(), "error": str(error)})
                outcome, lost = "oom" if out else "failed", agree.is_secondary(error)
                # "secondary": another rank is gone without a word, and nothing is known to be wrong with the run
                text = str(error) or _describe(error)
                run_folder.write_status(folder, outcome, error=text, secondary=lost)
            except OSError as problem:
                _print(f"error: status.json could not be written: {problem}")
    if env.world_size() > 1 and not (told_here and env.under_torchrun()):
        time.sleep(QUIET_RANK_SECONDS)
    if isinstance(error, ConfigError):
        env.end_restarts()
    # either may be closed (None), or a pipe whose reader is gone
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status if told_here else agree.failure_status(status))


def _print(text: str) -> None:
    # where nobody reads, status.json still has to be written
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _describe(error: BaseException) -> str:
    if isinstance(error, agree.AgreedError):
        return str(error) if error.user else f"{error}\n{error.trace}"
    if isinstance(error, (*agree.USER_ERRORS, HangError)):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return "".join(traceback.format_exception(error))
