"""Refuse a model whose forward, loss or data hook changes Python state that a forward or loss reads."""

from __future__ import annotations

import contextlib
import io
import itertools
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from autopipe import draws
from autopipe.errors import AutopipeError, TraceError
from autopipe.trace.explain import failed_on_real_numbers
from autopipe.trace.record.model_snapshot import BufferSnapshot, left_as_it_was
from autopipe.trace.state.between import refuse_data, refuse_hooks, refuse_reading_hooks
from autopipe.trace.state.counts import refuse_counts
from autopipe.trace.state.drawing import refuse_later_items
from autopipe.trace.state.observing.bytecode import constants
from autopipe.trace.state.observing.files import POSITION, watched_files
from autopipe.trace.state.observing.observe import Ran, observed, refuse_seed
from autopipe.trace.state.observing.reach import named, reached, roots
from autopipe.trace.state.reading.source import Access, Key, Reader, is_helper, meets, owner_key, read_by_torch, readers
from autopipe.trace.state.refusal import DRAW, FORWARD, KEEP, refuse
from autopipe.trace.state.snapshots.fingerprints import GENERATORS, ITERATORS
from autopipe.trace.state.snapshots.places import Unusable, put, value_at
from autopipe.trace.state.snapshots.settings import OF_RESULTS, SETTINGS
from autopipe.trace.state.snapshots.snapshot import DRAWN, Place, Snapshot
from autopipe.trace.state.trying.later import changed_entries, keeps_a_part
from autopipe.trace.state.trying.probe import Probe
from autopipe.trace.state.trying.writer import writing_line
from autopipe.users_code import is_package
from autopipe.workload import Item, Workload
from autopipe.workload.batches.layouts import copied_item
from autopipe.workload.model.placeholders import has_placeholders

_ENOUGH = 4  # samples; a half of them is a batch of more than one sample
_MOST_PLACES = 64  # changed places that are searched for in the source
_MOST_NAMES = 3
_COPIED = (itertools.count, itertools.cycle)  # iterators whose later values can be tried
_NOT_TRIED = (
    "not known whether the loss depends on later values of {}: a forward with them takes too long or ends the run"
)


