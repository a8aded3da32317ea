"""The known calls of forward and loss: a tree, because runs that begin alike have their first calls in common."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable
from typing import Any

from torch import Tensor

from autopipe.trace.record.fixed import NOT_FIXED
from autopipe.trace.record.running import Running
from autopipe.trace.tape.keys import Key

_MOST_RUNS, _MOST_FORMS = 64, 128


class Entry:
    """One known call, or the beginning.

    ``next``: the calls that have followed it; ``ends``: what the runs returned that ended here.
    """

    __slots__ = ("again", "answer", "buffers", "call", "changed", "draws", "ends", "error", "form", "forms", "inner",
                 "is_node", "is_sized", "key", "moves", "name", "next", "nodes", "num_runs", "origin", "parent",
                 "results")  # fmt: skip

    def __init__(self, key: Key = (), name: str = "") -> None:
        self.key, self.name = key, name
        self.next: dict[Key, Entry] = {}
        # with the calls of the backward pass, and what names the stage code that does the same
        self.ends: dict[Hashable, tuple[list[Any], Any]] = {}
        self.parent: Entry | None = None  # the call before it
        self.answer: Any = NOT_FIXED  # of a read: the number that depends on nothing but constants
        self.error: type[Exception] | None = None  # of the exception that it raised
        self.form: Any = None  # of what it returned
        self.forms: Any = None  # with a number that changes: of its results, and how many numbers it draws
        self.results: list[Tensor] = []  # the new tensors among it
        self.changed: tuple[int, ...] = ()  # places of the tensors that it wrote to
        self.draws = 0  # random numbers of torch: how often it drew
        self.nodes: tuple[dict[str, Any], ...] = ()  # metadata of the nodes that it became
        self.is_node = False  # whether it became a node of the graph
        self.is_sized = False  # sizes of its results depend on the data
        self.again = False  # it runs on fakes each time
        self.moves = False  # its fakes know their numbers, which a number that changes gives
        self.inner: list[Any] | None = None  # of a function of the user's own: the calls in it
        self.origin: tuple[Hashable, ...] | None = None  # identifies its result, if it depends on constants only
        self.buffers: frozenset[str] = frozenset()  # of the model among these constants
        self.num_runs = 0  # of the beginning: recorded runs that began here
        self.call: Running | None = None  # with an ``origin``: how its result is made


class Roots(dict[Hashable, Entry]):
    """The beginnings of the known calls by the form of the inputs: of 128 forms, each with at most 64 endings."""

    def of(self, form: Hashable) -> Entry:
        """Return the beginning for a form: a new one, if that is new or has too many calls."""
        if form not in self or self[form].num_runs > _MOST_RUNS:
            if len(self) >= _MOST_FORMS:
                del self[next(iter(self))]
            self[form] = Entry()
        return self[form]


class Origins:
    """The tensors that depend on nothing but constants, whatever run has made them."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Tensor], Entry]] = {}
        self._buffers: dict[Hashable, frozenset[str]] = {}  # by what identifies a tensor, see ``Entry.buffers``
        self.written: set[str] = set()  # buffers that something writes: they are no constants

    def add(self, value: Tensor, entry: Entry) -> None:
        """Note what has made a tensor, as long as it lives."""
        number = id(value)
        self._entries[number] = weakref.ref(value, lambda _: self._entries.pop(number, None)), entry

    def identify(self, entry: Entry, buffers: Collection[str]) -> None:
        """Note a call whose result depends on nothing but constants, ``buffers`` among them."""
        assert entry.origin is not None, "its result is identified"
        names = [part[0] for part in entry.origin if isinstance(part, tuple) and part and part[0] in buffers]
        entry.buffers = frozenset(names).union(*(self._buffers.get(part, ()) for part in entry.origin))
        if entry.buffers:
            self._buffers[entry.origin] = entry.buffers
        self.add(entry.results[0], entry)

    def entry(self, value: Tensor) -> Entry | None:
        """Return the call that has made a tensor; None if it depends on a batch, on state or on random numbers."""
        reference, entry = self._entries.get(id(value), (None, None))
        if entry is None or reference is None or reference() is not value:
            return None
        return None if entry.origin is None or self.written & entry.buffers else entry

    def identity(self, value: Tensor) -> Hashable:
        """Return what identifies the content of a tensor, or None."""
        entry = self.entry(value)
        return None if entry is None else entry.origin
