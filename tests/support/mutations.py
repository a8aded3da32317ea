"""Damage to documents: structured changes of a JSON or TOML value, and changes of the bytes of a file.

Everything is drawn by hypothesis, so that failures are minimized and reproduced.
"""

from __future__ import annotations

import copy
import json
import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

# `make fuzz` sets more
EXAMPLES = int(os.environ.get("AUTOPIPE_FUZZ_EXAMPLES", "60"))
FUZZING = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


STRANGE: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, -(2**63) - 1, 10**30, 0.5, -0.5, 1e308, -1e308, float("nan"),
    float("inf"), 5e-324, "", "x", "-1", "1", "s0", "s0*s0", "9**9**9", "s0//0", "((((", "../../etc/passwd",
    "/etc/passwd", "a\x00b", "\ud800", "\N{SNOWMAN}" * 9, "$(touch x)", "'; touch x;", "\n", [], {}, [[]], {"": {}},
    [None], nested(60), "float32", "1f1b", "2bw", "cuda", "cpu",
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return every position in a document except its root."""
    paths: list[tuple[Any, ...]] = []
    entries: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        entries = list(value.items())
    elif isinstance(value, list):
        entries = list(enumerate(value))
    for key, entry in entries:
        paths += [(*path, key), *places(entry, (*path, key))]
    return paths


def parent(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        document = document[key]
    return document


@st.composite
def mutated(draw: st.DrawFn, document: Any) -> Any:
    """Draw a document with one to three changes."""
    changed = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        known = places(changed)
        if not known:
            break
        path = draw(st.sampled_from(known))
        holder, key = parent(changed, path), path[-1]
        kind = draw(st.sampled_from(["drop", "replace", "replace", "nudge", "swap", "repeat", "rename", "add"]))
        if kind == "drop":
            del holder[key]
        elif kind == "replace":
            holder[key] = copy.deepcopy(draw(st.sampled_from(STRANGE)))
        elif kind == "nudge":
            holder[key] = nudged(draw, holder[key])
        elif kind == "swap":
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            other = draw(st.sampled_from(keys))
            holder[key], holder[other] = holder[other], holder[key]
        elif kind == "repeat" and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        elif kind == "rename" and isinstance(holder, dict):
            holder[draw(st.sampled_from(["", "x", key + "s", key.upper()]))] = holder.pop(key)
        elif kind == "add" and isinstance(holder, dict):
            holder[draw(st.text(max_size=5))] = copy.deepcopy(draw(st.sampled_from(STRANGE)))
    return changed


def nudged(draw: st.DrawFn, value: Any) -> Any:
    """Draw a value slightly different from the given one, as by a typo or a single bit."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return draw(st.sampled_from([value + 1, value - 1, -value, value * 2, value * 10**20, 0]))
    if isinstance(value, str):
        return draw(st.sampled_from([value + "x", value[1:], value.upper(), value * 2, value[::-1]]))
    return value


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Draw the bytes of a file with one to four changes."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        kind = draw(st.sampled_from(["truncate", "flip", "insert", "remove", "copy"]))
        if kind == "truncate":
            data = data[:at]
        elif kind == "flip" and data:
            data = data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :]
        elif kind == "insert":
            data = data[:at] + draw(st.binary(min_size=1, max_size=4)) + data[at:]
        elif kind == "remove":
            data = data[:at] + data[at + draw(st.integers(1, 40)) :]
        elif kind == "copy":
            data = data[:at] + data[at : at + draw(st.integers(1, 80))] + data[at:]
    return data


def as_json(document: Any) -> bytes:
    """Return the JSON text of a document, which may contain NaN."""
    return json.dumps(document).encode("utf-8")
