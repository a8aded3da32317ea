"""Values as bytes, for commands between the controller and its ranks: a JSON header, then the memory of the tensors.

Nothing is unpickled. A value of another type is refused by name (``UnsendableError``). Tensors arrive with their
strides, because kernels may round differently over others, and on the host or on the device of the process that
decodes them.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autopipe.script.devices import CPU, DEVICE, HOST, place_of
from autopipe.script.state import parked
from autopipe.strides import extent
from autopipe.trace.record.targets import qualified_name

_MOST_GAPS = 4  # times the elements: the memory of a tensor with wider gaps is not sent as it is


class UnsendableError(TypeError):
    """A value that has no form as bytes."""


class Value(int):
    """The number of a value that the last rank has."""


def encoded(value: Any, device: torch.device = CPU) -> list[bytes | memoryview]:
    """Return a message: its length and header, then the memory of its tensors, copied at this moment.

    ``device``: of this process, besides the host.

    Raises: UnsendableError.
    """
    blobs: list[memoryview] = []
    header = json.dumps(_encoded(value, blobs, device)).encode()
    sizes = json.dumps([len(blob) for blob in blobs]).encode()
    return [len(header).to_bytes(8, "little") + len(sizes).to_bytes(8, "little"), header, sizes, *blobs]


def decoded(read: Callable[[memoryview], None], device: torch.device = CPU, *, parks: bool = False) -> Any:
    """Return the next message. ``read`` fills a buffer; ``device``: of this process. ``parks``: see ``state.parked``.

    Raises: whatever ``read`` raises.
    """
    lengths = bytearray(16)
    read(memoryview(lengths))
    header = bytearray(int.from_bytes(lengths[:8], "little"))
    sizes = bytearray(int.from_bytes(lengths[8:], "little"))
    read(memoryview(header))
    read(memoryview(sizes))
    blobs = []
    for size in json.loads(bytes(sizes)):
        blob = torch.empty(size, dtype=torch.uint8, device=CPU)
        if size:
            read(memoryview(blob.numpy()))  # type: ignore[arg-type]  # an array has a buffer
        blobs.append(blob)
    return _decoded(json.loads(bytes(header)), blobs, functools.partial(_rebuilt, device=device, parks=parks))


_NAMED = (torch.dtype, torch.layout, torch.memory_format)


def _encoded(value: Any, blobs: list[memoryview], device: torch.device) -> Any:
    again = functools.partial(_encoded, blobs=blobs, device=device)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Value):
        return ["V", int(value)]
    if isinstance(value, np.generic):
        return again(value.item())
    if isinstance(value, (int, float)):
        return ["n", float(value).hex()] if isinstance(value, float) else int(value)
    if isinstance(value, complex):
        return ["c", value.real.hex(), value.imag.hex()]
    if isinstance(value, Tensor):
        return _tensor(value, blobs, device)
    if isinstance(value, torch.Size):
        return ["S", *value]
    if isinstance(value, (tuple, list)):
        return ["t" if isinstance(value, tuple) else "l", *map(again, value)]
    if isinstance(value, dict):
        return ["d", *([again(key), again(entry)] for key, entry in value.items())]
    if isinstance(value, slice):
        return ["s", *map(again, (value.start, value.stop, value.step))]
    if value is ...:
        return ["e"]
    if isinstance(value, _NAMED):
        return ["N", str(value).removeprefix("torch.")]
    if isinstance(value, torch.device):
        return ["D", str(value) if value.type == "meta" else _place(value, device, "the device")]
    if isinstance(value, type) or callable(value):
        return ["F", name_of(value)]
    raise UnsendableError(f"{type(value).__module__}.{type(value).__qualname__}")


def _decoded(form: Any, blobs: Sequence[Tensor], rebuilt: Any) -> Any:
    if not isinstance(form, list):
        return form
    again = functools.partial(_decoded, blobs=blobs, rebuilt=rebuilt)
    tag, rest = form[0], form[1:]
    match tag:
        case "V":
            return Value(rest[0])
        case "n":
            return float.fromhex(rest[0])
        case "c":
            return complex(float.fromhex(rest[0]), float.fromhex(rest[1]))
        case "T":
            return rebuilt(rest, blobs)
        case "S":
            return torch.Size(rest)
        case "t":
            return tuple(map(again, rest))
        case "l":
            return list(map(again, rest))
        case "d":
            # names are one object each, as in one process: pickle writes the second one as a reference
            return {sys.intern(key) if type(key) is str else again(key): again(entry) for key, entry in rest}
        case "s":
            return slice(*map(again, rest))
        case "e":
            return ...
        case "N":
            return getattr(torch, rest[0])
        case "D":
            return {HOST: CPU, DEVICE: rebuilt.keywords["device"]}.get(rest[0]) or torch.device(rest[0])
        case "F":
            return resolved(rest[0])
    raise UnsendableError(f"unknown tag {tag!r}")


def _place(place: torch.device, device: torch.device, what: str) -> str:
    name = place_of(place, device)
    if not name:
        raise UnsendableError(f"{what} {place}, where the model is not: it is on {device}")
    return name


def _tensor(tensor: Tensor, blobs: list[memoryview], device: torch.device) -> Any:
    plain, family = parked.plain_of(tensor), parked.family_of(tensor)
    if plain.layout != torch.strided or plain.is_quantized:
        raise UnsendableError(f"a tensor of layout {plain.layout} on {plain.device}")
    place = _place(plain.device if family is None else family.device, device, "a tensor on")
    copy = as_it_arrives(plain)
    memory = copy.as_strided((extent(copy.shape, copy.stride()),), (1,))
    memory = torch.view_as_real(memory).flatten() if memory.is_complex() else memory
    blobs.append(memoryview(memory.view(torch.uint8).numpy()))  # type: ignore[arg-type]  # an array has a buffer
    dtype = str(copy.dtype).removeprefix("torch.")
    return ["T", len(blobs) - 1, dtype, list(copy.shape), list(copy.stride()), place]


def as_it_arrives(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor on the host, with its strides unless they leave wide gaps."""
    tensor = tensor.resolve_conj().resolve_neg()
    span = extent(tensor.shape, tensor.stride())
    if span > _MOST_GAPS * tensor.numel() + 1024:
        tensor = tensor.contiguous()
        span = tensor.numel()
    memory = tensor.as_strided((span,), (1,), tensor.storage_offset()).to(CPU, copy=True)
    return memory.as_strided(tensor.shape, tensor.stride())


