"""``train.py`` with one thing broken on the last rank; the environment variable FAULT says what. Run under torchrun."""

import os
import signal
import sys

import train
from conf.command import read_command_line
from dist import env

STEP = 5


def broken(*arguments, **options):
    raise RuntimeError("broken on purpose")


def break_run(run: train.Run, fault: str) -> None:
    """Arrange for ``fault`` to happen in step STEP."""
    step = run.observer.step

    def at_step(record):
        step(record)
        if record["step"] != STEP:
            return
        if fault == "raise in forward":
            run.model.register_forward_pre_hook(broken)
        elif fault == "raise in optimizer":
            run.optimizer.step = broken
        elif fault == "raise in loader":
            run.loader._dataset.batch = broken
        elif fault.startswith("exit"):
            os._exit(int(fault.split()[1]))
        elif fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

    run.observer.step = at_step


def main() -> int:
    fault = os.environ["FAULT"]
    if env.rank() == env.world_size() - 1:
        build_run = train.build_run
        if fault == "raise in data":
            train.open_data = broken

        def build_broken_run(*arguments):
            run = build_run(*arguments)
            break_run(run, fault)
            return run

        train.build_run = build_broken_run
    return train.main(read_command_line("faulty.py", sys.argv[1:], env.rank(), env.world_size()))


if __name__ == "__main__":
    sys.exit(main())
