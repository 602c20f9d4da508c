"""Predict memory and speed of a run that does not run: ``python -m memopt.plan [key=value ...]``, keys as ``train.py``.

    python -m memopt.plan model=llama3_8b train.seq_len=8192 train.global_batch=512 plan.world=64 plan.device=h100-80gb
    python -m memopt.plan memory.budget_gib=1 run.device=cpu

Prints the ledger of a rank for every optimizer, the largest microbatch of each, the candidates of the run, whether
sharding alone suffices, and an estimate of tokens/s by nodes; writes ``plan.json`` and ``plan.png``. Needs no GPU, no
data and no memory of the model's size. Exit status: 0, or 2 for a wrong setting and for a run that fits nowhere.
"""

import sys
from pathlib import Path

from conf.checks import ConfigError
from conf.command import leave_with, read_command_line
from memopt.plan_settings import GPU, PlanSettings, help_text, load_device, split_overrides


def main(arguments: list[str]) -> None:
    """The command line."""
    if "--help" in arguments or "-h" in arguments:
        print(help_text("python -m memopt.plan"))
        return
    try:
        settings, overrides = split_overrides(arguments)
        config = read_command_line("python -m memopt.plan", overrides, world_size=settings.world)
        device = load_device(settings.device or ("cpu" if config.run.device == "cpu" else GPU))
        # after every check that does without: torch takes seconds
        from rich.console import Console

        from memopt import plan_report
        from memopt.plan_arms import build_plan

        plan = build_plan([text for text in overrides if text != "--print-config"], config, settings, device)
        folder = _folder(settings, config.model.name, device.name)
        plan_report.show(plan, Console(width=None if sys.stdout.isatty() else 160, highlight=False))
        plan_report.write(plan, folder)
        print(f"written to {folder}/plan.json and plan.png")
        if why := plan_report.misfit(plan.arms[0], plan):
            leave_with(ConfigError(why), 0)
    except ConfigError as error:
        leave_with(error, 0)


def _folder(settings: PlanSettings, model: str, device: str) -> Path:
    folder = Path(settings.dir or f"outputs/plan/{model}-{settings.world}x{device}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"plan.dir={folder} cannot be made: {error}. Set another folder.") from None
    return folder


if __name__ == "__main__":
    main(sys.argv[1:])