def _rebuilt(rest: Sequence[Any], blobs: Sequence[Tensor], device: torch.device, parks: bool) -> Tensor:
    index, name, shape, stride, place = rest
    if parks and place == DEVICE:
        return parked.parked_value(_rebuilt([*rest[:-1], HOST], blobs, device, parks), device)
    dtype: torch.dtype = getattr(torch, name)
    memory = blobs[index]
    if place != HOST:
        memory = torch.empty_like(memory, device=device).copy_(memory)  # ``to`` may leave it on the host
    if not memory.numel():
        return torch.empty_strided(shape, stride, dtype=dtype, device=memory.device)
    if dtype.is_complex:
        numbers = torch.view_as_complex(memory.view(dtype.to_real()).view(-1, 2))
    else:
        numbers = memory.view(dtype)
    strided: Tensor = numbers.as_strided(shape, stride)
    return strided


def name_of(target: Any) -> str:
    """Return the dotted name of a function or class that every process can import.

    Raises: UnsendableError if the name leads to something else, as for a function that is local or of the script.
    """
    own = f"{target.__module__}.{target.__qualname__}" if isinstance(target, type) else ""
    name = own or qualified_name(target)
    if name.startswith("__main__.") or "<" in name:
        raise UnsendableError(f"{name}, which only the script has")
    try:
        reached = resolved(name)
    except (ImportError, AttributeError):
        reached = None
    if reached is not target:
        for other in (f"torch.nn.functional.{name.rpartition('.')[2]}", f"torch.Tensor.{name.rpartition('.')[2]}"):
            try:
                if resolved(other) is target:
                    return other
            except (ImportError, AttributeError):
                continue
        raise UnsendableError(f"{name}, which cannot be imported under this name")
    return name


@functools.cache
def resolved(name: str) -> Any:
    """Return what a dotted name stands for: the longest prefix that is a module, then attributes.

    Raises: ImportError, AttributeError.
    """
    parts = name.split(".")
    if len(parts) == 1:
        import builtins

        return getattr(builtins, name)
    for count in range(len(parts) - 1, 0, -1):
        try:
            place: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            place = getattr(place, part)
        return place
    raise ImportError(f"no module {parts[0]!r}")


def module_form(module: nn.Module, names: dict[int, str]) -> tuple[Any, ...]:
    """Return a module of torch.nn as sendable values: class, plain attributes, names of its tensors, submodules.

    ``names``: id of a parameter or buffer -> its first name in the model.

    Raises: UnsendableError for a class that is not torch's, or an attribute without a form.
    """
    kind = type(module)
    if not kind.__module__.startswith("torch.nn.modules."):
        raise UnsendableError(f"module class {kind.__module__}.{kind.__qualname__}")
    tensors = {key: None if value is None else names[id(value)] for key, value in module._parameters.items()}
    buffers = {key: None if value is None else names[id(value)] for key, value in module._buffers.items()}
    return (
        kind,
        attributes_of(module),
        tensors,
        buffers,
        {key: None if child is None else module_form(child, names) for key, child in module._modules.items()},
    )


# what nn.Module keeps for itself, and the weights of recurrent layers, which are attributes and parameters
_OWN = {
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_backward_pre_hooks", "_backward_hooks",
    "_is_full_backward_hook", "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_flat_weights", "_flat_weight_refs",
}  # fmt: skip


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of a module of torch that its code reads, such as the rate of a dropout."""
    kind: Any = type(module)  # a class is hashable
    names = names_in(kind)
    return {key: value for key, value in vars(module).items() if key in names and key not in _OWN}


@functools.cache
def names_in(kind: type) -> frozenset[str]:
    """Return the names in the code of a class: those of all attributes that it reads, and more."""
    members = [member for owner in kind.__mro__ for member in vars(owner).values()]
    functions = [getattr(member, "fget", None) or getattr(member, "__func__", member) for member in members]
    return frozenset(name for f in functions if isinstance(f, types.FunctionType) for name in _names_of(f.__code__))


def _names_of(code: types.CodeType) -> Iterator[str]:
    """Yield the names in a code and in the functions that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_of(constant)


def rebuilt_module(form: Sequence[Any], tensors: dict[str, Tensor]) -> nn.Module:
    """Return the module of a form. ``tensors``: first name -> parameter or buffer of this process."""
    kind, attributes, parameters, buffers, children = form
    module: nn.Module = kind.__new__(kind)
    nn.Module.__init__(module)
    for key, name in parameters.items():
        module._parameters[key] = None if name is None else tensors[name]  # type: ignore[assignment]
    for key, name in buffers.items():
        module._buffers[key] = None if name is None else tensors[name]
    for key, child in children.items():
        module._modules[key] = None if child is None else rebuilt_module(child, tensors)
    vars(module).update(attributes)
    if isinstance(module, nn.RNNBase):
        names = module._flat_weights_names
        module._flat_weights = [module._parameters.get(name) for name in names]
        module._flat_weight_refs = [None] * len(names)
    return module
