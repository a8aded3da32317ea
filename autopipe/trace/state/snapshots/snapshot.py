"""Snapshots of Python state: every attribute, global, closure cell and container that a model and its loss reach.

A *place* is an owner and a key: (object, attribute), (list, index), (dict, key), (closure cell, ""). ``Snapshot`` keeps
a fingerprint of the value at each place, so that two snapshots show which places changed, and can restore them all.
"""

from __future__ import annotations

import contextvars
import functools
import gc
import io
import itertools
import types
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from autopipe.trace.record.containers import CONTAINERS, attributes, copied, entries, length
from autopipe.trace.state.snapshots.arrays import is_array, many_bytes, numbers
from autopipe.trace.state.snapshots.fingerprints import (
    GENERATORS,
    ITERATORS,
    LARGEST,
    PLAIN,
    content_of,
    drawn,
    fingerprint,
    is_plain_key,
    same_value,
)
from autopipe.trace.state.snapshots.kinds import (
    MOST_ENTRIES,
    behind,
    has_attributes,
    is_known,
    is_users_object,
    may_be_state,
    memoized,
)
from autopipe.trace.state.snapshots.places import OF_FUNCTIONS, ByIdentity, slots
from autopipe.trace.state.snapshots.restoring import Kept
from autopipe.trace.state.snapshots.settings import SETTINGS
from autopipe.users_code import is_model_module

Place = tuple[int, Any]
WHOLE = "(its content)"  # the key of a container's length, order and keys
ANY = "(any entry)"  # the key of an entry at an unknown index
DRAWN = "(its state)"  # the key of a generator's state
_OTHERS = "(its other entries)"  # the key of the entries of a container beyond the first MOST_ENTRIES
_ABSENT = object()
_DEEPEST = 6  # objects in objects, counted from the module that holds them
_MOST_PLACES = 200_000
_MOST_BYTES = 1 << 29  # of large arrays whose content is compared
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NOT_STATE = frozenset(("_parameters", "_buffers", "_modules", "_abc_impl"))
_FIELDS_OF_TORCH = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class Names:
    """A root that represents some globals of a module, or attributes of a class, too large to inspect completely."""

    module: types.ModuleType | type
    names: frozenset[str]


