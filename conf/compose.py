"""From a command line to a checked ``Config``.

The compose API of Hydra is used, not ``@hydra.main``, which would write folders and logs before a setting is checked.
Rules decided here: overrides are plain ``key=value`` and ``group=choice``; every key exists already, so ``+key`` and
``~key`` are refused, as is ``hydra.*``; the value of a text key is taken literally, so that ``run.name=1e3`` and
``data.path=a=b, c`` mean what they say; paths are resolved once, against the folder the command was started in.
"""

import ast
import dataclasses
import difflib
import hashlib
import inspect
import json
import os
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf import optimizers, rules, schema
from conf.checks import ConfigError
from conf.schema import Config

FOLDER = Path(__file__).parent
GROUPS = ("model", "optimizer", "parallel", "data", "log", "experiment")
# group -> name of its schema node -> dataclass; a YAML names its schema first in its defaults
SCHEMAS: dict[str, dict[str, type]] = {
    "model": {"schema": schema.ModelConfig},
    "optimizer": {
        "adamw_schema": optimizers.AdamWConfig,
        "gefen_schema": optimizers.GefenConfig,
        "rso_schema": optimizers.RSOConfig,
        "sgd_schema": optimizers.SGDConfig,
    },
    "parallel": {"schema": schema.ParallelConfig},
    "data": {"schema": schema.DataConfig},
    "log": {"schema": schema.LogConfig},
}


def load_config(overrides: Sequence[str], world_size: int = 1) -> Config:
    """Compose, type-check and rule-check the configuration of a run of ``world_size`` processes.

    Raises ``ConfigError`` for anything wrong with it; makes no file, folder or process group.
    """
    composed = _compose([_literal(text) for text in overrides])
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(_first_line(error)) from None
    assert isinstance(config, Config)
    _resolve_paths(config)
    rules.check(config, world_size)
    return config


def to_yaml(config: Config) -> str:
    """The resolved configuration as YAML; composing nothing but this text gives the same run."""
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


def config_hash(config: Config) -> str:
    """Twelve hex digits that name this configuration, whatever folder it runs in."""
    content = dataclasses.asdict(config)
    content["run"].pop("dir")
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def flatten(config: typing.Any, prefix: str = "") -> dict[str, object]:
    """Dotted key -> value of every setting of a config section; lists count as one value."""
    result: dict[str, object] = {}
    for item in dataclasses.fields(config):
        value, key = getattr(config, item.name), f"{prefix}{item.name}"
        if dataclasses.is_dataclass(value):
            result |= flatten(value, f"{key}.")
        elif isinstance(value, list):
            result[key] = [vars(entry) if isinstance(entry, schema.SourceConfig) else entry for entry in value]
        else:
            result[key] = value
    return result


def help_text(command: str) -> str:
    """Usage, the choices of each group, and every key with its documentation and its value where nothing is set."""
    lines = [f"usage: {command} [key=value | group=choice ...]", "       --help | --print-config", "", "Groups:"]
    for group in GROUPS:
        choices = sorted(path.stem for path in (FOLDER / group).glob("*.yaml"))
        lines += textwrap.wrap(f"  {group} = {' | '.join(choices)}", 118, subsequent_indent="      ")
    lines += ["", "Keys (defaults are those of a run that sets nothing; another choice of a group has its own, which"]
    lines += ["--print-config shows):"]
    documentation = _field_docs()
    # a YAML of a group wins over the default of its class
    values = flatten(OmegaConf.to_object(_compose([])))
    for key, owner, item in _keys(Config):
        default = _text(values[key]) if key in values else _default_text(item)
        lines += [f"  {key} ({_type_name(item.type)}, default {default})"]
        lines += textwrap.wrap(
            documentation[owner, item.name], 112, initial_indent="      ", subsequent_indent="      "
        )
    return "\n".join(lines)


