"""``Finding``: the result of one check before a run, and the fix for a problem."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    state: str  # ok, note (nothing has to be done), or problem
    detail: str = field(metadata={"key": "found"})  # under this key in the document of ``doctor``
    fix: str = ""  # for a problem
    host: str = ""  # "": this machine
