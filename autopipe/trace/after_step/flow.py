"""``Flow``: which tensors a piece of code changes, and on which others the new values depend.

Each memory has the set of names that its content depends on. A call propagates the names of its inputs to its results
and to the memory that it writes. Python numbers read from tensors (``item()``) carry no names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Names = frozenset[str]


class Flow(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__ has no annotation
    """Tracks which named tensors the operations in the block write, and from which their new values come."""

    def __init__(self, named: Mapping[str, Tensor], others: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.named = dict(named)
        self.used = ""  # name of one of ``others``, which must not be used, that was used
        self.written: set[str] = set()  # names of the tensors whose memory was written
        # shape of a written tensor that was neither given nor made in the block
        self.foreign_shape: tuple[int, ...] | None = None
        self._content: dict[int, Names] = {}
        self._name_of: dict[int, str] = {}
        self._alive: list[Any] = []  # keys are unique only among live memories
        for name, tensor in named.items():
            self._name_of[self._key(tensor)] = name
            self._content[self._key(tensor)] = frozenset({name})
        self._others = {self._key(tensor): name for name, tensor in (others or {}).items()}

    def sources(self, name: str) -> Names:
        """Return the names that the current content of a tensor depends on, including its own."""
        tensor = self.named[name]
        return self._content.get(self._key(tensor), frozenset()) | {name}

    def depends(self, tensor: Tensor) -> bool:
        """Return whether a tensor was computed from the named ones and is not one of them."""
        key = self._key(tensor)
        return key not in self._name_of and bool(self._content.get(key))

    def changed(self) -> set[str]:
        """Return the names of the tensors that were written, or bound to other memory (``p.data = ...``)."""
        bound = {name for name, tensor in self.named.items() if self._name_of.get(self._key(tensor)) != name}
        return self.written | bound

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = func._schema
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        targets = [
            given[a.name]
            for a in schema.arguments
            if a.alias_info is not None and a.alias_info.is_write and a.name in given
        ]
        if schema.name.startswith("aten::_foreach_"):
            self._each(list(given.values()), targets, result)
        else:
            self._pass_on(given.values(), targets, result)
        return result

    def _each(self, given: list[Any], targets: list[Any], result: Any) -> None:
        """Treat a call over lists as one call for each element."""
        count = max((len(value) for value in given if isinstance(value, (list, tuple))), default=0)

        def at(value: Any, index: int) -> Any:
            return value[index] if isinstance(value, (list, tuple)) and len(value) == count else value

        for index in range(count):
            self._pass_on(
                [at(value, index) for value in given], [at(target, index) for target in targets], at(result, index)
            )

    def _pass_on(self, given: Iterable[Any], targets: Iterable[Any], result: Any) -> None:
        read = [self._key(tensor) for tensor in _tensors(list(given))]
        self.used = self.used or next((self._others[key] for key in read if key in self._others), "")
        names: Names = frozenset().union(*(self._content.get(key, frozenset()) for key in read))
        for tensor in _tensors(list(targets)):
            key = self._key(tensor)
            if key not in self._content:
                self.foreign_shape = tuple(tensor.shape)
            self._content[key] = self._content.get(key, frozenset()) | names
            if key in self._name_of:
                self.written.add(self._name_of[key])
        for tensor in _tensors(result):
            self._content.setdefault(self._key(tensor), names)

    def _key(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        return int(storage._cdata)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
