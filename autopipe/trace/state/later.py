"""The values that a changing place may have at a later step."""

from __future__ import annotations

import contextlib
import decimal
import fractions
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from autopipe.trace.record.containers import CONTAINERS, attributes, entries, length
from autopipe.trace.state.arrays import as_numpy, decoded, is_array, numbers, put_numbers
from autopipe.trace.state.fingerprints import PLAIN, copied_iterator, drawn, fingerprint, is_plain_key, same_value
from autopipe.trace.state.kinds import MOST_ENTRIES, is_users_object
from autopipe.trace.state.places import ByIdentity, put, slots, value_at
from autopipe.trace.state.snapshot import ANY, DRAWN, WHOLE, Place, Snapshot
from autopipe.trace.state.watched import Watched, watched_count

_AHEAD = (1, 10, 100, 1_000, 1_000_000)  # changes ahead; the first is the next value
_DRAWS_AHEAD = (1, 2, 3, 5, *_AHEAD[1:])  # of an iterator, which may repeat a few values
_MOST_VALUES = 16  # values that are tried in one place
_LONGER = 1_000  # entries that are added to a list of numbers or texts
_FEW = 8  # entries that are added to a list of anything else, such as tensors
_DEEPEST = 4  # objects in objects that replace each other

_NUMBERS = (int, float, np.number, np.bool_, decimal.Decimal, fractions.Fraction)

Fingerprint = tuple[Any, ...]
Setter = Callable[[Any], object]


@dataclass
class Changing:
    """A number, an array or a container at a place that changes from run to run, and its later values."""

    place: Place  # the place that changed, with the value in it or below it
    value: Any  # after the last run
    before: Fingerprint  # of the value one run earlier, or () if it is unknown
    set: Setter  # puts another value in the place
    seen: list[int] = field(default_factory=list)  # numbers at which a comparison may turn out differently

    def candidates(self) -> list[Any]:
        """Return later values, in the order in which they are tried."""
        if isinstance(self.value, CONTAINERS):
            return [1, _LONGER]  # entries more
        if isinstance(self.value, np.ndarray):
            return list(_later_arrays(self.value, decoded(self.before) if self.before else None))
        return list(_later_numbers(self.value, self.before, self.seen))

    def watch(self) -> None:
        """Put a number in the place that notes what it is compared with."""
        if type(self.value) is int:
            self.set(Watched(self.value, self.seen))