def _compose(overrides: list[str]) -> DictConfig:
    store = ConfigStore.instance()
    store.store(name="config_schema", node=Config)
    for group, nodes in SCHEMAS.items():
        for name, node in nodes.items():
            store.store(group=group, name=name, node=node)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(FOLDER), version_base="1.3"):
            return compose("config", overrides=overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error)) from None
    except yaml.YAMLError as error:
        where = f"{error.problem_mark}".strip() if isinstance(error, yaml.MarkedYAMLError) else f"a YAML of {FOLDER}"
        what = error.problem if isinstance(error, yaml.MarkedYAMLError) else _first_line(error)
        raise ConfigError(f"this is not valid YAML: {what} ({where}). Correct that file.") from None


def _literal(text: str) -> str:
    """Refuse override syntax that this program does not have, and quote the value of a text key."""
    if text.startswith("-"):
        raise ConfigError(
            f"{text} is not an option. Settings are key=value; --help lists them. "
            "For a sweep, start one command per setting."
        )
    key, equals, value = text.partition("=")
    if text[:1] == "~":
        raise ConfigError(f"{text}: keys cannot be removed. Set another value instead: {text[1:]}=<value>.")
    if not equals or not key:
        raise ConfigError(f"{text!r} is not a setting. Write key=value or group=choice; --help lists them.")
    if key[:1] == "+":
        raise ConfigError(f"{text}: keys cannot be added. Write {key.lstrip('+')}=<value> without the sign.")
    if key == "hydra" or key.startswith("hydra."):
        raise ConfigError(f"{text}: Hydra's own settings have no effect here. Leave it out; run.dir sets the folder.")
    group = key.partition("/")[0].partition("@")[0]
    # a mapping (data={dir: x}) sets keys of the section
    if key in GROUPS and value[:1] != "{":
        choices = sorted(path.stem for path in (FOLDER / key).glob("*.yaml"))
        if value not in choices:
            raise ConfigError(f"{text}: there is no such {key}. Choose one of {', '.join(choices)}, or leave it out.")
    if group != key and group in GROUPS:
        raise ConfigError(f"{text} is not a setting. Choose a group with {group}=<choice>.")
    if _is_text(key) and value[:1] not in ("'", '"') and "${" not in value and value != "null":
        escaped = value.replace("\\", "\\\\").replace("'", "\\'") if "'" in value else value
        return f"{key}='{escaped}'"
    return text


def _is_text(key: str) -> bool:
    return any(name == key and item.type in (str, str | None) for name, _, item in _keys(Config))


def _keys(cls: type, prefix: str = "") -> Iterator[tuple[str, str, dataclasses.Field[typing.Any]]]:
    """Every dotted key below ``cls`` with the class that owns it; the rules of all optimizers are listed."""
    for item in dataclasses.fields(cls):
        if isinstance(item.type, type) and dataclasses.is_dataclass(item.type):
            variants: list[type] = [item.type, *item.type.__subclasses__()]
            seen: set[str] = set()
            for variant in variants:
                for key, owner, leaf in _keys(variant, f"{prefix}{item.name}."):
                    if key not in seen:
                        seen.add(key)
                        yield key, owner, leaf
        else:
            yield f"{prefix}{item.name}", cls.__name__, item


