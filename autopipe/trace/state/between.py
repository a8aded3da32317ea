"""Refuse a data hook, or a function between two forward passes, that writes state which a forward or loss reads."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree

from autopipe.errors import TraceError
from autopipe.trace.state.observing.observe import Ran
from autopipe.trace.state.observing.reach import BACKWARD, between_forwards
from autopipe.trace.state.reading.source import WHOLE, Access, Key, owner_key, readers
from autopipe.trace.state.refusal import DATA, FREEZE, INPUT, KEEP, refuse
from autopipe.trace.state.snapshots.snapshot import Snapshot
from autopipe.users_code import is_package

if TYPE_CHECKING:
    from autopipe.trace.state.check import Look


def refuse_data(look: Look, last: Snapshot, data: dict[types.CodeType, Ran]) -> None:
    """Refuse a data hook that changes the model, or state that a forward or loss reads."""
    ran = dict(data)
    for name in ("data", "evaluate_data"):
        function = look.hooks.get(name)
        if isinstance(function, types.FunctionType):
            ran.setdefault(function.__code__, Ran(function.__code__, function.__globals__))
    ran = {code: one for code, one in ran.items() if not is_package(code.co_filename)}
    known = {owner_key(owner) for owner in last.owners.values()}
    parts = _parts(look, last)
    for reader in readers(ran, last):
        for access in reader.accesses():
            if access.kind == "read" or (access.kind == "write" and not access.repeated):
                continue  # state set once in each call of data() is equal in every call
            changes_model = access.changes_model and id(access.owner) in parts
            if changes_model and _is_torchs(access.owner):
                refuse(DATA, f"the model ({access.changes_model})", [access], [], FREEZE)
            for key in access.places:
                if key[0] not in known:
                    continue
                read = look.really_read(key, last, set())
                if read is not None:
                    refuse(DATA, _name(key, last), [access], [read], INPUT)
            if changes_model and access.changes_model.endswith("()"):
                refuse(DATA, f"the model ({access.changes_model})", [access], [], FREEZE)


def refuse_hooks(look: Look, last: Snapshot) -> None:
    """Refuse a function between two forward passes that writes state that a forward or loss reads."""
    known = {owner_key(owner) for owner in last.owners.values()}
    for who, access in _accesses(between_forwards(look.model, look.hooks, look.ran), last):
        for key in access.places if access.kind != "read" else ():
            read = look.really_read(key, last, set()) if key[0] in known else None
            if read is not None:
                refuse(who, _name(key, last), [access], [read], INPUT)


def refuse_reading_hooks(look: Look, last: Snapshot, data: dict[types.CodeType, Ran]) -> None:
    """Refuse a function of the ranks between two forward passes that reads what data, forward or loss write.

    For a model that varies: ranks run these functions, and not its data, forward and loss.
    """
    own = {code: ran for code, ran in data.items() if not is_package(code.co_filename)}
    accesses = [access for _, access in look.accesses(last)]
    accesses += [access for reader in readers(own, last) for access in reader.accesses()]
    written = {key: access.where for access in accesses if access.kind != "read" for key in access.places}
    hooks = (each for each in between_forwards(look.model, look.hooks, look.ran) if each[0] != BACKWARD)
    for who, access in _accesses((*hooks, *_of_scheduler(look)), last):
        key = next((key for key in access.places if access.kind != "write" and key in written), None)
        if key is not None:
            raise TraceError(
                f"{who} reads {_name(key, last)}, which data, forward or loss set: ranks run it without them",
                where=access.where,
                remedy=f"it is set at {written[key]}; {KEEP}",
            )


def _accesses(functions: Iterable[tuple[str, Ran]], last: Snapshot) -> Iterator[tuple[str, Access]]:
    """Yield the accesses of functions that did not run, each with what runs it."""
    for who, ran in functions:
        for function in ran.functions or ():
            last.functions.setdefault(ran.code, function)
        for reader in readers({ran.code: ran}, last):
            yield from ((who, access) for access in reader.accesses())


def _of_scheduler(look: Look) -> Iterator[tuple[str, Ran]]:
    """Yield the user's functions that the scheduler has been given, such as that of a LambdaLR."""
    if "scheduler" not in look.hooks:
        return
    optimizer = look.workload.optimizer([*look.model.named_parameters()])
    scheduler = None if optimizer is None else look.workload.scheduler(optimizer)
    waiting, seen = [scheduler], set[int]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, types.FunctionType) and not is_package(value.__code__.co_filename):
            yield "the scheduler", Ran(value.__code__, value.__globals__, functions=[value])
        elif isinstance(value, LRScheduler) and id(value) not in seen:
            seen.add(id(value))
            waiting += pytree.tree_leaves([*vars(value).values()])


def _parts(look: Look, last: Snapshot) -> set[int]:
    """Return the ids of the parts of the model, and of other instances of its class that a global may hold."""
    whole = [owner for owner in last.owners.values() if type(owner) is type(look.model)]
    return {id(part) for model in (look.model, *whole) for part in (*model.modules(), *model.parameters())}


def _name(key: Key, last: Snapshot) -> str:
    owned = {place[1]: name for place, name in last.names.items() if owner_key(last.owners[place[0]]) == key[0]}
    return owned.get(key[1]) or owned.get(WHOLE) or str(key[1])


def _is_torchs(owner: Any) -> bool:
    return type(owner).__module__.startswith("torch.")


__all__ = ["refuse_data", "refuse_hooks", "refuse_reading_hooks"]
