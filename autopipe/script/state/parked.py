"""``Parked``: a tensor that says it is on a GPU, and whose memory is on the host until its values are used there.

The object stays the same: optimizers and ties keep it. Metadata is answered here. A parameter is copied to the device
for one operation, and the copy is dropped afterwards, unless the operation changed it, or returned or keeps a view of
it: then the copy becomes the memory of the tensor and of all that share it. So no alias is ever lost.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from autopipe.script.devices import CPU
from autopipe.script.refusals import from_a_library
from autopipe.script.state.metadata import KEPT, MEMORY, METADATA, METADATA_CALLS, MOVES, VIEWS
from autopipe.trace.record.fakes import PARKED, fake_like, in_fake_mode
from autopipe.trace.record.targets import property_name

before_write: list[Callable[[Tensor], None]] = []
"""Called with each tensor whose memory a function outside may change from now on."""


class Family:
    """Memory on the host that stands for memory on a device, and the tensors that have it.

    ``streams``: whether an operation gets a copy that is dropped afterwards. Otherwise the first use moves it.
    """

    def __init__(self, device: torch.device, *, streams: bool) -> None:
        self.device, self.streams = device, streams
        self._members: list[weakref.ref[Tensor]] = []

    def add(self, tensor: Tensor) -> None:
        """Note that a tensor has the memory."""
        vars(tensor)[PARKED] = self
        self._members = [entry for entry in self._members if entry() is not None]
        self._members.append(weakref.ref(tensor))

    def members(self) -> list[Tensor]:
        """Return the tensors that are alive."""
        tensors = (entry() for entry in self._members)
        return [tensor for tensor in tensors if tensor is not None and family_of(tensor) is self]


_BY_STORAGE: weakref.WeakValueDictionary[int, Family] = weakref.WeakValueDictionary()
"""Address of torch's object for the host's memory -> family. It lives as long as a member, and so does the family."""


def family_of(tensor: Tensor) -> Family | None:
    """Return the family of a parked tensor, None for another one."""
    family: Family | None = vars(tensor).get(PARKED)
    return family


def is_parked(value: Any) -> bool:
    """Return whether a value is a tensor whose memory is on the host instead of the device."""
    return isinstance(value, Tensor) and PARKED in vars(value)


def plain_of(tensor: Tensor) -> Tensor:
    """Return an ordinary tensor without gradient in the same memory, wherever that is."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


def on_host(tensor: Tensor) -> Tensor:
    """Return a copy on the host."""
    return plain_of(tensor).to(CPU, copy=True)


def park(tensor: Tensor, host: Tensor, device: torch.device, *, streams: bool = True) -> None:
    """Give a tensor the memory of ``host``, an ordinary tensor, in place of its own. It says ``device``."""
    _set(tensor, host, Family(device, streams=streams))


def parked_value(host: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on ``device`` with the values of ``host``, which move there when something uses them."""
    value = host.detach()
    _set(value, host, Family(device, streams=False))
    return value


def storage_uses(tensor: Tensor) -> int:
    """Return how many tensors and storages refer to the memory of a tensor; 1 if only it does."""
    with torch._C.DisableTorchFunctionSubclass():
        storage = tensor.untyped_storage()
        return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # without this object


def _set(tensor: Tensor, memory: Tensor, family: Family | None) -> None:
    """Bind a tensor to other memory. None: it is ordinary then. A fake tensor, which has no memory, is left alone."""
    if isinstance(memory, FakeTensor):
        return
    vars(tensor).pop(PARKED, None)
    with torch._C.DisableTorchFunctionSubclass():
        if memory is not tensor:
            tensor.data = memory.detach()
        if family is not None:
            family.add(tensor)
            _BY_STORAGE.setdefault(tensor.untyped_storage()._cdata, family)
    if type(tensor) in (Tensor, nn.Parameter, ParkedTensor, ParkedParameter):  # a remote one keeps its class
        kinds = (nn.Parameter, Tensor) if family is None else (ParkedParameter, ParkedTensor)
        tensor.__class__ = kinds[not isinstance(tensor, nn.Parameter)]


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor in a copy of the whole memory of a parked one, without gradient."""
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), torch.no_grad():
        if in_fake_mode():
            return plain_of(tensor).to(device)
        memory = torch.empty(0, dtype=torch.uint8, device=CPU).set_(tensor.untyped_storage()).to(device)
        return _view(tensor, memory.untyped_storage())


