"""``Remote``: a parameter or buffer whose newest value is on a rank. The script holds the same object as before.

Metadata is answered here. Any other use brings the value first (``Weights``). A result with a gradient keeps one that
leads to a leaf of its own: a backward through it is refused, because it would not reach the parameter's gradient.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopipe.script.refusals import from_a_library, refused
from autopipe.script.state import parked
from autopipe.script.state.metadata import METADATA, METADATA_CALLS
from autopipe.script.state.parked import ParkedParameter, ParkedTensor, is_parked
from autopipe.trace.record.targets import property_name

if TYPE_CHECKING:
    from autopipe.script.controller import Controller

_REFUSED = {
    "register_hook": "a hook on a parameter would not run on its rank",
    "register_post_accumulate_grad_hook": "a hook on a parameter would not run on its rank",
    "retain_grad": "retain_grad() of a parameter",
    "share_memory_": "memory that is shared with other processes is not the rank's",
}

controller: Controller | None = None
"""The controller whose parameters are remote; None before the first training call of the model."""

_own_use: list[None] = []


def busy() -> bool:
    """Return whether autopipe itself is using the model, so that nothing is intercepted."""
    return bool(_own_use)


@contextlib.contextmanager
def plain(tensors: dict[str, Tensor]) -> Iterator[None]:
    """Make the tensors of the model ordinary ones inside, for autopipe's own use. Parked ones remain parked."""
    _own_use.append(None)
    kinds = {name: tensor.__class__ for name, tensor in tensors.items()}
    for tensor in tensors.values():
        both = (ParkedParameter, ParkedTensor) if is_parked(tensor) else (nn.Parameter, Tensor)
        tensor.__class__ = both[not isinstance(tensor, nn.Parameter)]
    try:
        yield
    finally:
        _own_use.pop()
        for name, tensor in tensors.items():
            if kinds[name] not in (ParkedParameter, ParkedTensor) or is_parked(tensor):  # else it was moved
                tensor.__class__ = kinds[name]


def is_remote(value: Any) -> bool:
    """Return whether a value is a remote parameter or buffer."""
    return isinstance(value, (RemoteParameter, RemoteBuffer))


def tracked(value: Tensor, what: str) -> Tensor:
    """Return a leaf with the value. A backward that reaches it is refused: ``what`` says what it would be."""
    leaf = value.detach().requires_grad_()

    def refuse(gradient: Tensor) -> Tensor:
        raise refused(f"{what}: the gradient would be lost")

    hooks: Any = leaf
    hooks.register_hook(refuse)
    return leaf


class _Intercepted:
    """The interception, for parameters and buffers. ``_ordinary``: the class that the script knows."""

    _ordinary: type[Tensor] = Tensor

    def __deepcopy__(self: Any, memo: Any) -> Any:
        if not is_parked(self):
            return _as_ordinary(self, "__deepcopy__", memo)
        _bring(self, "__deepcopy__")
        return parked.copied(self, memo)

    def __copy__(self: Any) -> Any:
        if is_parked(self):
            _bring(self, "__copy__")
            return parked.shallow(self)
        function, arguments, *state = _as_ordinary(self, "__reduce_ex__", 4)
        return copy._reconstruct(self, None, function, arguments, *state)  # type: ignore[attr-defined]  # as for any object

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _as_ordinary(self, "__reduce_ex__", protocol)

    def __repr__(self, **kwargs: Any) -> str:
        return str(_as_ordinary(self, "__repr__"))

    def __format__(self, spec: str) -> str:
        return str(_as_ordinary(self, "__format__", spec))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer metadata, and prepare any other access."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if busy() or controller is None:
                return parked.called(func, args, kwargs)
            name = getattr(func, "__name__", "")
            prop = property_name(func) if name in ("__get__", "__set__", "__delete__") else ""
            if prop in METADATA or name in METADATA_CALLS:
                return parked.called(func, args, kwargs)
            if prop in ("grad", "_grad") and is_remote(args[0]):
                return _gradient(args[0], name, args[1:])
            if name in _REFUSED:
                raise refused(f"{name}(): {_REFUSED[name]}")
            if (name == "data_ptr" or prop == "_version") and not from_a_library():
                raise refused(f"{prop or name} of a parameter: what is done with it cannot be seen")
            if name in ("requires_grad_", "__set__") and prop in ("", "requires_grad"):
                return func(*args, **kwargs)
            return _accessed(func, name, args, kwargs)


