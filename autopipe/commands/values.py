"""Converts Python values of options to what the command line parses: paths, bytes, hosts, TARGET texts."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autopipe.commands.metrics.registry import LOGGERS
from autopipe.commands.options import CHOICES, LEAST, NEWEST, NUMBERS, SWITCHES, exclusive_pair
from autopipe.errors import unknown_choice, with_article
from autopipe.units import parse_bandwidth, parse_bytes

_PATHS = ("work_dir", "schedule_file", "cluster", "ssh_config", "init_from", "run_dir", "trace")
_TEXTS = ("opaque", "device_name", "remote_python", "interface")
TARGETS = ("target", "loss", "data", "eval_data", "optimizer", "after_step")


class LiteralText(str):
    """The text of a Python literal, as typed after ``--arg``. Any other string is itself the value."""

    __slots__ = ()


def parsed(options: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """Return the options that are given, as the command line parses them.

    Raises: TypeError for a name that is not in ``known``; ValueError for an invalid value.
    """
    for name in options:
        if name not in known:
            raise TypeError(unknown_choice("option", name, known))
    values = {name: _parsed(name, value) for name, value in options.items() if value is not None}
    pair = exclusive_pair(values)
    if pair is not None:
        raise ValueError(f"{pair[0]} and {pair[1]} exclude each other; give one")
    return values


def _parsed(name: str, value: Any) -> Any:
    if name in CHOICES and value not in CHOICES[name]:
        raise ValueError(unknown_choice(name, str(value), CHOICES[name]))
    if name in LEAST and (type(value) is not int or value < LEAST[name]):
        raise ValueError(f"{name} must be a whole number of at least {LEAST[name]}, got {value!r}")
    if name in SWITCHES and not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    if name in NUMBERS:
        return _number(name, value)
    if name in _TEXTS and not isinstance(value, str):
        raise ValueError(f"{name} must be a text, got {value!r}")
    if name in _PATHS:
        return _path(name, value)
    if name in TARGETS:
        return target_text(value, name)
    return _PARSERS[name](value) if name in _PARSERS else value


def _number(name: str, value: Any) -> float:
    """Return a number unchanged. Raises: ValueError unless it is finite and at least 0."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")
    if name == "watchdog" and value == 0:
        raise ValueError("watchdog must be above 0 seconds, got 0")
    if name == "ema" and value >= 1:
        raise ValueError(f"ema must be below 1, got {value!r}")
    return value


def _path(name: str, value: Any) -> Path:
    """Return a path. Raises: ValueError for anything else."""
    if isinstance(value, (str, os.PathLike)):
        text = os.fspath(value)
        if isinstance(text, str):
            return Path(text)
    raise ValueError(f"{name} must be a path, got {value!r}")


def _seed(value: Any) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise ValueError(f"seed must be a whole number that fits in 64 bits, got {value!r}")
    return value


def _resume(value: Any) -> bool | int:
    if isinstance(value, bool) or (type(value) is int and value >= NEWEST):
        return value
    raise ValueError(f"resume must be True, False or the step of a checkpoint, got {value!r}")


def _sizes(value: Any) -> tuple[int, ...]:
    sizes = tuple(value) if isinstance(value, (list, tuple, range)) else ()
    if not sizes or not all(type(size) is int and size >= 1 for size in sizes):
        raise ValueError(f"microbatch_sizes must be a list of whole numbers of at least 1, got {value!r}")
    return sizes


def _arguments(value: Mapping[str, Any]) -> dict[str, str]:
    """Return keyword arguments of the model as texts, which ranks parse as Python literals."""
    try:
        arguments: dict[Any, Any] = dict(value)
    except (TypeError, ValueError):
        arguments = {None: None}
    if not all(isinstance(name, str) for name in arguments):
        raise ValueError(f"arg must be a dictionary of the model's keyword arguments, got {value!r}")
    return {name: _literal(name, item) for name, item in arguments.items()}


def _literal(name: str, value: Any) -> str:
    if isinstance(value, LiteralText):
        return value
    text = value if isinstance(value, str) and not _is_literal(value) else repr(value)
    if not isinstance(value, str) and (not _is_literal(text) or ast.literal_eval(text) != value):
        raise ValueError(
            f"arg: {name} is {with_article(type(value).__name__)}; only numbers, strings, booleans, None, and lists, "
            "tuples and dictionaries of them can be passed to ranks; build other objects in the model file"
        )
    return text


def _is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return False
    return True


def _inputs(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"input must be a text or a list of texts, got {value!r}")
    return tuple(texts)


