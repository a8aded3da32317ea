"""What a forward keeps of its tensors: outputs in attributes of the model, and constants such as a mask.

The fake tensors of a call must not stay in the script's objects. An attribute gets the output itself, as in one
process; constants, inputs and parameters are given wherever they are kept. Another tensor that is kept is refused.
"""

from __future__ import annotations

import functools
import gc
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from autopipe.script.refusals import EffectError
from autopipe.trace.graph.replay import context_of
from autopipe.trace.lines.of_nodes import where_text
from autopipe.trace.record.containers import attributes
from autopipe.trace.record.recorder import Recorder
from autopipe.trace.record.values import storage_key
from autopipe.trace.tape.entries import Entry
from autopipe.trace.tape.results import OWN, is_held

_DEPTH = 3
_MOST = 64  # the latest entries of a container that are looked at
_CONTAINERS = frozenset((dict, OrderedDict, list, tuple, set, deque))
_REGISTRIES = frozenset(("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"))
_PLAIN = (bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.device, types.FunctionType, type)


class KeptTensors:
    """The fake tensors in the attributes of modules. ``places``: (place, tensor) of each."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.places: list[tuple[tuple[int, str, int], Tensor]] = []
        self._attributes: list[tuple[dict[str, Any], str]] = []
        seen: set[int] = set()
        for number, module in enumerate(modules):
            own = vars(module)
            for name, value in own.items():
                if isinstance(value, _PLAIN) or name in _REGISTRIES or (type(value) in _CONTAINERS and not value):
                    continue
                fakes: list[Tensor] = []
                _mapped(value, lambda tensor, fakes=fakes: fakes.append(tensor) or tensor, _DEPTH, seen)  # type: ignore[misc]
                self.places += [((number, name, place), tensor) for place, tensor in enumerate(fakes)]
                if fakes:
                    self._attributes.append((own, name))

    def replace(self, values: Mapping[int, Any]) -> None:
        """Put other values in the place of tensors. ``values``: by the id of the tensor."""
        for own, name in self._attributes:
            if name in own:
                own[name] = _mapped(own[name], lambda tensor: values.get(id(tensor), tensor), _DEPTH, set())
        self.places = [(place, tensor) for place, tensor in self.places if id(tensor) not in values]


def refuse_registered(modules: Sequence[nn.Module], registered: Container[tuple[int, str]]) -> None:
    """Refuse parameters and buffers that the forward has registered, and remove them.

    ``registered``: (id of the dictionary, name) of those before the call.

    Raises: EffectError.
    """
    for module in modules:
        registries: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for registry in registries:
            for name in [name for name, value in registry.items() if isinstance(value, FakeTensor)]:
                if (id(registry), name) not in registered:
                    del registry[name]
                    raise EffectError(
                        f"the forward registers {name} in a {type(module).__name__}",
                        remedy="register it where the model is built",
                    )


def _mapped(value: Any, of: Callable[[Tensor], Any], depth: int, seen: set[int]) -> Any:
    """Replace each fake tensor in a value, in place where that is possible, and return the value.

    ``seen``: the containers and objects that were looked at, by id.
    """
    if isinstance(value, Tensor):
        return of(value) if isinstance(value, FakeTensor) else value
    if depth == 0 or id(value) in seen or isinstance(value, (*_PLAIN, nn.Module, types.ModuleType)):
        return value
    seen.add(id(value))
    if isinstance(value, (list, deque)):
        for place in range(max(0, len(value) - _MOST), len(value)):
            now = _mapped(value[place], of, depth - 1, seen)
            if now is not value[place]:
                value[place] = now
    elif isinstance(value, tuple):
        entries = [_mapped(entry, of, depth - 1, seen) for entry in value]
        if any(now is not before for now, before in zip(entries, value, strict=True)):
            return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    else:
        own: dict[Any, Any] = value if isinstance(value, dict) else attributes(value) or {}
        for key in list(own)[-_MOST:]:
            now = _mapped(own[key], of, depth - 1, seen)
            if now is not own[key]:
                own[key] = now
    return value


class ConstantResults:
    """The results of a recorded call that depend on constants only, with what computes them."""

    def __init__(self, recorder: Recorder, path: Sequence[Entry]) -> None:
        """``path``: the calls of the run."""
        dependent = _dependent(recorder)
        written = {storage_key(tensor) for node in dependent for tensor in node.meta.get("changed", ())}
        of_script = set(map(storage_key, recorder.writer.known.constant_fakes))
        self._constants = recorder.constants
        # place of the call and of the result -> what computes it
        self.nodes: dict[tuple[int, int], fx.Node] = {}
        # places of results in the memory of a tensor of the script that is neither parameter nor buffer
        self.views: set[tuple[int, int]] = set()
        copies: dict[fx.Node, fx.Node] = {}
        graph = fx.Graph()
        for node in recorder.graph.nodes:
            if node.op not in ("placeholder", "output") and node not in dependent:
                copies[node] = graph.node_copy(node, copies.__getitem__)
                copies[node].meta = {key: node.meta[key] for key in ("grad", "autocast") if key in node.meta}
        known = recorder.writer.known
        for position, entry in enumerate(path):
            for index, result in enumerate(entry.results):
                node = known.node(result) if known.has(result) else None
                if node in copies and storage_key(result) in of_script:
                    self.views.add((position, index))
                elif node in copies and storage_key(result) not in written:
                    self.nodes[position, index] = copies[node]

    def among(self, path: Sequence[Entry]) -> dict[int, fx.Node]:
        """Return what computes each of these results of a run, by the id of the result. ``path``: its calls."""
        return {id(path[position].results[index]): node for (position, index), node in self.nodes.items()}

    def values(self, nodes: Mapping[int, fx.Node]) -> dict[int, Tensor]:
        """Return new tensors with the values of results, by the id of the result. ``nodes``: of ``among``."""
        values: dict[fx.Node, Any] = {}
        with _disable_current_modes(), torch.no_grad():
            for node in next(iter(nodes.values())).graph.nodes if nodes else ():
                values[node] = self._run(node, values)
        return {number: values[node] for number, node in nodes.items()}

    def _run(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        if node.op == "get_attr":
            return self._constants[str(node.target)].clone()
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
        with context_of(node.meta):
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            assert callable(node.target)
            return node.target(*args, **kwargs)


def _dependent(recorder: Recorder) -> set[fx.Node]:
    """Return the calls that depend on the inputs, parameters, buffers or random numbers."""
    names = {*recorder.faked_model.names.values(), *recorder.faked_model.aliases}
    dependent: set[fx.Node] = set()
    for node in recorder.graph.nodes:
        source = node.op in ("placeholder", "call_module") or (node.op == "get_attr" and str(node.target) in names)
        if source or node.meta.get("random", (0, 0))[1] or any(entry in dependent for entry in node.all_input_nodes):
            dependent.add(node)
    return dependent


def path_to(entry: Entry) -> list[Entry]:
    """Return the calls of a run that has come to an entry, in order."""
    path = []
    while entry.parent is not None:
        path.append(entry)
        entry = entry.parent
    path.reverse()
    return path


def give(tensors: list[Tensor], values: Mapping[int, Any], ours: Sequence[Any] = ()) -> None:
    """Put values in the place of tensors in all dictionaries, lists and closures that have one.

    ``values``: by the id of a tensor. ``ours``: what has them in any case, besides ``tensors``.
    """
    for place in range(len(tensors)):
        if id(tensors[place]) not in values:
            continue
        for holder in gc.get_referrers(tensors[place]):
            if isinstance(holder, functools._lru_cache_wrapper):
                holder.cache_clear()
            elif holder is not tensors and all(holder is not own for own in ours):
                _put(holder, tensors[place], values[id(tensors[place])])


def give_results(path: Sequence[Entry], values: Callable[[], Mapping[int, Any]], numbers: Container[int]) -> None:
    """Put values in the place of those results of a run that something else has. ``path``: its calls.

    ``values``: by the id of the result; called if there is one. ``numbers``: the ids that it will have.
    """
    for entry in path:
        places = [place for place in _places_held(entry.results) if id(entry.results[place]) in numbers]
        if places:
            every = values()
            give(entry.results, {id(entry.results[place]): every[id(entry.results[place])] for place in places})


def refuse_kept(
    path: Sequence[Entry], of_torch: dict[tuple[int, int], int], returned: Container[int] = frozenset()
) -> None:
    """Refuse results of a run that something of the script has: their values are elsewhere. ``path``: its calls.

    ``of_torch``: receives how many references there are to a result that only torch has, at its place. ``returned``:
    ids of results that the script may have.

    Raises: EffectError.
    """
    for position, entry in enumerate(path):
        for index in list(_places_held(entry.results)):
            count = getrefcount(entry.results[index])
            if of_torch.get((position, index)) == count or id(entry.results[index]) in returned:
                continue
            holders = gc.get_referrers(entry.results[index])
            if not any(_is_of_the_script(holder, entry) for holder in holders):
                of_torch[position, index] = count
                continue
            del holders
            gc.collect()  # a cycle of objects that nothing else has
            if index in _places_held(entry.results):
                raise EffectError(
                    "the forward keeps a tensor in another place than an attribute of the model",
                    where=where_text(entry.nodes[0]) if entry.nodes else "",
                    remedy="return it, or set an attribute of a module to it",
                )


def give_parameters(fakes: dict[str, Tensor], values: Mapping[int, Tensor], ours: Sequence[Any]) -> None:
    """Put parameters and buffers in the place of their fakes where the script has those.

    ``values``: by the id of the fake. ``ours``: what has the fakes in any case.

    Raises: EffectError for one that is the key of a dictionary, such as the state of an optimizer.
    """
    counts = {name: getrefcount(fake) - (fake._use_count() > 1) for name, fake in fakes.items()}  # type: ignore[attr-defined]
    least = min(counts.values(), default=0)
    for name, count in counts.items():
        if count > least:
            give([fakes[name]], values, ours)
            for holder in gc.get_referrers(fakes[name]):
                if isinstance(holder, dict) and any(key is fakes[name] for key in holder):
                    del holder[fakes[name]]
                    raise EffectError(f"the forward looks {name} up in a dictionary", remedy="look it up in the loop")


def _places_held(results: list[Tensor]) -> Iterator[int]:
    """Yield the places of the results that something else has, too."""
    for place in range(len(results)) if is_held(results, OWN) else ():
        result: Any = results[place]
        if getrefcount(result) - (result._use_count() > 1) > OWN:
            yield place


def _is_of_the_script(holder: Any, entry: Entry) -> bool:
    """Return whether what refers to a result may be an object of the script: not a list or frame of ours."""
    if holder is entry.results or isinstance(holder, (types.FrameType, Entry)):
        return False
    if isinstance(holder, dict):
        return not any(isinstance(owner, torch.autograd.function.FunctionCtx) for owner in gc.get_referrers(holder))
    return not isinstance(holder, torch.autograd.function.FunctionCtx)


def _put(holder: Any, result: Tensor, value: Tensor) -> None:
    if isinstance(holder, types.CellType):
        holder.cell_contents = value
    elif isinstance(holder, dict):
        for key in [key for key, entry in holder.items() if entry is result]:
            holder[key] = value
    elif isinstance(holder, (list, deque)):
        for place in [place for place, entry in enumerate(holder) if entry is result]:
            holder[place] = value
