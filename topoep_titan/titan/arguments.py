"""What is wrong with a refused command line, in one sentence: the nearest key, a switch's forms."""

import dataclasses
import difflib
import re
from typing import Any


def refusal(config: Any, arguments: list[str], said: str) -> str:
    """``config``: the recipe's dataclasses; ``said``: the parser's own words, for all else."""
    options = {_option(key): value for key, value in _flat(config).items()}
    for argument, following in zip(arguments, [*arguments[1:], ""]):
        if not argument.startswith("--"):
            continue
        name, _, given = argument.partition("=")
        name = "--" + name[2:].replace("_", "-")
        if isinstance(options.get(name), bool) and _is_bool(given or following):
            return f"{name} is a switch without a value; give {name} or {_negated(name)}"
        known = name in options or _positive(name) in options or name in said
        if not known or name in _unrecognized(said):
            near = difflib.get_close_matches(name, options, 1, 0.5)
            return f"unknown key {name}" + (f"; did you mean {near[0]}?" if near else "")
    # A box is drawn around the parser's words, its title in the first line, hints at the end.
    words = re.sub(r"[^\x20-\x7e]+", " ", "\n".join(said.splitlines()[1:]))
    words = re.split(r"Argument helptext:|For full helptext", words)[0]
    return re.sub(r"\s+", " ", words).strip(" .")


def _unrecognized(said: str) -> list[str]:
    found = re.search(r"[Uu]nrecognized options?: ([^\n]*)", said)
    return re.findall(r"--[\w.-]+", found[1].replace("_", "-")) if found else []


def _option(key: str) -> str:
    return "--" + key.replace("_", "-")


def _is_bool(value: str) -> bool:
    return value.lower() in ("true", "false", "yes", "no", "0", "1")


def _negated(name: str) -> str:
    table, _, key = name.rpartition(".")
    return f"{table}.no-{key}" if table else f"--no-{key[2:]}"


def _positive(name: str) -> str:
    return name.replace(".no-", ".").replace("--no-", "--")


def _flat(config: Any, prefix: str = "") -> dict[str, Any]:
    flat = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            flat |= _flat(value, f"{prefix}{field.name}.")
        else:
            flat[prefix + field.name] = value
    return flat
