"""The values that a changing place may have at a later step."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from autopipe.trace.record.containers import CONTAINERS, attributes, entries, length
from autopipe.trace.state.snapshots.arrays import as_numpy, decoded, is_array, numbers, put_numbers
from autopipe.trace.state.snapshots.fingerprints import (
    PLAIN,
    copied_iterator,
    drawn,
    fingerprint,
    is_plain_key,
    same_value,
)
from autopipe.trace.state.snapshots.kinds import MOST_ENTRIES, is_users_object
from autopipe.trace.state.snapshots.places import ByIdentity, put, slots, value_at
from autopipe.trace.state.snapshots.snapshot import ANY, DRAWN, WHOLE, Place, Snapshot
from autopipe.trace.state.trying.values import (
    AHEAD,
    GROWING,
    LONGER,
    MOST_VALUES,
    NUMBERS,
    Fingerprint,
    cast,
    differ,
    is_number_text,
    later_arrays,
    later_numbers,
    later_texts,
    longer,
    step_of,
    unused,
)
from autopipe.trace.state.trying.watched import watched, watched_count

_DRAWS_AHEAD = (1, 2, 3, 5, *AHEAD[1:])  # of an iterator, which may repeat a few values
_FEW = 8  # entries that are added to a list of anything else, such as tensors
_DEEPEST = 6  # objects in objects that replace each other

Setter = Callable[[Any], object]


@dataclass
class Changing:
    """A number, an array or a container at a place that changes from run to run, and its later values."""

    place: Place  # the place that changed, with the value in it or below it
    value: Any  # after the last run
    before: Fingerprint  # of the value one run earlier, or () if it is unknown
    set: Setter  # puts another value in the place
    seen: list[Any] = field(default_factory=list)  # numbers at which a comparison may turn out differently

    def candidates(self) -> list[Any]:
        """Return later values, in the order in which they are tried."""
        is_lengthened_set = isinstance(self.value, set) and self.place[1] == WHOLE
        if is_lengthened_set or isinstance(self.value, (list, dict, deque)):
            more = sorted({number - length(self.value) for number in self.seen})
            return [1, LONGER, *(n for n in more if 1 < n < LONGER)][:MOST_VALUES]  # entries more
        if isinstance(self.value, np.ndarray):
            return list(later_arrays(self.value, decoded(self.before) if self.before else None))
        if is_number_text(self.value):
            return [*later_texts(self.value, self.before, self.seen), longer(self.value)]
        if isinstance(self.value, GROWING):
            return [longer(self.value)]
        return list(later_numbers(self.value, self.before, self.seen))

    def between(self, last: Any, first: Any) -> Any:
        """Return the integer midway between two others, in the type of the value; None if they are adjacent."""
        middle = (int(last) + int(first)) // 2
        return None if middle in (int(last), int(first)) else next(cast(self.value, [middle]), None)

    def watch(self, constants: Sequence[int], in_c: Sequence[Any] = ()) -> None:
        """Put a number in the place that notes what it is compared with.

        ``constants``: numbers in the code, with which the length of a container or the number in a text is compared;
        ``in_c``: numbers with which a function of C may compare a number, which does not note it.
        """
        value = self.value.item() if isinstance(self.value, np.number) else self.value
        if type(value) in (int, float):
            step = step_of(value, self.before)
            near = (number for constant in in_c for number in (constant, constant - step))  # before and after the step
            self.seen.extend(number for number in near if type(value) is float or type(number) is int)
            self.set(watched(value, self.seen))
        elif isinstance(value, (*CONTAINERS, str, bytes)):
            self.seen.extend(near for constant in constants for near in (constant, constant + 1))


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
        return list(dict.fromkeys((*_DRAWS_AHEAD, *(n for n in ahead if 0 < n < AHEAD[-1]))))[:MOST_VALUES]

    def watch(self, constants: Sequence[int], in_c: Sequence[Any] = ()) -> None:
        """Put an iterator in the places whose numbers note what they are compared with."""
        start, step = _start_and_step(self.iterator)
        if step and not self.is_shared:
            self._put(watched_count(start, step, self.seen))

    def _put(self, iterator: Any) -> None:
        for setter in self.setters:
            setter(iterator)


@dataclass
class _Slot:
    """An entry or attribute of an object."""

    owner: Any
    key: Any
    around: _Slot | None = None  # what holds the tuple that has this entry

    def value(self) -> Any:
        """Return the present value."""
        return value_at(self.owner if self.around is None else self.around.value(), self.key)

    def put(self, value: Any) -> None:
        """Replace the value. A tuple is replaced by one with another entry."""
        if self.around is None:
            put(self.owner, self.key, value)
        else:
            present = self.around.value()
            others = list(tuple.__iter__(present))
            others[self.key] = value
            self.around.put(tuple.__new__(type(present), others))


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
        yield from below.changing(_Slot(owner, key), then, _DEEPEST)


def changed_entries(place: Place, before: Snapshot, last: Snapshot) -> list[int] | None:
    """Return the indices of the entries of an array that changed (on its first axis), or None for another place."""
    owner, then = last.owners[place[0]], before.values.get(place, ())
    if place[1] != ANY or not is_array(owner) or not then:
        return None
    old, new = decoded(then), as_numpy(owner)
    if old is None or (old.dtype, old.shape) != (new.dtype, new.shape):
        return None
    return sorted({int(index) for index in np.nonzero(differ(new, old))[0]})


def keeps_a_part(place: Place, before: Snapshot, last: Snapshot) -> bool:
    """Return whether the value at a place has an entry or attribute that did not change, beside those that did."""
    owner, then = last.owners[place[0]], before.values.get(place, ())
    if (indices := changed_entries(place, before, last)) is not None:
        return len(indices) < len(as_numpy(owner))
    below = _Below(place, before, last)
    entries_before = ((slot.value(), below.then(then, slot.key)) for slot in below.slots(_Slot(owner, place[1])))
    return any(same_value(fingerprint(entry), entry_before) for entry, entry_before in entries_before)


@dataclass
class _Below:
    """Compares a value with the one before it, entry by entry."""

    place: Place
    before: Snapshot
    last: Snapshot

    def changing(self, slot: _Slot, then: Fingerprint, depth: int) -> Iterator[Changing]:
        """Yield the numbers in a value that differ from those in the value before."""
        now = slot.value()
        if isinstance(now, NUMBERS):
            if not same_value(fingerprint(now), then):
                yield Changing(self.place, now, then, slot.put)
        elif is_array(now):
            if isinstance(now, np.ndarray) and not same_value(numbers(now), then := self.then(then, ANY)):
                yield Changing(self.place, as_numpy(now), then, slot.put)
        elif depth:
            if type(now) in GROWING and (len(now) != _length(then) or _counts(now, then)):
                yield Changing(self.place, now, then, slot.put)
            if isinstance(now, (list, dict, deque)) and id(now) in self.last.owners and length(now) != _length(then):
                yield Changing(self.place, now, then, functools.partial(_lengthen, now))
            for below in self.slots(slot):
                yield from self.changing(below, self.then(then, below.key), depth - 1)

    def slots(self, slot: _Slot) -> Iterator[_Slot]:
        """Yield the entries or attributes of a value."""
        now = slot.value()
        if isinstance(now, tuple):
            yield from (_Slot(now, index, slot) for index in range(length(now)))
        elif id(now) not in self.last.owners:
            return  # the snapshot would not restore it
        elif isinstance(now, (list, dict, deque)):
            names = [name for name, _ in itertools.islice(entries(now), MOST_ENTRIES)]
            yield from (_Slot(now, name if is_plain_key(name) else ByIdentity(name)) for name in names)
        elif is_users_object(now) and not isinstance(now, nn.Module):
            yield from (_Slot(now, name) for name in {**(attributes(now) or {}), **slots(now)})

    def then(self, then: Fingerprint, key: Any) -> Fingerprint:
        """Return the fingerprint of an entry or attribute of an earlier value, or () if it is unknown."""
        if len(then) == 3:  # a tuple of plain values
            return fingerprint(then[2][key]) if type(key) is int and key < len(then[2]) else ()
        return self.before.values.get((id(then[1]), key), ()) if then[:1] == ("is",) else ()


def _counts(now: Any, then: Fingerprint) -> bool:
    """Return whether a text of a number is another than before."""
    return is_number_text(now) and not same_value(fingerprint(now), then)


def _length(then: Fingerprint) -> int:
    """Return the length of an earlier text or container, or -1 if it is unknown. A container may have changed since."""
    if len(then) == 3:  # a tuple of plain values
        return len(then[2])
    if then[:1] == ("is",) and isinstance(then[1], (*CONTAINERS, tuple, frozenset)):
        return length(then[1]) if not isinstance(then[1], frozenset) else len(then[1])
    return len(then[1][1]) if len(then) == 2 and then[0] == "==" and then[1][0] in (str, bytes) else -1


# --- iterators and containers -----------------------------------------------------------------------------------------


def _holders(iterator: Any, last: Snapshot) -> Iterator[Setter]:
    """Yield functions that replace an iterator in the places that hold it, or its ``__next__``."""
    for owner, key in holding(iterator, last):
        if owner not in last.owners or isinstance(last.owners[owner], tuple):
            continue
        setter = put if last.values[owner, key][1] is iterator else _put_next
        yield functools.partial(setter, last.owners[owner], key)


def holding(iterator: Any, last: Snapshot) -> Iterator[Place]:
    """Yield the places that hold an iterator, or its ``__next__``."""
    for place, kept in last.values.items():
        if kept[:1] == ("is",) and (kept[1] is iterator or getattr(kept[1], "__self__", None) is iterator):
            yield place


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
        set.update(container, unused(many))
    else:
        entry = next(reversed(dict.values(container)), None)
        dict.update(container, dict.fromkeys(unused(many), entry))


__all__ = ["Changing", "Iterating", "changing", "holding"]