def _gradient(parameter: Tensor, name: str, values: tuple[Any, ...]) -> Any:
    assert controller is not None
    key = controller.weights.names.get(id(parameter), "")
    gradients = controller.gradients
    if name == "__get__":
        return gradients.get(key)
    value = values[0] if name == "__set__" else None
    if value is not None:
        if getattr(value, "lz_key", None) is not None:  # an output of the model
            value = controller.fetch(value.lz_key)
        if not isinstance(value, Tensor) or value.shape != parameter.shape or value.dtype != parameter.dtype:
            raise RuntimeError(f"assigned grad has data of a different size or type than {key}")
    gradients.set(key, value)
    return None


def _accessed(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    assert controller is not None
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if is_remote(leaf)]
    controller.note_read(name)
    controller.weights.touch(controller.weights.names_of(leaf for leaf in leaves if not is_parked(leaf)))
    if name == "grad" and getattr(func, "__module__", "").startswith("torch.autograd"):
        raise refused("torch.autograd.grad of a parameter of the model")
    if not torch.is_grad_enabled() or name in ("__get__", "__set__") or not any(leaf.requires_grad for leaf in leaves):
        return parked.called(func, args, kwargs)
    stand_ins: dict[int, Tensor] = {}

    def stand_in(value: Any) -> Any:
        if not is_remote(value) or not value.requires_grad or is_parked(value):
            return value
        if id(value) not in stand_ins:
            stand_ins[id(value)] = _leaf_of(value)
        return stand_ins[id(value)]

    again, keywords = pytree.tree_map(stand_in, (args, kwargs))
    result = parked.called(func, again, keywords, _leaf_of)
    origins = {id(leaf): value for value in leaves for leaf in [stand_ins.get(id(value))] if leaf is not None}
    return pytree.tree_map(lambda value: origins.get(id(value), value), result)


def _leaf_of(value: Tensor) -> Tensor:
    return tracked(value, "a loss that has a parameter of the model in it")


def _bring(tensor: Any, method: str) -> None:
    """Bring the newest value of a tensor."""
    if controller is not None and not busy() and id(tensor) in controller.weights.names:
        controller.note_read(method)
        controller.weights.touch(() if is_parked(tensor) else controller.weights.names_of([tensor]))


def _as_ordinary(tensor: Any, method: str, *args: Any) -> Any:
    """Call a method of the ordinary class on an up-to-date tensor."""
    _bring(tensor, method)
    if is_parked(tensor):
        if method == "__reduce_ex__":
            return parked.reduced(tensor, *args)
        return getattr(parked.shown(tensor), method)(*args)
    remote = tensor.__class__
    tensor.__class__ = remote._ordinary
    try:
        return getattr(tensor, method)(*args)
    finally:
        tensor.__class__ = remote


class RemoteParameter(_Intercepted, nn.Parameter):  # type: ignore[misc]  # both classes may be copied
    """A parameter of the model while it runs in stages."""

    _ordinary = nn.Parameter


class RemoteBuffer(_Intercepted, Tensor):  # type: ignore[misc]  # both classes may be copied
    """A buffer of the model while it runs in stages."""


def _note_write(tensor: Tensor) -> None:
    """Keep the value of a remote tensor before something changes it."""
    if controller is not None and not busy():
        controller.weights.touch(controller.weights.names_of([tensor]))


parked.before_write.append(_note_write)
