"""Later values of numbers, arrays, texts, tuples and sets."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import fractions
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from autopipe.trace.state.snapshots.arrays import decoded

AHEAD = (1, 10, 100, 1_000, 1_000_000)  # changes ahead; the first is the next value
MOST_VALUES = 24  # values that are tried in one place
LONGER = 1_000  # entries that are added to a list of numbers or texts
NUMBERS = (
    *(int, float, complex, np.number, np.bool_, decimal.Decimal, fractions.Fraction),
    *(datetime.date, datetime.timedelta),
)
_DIGITS = 16  # of a text that is a number
GROWING = (str, bytes, tuple, frozenset, set)  # values that are replaced by longer ones

Fingerprint = tuple[Any, ...]


def later_numbers(value: Any, before: Fingerprint, seen: list[Any]) -> Iterator[Any]:
    """Yield later values of a number, of its own type; those that the type cannot hold are left out."""
    if isinstance(value, (bool, np.bool_)):
        yield type(value)(not value)
        return
    now = value.item() if isinstance(value, np.generic) else value
    step = step_of(now, before)
    later = []
    for many in AHEAD:
        try:
            later.append(now + step * many)
        except (ArithmeticError, TypeError):
            continue
    if isinstance(value, np.integer):  # a narrow counter ends soon, and begins again at the other end
        limits = np.iinfo(value.dtype)
        later = [n for n in later if limits.min <= n <= limits.max]
        later += [int(limits.max), int(limits.min)] if len(later) < len(AHEAD) else []
    if seen:
        later += sorted({number for number in seen if (number - now) * step > 0}, key=lambda n: abs(n - now))
    yield from cast(value, list(dict.fromkeys(later))[:MOST_VALUES])


def cast(value: Any, candidates: list[Any]) -> Iterator[Any]:
    """Yield numbers as the type of a value, except those that the type cannot hold."""
    for number in candidates:
        kept = None
        with np.errstate(all="ignore"), contextlib.suppress(Exception):  # of an enumeration, or a class of the user
            kept = number if type(number) is type(value) else type(value)(number)
        if kept is not None and not (isinstance(number, float) and not math.isfinite(float(kept))):
            yield kept


def step_of(now: Any, before: Fingerprint) -> Any:
    """Return the change of a number since its earlier fingerprint, or 1 if that is unknown."""
    then = _decoded_number(before)
    if then is None:
        return 1
    try:
        step = now - then
        return step if step and not (isinstance(step, float) and not math.isfinite(step)) else 1
    except (ArithmeticError, TypeError):
        return 1


def _decoded_number(before: Fingerprint) -> Any:
    """Return the number that a fingerprint describes, or None."""
    if before[:1] == ("is",):
        return before[1] if isinstance(before[1], NUMBERS) else None  # a number of another class
    if not before or len(before) != 2:
        return None
    if len(before[1]) == 3:
        array = decoded(before)
        return None if array is None else array.reshape(-1)[0].item()
    kind, content = before[1]
    return kind(content) if kind in (int, float, complex) else None


def later_arrays(now: Any, then: Any) -> Iterator[Any]:
    """Yield later contents of an array: of the entries that changed, in steps of their last change."""
    kind, flat = now.dtype.kind, now.reshape(-1)
    if kind not in "biuf":
        return
    if then is None or (then.dtype, then.shape) != (now.dtype, now.shape):
        places, steps = np.arange(now.size), [1] * now.size
    else:
        places = np.flatnonzero(differ(flat, then.reshape(-1)))
        exact: Any = float if kind == "f" else int
        steps = [exact(new) - exact(old) for new, old in zip(flat[places], then.reshape(-1)[places], strict=True)]
    for many in (1,) if kind == "b" else AHEAD:
        later = flat.copy()
        if kind == "b":
            later[places] = ~flat[places]
        elif kind == "f":
            with np.errstate(all="ignore"):
                later[places] = [float(n) + s * many for n, s in zip(flat[places], steps, strict=True)]
        else:
            limits = np.iinfo(now.dtype)
            ahead = (int(n) + s * many for n, s in zip(flat[places], steps, strict=True))
            later[places] = [min(max(n, int(limits.min)), int(limits.max)) for n in ahead]
        if kind != "f" or np.isfinite(later[places]).all():
            yield later.reshape(now.shape)


def differ(new: Any, old: Any) -> Any:
    """Return where the bytes of two arrays of the same type differ, so that NaN is equal to NaN."""
    entry = np.dtype((np.void, new.dtype.itemsize))
    return np.ascontiguousarray(new).view(entry) != np.ascontiguousarray(old).view(entry)


def is_number_text(value: Any) -> bool:
    """Return whether a value is a text of a whole number."""
    return type(value) in (str, bytes) and value.isdigit() and len(value) < _DIGITS


def later_texts(value: Any, before: Fingerprint, seen: list[Any]) -> Iterator[Any]:
    """Yield later values of the text of a whole number."""
    then = before[1][1] if len(before) == 2 and type(before[1]) is tuple and is_number_text(before[1][-1]) else None
    earlier = ("==", (int, int(then))) if then is not None else ()
    for number in later_numbers(int(value), earlier, seen):
        yield str(number) if type(value) is str else str(number).encode()


def longer(value: Any) -> Any:
    """Return a text, tuple or set with more entries."""
    if isinstance(value, (set, frozenset)):
        return value | set(unused(LONGER))
    return value + value[-1:] * LONGER


def unused(many: int) -> Iterator[int]:
    """Return numbers that are probably not a key yet."""
    return iter(range(2**40, 2**40 + many))


__all__ = [
    "AHEAD",
    "GROWING",
    "LONGER",
    "MOST_VALUES",
    "NUMBERS",
    "Fingerprint",
    "cast",
    "differ",
    "is_number_text",
    "later_arrays",
    "later_numbers",
    "later_texts",
    "longer",
    "step_of",
    "unused",
]
