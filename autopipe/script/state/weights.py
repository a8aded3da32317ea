"""``Weights``: parameters and buffers that the script sees. The newest values are on the ranks.

A read brings them here first, into the same memory. What was read may be written through any alias: a view, ``.data``,
numpy, an operator of C++. So no write is observed. Instead, a tensor that was read is compared with a copy before the
next command that depends on the weights, and sent back if it differs. A tensor of which an alias is alive (the count
of references to its storage says so) is read again after every step, and compared before every forward.

Copies are on the host. Tensors of a model on a GPU are parked (``parked``). One that moved to the GPU, because of what
the script did with it, is parked again with its copy, once it has no alias.

``Gradients`` are what the script sees as ``p.grad``. They are on the ranks until it looks. As with weights, no write is
observed: a gradient that was read is compared with a copy before the next command that depends on it, and sent back if
it differs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from autopipe.bits import same_bits
from autopipe.script.devices import CPU
from autopipe.script.refusals import refused
from autopipe.script.state.parked import is_parked, on_host, park, plain_of, storage_uses
from autopipe.strides import extent

_OWN_REFERENCES = 3  # the dictionary, the variable of the loop, and the argument of getrefcount


class Weights:
    """The tensors of the model by first name. ``ask``: returns the answers of all ranks to a command."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        ask: Callable[[list[Any]], list[Any]],
        write: Callable[[dict[str, Tensor]], None],
    ) -> None:
        self.tensors = dict(tensors)
        self.names = {id(tensor): name for name, tensor in self.tensors.items()}
        self._ask, self._write = ask, write
        self.stale = False  # whether the ranks have newer values
        self.copies: dict[str, Tensor] = {}  # of what the script may have changed
        self.gathers = 0
        self._shapes = {
            name: (tuple(tensor.shape), tensor.stride(), tensor.dtype) for name, tensor in self.tensors.items()
        }
        self._places: dict[str, int] = {}  # addresses
        self._check_places(self.tensors)
        self.touch(name for name in self.tensors if self.aliased(name))

    def aliased(self, name: str) -> bool:
        """Return whether something else refers to the memory of a tensor."""
        return storage_uses(self.tensors[name]) > 1

    def touch(self, names: Iterable[str]) -> None:
        """Prepare for the script's access to tensors: bring the newest values, and keep copies."""
        names = list(names)
        if self.stale:
            self.gather()
        for name in names:
            if name not in self.copies:
                self.copies[name] = on_host(self.tensors[name])

    def gather(self) -> None:
        """Bring all values that the ranks have into the memory that the script knows."""
        self.gathers += 1
        self.stale = False
        for answer in self._ask(["gather"]):
            for name, arrived in answer.items():
                tensor, value = self._plain(name), plain_of(arrived)
                if not same_bits(tensor, value):
                    tensor.copy_(value)
                if name in self.copies:
                    self.copies[name].copy_(value)

    def push(self, *, backward: bool = False) -> None:
        """Send what the script has changed. Call it before a command that depends on the weights.

        ``backward``: the command is one, of a forward with the values before the change.

        Raises: RefusedError if a parameter was changed before a backward, or a tensor has another shape, stride or
        dtype now, or the memory of another one.
        """
        changed: dict[str, Tensor] = {}
        self._check_places(self.copies)
        for name, copy in list(self.copies.items()):
            now = self._plain(name)
            form = (tuple(now.shape), now.stride(), now.dtype)
            if form != self._shapes[name]:
                raise refused(f"{name} had shape, strides and type {self._shapes[name]} and has now {form}")
            if not same_bits(now, copy):
                if backward and isinstance(self.tensors[name], nn.Parameter):
                    raise refused(f"{name} was changed between a forward and its backward")
                changed[name] = now
                copy.copy_(now)
        if changed:
            self._write(changed)
        for name in [name for name in self.copies if not self.aliased(name)]:
            self._drop(name)

    def park(self) -> None:
        """Take the tensors off the GPU, except those of which an alias is alive."""
        for name, tensor in self.tensors.items():
            if tensor.device != CPU and not is_parked(tensor) and not self.aliased(name):
                self._park(name, on_host(tensor))

    def _park(self, name: str, host: Tensor) -> None:
        tensor = self.tensors[name]
        park(tensor, host, tensor.device)
        self._places[name] = plain_of(tensor).data_ptr()

    def _drop(self, name: str) -> None:
        """Drop the copy of a tensor that has no alias, or give it the tensor as its memory."""
        copy, tensor = self.copies.pop(name), self.tensors[name]
        if tensor.device != CPU and not is_parked(tensor):
            self._park(name, copy)

    def names_of(self, tensors: Iterable[Tensor]) -> list[str]:
        """Return the names of those tensors that are of the model."""
        return [self.names[id(tensor)] for tensor in tensors if id(tensor) in self.names]

    def moved(self, names: Iterable[str] | None = None) -> None:
        """Note that the ranks have newer values: of ``names``, or of all tensors."""
        self.stale = True
        for name in self.copies if names is None else [name for name in names if name in self.copies]:
            if self.aliased(name):
                self.gather()
                return
        # no alias is left: the copies would be compared with values that are out of date
        for name in list(self.copies):
            if names is None or name in set(names):
                self._drop(name)

    def _check_places(self, names: Iterable[str]) -> None:
        """Refuse parameters in the memory of other tensors, as after ``a.data = b.data``: a step would change both."""
        places = {name: self._plain(name).data_ptr() for name in names}
        if all(self._places.get(name) == place for name, place in places.items()):
            return
        self._places.update(places)
        end, last = 0, ""
        plain = {name: self._plain(name) for name in self.tensors}
        for name in sorted((name for name in plain if plain[name].numel()), key=lambda name: self._places[name]):
            trained = any(isinstance(self.tensors[other], nn.Parameter) for other in (last, name) if other)
            if self._places[name] < end and trained:
                raise refused(f"{last} and {name} are in the same memory", "one parameter in both places")
            end = self._places[name] + extent(plain[name].shape, plain[name].stride()) * plain[name].element_size()
            last = name

    def _plain(self, name: str) -> Tensor:
        return plain_of(self.tensors[name])


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class Gradients:
    """The gradients by name of the parameter. ``ask``, ``send`` and ``scatter`` reach all ranks."""

    def __init__(
        self,
        ask: Callable[[list[Any]], list[Any]],
        send: Callable[[list[Any]], None],
        scatter: Callable[[list[Any], dict[str, Any]], None],
    ) -> None:
        self._ask, self._send, self._scatter = ask, send, scatter
        self.any = False  # whether a rank may have a gradient
        self._known = False  # whether ``seen`` is complete
        self.seen: dict[str, Tensor | None] = {}
        self._copies: dict[str, Tensor | None] = {}
        self.reads = 0

    def get(self, name: str) -> Tensor | None:
        """Return the gradient of a parameter: the same object until it is dropped."""
        if not self.any:
            return None
        if not self._known:
            self._fetch()
        return self.seen.get(name)

    def _fetch(self) -> None:
        self.reads += 1
        self._known = True
        for answer in self._ask(["gradients"]):
            for name, value in answer.items():
                old = self.seen.get(name)
                if old is not None and value is not None:
                    plain_of(old).copy_(plain_of(value))
                else:
                    self.seen[name] = value
        self._copies = {name: None if value is None else on_host(value) for name, value in self.seen.items()}

    def set(self, name: str, value: Tensor | None) -> None:
        """Replace the gradient of a parameter."""
        if value is None:
            if self.any and not (self._known and self.seen.get(name) is None):
                self.push()
                self._send(["zero", [name], True])
                self.seen[name] = self._copies[name] = None
            return
        if self.any and not self._known:
            self._fetch()
        self.any = self._known = True
        self.seen[name], self._copies[name] = value, on_host(value)
        self._scatter(["write_gradients"], {name: value})

    def zero(self, names: Sequence[str] | None, to_none: bool) -> None:
        """Drop gradients, or set them to zero; None for all parameters."""
        if not self.any:
            return
        self.push()
        self._send(["zero", None if names is None else list(names), to_none])
        for name in list(self.seen) if names is None else names:
            known = self.seen.get(name)
            if to_none:
                if self._known:
                    self.seen[name] = self._copies[name] = None
                else:
                    self.seen.pop(name, None)
            elif known is not None:
                plain_of(known).zero_()
                self._copies[name] = on_host(known)
        if names is None and to_none:
            self.any, self._known = False, False
            self.seen, self._copies = {}, {}

    def push(self) -> None:
        """Send what the script has changed. Call it before a command that depends on gradients."""
        changed: dict[str, Tensor] = {}
        for name, value in self.seen.items():
            copy = self._copies.get(name)
            if value is not None and (copy is None or not same_bits(plain_of(value), copy)):
                changed[name] = value
                self._copies[name] = on_host(value)
        if changed:
            self._scatter(["write_gradients"], changed)

    def moved(self) -> None:
        """Note that a backward, or a scaling, has changed the gradients on the ranks."""
        self.any, self._known = True, False
        kept: dict[str, Tensor | None] = {}
        for name in list(self.seen):
            value = self.seen[name]
            # torch adds to a gradient in place: what the script keeps of it must follow
            if value is not None and (sys.getrefcount(value) > _OWN_REFERENCES or storage_uses(value) > 1):
                kept[name] = value
        self.seen, self._copies = kept, {}
        if kept:
            del value
            self._fetch()

    def names(self, wanted: Iterable[str]) -> list[str]:
        """Return the parameters among ``wanted`` that have a gradient, in their order."""
        return [name for name in wanted if self.get(name) is not None]
