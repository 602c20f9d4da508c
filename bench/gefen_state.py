"""Bytes of optimizer state per parameter, every tensor counted: ``python -m bench.gefen_state``.

Each model's real parameters, on the meta device, go through the real optimizer: nothing is computed from a formula and
nothing is allocated, so that 70B takes seconds too. One process; sharded over n ranks, what is not rows (codebook,
columns, counters) is held on each.
"""

import torch
from rich.console import Console
from rich.table import Table

from bench.machine import write_result
from conf.compose import load_config
from memopt.build import build_optimizer
from models.build import build_model
from models.names import named_parameters

MODELS = (
    "llama3_60m", "llama3_130m", "llama3_350m", "llama3_1b", "llama3_1_5b", "llama3_8b", "llama3_70b", "gpt2_124m",
    "gpt2_355m", "gpt2_774m", "gpt2_1_5b",
)  # fmt: skip
OPTIMIZERS = {
    "adamw": ["optimizer=adamw"],
    "gefen": ["optimizer=gefen"],
    "gefen, block": ["optimizer=gefen", "optimizer.second_moment=block"],
    "gefen, fp32 momentum": ["optimizer=gefen", "optimizer.momentum=fp32"],
}
TARGET = 1.02


def state_bytes(model: str, optimizer: list[str]) -> tuple[int, int]:
    """(bytes of state, parameters) of one process."""
    config = load_config([f"model={model}", *optimizer])
    named = named_parameters(build_model(config.model, 256, "cpu"))
    built = build_optimizer(config.optimizer, named)
    assert built.state_is_final and all(parameter.device == torch.device("meta") for parameter in named.values())
    return built.state_bytes(), sum(parameter.numel() for parameter in named.values())


def main() -> None:
    """Print the table, write ``bench/results/gefen_state.json``."""
    table = Table("model", "parameters", *OPTIMIZERS)
    rows = {}
    for model in MODELS:
        found = {name: state_bytes(model, overrides) for name, overrides in OPTIMIZERS.items()}
        parameters = found["adamw"][1]
        rows[model] = {"parameters": parameters, **{name: held / parameters for name, (held, _) in found.items()}}
        table.add_row(model, f"{parameters:,}", *[f"{held / parameters:.4f}" for held, _ in found.values()])
    console = Console()
    console.print("bytes of state per parameter", table)
    console.print(f"written to {write_result('gefen_state', {'bytes_per_parameter': rows, 'target': TARGET})}")


if __name__ == "__main__":
    main()