def _observer(value: Any) -> str | Callable[..., Any]:
    """Return a TARGET text, or a function of any kind: no rank imports it."""
    if isinstance(value, (str, os.PathLike)):
        return str(os.fspath(value))
    if not callable(value):
        raise ValueError(f"on_step and on_evaluate must be a function or a TARGET text, got {value!r}")
    function: Callable[..., Any] = value
    return function


def _loggers(value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)):
        raise ValueError(f"log must be a name or a list of names, got {value!r}")
    for name in names:
        if name not in LOGGERS:
            raise ValueError(unknown_choice("logger", str(name), LOGGERS))
    return tuple(dict.fromkeys(names))


def _audits(value: Any) -> int | None:
    if value == "auto":
        return None
    if type(value) is not int or value < 0:
        raise ValueError(f"audit_every must be 'auto' or a whole number of at least 0, got {value!r}")
    return value


def _team(value: Any) -> str | int:
    if value != "auto" and (type(value) is not int or value < 1):
        raise ValueError(f"tensor_parallel must be 'auto' or a whole number of at least 1, got {value!r}")
    team: str | int = value
    return team


def _schedule(value: str) -> str:
    from autopipe.schedules import REGISTRY

    known = ("auto", *REGISTRY)
    if value not in known:
        raise ValueError(unknown_choice("schedule", str(value), known))
    return value


def _bytes(value: Any) -> int:
    return int(_quantity("gpu_memory", value, parse_bytes))


def _rate(value: Any) -> float:
    return float(_quantity("link", value, parse_bandwidth))


def _quantity(name: str, value: Any, parse: Callable[[str], float]) -> float:
    """Return a quantity above 0, which is a number or a text with a unit. Raises: ValueError or PlanError."""
    if isinstance(value, str):
        return parse(value)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a number above 0 or a text with a unit, got {value!r}")
    return value


def _hosts(value: Any) -> tuple[Any, ...]:
    from autopipe.launch.remote.hosts import checked_hosts, parse_hosts

    if isinstance(value, str):
        return parse_hosts(value)
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"hosts must be a text such as 'h1:2,h2:2' or a list of hosts, got {value!r}")
    return checked_hosts(value) if value else ()


def _hostfile(value: Any) -> tuple[Any, ...]:
    from autopipe.launch.remote.hosts import checked_hosts, read_hostfile

    return checked_hosts(value) if isinstance(value, (list, tuple)) else read_hostfile(_path("hostfile", value))


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "arg": _arguments,
    "input": _inputs,
    "microbatch_sizes": _sizes,
    "seed": _seed,
    "resume": _resume,
    "gpu_memory": _bytes,
    "link": _rate,
    "hosts": _hosts,
    "hostfile": _hostfile,
    "audit_every": _audits,
    "schedule": _schedule,
    "tensor_parallel": _team,
    "on_step": _observer,
    "on_evaluate": _observer,
    "log": _loggers,
}


def target_text(value: Any, option: str) -> str:
    """Return the TARGET text by which every rank imports a function or class. A text or path is returned unchanged.

    Raises: ValueError for an object that cannot be imported by name, such as a lambda or a local function.
    """
    if isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    name, module = getattr(value, "__qualname__", ""), sys.modules.get(getattr(value, "__module__", None) or "")
    if not name or module is None:
        raise _unimportable(option, f"{with_article(type(value).__name__)}, not a function or class")
    if "<" in name:
        raise _unimportable(option, f"{name}, a lambda or local function")
    attribute: Any = module
    for part in name.split("."):
        attribute = getattr(attribute, part, None)
    if getattr(attribute, "__qualname__", None) != name or getattr(value, "__self__", None) is not None:
        raise _unimportable(option, f"{name}, which {module.__name__} does not define under that name")
    return f"{_location(module, option)}:{name}"


def _location(module: Any, option: str) -> str:
    """Return the file of a script or of a single-file module, else the dotted name of a module."""
    name, path = module.__name__, getattr(module, "__file__", None)
    if name == "__main__" and module.__spec__ is not None:  # python -m package.module
        name = module.__spec__.name
    if path is None or not Path(path).is_file():
        if name == "__main__":
            raise _unimportable(option, "defined in an interactive session")
        return str(name)
    is_single = "." not in name and not hasattr(module, "__path__")
    return str(Path(path).resolve()) if is_single else str(name)


def _unimportable(option: str, problem: str) -> ValueError:
    return ValueError(
        f"{option} is {problem}; every rank imports it by name, so define it with `def` or `class` at the top level of "
        "a module, or pass a text such as 'model.py:build_model'"
    )
