"""Artifacts: frozen dataclasses to JSON files and back, checked field by field.

Every file that one step writes and another reads goes through this module. A truncated file, a wrong type or a changed
digit gives an ``ArtifactError`` that names the field, never a traceback or a silent default. The ``__post_init__`` of
each dataclass defines which values are valid. ``digest``, the SHA-256 of the other fields, detects later changes; a
file that is edited on purpose omits it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import json
import math
import os
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from autopipe.errors import ArtifactError, AutopipeError, VersionError, disk_is_full, with_article

SCHEMA_VERSION = 1
"""The format of every kind of artifact that has no ``FORMAT`` of its own."""
LARGEST = 2**63
"""The exclusive limit of counts, sizes and seeds. A step never writes a larger value, which would overflow later."""

OMIT_DEFAULT = types.MappingProxyType({"omit_default": True})
"""Metadata of a dataclass field that files and digests contain only if its value differs from the default."""

T = TypeVar("T")


def encode(value: Any) -> Any:
    """Return a dataclass, with all its values, as plain JSON values. Raises: ValueError for a non-finite float."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: encode(getattr(value, name)) for name in _written(value)}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"an artifact cannot contain {value}")
    return value


def _written(value: Any) -> list[str]:
    return [
        field.name
        for field in dataclasses.fields(value)
        if not (field.metadata.get("omit_default") and getattr(value, field.name) == field.default)
    ]


def canonical(value: Any) -> str:
    """Return the canonical JSON text of a value: sorted keys, no spaces. Equal values give equal texts."""
    return json.dumps(encode(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def digest(value: Any) -> str:
    """Return the first 16 hex digits of the SHA-256 of the canonical text."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:16]


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def decode(kind: Any, value: Any, path: str) -> Any:
    """Return plain JSON values as ``kind``. ``path``: the field, for errors; "" for the whole file.

    Raises: ArtifactError naming ``path``.
    """
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
        return {decode(str, key, path): decode(item, entry, _below(path, key)) for key, entry in value.items()}
    if kind is Any:
        return value
    if isinstance(kind, type) and issubclass(kind, enum.StrEnum):
        return _decode_enum(kind, value, path)
    if kind is float and type(value) is int and -LARGEST < value < LARGEST:
        return float(value)
    if kind is type(None):
        kind = types.NoneType
    if type(value) is not kind:
        raise _mismatch({"NoneType": "null"}.get(kind.__name__, kind.__name__), value, path)
    if kind is float and not math.isfinite(value):
        raise _mismatch("a finite number", value, path)
    if kind is int and not -LARGEST < value < LARGEST:
        raise _mismatch("a number below 2**63", value, path)
    if kind is str and not _is_text(value):
        raise _mismatch("text", value, path)
    return value


def _decode_enum(kind: type[enum.StrEnum], value: Any, path: str) -> enum.StrEnum:
    if value not in list(kind):
        raise _mismatch(f"one of {', '.join(kind)}", value, path)
    return kind(value)


def _is_text(value: str) -> bool:
    """Return whether a text can be part of a path. A lone surrogate and NUL cannot.

    Surrogates U+DC80 to U+DCFF can: Python uses them for bytes of a path that the locale cannot decode (PEP 383).
    """
    try:
        return b"\0" not in value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _wrong(path: str, what: str) -> ArtifactError:
    return ArtifactError(f"{path}: {what}" if path else what, remedy="run the step that wrote the file again")


def _decode_dataclass(kind: type, value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        raise _mismatch("an object", value, path)
    hints = _hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(set(value) - set(fields))
    if unknown:
        raise _wrong(path, f"unknown key {ascii(unknown[0])[:60]}")
    arguments = {}
    for name, field in fields.items():
        if name in value:
            arguments[name] = decode(hints[name], value[name], _below(path, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise _wrong(path, f"key {name!r} is missing")
    try:
        return kind(**arguments)
    except AutopipeError:
        raise
    except ValueError as error:
        raise _wrong(path, str(error)) from error


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


def _shown(value: Any) -> str:
    """Return any value of a file as short ASCII text, for messages."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _mismatch(expected: str, value: Any, path: str) -> ArtifactError:
    named = expected if " " in expected or expected in ("null", "text") else with_article(expected)
    return _wrong(path, f"expected {named}, found {_shown(value)}")


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees the old text or the new one. Raises: ArtifactError if that fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # a path in a comment may contain bytes that are not text
        with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        full = disk_is_full(error, path.parent)
        raise ArtifactError(
            f"the disk of {path} is full" if full else f"cannot write {path.name}: {error.strerror}",
            where=str(path),
            remedy="choose a writable folder with free space (--work-dir, --run-dir)",
        ) from error


def format_of(kind: type) -> int:
    """Return the version of the format of a kind of artifact."""
    version: int = getattr(kind, "FORMAT", SCHEMA_VERSION)
    return version


def save(value: Any, path: Path) -> None:
    """Write an artifact atomically: ``{"kind", "schema_version", "digest", ...fields}``, indented.

    Mappings keep their order, because the gradient norm is added in the order of the model's parameters.
    """
    body = encode(value)
    head = {"kind": type(value).__name__, "schema_version": format_of(type(value)), "digest": digest(body)}
    write_text(path, json.dumps({**head, **body}, indent=1) + "\n")


def load(kind: type[T], path: Path, *, renew: str) -> T:
    """Read an artifact of ``kind``. ``renew``: the command that writes it again, for errors.

    Raises: ArtifactError naming the file, the field and ``renew``; VersionError for another format version.
    """

    def damaged(what: str) -> ArtifactError:
        return ArtifactError(f"{path.name} is damaged: {what}", where=str(path), remedy=renew)

    try:
        document = _parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(f"there is no {path.name}", where=str(path), remedy=renew) from None
    except UnicodeDecodeError:
        raise damaged("it is not valid UTF-8") from None
    except OSError as error:
        raise ArtifactError(f"{path.name} cannot be read: {error.strerror}", where=str(path), remedy=renew) from None
    except (ValueError, RecursionError) as error:
        raise damaged(f"it is not JSON ({error})") from None
    if not isinstance(document, dict):
        raise damaged("it does not contain an object")
    found_kind, version = document.pop("kind", None), document.pop("schema_version", None)
    if found_kind != kind.__name__ or type(version) is not int:
        name = found_kind if isinstance(found_kind, str) and found_kind.isidentifier() else _shown(found_kind)
        expected = f"expected a {kind.__name__} of format {format_of(kind)}"
        raise damaged(f"it is a {name} of format {_shown(version)}; {expected}")
    if version != format_of(kind):
        raise VersionError(
            f"{path.name} was written by another version of autopipe: it is a {found_kind} of format {version}, and "
            f"this version reads format {format_of(kind)}",
            where=str(path),
            remedy=renew,
        )
    written = document.pop("digest", None)
    try:
        value = typing.cast(T, decode(kind, document, ""))
    except AutopipeError as error:
        raise damaged(error.what) from None
    if written is not None and written != digest(document):
        raise ArtifactError(
            f"{path.name} was modified after it was written (digest mismatch)",
            where=str(path),
            remedy=f'{renew}; or delete its "digest" line to use it anyway' if renew else "",
        )
    return value


def _parse(text: str) -> Any:
    """Parse strict JSON: duplicate keys, NaN and infinities are errors."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"key {_shown(next(key for key in keys if keys.count(key) > 1))} appears twice")
        return entries

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is not allowed as a number")

    return json.loads(text, object_pairs_hook=unique, parse_constant=constant)