def refuse_changing_state(
    workload: Workload,
    model: nn.Module,
    item: Item,
    data: dict[types.CodeType, Ran] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> tuple[str, ...]:
    """Run forward and loss a few times, and refuse state that they change and read. The model is restored.

    ``data``: the functions that ran when the batch was created. ``settings``: those of the process before the model
    first ran. Returns notes for the user.

    Raises: TraceError with the state, the line that writes it and the line that reads it.
    """
    hooks = workload.functions() if hasattr(workload, "functions") else {}
    halves = workload.num_samples(item) >= _ENOUGH and not workload.is_fixed(item)
    SETTINGS.restore({name: value for name, value in (settings or {}).items() if name in OF_RESULTS})
    parts, is_large = [workload.split(item, 2)[-1], item] if halves else [item], has_placeholders(model)
    tries = [(part, is_large) for part in parts]
    tries += [(item, False)] if is_large else []  # it may run a backward in its forward
    for number, (part, drops_saved) in enumerate(tries, 1):
        look = Look(workload, model, part, hooks, _drops_saved=drops_saved)
        with look.restored(compared=True) as before:
            try:
                second, last = look.run_until_filled(before)
            except AutopipeError:
                raise
            except Exception as error:
                if number == len(tries):
                    raise failed_on_real_numbers("the model itself failed", error) from error
                continue  # it may fail with few samples only
            look.refuse_set(before, last)
            varies = getattr(workload, "varies", False)  # its Python runs for each microbatch, in one process
            look.refuse_files(shared=varies)
            if varies:
                refuse_reading_hooks(look, last, data or {})
                break
            look.refuse_changes(second, last)
            refuse_counts(look, last)
            refuse_hooks(look, last)
            refuse_data(look, last, data or {})
            refuse_later_items(look)
            break
    return tuple(look.notes)


@dataclass
class Look:
    """Runs a model on one batch and compares the Python state before and after each run."""

    workload: Workload
    model: nn.Module
    item: Item
    hooks: dict[str, Any]
    ran: dict[types.CodeType, Ran] = field(default_factory=dict)  # user functions that run in forward and loss
    has_generator: bool = False  # they can reach a torch generator other than the global one
    notes: list[str] = field(default_factory=list)  # messages for the user
    _accesses: list[tuple[Reader, Access]] | None = None
    _files: dict[str, str] = field(default_factory=dict)  # that every run changes and reads, with the changing line
    loss: Tensor | None = None  # of the first run, if it has changed neither state nor buffers
    _loss: Tensor | None = None  # of the last run
    _drops_saved: bool = False  # whether nothing is kept for a backward
    _buffers: BufferSnapshot = field(init=False)  # before the first run
    _met: Snapshot = field(default_factory=Snapshot)  # of what only functions reach, before the first of them ran

    def snapshot(self) -> Snapshot:
        """Take a snapshot of what the model, the loss, the user's modules and the recorded functions reach."""
        snapshot = Snapshot.of(self._roots())
        snapshot.extend(root for ran in self.ran.values() for root in named(ran))
        self.has_generator |= snapshot.has_generator()
        return snapshot

    @contextlib.contextmanager
    def restored(self, *, compared: bool = False) -> Iterator[Snapshot]:
        """Restore model, loss and the user's modules after the block. Yields the snapshot before it."""
        with left_as_it_was(self.model) as self._buffers:
            before = Snapshot.of(self._roots(), compared=compared)
            self.has_generator |= before.has_generator()
            try:
                yield before
            finally:
                self._met.restore()
                before.restore()

    def _roots(self) -> Iterator[tuple[str, Any]]:
        return roots(self.model, self.hooks, self.ran.values())

    def run_until_filled(self, before: Snapshot) -> tuple[Snapshot, Snapshot]:
        """Run the batch until caches are filled; return the snapshots after the last two runs.

        A run that changes nothing is the last one, because the next would start from the same state. There are at most
        three. ``before``: the snapshot before the first run. State that only newly discovered functions reach is
        recorded when the first run is about to call them.
        """
        met = self._met = Snapshot()

        def meet(ran: Ran) -> None:
            met.extend(reached(ran), before)

        with watched_files() as files:
            loss = observed(lambda: self.run(self.item), self.ran, meet, refuse_seed)
        last = self.snapshot()
        if not last.changed_since(before, met) and not files.carried():
            self.loss = loss if self._buffers.are_unchanged() else None
            return last, last
        for _ in range(2):
            with watched_files() as files:
                self._loss = self.run(self.item)
            second, last = last, self.snapshot()
            if not last.changed_since(second) and not files.carried():
                return last, last
        self._files = files.carried()
        return second, last

    def run(self, item: Item) -> Tensor:
        """Return the loss of a batch."""
        item = copied_item(item)
        with draws.flat_checkpoints(), self._seeded(), torch.enable_grad(), self._nothing_saved():
            return self.workload.loss(self.model, item)[0].detach()

    def _nothing_saved(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which a large model keeps no activations for a backward, which nothing here runs."""
        if not self._drops_saved:
            return contextlib.nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda nothing: nothing)

    def _seeded(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which every run draws the same numbers.

        One seed suffices if all numbers come from torch's global generator. Seeding every operation separately takes
        longer than the forward of a small model.
        """
        seed = self.workload.spec.seed, 0, 0
        if self.workload.spec.opaque_modules or self.has_generator:
            return draws.Draws(*seed)
        return draws.at(seed, 0)

    # --- forward and loss ---------------------------------------------------------------------------------------------

    def refuse_changes(self, second: Snapshot, last: Snapshot) -> None:
        """Refuse state that changes between runs of the same batch, weights and random numbers, and is read."""
        if second is last:
            return
        changed = [place for place in last.changed_since(second) if place[0] in second.owners]
        for place in changed:
            if last.owners[place[0]] is SETTINGS:
                self._refuse_setting(place[1], last)
        unknown = []  # places that the source does not show a read of
        for place in changed:
            if place[1] == DRAWN and not self._refuse_drawn(place, last):
                unknown.append(place)
        changed = [place for place in changed if place[1] != DRAWN]
        for place in changed[:_MOST_PLACES]:
            if not self._refuse_place(place, second, last):
                unknown.append(place)
        unknown += changed[_MOST_PLACES:]
        self._refuse_depended(list(dict.fromkeys(unknown)), second, last, set(changed))

    def refuse_files(self, *, shared: bool) -> None:
        """Refuse a file that every run changes and reads. ``shared``: only what other processes see."""
        for name, line in self._files.items():
            if shared and name.startswith(POSITION):
                continue
            raise TraceError(
                f"{FORWARD} changes {name}, and reads what an earlier call left there: "
                "the model is not one fixed graph",
                where=line,
                remedy=f"{KEEP}; for a log, write without reading",
            )

    def refuse_set(self, before: Snapshot, last: Snapshot) -> None:
        """Refuse a setting that decides how torch computes, if a run leaves another value of it."""
        for name in OF_RESULTS:
            value = before.setting(name)
            if value != last.setting(name):
                SETTINGS.write(name, value)
                raise TraceError(
                    f"{FORWARD} changes the setting {name}: stages would compute without it",
                    where=writing_line(lambda: self.run(self.item), SETTINGS, name),
                    remedy="set it at the top of the model file, or where the model is built",
                )

    def _refuse_setting(self, name: str, last: Snapshot) -> NoReturn:
        """Refuse a setting of the process that every call changes."""
        line = writing_line(lambda: self.run(self.item), SETTINGS, name)
        last.restore()
        raise TraceError(
            f"{FORWARD} changes the setting {name} with every call: the model is not one fixed graph",
            where=line,
            remedy="set it once, where the model is built",
        )

    def _refuse_drawn(self, place: Place, last: Snapshot) -> bool:
        """Refuse a generator, iterator or stream whose values are used. Return whether all of them are discarded."""
        owner = last.owners[place[0]]
        uses = self._uses(owner, last)
        if uses and all(use.feeds is not None and not self.is_read(use.feeds, last) for use in uses):
            return True
        is_known = isinstance(owner, (*GENERATORS, *ITERATORS)) and not isinstance(owner, _COPIED)
        if all(is_package(use.where) for use in uses) and not is_known:
            return False
        is_drawn = isinstance(owner, GENERATORS) or (hasattr(owner, "__next__") and not isinstance(owner, io.IOBase))
        kind = "the generator " if is_drawn else ""
        uses = [use for use in uses if use.feeds is None or self.is_read(use.feeds, last)]
        return refuse(FORWARD, f"{kind}{last.names[place]}", uses, [], DRAW if kind else KEEP)

    def is_read(self, places: frozenset[Key], last: Snapshot) -> bool:
        """Return whether the value at one of these places reaches anything except state that nothing reads."""
        return any(read_by_torch(place) or self.really_read(place, last, set()) for place in places)

    def _refuse_place(self, place: Place, second: Snapshot, last: Snapshot) -> bool:
        """Refuse a place that is read. Return whether the source shows that it is harmless."""
        owner = owner_key(last.owners[place[0]])
        indices = changed_entries(place, second, last)
        keys = [(owner, place[1])] if indices is None else [(owner, index) for index in indices]
        is_tensor = isinstance(value_at(last.owners[place[0]], place[1]), Tensor)
        accesses = [access for _, access in self.accesses(last) if any(meets(access, key) for key in keys)]
        writes = [access for access in accesses if access.kind != "read"]
        read = next((read for key in keys if (read := self.really_read(key, last, set()))), None)
        if read is None and writes:
            read = read_by_torch(keys[0])
        if is_tensor and not writes:
            return True  # the recording detects tensors that are changed in place
        if read is None:
            return False
        if all(is_package(access.where) for access in accesses) and keeps_a_part(place, second, last):
            return False  # what is read may be the part that does not change
        carried = self._carried(place, last)
        if carried is None:
            carried = not writes or any(access.kind == "update" for access in writes)
        if carried and not writes:
            if is_package(read.where):
                return False
            line = writing_line(lambda: self.run(self.item), last.owners[place[0]], place[1])
            last.restore()
            writes = [Access("update", frozenset(keys), line)] if line else []
        if carried:
            refuse(FORWARD, last.names[place], writes, [read], KEEP)
        return True  # every run writes it before reading it

    def _refuse_depended(self, places: list[Place], second: Snapshot, last: Snapshot, changed: set[Place]) -> None:
        """Refuse state that the loss depends on, although the source does not show where it is read.

        ``changed``: all places that change from run to run.
        """
        if not places:
            return

        def run() -> Tensor:
            loss: Tensor = observed(lambda: self.run(self.item), self.ran, lambda ran: last.extend(named(ran)))
            return loss

        numbers = constants(self.ran), constants(self.ran, of_math=True)
        probe = Probe(run, self.model, last, self.snapshot, numbers, changed, self._loss)
        place = probe.affecting(places, second)
        if place is None:
            if probe.unknown:
                self.notes.append(_NOT_TRIED.format(", ".join(probe.unknown[:_MOST_NAMES])))
            return
        owner, key = last.owners[place[0]], place[1]
        writes = (a.where for _, a in self.accesses(last) if a.kind != "read" and meets(a, (owner_key(owner), key)))
        why = "the loss depends on it" if probe.is_repeatable else "two runs on the same batch have different losses"
        raise TraceError(
            f"{FORWARD} changes {last.names[place]}, and {why}: the model is not one fixed graph",
            where=probe.writer(owner, key) or next(writes, ""),
            remedy=KEEP,
        )

    def really_read(self, key: Key, last: Snapshot, seen: set[Key]) -> Access | None:
        """Return a read of a place whose value reaches anything except state that nothing reads."""
        if key in seen:
            return None
        seen.add(key)
        for reader, access in self.accesses(last):
            if access.kind != "read" or not meets(access, key) or is_helper(reader):
                continue
            if access.feeds is None:
                return access
            for place in access.feeds - {key}:
                if read_by_torch(place) or self.really_read(place, last, seen):
                    return access
        return None

    def _carried(self, place: Place, last: Snapshot) -> bool | None:
        """Return whether a run reads what the previous run left: with an unusable value in its place, the run fails.

        None if the value cannot be replaced.
        """
        owner, key = last.owners[place[0]], place[1]
        try:
            wanted = self.run(self.item)
            if not put(owner, key, Unusable()):
                return None
            loss = self.run(self.item)
        except (Exception, SystemExit):
            return True
        finally:
            last.restore()
        return not torch.equal(wanted, loss)

    def _uses(self, drawn: Any, last: Snapshot) -> list[Access]:
        """Return where forward and loss reference a generator, iterator or stream, or what draws from it."""
        outer = [drawn]
        while id(outer[-1]) in last.inside and len(outer) < _MOST_NAMES:
            outer.append(last.inside[id(outer[-1])])
        readers = [Reader(ran, last) for ran in self.ran.values()]
        return [use for one in outer for reader in readers for use in reader.uses(one)]

    def accesses(self, last: Snapshot) -> list[tuple[Reader, Access]]:
        """Return every access in the functions that ran, and in those that they call in branches not taken."""
        if self._accesses is None:
            self._accesses = [(reader, access) for reader in readers(self.ran, last) for access in reader.accesses()]
        return self._accesses


__all__ = ["Look", "refuse_changing_state"]
