"""The settings of a recipe as its source declares them: nothing of it is imported.

A config is a dataclass that extends others, each field with a text behind it. Importing a recipe
takes torch along, a second and more; ``--help`` answers from here.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Setting:
    """A field of a config."""

    name: str
    """As in a settings file: ``deployment.engine`` is a field of the part ``deployment``."""
    type: str
    """As the source says it."""
    default: Any
    """None too where the source computes it."""
    meaning: str


def describe_settings(module: str, name: str = "Config") -> dict[str, Setting]:
    """All settings of the config of that name, those of its bases first, parts field by field.

    Older spellings, which are read and not shown, are left out.

    Raises:
        ValueError: there is no such class, or a field has no text.
    """
    return {setting.name: setting for setting in _read_class(_Source(module), name)}


class _Source:
    """A module's syntax tree, and where its names come from."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.classes: dict[str, ast.ClassDef] = {}
        self.values: dict[str, Any] = {}
        self.imports: dict[str, tuple[str, str]] = {}
        for node in ast.parse(_find_source(module).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                self.classes[node.name] = node
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = (node.module, alias.name)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.values[node.targets[0].id] = node.value

    def find_class(self, reference: ast.expr) -> tuple[_Source, str]:
        """Where the class is that an expression of this module names."""
        if isinstance(reference, ast.Attribute) and isinstance(reference.value, ast.Name):
            package, module = self.imports[reference.value.id]
            return _Source(f"{package}.{module}"), reference.attr
        name = ast.unparse(reference)
        if name in self.classes:
            return self, name
        if name in self.imports:
            module, original = self.imports[name]
            return _Source(module).find_class(ast.Name(original))
        if isinstance(self.values.get(name), ast.Name):  # another name of a class
            return self.find_class(self.values[name])
        raise ValueError(f"{self.module} must define or import {name}")

    def value_of(self, expression: ast.expr | None) -> Any:
        """The plain value of a default, None where it is none."""
        if isinstance(expression, ast.Name) and expression.id in self.values:
            return self.value_of(self.values[expression.id])
        if isinstance(expression, ast.Call):
            name = ast.unparse(expression.func)
            if name in ("DefaultInt", "DefaultFloat"):
                return self.value_of(expression.args[0])
            factory = next(
                (k.value for k in expression.keywords if k.arg == "default_factory"), None
            )
            return self.value_of(factory.body) if isinstance(factory, ast.Lambda) else None
        try:
            return ast.literal_eval(expression) if expression is not None else None
        except ValueError:
            return None


def _find_source(module: str) -> Path:
    """The file of a module, whose packages are not imported.

    Raises:
        ValueError: there is none.
    """
    loaded = getattr(sys.modules.get(module), "__file__", None)
    if loaded is not None:  # a program's own config is in __main__
        return Path(loaded)
    package, *rest = module.split(".")
    spec = find_spec(package)
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin)
        base = path.parent.joinpath(*rest) if rest else path.with_suffix("")
        for candidate in (base.with_suffix(".py"), base / "__init__.py"):
            if candidate.is_file():
                return candidate
    raise ValueError(f"module must be one with a source file, got {module!r}")


def _read_class(source: _Source, name: str) -> Iterator[Setting]:
    home, name = source.find_class(ast.Name(name))
    node = home.classes[name]
    # As Python resolves them, for bases that share one: the first base's fields are read last.
    for base in reversed(node.bases):
        if _is_abstract(base):
            continue
        yield from _read_class(*home.find_class(base))
    for field, text in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        kind = ast.unparse(field.annotation)
        if kind.startswith(("Suppress", "ClassVar")):
            continue
        setting = field.target.id
        if not (isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)):
            raise ValueError(f"{name}.{setting} must have a text that says what it does")
        meaning = " ".join(str(text.value.value).split()).replace("``", "")
        if _is_part(field.value):
            for part in _read_class(*home.find_class(ast.Name(kind))):
                yield Setting(f"{setting}.{part.name}", part.type, part.default, part.meaning)
        else:
            yield Setting(setting, kind, home.value_of(field.value), meaning)


def _is_abstract(base: ast.expr) -> bool:
    """Whether a base is one of Python's own, which has no fields."""
    return ast.unparse(base).split("[")[0] in ("ABC", "Protocol", "Generic")


def _is_part(default: ast.expr | None) -> bool:
    """Whether the default is made by a class: ``field(default_factory=TrainerConfig)``."""
    if not isinstance(default, ast.Call):
        return False
    factories = [keyword.value for keyword in default.keywords if keyword.arg == "default_factory"]
    return any(isinstance(factory, ast.Name) and factory.id[0].isupper() for factory in factories)
