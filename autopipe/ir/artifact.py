"""Artifacts: frozen dataclasses to JSON files and back, checked field by field.

Every file that one step writes and another reads goes through this module. A truncated file, a wrong type or a changed
digit gives an ``ArtifactError`` that names the field, never a traceback or a silent default. The ``__post_init__`` of
each dataclass defines which values are valid. ``digest``, the SHA-256 of the other fields, detects later changes; a
file that is edited on purpose omits it.
"""

from __future__ import annotations

import contextlib
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

from autopipe.errors import ArtifactError, AutopipeError, VersionError, disk_is_full
from autopipe.ir.decoding import decode, shown

SCHEMA_VERSION = 1
"""The format of every kind of artifact that has no ``FORMAT`` of its own."""
OMIT_DEFAULT = types.MappingProxyType({"omit_default": True})
"""Metadata of a dataclass field that files and digests contain only if its value differs from the default."""

T = TypeVar("T")


def encode(value: Any) -> Any:
    """Return a dataclass, with all its values, as plain JSON values. Raises: ValueError for a non-finite float."""
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"an artifact cannot contain {value}")
    if isinstance(value, (float, type)) or not dataclasses.is_dataclass(value):
        return value
    entries = {}
    kind: Any = type(value)
    for name, omitted, default in _written(kind):
        entry = getattr(value, name)
        if not (omitted and entry == default):
            entries[name] = encode(entry)
    return entries


@functools.cache
def _written(kind: Any) -> tuple[tuple[str, bool, Any], ...]:
    """Return the fields of a dataclass: name, whether the default is omitted, and the default."""
    return tuple(
        (field.name, bool(field.metadata.get("omit_default")), field.default) for field in dataclasses.fields(kind)
    )


def canonical(value: Any) -> str:
    """Return the canonical JSON text of a value: sorted keys, no spaces. Equal values give equal texts."""
    return _canonical_of(encode(value))


def digest(value: Any) -> str:
    """Return the first 16 hex digits of the SHA-256 of the canonical text."""
    return _digest_of(encode(value))


def _canonical_of(plain: Any) -> str:
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _digest_of(plain: Any) -> str:
    return hashlib.sha256(_canonical_of(plain).encode()).hexdigest()[:16]


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
    head = {"kind": type(value).__name__, "schema_version": format_of(type(value)), "digest": _digest_of(body)}
    write_text(path, json.dumps({**head, **body}, indent=1) + "\n")


def load(kind: type[T], path: Path, *, renew: str) -> T:
    """Read an artifact of ``kind``. ``renew``: the command that writes it again, for errors.

    Keys in ``REMOVED`` of the kind are ignored.

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
        name = found_kind if isinstance(found_kind, str) and found_kind.isidentifier() else shown(found_kind)
        expected = f"expected a {kind.__name__} of format {format_of(kind)}"
        raise damaged(f"it is a {name} of format {shown(version)}; {expected}")
    if version != format_of(kind):
        raise VersionError(
            f"{path.name} was written by another version of autopipe: it is a {found_kind} of format {version}, and "
            f"this version reads format {format_of(kind)}",
            where=str(path),
            remedy=renew,
        )
    written = document.pop("digest", None)
    removed: frozenset[str] = getattr(kind, "REMOVED", frozenset())
    try:
        value = typing.cast(T, decode(kind, {k: v for k, v in document.items() if k not in removed}, ""))
    except AutopipeError as error:
        raise damaged(error.what) from None
    if written is not None and written != _digest_of(document):
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
            raise ValueError(f"key {shown(next(key for key in keys if keys.count(key) > 1))} appears twice")
        return entries

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is not allowed as a number")

    return json.loads(text, object_pairs_hook=unique, parse_constant=constant)
