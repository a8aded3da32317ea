"""Plain JSON values to dataclasses, checked field by field.

The reader of a type is composed once: graphs and profiles have many thousands of fields, and each rank reads them. The
path of a field is only composed for an error.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import types
import typing
from collections.abc import Callable
from typing import Any

from autopipe.errors import ArtifactError, AutopipeError, with_article

LARGEST = 2**63
"""The exclusive limit of counts, sizes and seeds. A step never writes a larger value, which would overflow later."""

_Read = Callable[[Any], Any]


class _MismatchError(Exception):
    """A value that a type does not take."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.parts: list[str | int] = []  # names of fields and positions in lists, from the value outwards


def decode(kind: Any, value: Any, path: str) -> Any:
    """Return plain JSON values as ``kind``. ``path``: the field, for errors; "" for the whole file.

    Raises: ArtifactError naming the field.
    """
    try:
        return _reader(kind)(value)
    except _MismatchError as wrong:
        for part in reversed(wrong.parts):
            path = f"{path}[{part}]" if isinstance(part, int) else f"{path}.{part}" if path else part
        what = f"{path}: {wrong.what}" if path else wrong.what
        raise ArtifactError(what, remedy="run the step that wrote the file again") from wrong.__cause__


def shown(value: Any) -> str:
    """Return any value of a file as short ASCII text, for messages."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _reader(kind: Any) -> _Read:
    """Return the function that reads a value of a type."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _of_dataclass(kind)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _of_union([_reader(option) for option in inner])
    if origin is tuple:
        return _of_list(_reader(inner[0])) if inner[1:] == (Ellipsis,) else _of_tuple([_reader(item) for item in inner])
    if origin is dict:
        return _of_dict(_reader(inner[1]))
    if kind is Any:
        return lambda value: value
    if isinstance(kind, type) and issubclass(kind, enum.StrEnum):
        return _of_enum(kind)
    special = {float: _number, int: _integer, str: _text}.get(kind)
    return special or _of_type(types.NoneType if kind is None else kind)


@functools.cache  # not of other types: unions of another order are equal
def _of_dataclass(kind: type) -> _Read:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    missing = dataclasses.MISSING
    required = {name for name, field in fields.items() if field.default is missing and field.default_factory is missing}
    readers: dict[str, _Read] = {}

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _mismatch("an object", value)
        if not readers:  # not before: a type may contain itself
            hints = typing.get_type_hints(kind)
            readers.update({name: _reader(hints[name]) for name in fields})
        if not value.keys() <= fields.keys():
            raise _MismatchError(f"unknown key {ascii(min(value.keys() - fields.keys()))[:60]}")
        arguments = {}
        for name, reader in readers.items():
            if name in value:
                try:
                    arguments[name] = reader(value[name])
                except _MismatchError as wrong:
                    wrong.parts.append(name)
                    raise
            elif name in required:
                raise _MismatchError(f"key {name!r} is missing")
        try:
            return kind(**arguments)
        except AutopipeError:
            raise
        except ValueError as error:
            raise _MismatchError(str(error)) from error

    return read


def _of_union(readers: list[_Read]) -> _Read:
    def read(value: Any) -> Any:
        failures: list[Exception] = []
        for reader in readers:
            try:
                return reader(value)
            except (_MismatchError, ArtifactError) as error:
                failures.append(error)
        raise failures[0]

    return read


def _of_list(reader: _Read) -> _Read:
    def read(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise _mismatch("a list", value)
        items: list[Any] = []
        try:
            for item in value:
                items.append(reader(item))  # an error is at the position of the next item
        except _MismatchError as wrong:
            wrong.parts.append(len(items))
            raise
        return tuple(items)

    return read


def _of_tuple(readers: list[_Read]) -> _Read:
    def read(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise _mismatch("a list", value)
        if len(value) != len(readers):
            raise _mismatch(f"a list of {len(readers)}", value)
        items: list[Any] = []
        try:
            for reader, item in zip(readers, value, strict=True):
                items.append(reader(item))
        except _MismatchError as wrong:
            wrong.parts.append(len(items))
            raise
        return tuple(items)

    return read


def _of_dict(reader: _Read) -> _Read:
    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _mismatch("an object", value)
        items = {}
        for key, item in value.items():
            name = _text(key)
            try:
                items[name] = reader(item)
            except _MismatchError as wrong:
                wrong.parts.append(name)
                raise
        return items

    return read


def _of_enum(kind: type[enum.StrEnum]) -> _Read:
    members = {str(member): member for member in kind}

    def read(value: Any) -> Any:
        if not isinstance(value, str) or value not in members:
            raise _mismatch(f"one of {', '.join(members)}", value)
        return members[value]

    return read


def _of_type(kind: type) -> _Read:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise _mismatch({"NoneType": "null"}.get(kind.__name__, kind.__name__), value)
        return value

    return read


def _number(value: Any) -> float:
    if type(value) is int and -LARGEST < value < LARGEST:
        return float(value)
    if type(value) is not float:
        raise _mismatch("float", value)
    if not math.isfinite(value):
        raise _mismatch("a finite number", value)
    return value


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise _mismatch("int", value)
    if not -LARGEST < value < LARGEST:
        raise _mismatch("a number below 2**63", value)
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise _mismatch("str", value)
    if not _is_text(value):
        raise _mismatch("text", value)
    return value


def _is_text(value: str) -> bool:
    """Return whether a text can be part of a path. A lone surrogate and NUL cannot.

    Surrogates U+DC80 to U+DCFF can: Python uses them for bytes of a path that the locale cannot decode (PEP 383).
    """
    try:
        return b"\0" not in value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False


def _mismatch(expected: str, value: Any) -> _MismatchError:
    named = expected if " " in expected or expected in ("null", "text") else with_article(expected)
    return _MismatchError(f"expected {named}, found {shown(value)}")
