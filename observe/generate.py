"""Sample text from a checkpoint, on one process, whatever world size it was saved with.

    python -m observe.generate run.dir=outputs/20250101-120000-run prompt="def main(" tokens=200 temperature=0.7

The sampled text goes to standard output, prompt included, everything else to standard error. Model and tokenizer are
those that the checkpoint names; what does not fit is refused. The run may still be training: nothing is changed.
"""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.checks import ConfigError
from conf.schema import ModelConfig
from dist import env

if TYPE_CHECKING:
    import torch

    from data.tokenizer import Tokenizer
    from dist.checkpoint import Checkpointer

GROUP_TIMEOUT_SECONDS = 60.0


def _option(default: Any, documentation: str) -> Any:
    return dataclasses.field(default=default, metadata={"documentation": documentation})


@dataclass
class GenerateConfig:
    """What to sample, and from what."""

    run_dir: str | None = _option(None, "Run folder; must be given.")
    checkpoint: str = _option("latest", "latest (newest undamaged) or a step number.")
    prompt: str = _option("", "Text to continue; empty starts where a document starts.")
    tokens: int = _option(128, "Tokens to draw.")
    temperature: float = _option(0.8, "Above 1 bolder, below 1 safer; 0 takes the likeliest token each time.")
    top_k: int = _option(50, "Draw from the likeliest this many; 0 draws from all.")
    seed: int = _option(0, "Seed of the draws.")
    device: str = _option("auto", "cpu, cuda or auto.")
    tokenizer: str | None = _option(None, "Tokenizer file, where the one that the run was trained with has moved.")

    def __post_init__(self) -> None:
        if self.run_dir is None:
            raise ConfigError("run.dir is not set. Give the run folder: run.dir=outputs/<date>-<name>.")
        if self.checkpoint != "latest" and not self.checkpoint.isdecimal():
            raise ConfigError(f"checkpoint={self.checkpoint} is neither latest nor a step number. Set one of these.")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f"run.device={self.device} is not one of auto, cpu, cuda. Set one of these.")
        for key, low in (("tokens", 1), ("temperature", 0), ("top_k", 0), ("seed", 0)):
            if not low <= getattr(self, key) < float("inf"):
                raise ConfigError(f"{key}={getattr(self, key)} must be >= {low}. Set {key} to {low} or more.")


# the key of a field where it is not the field's name
_KEYS = {"run_dir": "run.dir", "device": "run.device"}


def main(arguments: Sequence[str]) -> int:
    """Print a sample; returns the exit status."""
    if any(text in ("--help", "-h") for text in arguments):
        print(help_text())
        return 0
    try:
        print(generate(read_arguments(arguments)))
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def read_arguments(arguments: Sequence[str]) -> GenerateConfig:
    """``key=value`` words as a ``GenerateConfig``. Raises ``ConfigError`` for unknown keys and wrong types."""
    fields = {_KEYS.get(item.name, item.name): item for item in dataclasses.fields(GenerateConfig)}
    values: dict[str, Any] = {}
    for text in arguments:
        key, equals, value = text.partition("=")
        if not equals or key not in fields:
            raise ConfigError(f"{text}: there is no such key here. The keys are {', '.join(fields)} (key=value).")
        kind = {int: int, float: float}.get(fields[key].type, str)  # type: ignore[call-overload]
        try:
            values[fields[key].name] = kind(value)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise ConfigError(f"{text} must be {wanted}. Set for example {key}={fields[key].default}.") from None
    return GenerateConfig(**values)


def help_text() -> str:
    """Every key with its default."""
    lines = ["usage: python -m observe.generate run.dir=<run folder> [key=value ...]", "", "Keys:"]
    for item in dataclasses.fields(GenerateConfig):
        default = "null" if item.default is None else repr(item.default)
        lines.append(f"  {_KEYS.get(item.name, item.name)} (default {default}): {item.metadata['documentation']}")
    return "\n".join(lines)


def generate(config: GenerateConfig) -> str:
    """The prompt and its continuation. Raises ``ConfigError``: no run, no checkpoint, damaged, another tokenizer."""
    assert config.run_dir is not None
    folder = Path(config.run_dir).expanduser()
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"run.dir={config.run_dir} holds no run (no config.yaml). Give the folder of a run.")
    if env.world_size() > 1:
        raise ConfigError(f"{env.world_size()} processes were started. Sampling needs one: leave torchrun out.")
    # imported here: torch takes seconds, and a wrong key must not
    from dist.checkpoint import Checkpointer
    from dist.group import choose_device, process_group

    device = choose_device(config.device)
    with process_group(device, GROUP_TIMEOUT_SECONDS):
        checkpointer = Checkpointer(folder / "checkpoints")
        try:
            return _sample(config, checkpointer, _find_step(checkpointer.folder, config.checkpoint), device)
        finally:
            checkpointer.close()


def _find_step(folder: Path, wanted: str) -> int:
    from dist.restore import find_step

    try:
        # not Checkpointer.find, which tidies up and must leave that to a run that is still training
        step = find_step(folder, "auto" if wanted == "latest" else wanted)
    except ConfigError as error:
        # the same choice has other names here
        text = str(error).replace("checkpoint.resume", "checkpoint").replace("checkpoint=auto", "checkpoint=latest")
        raise ConfigError(text.replace("or auto.", "or latest.")) from None
    if step is None:
        raise ConfigError(f"{folder} holds no complete checkpoint. Train with checkpoint.interval above 0.")
    return step


def _sample(config: GenerateConfig, checkpointer: "Checkpointer", step: int, device: "torch.device") -> str:
    from models.build import build_model
    from models.init import init_weights
    from models.names import named_parameters
    from models.sample import sample

    meta = checkpointer.read_meta(step)
    settings = meta["config"]
    model_config = ModelConfig(
        **{item.name: settings[f"model.{item.name}"] for item in dataclasses.fields(ModelConfig)}
    )
    tokenizer = _open_tokenizer(config.tokenizer, meta["data"])
    model = build_model(model_config, settings["train.seq_len"], device.type)
    # for the memory and the buffers; the checkpoint then fills every parameter
    init_weights(model, seed=0, device=device)
    tensors = {f"model.{name}": parameter.detach() for name, parameter in named_parameters(model).items()}
    checkpointer.load(step, tensors, skip=["optimizer.*"])
    prompt = tokenizer.encode(config.prompt)
    start = prompt
    if not prompt or settings["data.add_bos"]:
        start = [_first_token(tokenizer), *prompt]
    drawn = sample(
        model, start, config.tokens, config.temperature, config.top_k, config.seed, vocab_size=tokenizer.vocab_size
    )
    return tokenizer.decode([*prompt, *drawn])


def _open_tokenizer(path: str | None, data: dict[str, Any]) -> "Tokenizer":
    from data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path or data["sources"][0]["path"])
    if tokenizer.hash != data["tokenizer"]:
        raise ConfigError(
            f"{tokenizer.path} (hash {tokenizer.hash[:12]}) is not the tokenizer that the checkpoint was trained with "
            f"(hash {data['tokenizer'][:12]}). Set tokenizer=<file> to that one."
        )
    return tokenizer


def _first_token(tokenizer: "Tokenizer") -> int:
    # what stands before every document in training: the begin marker, or the end of the document before it
    first = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    if first is None:
        raise ConfigError("The tokenizer has neither begin nor end marker to start from. Set prompt=<text>.")
    return first


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
