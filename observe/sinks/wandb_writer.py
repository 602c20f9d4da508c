"""The process that talks to Weights & Biases. It is started by ``observe.sinks.wandb_sink``, not imported.

It reads one JSON object per line from stdin (``init``, then any number of ``log`` and ``summary``, then ``finish``) and
reports on stdout, one JSON object per line: ``ready``, or ``failed`` where the run cannot be opened. Whatever the
service does, only this process waits for it. When stdin ends without ``finish``, the trainer has died: the run is
closed as failed.
"""

import json
import os
import signal
import sys
import threading
from typing import Any


def main() -> int:
    """Serve one run until stdin ends; 0 if all that was read was handed to W&B."""
    # a signal to the job means "save and stop" to the trainer, whose end of the pipe says when this process is done
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    report = os.fdopen(os.dup(1), "w", buffering=1)
    # what the library prints goes to the log file that stderr is
    os.dup2(2, 1)

    def say(kind: str, **fields: Any) -> None:
        try:
            report.write(json.dumps({"kind": kind, **fields}) + "\n")
        except BrokenPipeError:
            pass

    lines = (json.loads(line) for line in sys.stdin)
    first = next(lines, None)
    if first is None:
        return 1
    try:
        run = _open(first["init"])
    except Exception as error:
        say("failed", reason=_first_line(error))
        return 1
    say("ready", folder=run.settings.sync_dir)
    exit_code = 1
    for message in lines:
        if "log" in message:
            run.log(message["log"])
        elif "summary" in message:
            run.summary.update(message["summary"])
        else:
            exit_code = message["finish"]
    # the last resort where finish() itself does not keep to its limit
    timer = threading.Timer(first["init"]["timeout"] + 5, os._exit, (1,))
    timer.daemon = True
    timer.start()
    run.finish(exit_code=exit_code)
    return 0


def _open(init: dict[str, Any]) -> Any:
    # wandb 0.31 reports its own errors to a third party at exit, offline too, and waits for a proxy that never answers
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    import wandb

    if not hasattr(wandb, "init"):
        raise ImportError("a folder named wandb hides the package; move it, or install wandb")
    settings = wandb.Settings(
        init_timeout=init["timeout"],
        finish_timeout=init["timeout"],
        console="off",
        silent=True,
        disable_git=True,
        disable_code=True,
        x_stats_pid=init["trainer"],
    )
    run = wandb.init(mode=init["mode"], resume="allow", settings=settings, **init["run"])
    # every curve is drawn over the optimizer step, whichever order the records arrive in
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")
    return run


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