@dataclass
class Iterating:
    """An ``itertools.count`` or ``cycle`` that forward or loss draw from."""

    place: Place
    iterator: Any
    setters: list[Setter]  # put another iterator in the places that hold this one
    seen: list[int] = field(default_factory=list)
    is_shared: bool = False  # whether something else than these places holds it, or it cannot be copied
    _before: Any = None  # how far it was before a run

    def renew(self) -> None:
        """Put a copy in the places before a run, so that every run draws the same values."""
        self._before = drawn(self.iterator)
        copy = copied_iterator(self.iterator)
        self.is_shared |= copy is None or not self.setters
        if not self.is_shared:
            self._put(copy)

    def ran(self) -> None:
        """Look after a run whether it drew from the iterator itself."""
        self.is_shared |= drawn(self.iterator) != self._before

    def set(self, ahead: int) -> None:
        """Go on to a later value."""
        iterator = self.iterator if self.is_shared else copied_iterator(self.iterator)
        deque(itertools.islice(iterator, ahead), maxlen=0)
        if not self.is_shared:
            self._put(iterator)

    def candidates(self) -> list[Any]:
        """Return numbers of draws, in the order in which they are tried."""
        start, step = _start_and_step(self.iterator)
        ahead = sorted({(number - start) // step for number in self.seen}) if step else []
        return list(dict.fromkeys((*_DRAWS_AHEAD, *(n for n in ahead if 0 < n < _AHEAD[-1]))))[:_MOST_VALUES]

    def watch(self) -> None:
        """Put an iterator in the places whose numbers note what they are compared with."""
        start, step = _start_and_step(self.iterator)
        if step and not self.is_shared:
            self._put(watched_count(start, step, self.seen))

    def _put(self, iterator: Any) -> None:
        for setter in self.setters:
            setter(iterator)


def changing(place: Place, before: Snapshot, last: Snapshot) -> Iterator[Changing | Iterating]:
    """Yield what can be replaced at a place that changed between two snapshots: only what changed in it."""
    owner, key = last.owners[place[0]], place[1]
    then = before.values.get(place, ())
    if key == DRAWN:
        if isinstance(owner, (itertools.count, itertools.cycle)):
            yield Iterating(place, owner, list(_holders(owner, last)))
    elif key == WHOLE:
        if isinstance(owner, CONTAINERS):
            yield Changing(place, owner, then, functools.partial(_lengthen, owner))
    elif key == ANY and is_array(owner):
        yield Changing(place, as_numpy(owner), then, functools.partial(put_numbers, owner))
    else:
        below = _Below(place, before, last)
        yield from below.changing(value_at(owner, key), then, functools.partial(put, owner, key), _DEEPEST)


def changed_entries(place: Place, before: Snapshot, last: Snapshot) -> list[int] | None:
    """Return the indices of the entries of an array that changed (on its first axis), or None for another place."""
    owner, then = last.owners[place[0]], before.values.get(place, ())
    if place[1] != ANY or not is_array(owner) or not then:
        return None
    old, new = decoded(then), as_numpy(owner)
    if old is None or (old.dtype, old.shape) != (new.dtype, new.shape):
        return None
    return sorted({int(index) for index in np.nonzero(_differ(new, old))[0]})


def keeps_a_part(place: Place, before: Snapshot, last: Snapshot) -> bool:
    """Return whether the value at a place has an entry or attribute that did not change, beside those that did."""
    owner, then = last.owners[place[0]], before.values.get(place, ())
    if (indices := changed_entries(place, before, last)) is not None:
        return len(indices) < len(as_numpy(owner))
    value = value_at(owner, place[1])
    below = _Below(place, before, last)
    return any(same_value(fingerprint(entry), below.then(then, key)) for key, entry, _ in below.entries(value))


@dataclass
class _Below:
    """Compares a value with the one before it, entry by entry."""

    place: Place
    before: Snapshot
    last: Snapshot

    def changing(self, now: Any, then: Fingerprint, setter: Setter, depth: int) -> Iterator[Changing]:
        """Yield the numbers in a value that differ from those in the value before. ``setter`` replaces the value."""
        if isinstance(now, _NUMBERS):
            if not same_value(fingerprint(now), then):
                yield Changing(self.place, now, then, setter)
        elif is_array(now):
            if isinstance(now, np.ndarray) and not same_value(numbers(now), then := self.then(then, ANY)):
                yield Changing(self.place, as_numpy(now), then, setter)
        elif depth:
            if isinstance(now, (list, dict, deque)) and id(now) in self.last.owners and length(now) != _length(then):
                yield Changing(self.place, now, then, functools.partial(_lengthen, now))
            for key, entry, put_entry in self.entries(now):
                entry_setter = put_entry or functools.partial(_put_entry, now, key, setter)
                yield from self.changing(entry, self.then(then, key), entry_setter, depth - 1)

    def entries(self, now: Any) -> Iterator[tuple[Any, Any, Setter | None]]:
        """Yield the entries or attributes of a value: key, entry, and what replaces it (None for those of a tuple)."""
        if isinstance(now, tuple):
            yield from ((index, entry, None) for index, entry in enumerate(tuple.__iter__(now)))
        elif id(now) not in self.last.owners:
            return  # the snapshot would not restore it
        elif isinstance(now, (list, dict, deque)):
            for name, entry in list(itertools.islice(entries(now), MOST_ENTRIES)):
                key = name if is_plain_key(name) else ByIdentity(name)
                yield key, entry, functools.partial(put, now, key)
        elif is_users_object(now) and not isinstance(now, nn.Module):
            for name, entry in {**(attributes(now) or {}), **slots(now)}.items():
                yield name, entry, functools.partial(put, now, name)

    def then(self, then: Fingerprint, key: Any) -> Fingerprint:
        """Return the fingerprint of an entry or attribute of an earlier value, or () if it is unknown."""
        if len(then) == 3:  # a tuple of plain values
            return fingerprint(then[2][key]) if type(key) is int and key < len(then[2]) else ()
        return self.before.values.get((id(then[1]), key), ()) if then[:1] == ("is",) else ()


def _length(then: Fingerprint) -> int:
    """Return the length of an earlier list or dict, or -1 if it is unknown. It may have changed since."""
    return length(then[1]) if then[:1] == ("is",) and isinstance(then[1], (list, dict, deque)) else -1


def _put_entry(entries: Any, index: int, setter: Setter, value: Any) -> None:
    """Replace a tuple by one with another entry."""
    setter(tuple.__new__(type(entries), (*entries[:index], value, *entries[index + 1 :])))


# --- numbers ----------------------------------------------------------------------------------------------------------


def _later_numbers(value: Any, before: Fingerprint, seen: list[int]) -> Iterator[Any]:
    """Yield later values of a number, of its own type; those that the type cannot hold are left out."""
    if isinstance(value, (bool, np.bool_)):
        yield type(value)(not value)
        return
    now = value.item() if isinstance(value, np.generic) else value
    step = _step(now, before)
    later = []
    for many in _AHEAD:
        try:
            later.append(now + step * many)
        except (ArithmeticError, TypeError):
            continue
    if isinstance(value, np.integer):  # a narrow counter ends soon, and begins again at the other end
        limits = np.iinfo(value.dtype)
        later = [n for n in later if limits.min <= n <= limits.max]
        later += [int(limits.max), int(limits.min)] if len(later) < len(_AHEAD) else []
    later += sorted({number for number in seen if (number - now) * step > 0}, key=lambda n: abs(n - now))
    for number in list(dict.fromkeys(later))[:_MOST_VALUES]:
        kept = None
        with np.errstate(all="ignore"), contextlib.suppress(Exception):  # of an enumeration, or a class of the user
            kept = type(value)(number)
        if kept is None:
            continue
        if not isinstance(number, float) or math.isfinite(float(kept)) or not math.isfinite(now):
            yield kept


def _step(now: Any, before: Fingerprint) -> Any:
    """Return the change of a number since its earlier fingerprint, or 1 if that is unknown."""
    then = _decoded_number(before)
    if then is None:
        return 1
    try:
        step = now - then
        return step if step and math.isfinite(step) else 1
    except (ArithmeticError, TypeError):
        return 1


def _decoded_number(before: Fingerprint) -> Any:
    """Return the number that a fingerprint describes, or None."""
    if before[:1] == ("is",):
        return before[1]  # a number of another class
    if not before or len(before) != 2:
        return None
    if len(before[1]) == 3:
        array = decoded(before)
        return None if array is None else array.reshape(-1)[0].item()
    kind, content = before[1]
    return kind(content) if kind in (int, float) else None


def _later_arrays(now: Any, then: Any) -> Iterator[Any]:
    """Yield later contents of an array: of the entries that changed, in steps of their last change."""
    kind, flat = now.dtype.kind, now.reshape(-1)
    if kind not in "biuf":
        return
    if then is None or (then.dtype, then.shape) != (now.dtype, now.shape):
        places, steps = np.arange(now.size), [1] * now.size
    else:
        places = np.flatnonzero(_differ(flat, then.reshape(-1)))
        exact: Any = float if kind == "f" else int
        steps = [exact(new) - exact(old) for new, old in zip(flat[places], then.reshape(-1)[places], strict=True)]
    for many in (1,) if kind == "b" else _AHEAD:
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


def _differ(new: Any, old: Any) -> Any:
    """Return where the bytes of two arrays of the same type differ, so that NaN is equal to NaN."""
    entry = np.dtype((np.void, new.dtype.itemsize))
    return np.ascontiguousarray(new).view(entry) != np.ascontiguousarray(old).view(entry)


# --- iterators and containers -----------------------------------------------------------------------------------------


def _holders(iterator: Any, last: Snapshot) -> Iterator[Setter]:
    """Yield functions that replace an iterator in the places that hold it, or its ``__next__``."""
    for (owner, key), kept in last.values.items():
        if kept[:1] != ("is",) or owner not in last.owners or isinstance(last.owners[owner], tuple):
            continue
        if kept[1] is iterator:
            yield functools.partial(put, last.owners[owner], key)
        elif getattr(kept[1], "__self__", None) is iterator:
            yield functools.partial(_put_next, last.owners[owner], key)


def _put_next(owner: Any, key: Any, iterator: Any) -> None:
    put(owner, key, iterator.__next__)


def _start_and_step(iterator: Any) -> tuple[int, int]:
    """Return the next number of an ``itertools.count`` of integers, and its step; (0, 0) of any other iterator."""
    copy = copied_iterator(iterator) if isinstance(iterator, itertools.count) else None
    if copy is None:
        return 0, 0
    start = next(copy)
    step = next(copy) - start
    return (start, step) if type(start) is int and type(step) is int else (0, 0)


def _lengthen(container: Any, many: int) -> None:
    """Add copies of the last entry to a container."""
    if isinstance(container, (list, deque)):
        base: Any = list if isinstance(container, list) else deque
        last = container[-1] if container else None
        base.extend(container, [last] * (many if type(last) in PLAIN else min(many, _FEW)))
    elif isinstance(container, set):
        set.update(container, _unused(many))
    else:
        entry = next(reversed(dict.values(container)), None)
        dict.update(container, dict.fromkeys(_unused(many), entry))


def _unused(many: int) -> Iterator[int]:
    """Return numbers that are probably not a key yet."""
    return iter(range(2**40, 2**40 + many))


__all__ = ["Changing", "Iterating", "changing"]