def _field_docs() -> dict[tuple[str, str], str]:
    """(class, field) -> the string that stands under the field in its class."""
    documentation: dict[tuple[str, str], str] = {}
    modules = (schema, optimizers)
    for node in [node for module in modules for node in ast.parse(inspect.getsource(module)).body]:
        if not isinstance(node, ast.ClassDef):
            continue
        for statement, below in zip(node.body, node.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(below, ast.Expr):
                assert isinstance(statement.target, ast.Name) and isinstance(below.value, ast.Constant)
                documentation[node.name, statement.target.id] = " ".join(str(below.value.value).split())
    for cls in (value for module in modules for value in vars(module).values() if isinstance(value, type)):
        for base in cls.__mro__[1:]:
            for (owner, name), text in list(documentation.items()):
                if owner == base.__name__:
                    documentation.setdefault((cls.__name__, name), text)
    return documentation


def _type_name(kind: typing.Any) -> str:
    if isinstance(kind, type) and not isinstance(kind, types.GenericAlias):
        return kind.__name__
    return str(kind).replace("typing.", "").replace("conf.schema.", "").replace("NoneType", "None")


def _default_text(item: dataclasses.Field[typing.Any]) -> str:
    if item.default is not dataclasses.MISSING:
        return _text(item.default)
    assert item.default_factory is not dataclasses.MISSING
    return _text(item.default_factory())


def _text(value: object) -> str:
    """A value as a command line takes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _resolve_paths(config: Config) -> None:
    paths = (
        *((config.run, "dir"), (config.memory, "replay")),
        *((config.data, name) for name in ("path", "dir", "tokenizer")),
    )
    for section, name in paths:
        if getattr(section, name) is not None:
            setattr(section, name, os.path.abspath(os.path.expanduser(getattr(section, name))))
    for source in config.data.sources:
        source.path = os.path.abspath(os.path.expanduser(source.path))


def _explain(error: Exception) -> str:
    """One line with the key, the rule and the fix, from Hydra's chain of exceptions."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    # of a fault in a YAML file, Hydra names the file first and the fault after it
    file = re.match(r"In '(.*)': \w+ raised while composing config:", lines[0])
    if file and len(lines) > 1:
        return f"{FOLDER.name}/{file[1]}.yaml: {_explain_lines(lines[1:], lines[1])}"
    return _explain_lines(lines, _first_line(error))


def _explain_lines(lines: list[str], otherwise: str) -> str:
    """``otherwise`` is the message where the ``lines`` of an error say nothing that is known here."""
    key = next((line.removeprefix("full_key: ") for line in lines if line.startswith("full_key: ")), "")
    keys = {name: item for name, _, item in _keys(Config)}
    if "not in" in lines[0] or "not found" in lines[0]:
        if key in keys and f"'{key}'" in lines[0]:
            return f"{key} is written as one name. In a YAML file, put the last part under its section."
        if key in keys:
            section = key.partition(".")[0]
            return f"{key}: there is no such key here; the chosen {section} does not read it. Leave it out."
        # lr for optimizer.lr is too short to look alike
        same = [name for name in keys if name.rpartition(".")[2] == key.rpartition(".")[2]]
        close = same or difflib.get_close_matches(key, keys, 3, 0.5)
        hint = f"Did you mean {', '.join(close)}?" if close else "--help lists the keys."
        return f"{key or lines[0]}: there is no such key here. {hint}"
    value = re.match(r"Value '(.*)' (?:of type '.*' could not be converted to|is not a valid) (\w+)", lines[0])
    if key in keys and value:
        wanted = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}[value[2]]
        return f"{key}={value[1]} must be {wanted}. Set for example {key}={_default_text(keys[key])}."
    if key in keys and "ListConfig" in lines[0]:
        return f"{key} must be a list. Set for example {key}={_default_text(keys[key])}."
    if "is not Optional" in lines[0] or "Incompatible value 'None'" in lines[0]:
        default = f" Set for example {key}={_default_text(keys[key])}." if key in keys else ""
        return f"{key} cannot be null.{default or ' Leave it out.'}"
    if merged := re.match(r"Merge error: \w+ is not a subclass of (\w+)Config", lines[0]):
        key = key or merged[1].lower()
    if "Invalid type assigned" in lines[0] or merged:
        return f"{key} is a section, not a value. Set one of its keys: {key}.<key>=<value>; --help lists them."
    return f"{key}: {lines[0]}" if key else otherwise


def _first_line(error: BaseException) -> str:
    return next(line.strip() for line in str(error).splitlines() if line.strip())
