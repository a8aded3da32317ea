"""``Weights``: parameters and buffers that the script sees. The newest values are on the ranks.

A read brings them here first, into the same memory. What was read may be written through any alias: a view, ``.data``,
numpy, an operator of C++. So no write is observed. Instead, a tensor that was read is compared with a copy before the
next command that depends on the weights, and sent back if it differs. A tensor of which an alias is alive (the count
of references to its storage says so) is read again after every step, and compared before every forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.script.codec import same_bytes
from autopipe.script.refusals import refused
from autopipe.strides import extent


def storage_uses(tensor: Tensor) -> int:
    """Return how many tensors and storages refer to the memory of a tensor; 1 if only it does."""
    with torch._C.DisableTorchFunctionSubclass():
        storage = tensor.untyped_storage()
        return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # without this object


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
                self.copies[name] = self._plain(name).clone()

    def gather(self) -> None:
        """Bring all values that the ranks have into the memory that the script knows."""
        self.gathers += 1
        self.stale = False
        for answer in self._ask(["gather"]):
            for name, value in answer.items():
                tensor = self._plain(name)
                if not same_bytes(tensor, value):
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
            if not same_bytes(now, copy):
                if backward and isinstance(self.tensors[name], nn.Parameter):
                    raise refused(f"{name} was changed between a forward and its backward")
                changed[name] = now
                copy.copy_(now)
        if changed:
            self._write(changed)
        for name in [name for name in self.copies if not self.aliased(name)]:
            del self.copies[name]

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
                del self.copies[name]

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
        with torch._C.DisableTorchFunctionSubclass():
            return self.tensors[name].detach()


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
