"""``Finding``: one thing that was looked at before a run, and the fix where it is wrong."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """``state``: ok, note (nothing has to be done), or problem, which has a ``fix``. ``host`` "": this machine."""

    name: str
    state: str
    found: str
    fix: str = ""
    host: str = ""
