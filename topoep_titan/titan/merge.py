"""TOML tables laid strictly over nested dataclasses, and back again.

Nothing is guessed: an unknown key is refused with the nearest valid one, a value of another type
with what was expected and what came.
"""

import dataclasses
import difflib
import types
import typing
from typing import Any

from topoep_titan.errors import InputError


def merge(config: Any, table: dict[str, Any], path: str = "") -> Any:
    """A copy of dataclass ``config`` with ``table`` laid over it; its own checks run again.

    Raises InputError that names the key with its table, and the remedy.
    """
    fields = {field.name for field in dataclasses.fields(config) if _is_public(field)}
    hints = typing.get_type_hints(type(config), include_extras=True)
    changes = {}
    for key, value in table.items():
        where = f"{path}.{key}".lstrip(".")
        if key not in fields:
            raise InputError(f"unknown key '{where}'{_suggestion(key, fields, path)}")
        current = getattr(config, key)
        if dataclasses.is_dataclass(current) and isinstance(value, dict) and "kind" not in value:
            changes[key] = merge(current, value, where)
        else:
            changes[key] = _coerce(value, hints[key], where)
    try:
        return dataclasses.replace(config, **changes)
    except (ValueError, AssertionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"[{path or 'recipe'}]: {error}") from None


def as_table(config: Any, *, leave_out: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The dataclass as nested TOML values, which ``merge`` reads back.

    None is left out, and so are the dotted paths in ``leave_out``.
    """
    hints = typing.get_type_hints(type(config), include_extras=True)
    table = {}
    for field in dataclasses.fields(config):
        if not _is_public(field) or field.name in leave_out:
            continue
        prefix = f"{field.name}."
        below = frozenset(p.removeprefix(prefix) for p in leave_out if p.startswith(prefix))
        value = getattr(config, field.name)
        choices = _choices(hints[field.name])
        if choices:
            kind = next(name for name, cls in choices.items() if _is_a(value, cls))
            rest = {} if value is None else as_table(value, leave_out=below)
            table[field.name] = {"kind": kind, **rest} if rest else kind
        elif dataclasses.is_dataclass(value):
            table[field.name] = as_table(value, leave_out=below)
        elif value is not None:
            table[field.name] = _plain(value)
    return table


def _is_public(field: dataclasses.Field) -> bool:
    return field.init and not field.name.startswith("_")


def _is_a(value: Any, cls: type | None) -> bool:
    return value is None if cls is None else isinstance(value, cls)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return value


def _suggestion(key: str, fields: set[str], path: str) -> str:
    near = difflib.get_close_matches(key, fields, 1)
    if near:
        return f"; did you mean '{near[0]}'?"
    where = f"[{path}]" if path else "the top level"
    return f"; {where} has: {', '.join(sorted(fields))}"


def _coerce(value: Any, hint: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _coerce(value, arguments[0], where)
    choices = _choices(hint)
    if choices:
        return _choose(value, choices, where)
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            if option is not type(None):
                try:
                    return _coerce(value, option, where)
                except InputError:
                    continue
    elif origin is typing.Literal and value in arguments:
        return value
    elif origin is list and isinstance(value, list):
        return [_coerce(item, arguments[0], f"{where}[{i}]") for i, item in enumerate(value)]
    elif origin is tuple and isinstance(value, list) and len(value) == len(arguments):
        return tuple(_coerce(item, kind, where) for item, kind in zip(value, arguments))
    elif origin is dict and isinstance(value, dict):
        return value
    elif hint is float and type(value) in (int, float):
        return float(value)
    elif isinstance(hint, type) and type(value) is hint:
        return value
    raise InputError(f"'{where}': expected {_name(hint)}, got {value!r}")


def _choices(hint: Any) -> dict[str, type | None]:
    """Names of a union of config classes, as torchtitan annotates them for its command line."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return {}
    named = {}
    for option in typing.get_args(hint):
        marks = getattr(option, "__metadata__", ())
        name = next((mark.name for mark in marks if getattr(mark, "name", None)), None)
        if name:
            cls = typing.get_args(option)[0]
            named[name] = None if cls is type(None) else cls
    return named


def _choose(value: Any, choices: dict[str, type | None], where: str) -> Any:
    table = dict(value) if isinstance(value, dict) else {"kind": value}
    kind = table.pop("kind", None)
    if kind not in choices:
        raise InputError(f"'{where}': expected one of {', '.join(choices)}, got {value!r}")
    cls = choices[kind]
    return None if cls is None else merge(cls(), table, where)


def _name(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(repr(choice) for choice in typing.get_args(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        return " or ".join(_name(option) for option in options)
    return hint.__name__ if isinstance(hint, type) else str(hint)