@dataclass
class Snapshot:
    """The state below some roots."""

    values: dict[Place, tuple[Any, ...]] = field(default_factory=dict)  # fingerprints
    names: dict[Place, str] = field(default_factory=dict)  # readable paths
    owners: dict[int, Any] = field(default_factory=dict)  # by id; this also keeps them alive
    compared: bool = True  # whether there are fingerprints; without them the snapshot can only be restored
    _kept: Kept = field(default_factory=Kept)
    _long: dict[int, Any] = field(default_factory=dict)  # the content of containers with more than MOST_ENTRIES
    _bytes: int = 0  # of large arrays
    _whole: set[int] = field(default_factory=set)  # ids of the modules whose globals are all included

    @classmethod
    def of(cls, roots: Iterable[tuple[str, Any]], *, compared: bool = True) -> Snapshot:
        """Take a snapshot. ``roots``: (readable path, object); the attributes of a module are its globals.

        ``compared``: False for a snapshot without fingerprints, which can only be restored.
        """
        snapshot = cls(compared=compared)
        snapshot._add_settings()
        snapshot.extend(roots)
        return snapshot

    def extend(self, roots: Iterable[tuple[str, Any]]) -> None:
        """Add what more roots reach now."""
        pending = deque((path, value, 0) for path, value in roots)
        while pending and len(self.values) < _MOST_PLACES:
            path, value, depth = pending.popleft()
            if id(value) in self.owners or (isinstance(value, Names) and id(value.module) in self._whole):
                continue
            for name, entry in self._visit(path, value):
                if depth < _DEEPEST and type(entry) not in PLAIN:
                    pending.append((name, entry, 0 if isinstance(entry, nn.Module) else depth + 1))

    def changed_since(self, other: Snapshot) -> list[Place]:
        """Return the places whose value differs from that in another snapshot.

        Replacing an object by an equal one does not count as a change: some registries copy themselves at every use.
        """
        places = []
        for place, value in self.values.items():
            if not self._same(value, other, other.values.get(place, ()), set()):
                places += [place] if place[1] != _OTHERS else self._changed_entries(place[0], other)
        for place in places:
            if place not in self.values:
                self._put_entry(place)
        return places

    def _changed_entries(self, container: int, other: Snapshot) -> list[Place]:
        """Return the entries of a long container that changed, beyond those that have a place of their own."""
        now, places = dict(_others(self._long[container])), []
        before = dict(_others(other._long[container])) if container in other._long else {}
        for key, entry in now.items():
            if is_plain_key(key) and not same_value(fingerprint(entry), fingerprint(before.get(key, _ABSENT))):
                places.append((container, key))
                other.values[container, key] = fingerprint(before[key]) if key in before else ()
        return places[:MOST_ENTRIES]

    def _put_entry(self, place: Place) -> None:
        """Add the place of an entry of a long container."""
        container, key = place
        path = self.names[container, WHOLE]
        self._put(self.owners[container], key, dict(_others(self._long[container]))[key], f"{path}[{key!r}]")

    def _same(
        self, value: tuple[Any, ...], other: Snapshot, before: tuple[Any, ...], compared: set[tuple[int, int]]
    ) -> bool:
        if same_value(value, before):
            return True
        if not value or not before or (value[0], before[0]) != ("is", "is"):
            return False
        mine, theirs = value[1], before[1]
        if type(mine) is not type(theirs) or isinstance(mine, (Tensor, nn.Module, type, types.ModuleType)):
            return False
        pair = id(mine), id(theirs)
        if pair in compared:
            return True
        compared.add(pair)
        places, others = self._complete.get(id(mine)), other._complete.get(id(theirs))
        if places is None or others is None or places.keys() != others.keys():
            return False
        if isinstance(mine, types.FunctionType) and mine.__code__ is not theirs.__code__:
            return False
        return all(self._same(content, other, others[key], compared) for key, content in places.items())

    @functools.cached_property
    def _complete(self) -> dict[int, dict[Any, tuple[Any, ...]]]:
        """The contents of each owner whose entries are all known: id -> key -> fingerprint."""
        contents: dict[int, dict[Any, tuple[Any, ...]]] = {}
        for (owner, key), value in self.values.items():
            contents.setdefault(owner, {})[key] = value
        return {owner: content for owner, content in contents.items() if is_known(self.owners.get(owner), content)}

    def restore(self) -> None:
        """Restore containers, attributes, closure cells, arrays and settings, but no generators that the user owns."""
        self._kept.restore()

    def _add_settings(self) -> None:
        self.owners[id(SETTINGS)] = SETTINGS
        for name, value in SETTINGS.all():
            self.values[id(SETTINGS), name] = "==", value
            self.names[id(SETTINGS), name] = f"the setting {name}"
            self._kept.settings[name] = value

    # --- the walk -----------------------------------------------------------------------------------------------------

    def _put(self, owner: Any, key: Any, value: Any, path: str) -> None:
        place = (id(owner), key)
        self.values[place] = fingerprint(value) if self.compared else ()
        self.names[place] = path

    def _visit(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, Tensor):
            if isinstance(value, nn.Parameter):
                self.owners[id(value)] = value
                self._put(value, "requires_grad", value.requires_grad, f"{path}.requires_grad")
                self._kept.trained.append((value, value.requires_grad))
            if own := attributes(value):
                yield from self._assigned(path, value, own)
        elif is_array(value):
            self._bytes += (many := many_bytes(value))
            if self._bytes > _MOST_BYTES and many:
                return
            self.owners[id(value)] = value
            self.values[id(value), ANY] = content = numbers(value)
            self.names[id(value), ANY] = path
            self._kept.arrays.append((value, content))
        elif isinstance(value, GENERATORS) or type(value) in ITERATORS:
            self.owners[id(value)] = value
            self.values[id(value), DRAWN] = ("==", drawn(value))
            self.names[id(value), DRAWN] = path
            if isinstance(value, types.GeneratorType):  # its variables, and the iterators of its loops
                yield from ((f"a variable of {path}", one) for one in gc.get_referents(value))
        elif isinstance(value, (*CONTAINERS, tuple)):
            yield from self._container(path, value)
        elif isinstance(value, types.FunctionType):
            yield from self._function(path, value)
        elif isinstance(value, contextvars.ContextVar):
            self.owners[id(value)] = value
            self._kept.variables.append((value, content := value.get(None)))
            self._put(value, "", content, path)
            yield path, content
        elif isinstance(value, functools._lru_cache_wrapper):
            self.owners[id(value)] = value
            yield from ((f"{path}()", result) for result in memoized(value))
        elif isinstance(value, (nn.Module, type, types.ModuleType)):
            yield from self._object(path, value)
        elif isinstance(value, Names):
            yield from self._globals(value)
        else:
            if is_users_object(value):
                yield from self._object(path, value)
            else:
                yield from self._of_a_library(path, value)
            yield from ((path, inner) for inner in behind(value))

    def _container(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        self.owners[id(value)] = value
        if isinstance(value, set):
            content = copied(value)
            self._kept.containers.append((value, content))
            self.values[id(value), WHOLE] = ("==", frozenset(e if type(e) in PLAIN else id(e) for e in content))
            self.names[id(value), WHOLE] = path
            yield from ((f"an entry of {path}", entry) for entry in itertools.islice(content, MOST_ENTRIES))
            return
        if not isinstance(value, tuple):
            self._kept.containers.append((value, copied(value)))
        first = list(itertools.islice(entries(value), MOST_ENTRIES))
        self.values[id(value), WHOLE] = (
            "==",
            (length(value), *((k for k, _ in first) if isinstance(value, dict) else ())),
        )
        self.names[id(value), WHOLE] = path
        for key, entry in first:
            plain = is_plain_key(key)
            below = f"{path}[{key!r}]" if plain else f"{path}[{type(key).__name__}]"
            self._put(value, key if plain else ByIdentity(key), entry, below)
            yield below, entry
        if MOST_ENTRIES < length(value) <= LARGEST and self.compared:
            others = tuple((key, e if type(e) in PLAIN else id(e)) for key, e in _others(value) if is_plain_key(key))
            self.values[id(value), _OTHERS] = ("==", hash(others))
            self._long[id(value)] = value if isinstance(value, tuple) else self._kept.containers[-1][1]

    def _function(self, path: str, value: types.FunctionType) -> Iterator[tuple[str, Any]]:
        self.owners[id(value)] = value
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:
                continue  # not bound yet
            self.owners[id(cell)] = cell
            self._kept.cells.append((cell, content))
            self._put(cell, "", content, f"{name} of {value.__name__}")
            yield f"{name} of {value.__name__}", content
        for name, content in vars(value).items():
            self._put(value, name, content, f"{path}.{name}")
            yield f"{path}.{name}", content
        self._kept.containers.append((vars(value), dict(vars(value))))
        runs_with = {name: getattr(value, name) for name in OF_FUNCTIONS}
        self._kept.functions.append((value, runs_with))
        for name, content in runs_with.items():
            self._put(value, name, content, f"{path}.{name}")
        for content in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
            yield f"a default argument of {value.__name__}", content
        yield f"{path}.__kwdefaults__", value.__kwdefaults__

    def _assigned(self, path: str, tensor: Tensor, own: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Add the attributes that the user assigned to a tensor."""
        self.owners[id(tensor)] = tensor
        self._kept.containers.append((own, dict(own)))
        for name, entry in own.items():
            self._put(tensor, name, entry, f"{path}.{name}")
            yield f"{path}.{name}", entry

    def _object(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        self.owners[id(value)] = value
        if isinstance(value, (type, types.ModuleType)):
            yield from self._namespace(path, value)
            return
        own = attributes(value) or {}
        self._kept.containers.append((own, dict(own)))
        is_module = isinstance(value, nn.Module)
        is_torch = is_module and type(value).__module__.startswith("torch.")
        if not is_torch:
            yield type(value).__name__, type(value)
        if is_module:
            yield from self._registered(path, value)
        for name, entry in list(own.items()):
            if name.startswith("__") or name in _NOT_STATE or (is_module and name in _FIELDS_OF_TORCH):
                continue
            below = f"{path}.{name}"
            self._put(value, name, entry, below)
            yield below, entry
        if content := slots(value):
            self._kept.slots.append((value, content))
        for name, entry in content.items():
            self._put(value, name, entry, f"{path}.{name}")
            yield f"{path}.{name}", entry

    def _of_a_library(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Add the content of a stream, hash, lock or the like, and the attributes of a library's object."""
        if (now := content_of(value)) is not None:
            self.owners[id(value)] = value
            self.values[id(value), DRAWN] = ("==", now)
            self.names[id(value), DRAWN] = path
            if type(value) in (io.BytesIO, io.StringIO):
                self._kept.streams.append((value, value.__getstate__()))
        if has_attributes(value):
            for below, entry in self._object(path, value):
                if isinstance(entry, CONTAINERS):
                    yield below, entry

    def _namespace(self, path: str, value: type | types.ModuleType) -> Iterator[tuple[str, Any]]:
        own_name, is_module = getattr(value, "__name__", ""), isinstance(value, types.ModuleType)
        if is_module:
            self._whole.add(id(value))
        for name, entry in list(vars(value).items()):
            if name.startswith("__") or name in _NOT_STATE or not may_be_state(entry):
                continue
            if isinstance(entry, type) and entry.__module__ != own_name:
                continue
            yield self._bind(value, name, entry, name if is_module else f"{path}.{name}")

    def _globals(self, some: Names) -> Iterator[tuple[str, Any]]:
        module = some.module
        self.owners.setdefault(id(module), module)
        for name in sorted(name for name in some.names if name in vars(module)):
            entry = vars(module)[name]
            if (id(module), name) in self.values or name.startswith("__") or not may_be_state(entry):
                continue
            if not isinstance(entry, type) or is_model_module(entry.__module__):
                yield self._bind(module, name, entry, name)

    def _bind(self, owner: type | types.ModuleType, name: str, entry: Any, path: str) -> tuple[str, Any]:
        self._put(owner, name, entry, path)
        self._kept.bound.append((owner, name, entry))
        return path, entry

    def _registered(self, path: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
        self._put(module, "training", module.training, f"{path}.training")
        self._kept.containers.append((module._modules, dict(module._modules)))
        for name, child in module._modules.items():
            self._put(module, name, child, f"{path}.{name}")
            yield f"{path}.{name}", child
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            yield f"{path}.{name}", tensor
        for kind in _HOOKS:
            for hook in getattr(module, kind).values():
                yield f"a hook of {path}", hook


def _others(container: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (key, value) of the entries that have no place of their own."""
    return itertools.islice(entries(container), MOST_ENTRIES, None)