def _view(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """Return a tensor of the same form in other memory."""
    new = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return new.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def unpark(tensor: Tensor) -> None:
    """Move the memory of a parked tensor, and of all that share it, to the device; do nothing for another tensor."""
    family = family_of(tensor)
    if family is not None:
        _adopt(family, _on_device(tensor, family.device).untyped_storage())


def _adopt(family: Family, storage: torch.UntypedStorage) -> None:
    """Let the members of a family have a copy of their memory on the device in place of that on the host."""
    note_write(family)
    for member in family.members():
        with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), torch.no_grad():
            memory = _view(member, storage)
        _set(member, memory, None)


def note_write(family: Family) -> None:
    """Note that the members' memory may be changed by something that is not seen."""
    for member in family.members():
        for note in before_write:
            note(member)


def unpark_all(tensors: Iterable[Tensor]) -> None:
    """Move tensors to the device, except remote ones."""
    for tensor in tensors:
        if type(tensor) in (ParkedParameter, ParkedTensor):
            unpark(tensor)


def alias_of(tensor: Tensor, family: Family) -> Tensor:
    """Return what ``detach`` gives: a parked tensor in the same memory."""
    note_write(family)
    alias = plain_of(tensor)
    _set(alias, alias, family)
    return alias


# --- functions of parked tensors --------------------------------------------------------------------------------------


def called(func: Any, args: Any, kwargs: Any, leaf_of: Callable[[Tensor], Tensor] | None = None) -> Any:
    """Call a function of torch some of whose tensors may be parked, as if they were on the device.

    ``leaf_of``: returns a leaf for a copy whose gradient nothing may need. Without it, a parameter moves to the device
    if the function may need its gradient.
    """
    name = getattr(func, "__name__", "")
    prop = property_name(func) if name in ("__get__", "__set__", "__delete__") else ""
    first = args[0] if args and is_parked(args[0]) else None
    with torch._C.DisableTorchFunctionSubclass():
        if first is not None:
            answer = _of_tensor(first, func, prop or name, args, kwargs)
            if answer is not NotImplemented:
                return answer
        return _on_copies(func, args, kwargs, leaf_of)


