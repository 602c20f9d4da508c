"""The command line of every entry point: overrides in, a checked ``Config`` out, or one message and an exit status.

Nothing here or below imports torch, so that ``--help`` and a wrong key answer at once.
"""

import os
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from conf.checks import ConfigError
from conf.compose import help_text, load_config, to_yaml
from conf.schema import Config

CONFIG_STATUS = 2
# a launcher ends all processes when the first one leaves: the one that prints must be it
QUIET_RANK_SECONDS = 2.0


def read_command_line(command: str, arguments: Sequence[str], rank: int = 0, world_size: int = 1) -> Config:
    """The configuration of ``arguments`` for a run of ``world_size`` processes.

    Leaves the program with status 0 after ``--help`` or ``--print-config`` (the resolved configuration as YAML), and
    with status 2 after a configuration error, whose message rank 0 prints to standard error.
    """
    try:
        if "--help" in arguments or "-h" in arguments:
            _leave(help_text(command), rank, 0)
        config = load_config([text for text in arguments if text != "--print-config"], world_size)
        if "--print-config" in arguments:
            _leave(to_yaml(config), rank, 0)
        return config
    except ConfigError as error:
        leave_with(error, rank)


def leave_with(error: ConfigError, rank: int) -> NoReturn:
    """Print a configuration error on rank 0 and leave every rank with status 2."""
    _leave(f"error: {error}", rank, CONFIG_STATUS)


def _leave(text: str, rank: int, status: int) -> NoReturn:
    if rank == 0:
        try:
            print(text, file=sys.stderr if status else sys.stdout, flush=True)
        except BrokenPipeError:
            # `--help | head`: the reader has what it wants, and the exit must not flush into the closed pipe again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    elif status:
        time.sleep(QUIET_RANK_SECONDS)
    raise SystemExit(status)
