"""Settings files: TOML by hand, or the ``config.json`` that a run has left."""

from __future__ import annotations

import difflib
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import orjson

from hearth.errors import ConfigError
from training.config.describe import Setting, describe_settings
from training.config.parts import DefaultFloat, DefaultInt

ConfigT = TypeVar("ConfigT")

WIDTH = 100


def read_settings_file(config: ConfigT, path: str | Path) -> ConfigT:
    """The config with the settings of a file in place of its own; parts of it keep what is not
    named.

    In a ``.json`` file, which a run has written whole, a setting that nobody gave is one at its
    default. Whether values obey their rules is for ``validate`` to say.

    Raises:
        ConfigError: there is no such file, it is no TOML or JSON, or it names no setting.
    """
    path = Path(path).expanduser()
    try:
        text = path.read_bytes()
        settings = orjson.loads(text) if path.suffix == ".json" else tomllib.loads(text.decode())
    except OSError as error:
        raise ConfigError(
            f"the settings file must be readable, got '{path}': {error.strerror}"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path} must be TOML, or JSON in a .json file: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} must have names and values, got a {type(settings).__name__}")
    return _apply(config, settings, f"{path}: ", is_record=path.suffix == ".json")


def _apply(config: Any, settings: Mapping[str, Any], where: str, *, is_record: bool) -> Any:
    known, kinds = {field.name for field in fields(config)}, get_type_hints(type(config))
    given: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else "--help-all lists them"
            raise ConfigError(f"{where}{name} must be a setting, got none of that name: {hint}")
        current = getattr(config, name)
        if is_record and isinstance(current, DefaultInt | DefaultFloat) and value == current:
            continue
        if is_dataclass(current) and isinstance(value, Mapping):
            value = _apply(current, value, f"{where}{name}.", is_record=is_record)
        elif isinstance(kinds[name], type) and issubclass(kinds[name], Enum):
            value = _to_enum(kinds[name], value, where + name)
        given[name] = value
    return replace(config, **given)


def _to_enum(kind: type[Enum], value: object, where: str) -> Enum:
    try:
        return kind(value)
    except ValueError:
        choices = [member.value for member in kind]
        raise ConfigError(f"{where} must be one of {choices}, got {value!r}") from None


def format_settings(config: Any) -> str:
    """A config as a commented TOML file; a setting at its default is commented out."""
    usual, known = type(config)(), describe_settings(type(config).__module__)
    plain = [setting for setting in known.values() if "." not in setting.name]
    lines = [
        "# Settings of a run. What is commented out has the value shown by default.",
        "",
        *_format_group(config, usual, plain, ""),
    ]
    parts = dict.fromkeys(name.partition(".")[0] for name in known if "." in name)
    for part in parts:
        group = [setting for name, setting in known.items() if name.startswith(part + ".")]
        body = list(_format_group(getattr(config, part), getattr(usual, part), group, part + "."))
        lines += [f"[{part}]", "", *body]
    return "\n".join(lines).rstrip() + "\n"


def _format_group(config: Any, usual: Any, settings: list[Setting], prefix: str) -> Iterator[str]:
    for setting in settings:
        name = setting.name.removeprefix(prefix)
        value = getattr(config, name)
        yield from textwrap.wrap(
            setting.meaning, WIDTH, initial_indent="# ", subsequent_indent="# "
        )
        is_usual = value == getattr(usual, name) and type(value) is type(getattr(usual, name))
        line = f"{name} = {_to_toml(value)}"
        yield f"# {line}".rstrip() if is_usual or value is None else line
        yield ""


def _to_toml(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return orjson.dumps(value).decode()  # a JSON text is a TOML text
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_to_toml(str(key))} = {_to_toml(item)}" for key, item in value.items())
        return "{" + pairs + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_to_toml, value)) + "]"
    if isinstance(value, float):
        return repr(float(value))
    return repr(int(value)) if isinstance(value, int) else _to_toml(str(value))