def _of_tensor(tensor: Tensor, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Answer what needs no copy of the values. NotImplemented: anything else."""
    family = family_of(tensor)
    assert family is not None
    sets = getattr(func, "__name__", "") == "__set__"
    real = not in_fake_mode()
    detached = real and not (tensor.requires_grad and torch.is_grad_enabled())
    match name:
        case "device":
            return family.device
        case "is_cpu" | "is_cuda":
            return name == f"is_{family.device.type}"
        case "get_device":
            return family.device.index
        case "is_shared":
            return True  # as of any tensor on a GPU
        case "data" if sets:
            _replace(tensor, args[1])
            return None
        case "data" | "detach" if real:
            return alias_of(tensor, family)
        case "grad" | "_grad" if sets and args[1] is not None:
            unpark(tensor)
            return func(*args)
        case "copy_" if detached and isinstance(args[1], Tensor):
            note_write(family)
            plain_of(tensor).copy_(plain_of(args[1]))
            return tensor
    if name in METADATA or name in METADATA_CALLS or name in KEPT or (name == "requires_grad_"):
        return func(*args, **kwargs)
    if name in MEMORY and from_a_library():
        return func(*args, **kwargs)
    if name in MOVES and detached:
        return _moved(tensor, func, args, kwargs)
    if name in VIEWS and detached:
        return _viewed(tensor, family, func, args, kwargs)
    return NotImplemented


def _replace(tensor: Tensor, value: Tensor) -> None:
    """Set ``data``."""
    if value is not tensor:
        for note in before_write:
            note(tensor)
        _set(tensor, plain_of(value), family_of(value))


def _viewed(tensor: Tensor, family: Family, func: Any, args: Any, kwargs: Any) -> Any:
    """Return a view in the memory on the host, parked as well. NotImplemented: the result is not a view."""
    if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args[1:], kwargs))):
        return NotImplemented
    host = plain_of(tensor)
    view = func(host, *args[1:], **kwargs)
    if view.untyped_storage()._cdata != host.untyped_storage()._cdata:
        return NotImplemented
    note_write(family)
    view = view.detach()
    _set(view, view, family)
    return view


def _moved(tensor: Tensor, func: Any, args: Any, kwargs: Any) -> Any:
    """Return what a move to the host or to the same device gives. NotImplemented: another result."""
    fake = fake_like(tensor)
    result = func(fake, *args[1:], **kwargs)
    if result is fake:
        return tensor
    if result.device != CPU:
        return NotImplemented
    memory = torch.empty_strided(result.size(), result.stride(), dtype=result.dtype, device=CPU)
    return memory.copy_(plain_of(tensor))


def _on_copies(func: Any, args: Any, kwargs: Any, leaf_of: Callable[[Tensor], Tensor] | None) -> Any:
    """Run a function on copies of parked tensors; those that it changes, or lets escape, become their memory."""
    copies: dict[int, tuple[Tensor, Tensor]] = {}
    fake = in_fake_mode()
    for leaf in pytree.tree_leaves((args, kwargs)):
        family = family_of(leaf) if isinstance(leaf, Tensor) else None
        if family is None or id(leaf) in copies:
            continue
        needs = leaf.requires_grad and torch.is_grad_enabled()
        if fake:
            copies[id(leaf)] = leaf, _on_device(leaf, family.device).requires_grad_(needs)
        elif family.streams and not needs:
            copies[id(leaf)] = leaf, _on_device(leaf, family.device)
        elif family.streams and leaf_of is not None:
            copies[id(leaf)] = leaf, leaf_of(_on_device(leaf, family.device))
        else:
            unpark(leaf)
    if not copies:
        return func(*args, **kwargs)
    versions = {key: copy._version for key, (_, copy) in copies.items()}

    def copy_of(value: Any) -> Any:
        return copies[id(value)][1] if id(value) in copies else value

    again, keywords = pytree.tree_map(copy_of, (args, kwargs))
    result = func(*again, **keywords)
    del again, keywords
    origins = {id(copy): leaf for leaf, copy in copies.values()}
    result = pytree.tree_map(lambda value: origins.get(id(value), value), result)
    for key, (leaf, copy) in copies.items():
        family = family_of(leaf)
        if family is not None and not fake and (copy._version != versions[key] or storage_uses(copy) > 1):
            _adopt(family, copy.untyped_storage())
    return result


class _Parked:
    """The interception, for parameters and other tensors."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function as if the tensors were on the device. One with other subclasses is for those."""
        if not all(issubclass(kind, _Parked) or kind in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented
        return called(func, args, kwargs or {})

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        return copied(self, memo)

    def __copy__(self: Any) -> Any:
        return shallow(self)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return reduced(self, protocol)

    def __repr__(self: Any, **kwargs: Any) -> str:
        return repr(shown(self))

    def __format__(self: Any, spec: str) -> str:
        return format(shown(self), spec)


class ParkedParameter(_Parked, nn.Parameter):  # type: ignore[misc]  # both classes may be copied
    """A parameter that is parked."""


class ParkedTensor(_Parked, Tensor):  # type: ignore[misc]  # both classes may be copied
    """Another tensor that is parked: a buffer, or an alias of a parameter."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. ``nn.Parameter(tensor)`` marks an alias of a tensor of a class of its own."""
        if name == "_is_param" and value:
            self.__class__ = ParkedParameter  # type: ignore[assignment]  # of the same memory layout
        else:
            super().__setattr__(name, value)


def shown(tensor: Tensor) -> Tensor:
    """Return an ordinary tensor on the device with the values of a parked one, to be printed or compared."""
    family = family_of(tensor)
    assert family is not None
    copy = _on_device(tensor, family.device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copy, requires_grad=tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad)


def shallow(tensor: Tensor) -> Tensor:
    """Return what ``copy.copy`` gives of a parked tensor: another one in the same memory."""
    family = family_of(tensor)
    assert family is not None
    note_write(family)
    host = plain_of(tensor)
    new = nn.Parameter(host, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else host
    vars(new).update({key: value for key, value in vars(tensor).items() if key != PARKED})
    _set(new, host, family)
    return new


def copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Return a deep copy of a parked tensor, parked as well."""
    import copy

    if id(tensor) in memo:
        return memo[id(tensor)]  # type: ignore[no-any-return]
    family = family_of(tensor)
    assert family is not None
    host = on_host(tensor)
    new = nn.Parameter(host, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else host.detach()
    new.requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = new
    if not isinstance(tensor, nn.Parameter):  # whose copies have no attributes
        vars(new).update(copy.deepcopy({key: value for key, value in vars(tensor).items() if key != PARKED}, memo))
    _set(new, host, Family(family.device, streams=family.streams))
    return new


def reduced(tensor: Any, protocol: Any) -> Any:
    """Return what pickle writes of a tensor on the device. The memory on the host is written, with the device's name.

    See ``parking`` for the name.
    """
    attributes, kind = vars(tensor), tensor.__class__
    family = attributes.pop(PARKED)
    tensor.__class__ = nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor
    try:
        rebuild, values = tensor.__reduce_ex__(protocol)
        return rebuild, tuple(dict(value) if value is attributes else value for value in values)
    finally:
        tensor.__class__ = kind
        attributes[PARKED] = family


def device_of_storage(storage: Any) -> str | None:
    """Return the device that memory on the host stands for, None for other memory."""
    untyped = getattr(storage, "_untyped_storage", storage)
    family = _BY_STORAGE.get(getattr(untyped, "_cdata", 0))
    return None if family is None else str(family.device)
