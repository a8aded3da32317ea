"""Artifacts: frozen dataclasses to JSON files and back, checked field by field.

Every file that one step writes and another reads goes through here, so a truncated file, a wrong type or another
format version is one clear ``ArtifactError`` that names the field, never a traceback and never a silent default.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from autopipe.errors import ArtifactError, AutopipeError

SCHEMA_VERSION = 1
T = TypeVar("T")


def encode(value: Any) -> Any:
    """Turn a dataclass (and what it holds) into plain JSON values. Non-finite floats are refused."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} has no place in an artifact")
    return value


def canonical(value: Any) -> str:
    """Return the one text of a value: sorted keys, no spaces. Equal values give equal bytes."""
    return json.dumps(encode(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def digest(value: Any) -> str:
    """Return the first 16 hex digits of the SHA-256 of the canonical text."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:16]


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def decode(kind: Any, value: Any, path: str) -> Any:
    """Turn plain JSON values into ``kind``, or raise ``ArtifactError`` that names ``path``."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_dataclass(kind, value, path)
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        return _decode_union(kind, value, path)
    if origin is tuple:
        return _decode_tuple(typing.get_args(kind), value, path)
    if origin is dict:
        if not isinstance(value, dict):
            raise _mismatch("an object", value, path)
        item = typing.get_args(kind)[1]
        return {key: decode(item, entry, f"{path}.{key}") for key, entry in value.items()}
    if kind is Any:
        return value
    if kind is float and type(value) is int:
        return float(value)
    if kind is type(None):
        kind = types.NoneType
    if type(value) is not kind:
        raise _mismatch(getattr(kind, "__name__", str(kind)), value, path)
    if kind is float and not math.isfinite(value):
        raise _mismatch("a finite number", value, path)
    return value


def _decode_dataclass(kind: type, value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        raise _mismatch("an object", value, path)
    hints = _hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(set(value) - set(fields))
    if unknown:
        raise ArtifactError(f"{path}: unknown key {unknown[0]!r}", remedy="run the step that wrote the file again")
    arguments = {}
    for name, field in fields.items():
        if name in value:
            arguments[name] = decode(hints[name], value[name], f"{path}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ArtifactError(f"{path}: key {name!r} is missing", remedy="run the step that wrote the file again")
    try:
        return kind(**arguments)
    except AutopipeError:
        raise
    except ValueError as error:
        raise ArtifactError(f"{path}: {error}", remedy="run the step that wrote the file again") from error


def _decode_union(kind: Any, value: Any, path: str) -> Any:
    failures = []
    for option in typing.get_args(kind):
        try:
            return decode(option, value, path)
        except ArtifactError as error:
            failures.append(error)
    raise failures[0]


def _decode_tuple(kinds: tuple[Any, ...], value: Any, path: str) -> Any:
    if not isinstance(value, (list, tuple)):
        raise _mismatch("a list", value, path)
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(decode(kinds[0], item, f"{path}[{index}]") for index, item in enumerate(value))
    if len(value) != len(kinds):
        raise _mismatch(f"a list of {len(kinds)}", value, path)
    return tuple(decode(kind, item, f"{path}[{i}]") for i, (kind, item) in enumerate(zip(kinds, value, strict=True)))


def _mismatch(expected: str, value: Any, path: str) -> ArtifactError:
    shown = json.dumps(value, default=str)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return ArtifactError(f"{path}: expected {expected}, found {shown}", remedy="run the step that wrote the file again")


def write_text(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new one, never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ArtifactError(f"cannot write {path}: {error.strerror}", where=str(path)) from error


def save(value: Any, path: Path) -> None:
    """Write an artifact: ``{"kind", "schema_version", ...fields}``, indented, sorted, whole or not at all."""
    document = {"kind": type(value).__name__, "schema_version": SCHEMA_VERSION, **encode(value)}
    write_text(path, json.dumps(document, indent=1, sort_keys=True) + "\n")


def load(kind: type[T], path: Path, *, renew: str) -> T:
    """Read an artifact of ``kind``.

    Raises: ArtifactError, naming the file, the field, and ``renew`` (the command that writes it anew).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ArtifactError(f"there is no {path.name}", where=str(path), remedy=renew) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path.name} cannot be read: {error}", where=str(path), remedy=renew) from None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path.name} is not JSON: {error}", where=str(path), remedy=renew) from None
    if not isinstance(document, dict):
        raise ArtifactError(f"{path.name} holds no object", where=str(path), remedy=renew)
    found = document.pop("kind", None), document.pop("schema_version", None)
    if found != (kind.__name__, SCHEMA_VERSION):
        raise ArtifactError(
            f"{path.name} is a {found[0]} of format {found[1]}; wanted a {kind.__name__} of format {SCHEMA_VERSION}",
            where=str(path),
            remedy=renew,
        )
    try:
        return typing.cast(T, decode(kind, document, path.name))
    except ArtifactError as error:
        raise ArtifactError(error.what, where=str(path), remedy=renew) from None
    except AutopipeError as error:
        raise ArtifactError(f"{path.name}: {error.what}", where=str(path), remedy=renew) from None
