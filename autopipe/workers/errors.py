"""Errors between two processes, as JSON: an error of the other process is raised here as it was raised there."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from autopipe.errors import AutopipeError, InternalError
from autopipe.workload.users_errors import error_of_users_code


class OtherProcessError(Exception):
    """The cause of an error that another process raised. Its text is the traceback there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def described(error: BaseException) -> dict[str, Any]:
    """Return an error as JSON values. One that is not autopipe's becomes the user's, of its line, or an internal one.

    An OSError keeps its number, by which the command chooses the remedy.
    """
    text = "".join(traceback.format_exception(error))
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, BrokenPipeError):
        path = None if error.filename is None else str(error.filename)
        return {"type": "OSError", "fields": [error.errno, error.strerror, path], "traceback": text}
    if not isinstance(error, AutopipeError):
        message = f"{type(error).__name__}: {error}"
        error = error_of_users_code(error) or InternalError(message)
    fields = {name: value for name, value in vars(error).items() if _is_json(value)}
    return {"type": type(error).__name__, "message": str(error.args[0]), "fields": fields, "traceback": text}


def restored(description: Mapping[str, Any]) -> Exception:
    """Return the error that ``described`` described, with the traceback of the other process as its cause."""
    error: Exception
    if description["type"] == "OSError":
        number, reason, path = description["fields"]
        error = OSError(number, reason, path)
    else:
        kind = {kind.__name__: kind for kind in _kinds(AutopipeError)}[description["type"]]
        error = kind.__new__(kind, description["message"])
        vars(error).update(description["fields"])
    error.__cause__ = OtherProcessError(description["traceback"])
    return error


def _kinds(kind: type[AutopipeError]) -> Iterator[type[AutopipeError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
