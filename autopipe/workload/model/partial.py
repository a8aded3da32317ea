"""Build a model with memory for some of its parameters only, and the same initial weights as a complete build.

A complete build numbers the parameters in the order of their registration. A build in part places those that are not
wanted on the ``meta`` device as they are registered. Their initialization must still draw its random numbers, because
all parameters share one generator: a random operation on such a parameter runs on temporary memory of its shape, which
is freed at once. The peak is the wanted parameters and the largest other one.

A build that cannot be divided so raises ``NotDivisibleError``: a wanted parameter is computed from another one, or is
a copy of one (``copy.deepcopy``), or the model reads the values of a parameter.

Other initializations draw fewer numbers for a parameter on ``meta``: a function of ``nn.init`` that was imported by its
name, or a distribution whose draws depend on values. So the caller compares what was built with the digests of a
complete build (``workload.model.digests``), and builds completely if they differ.

``ZeroedMemory`` is memory that a build allocates and never writes: ``nn.Parameter(torch.empty(n))`` without
initializer. Its values are arbitrary, so two builds with one seed differ, and some contain NaN. Here it is filled with
zeros, which new memory usually contains, so that every rank and plain training start from the same weights. No random
number is drawn for it, and initialized tensors do not change.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

WORTH_BYTES = 256 << 20
"""A rank builds only its own parameters if the others take at least this much: a build may have to be repeated."""

# random operations that draw as many numbers for any values of their operands
_COUNTED = frozenset(
    {"normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_"}
    | {"rand_like", "randn_like", "randint_like"}
)
# initializers that do nothing to a tensor on ``meta``, not even draw numbers
_SKIPPING = ("_no_grad_trunc_normal_", "orthogonal_", "sparse_")

_EMPTY = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.empty_permuted,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}

_PAGES_FROM = 1 << 20  # bytes; smaller tensors are written, because a process may have only so many mappings


class NotDivisibleError(RuntimeError):
    """The wanted parameters cannot be built alone."""


class PartialBuild:
    """The parameters of one build, in the order of their registration, and which of them are wanted.

    ``wanted``: their numbers, from a complete build; None in that build, which gives memory to every parameter.
    """

    def __init__(self, wanted: frozenset[int] | None = None) -> None:
        self._wanted = wanted
        self._count = 0
        self._numbers = WeakTensorKeyDictionary()  # registered parameter -> number
        self._replaced = WeakTensorKeyDictionary()  # the user's parameter -> the one on ``meta``
        self._draws = _Draws()

    def numbers(self, model: nn.Module) -> dict[str, int]:
        """Return the number of each parameter, by all its names: its position in the order of registration, from 0.

        -1: it was not registered by ``register_parameter``.
        """
        named = model.named_parameters(remove_duplicate=False)
        return {name: self._numbers.get(p, -1) for name, p in named}  # type: ignore[no-untyped-call]  # untyped in torch

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Build the model in this block, in this thread. One thread at a time.

        Raises: NotDivisibleError.
        """
        register, builder = nn.Module.register_parameter, threading.get_ident()

        def register_part(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            own = threading.get_ident() == builder and parameter is not None
            register(module, name, self._part(parameter) if own and parameter is not None else parameter)

        nn.Module.register_parameter = register_part  # type: ignore[method-assign, assignment]
        try:
            if self._wanted is None:
                yield
            else:
                with _initializers_that_draw(), self._draws:
                    yield
        except Exception as error:
            if self._draws.refused:
                raise NotDivisibleError(self._draws.refused) from error
            raise
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]
        if self._draws.refused:
            raise NotDivisibleError(self._draws.refused)

    def _part(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter to register: itself, or one on ``meta`` in its place."""
        if parameter in self._numbers:
            return parameter
        if parameter in self._replaced:
            return self._replaced[parameter]  # type: ignore[no-any-return]
        if type(parameter) is not nn.Parameter:
            return parameter
        part = parameter
        if not parameter.is_meta and self._wanted is not None and self._count not in self._wanted:
            part = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            self._replaced[parameter] = part
        self._numbers[part] = self._count
        self._count += 1
        return part


@contextlib.contextmanager
def _initializers_that_draw() -> Iterator[None]:
    """Let the initializers in ``_SKIPPING`` draw the numbers for a tensor on ``meta``, too."""
    originals = {name: getattr(nn.init, name) for name in _SKIPPING if hasattr(nn.init, name)}

    def drawing(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def initialize(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not tensor.is_meta:
                return original(tensor, *args, **kwargs)
            original(_memory_like(tensor), *args, **kwargs)
            return tensor

        return initialize

    for name, original in originals.items():
        setattr(nn.init, name, drawing(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(nn.init, name, original)


def _memory_like(tensor: Tensor) -> Tensor:
    """Return a tensor with memory, of the form of one on ``meta``.

    A large one gets pages of its own, which the system gets back: a heap would keep them between smaller objects.
    """
    memory = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    if memory.nbytes >= _PAGES_FROM:
        _place_in_new_pages(memory)
    return memory


class _Draws(TorchDispatchMode):
    """Lets random operations on ``meta`` tensors draw their numbers, and refuses values that come from such tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.refused = ""  # also if the user's code catches the exception

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation."""
        kwargs = kwargs or {}
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        name = func._schema.name.rpartition("::")[2]
        if not any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        if name in _COUNTED and len(tensors) == 1:
            (tensor,) = tensors
            drawn = func(_memory_like(tensor), *args[1:], **kwargs)
            return tensor if name.endswith("_") else torch.empty_like(drawn, device="meta")
        targets = [args[at] if at < len(args) else kwargs.get(name) for at, name in written(func)]
        if any(isinstance(leaf, Tensor) and not leaf.is_meta for leaf in pytree.tree_leaves(targets)):
            raise self._refusal(f"{name} computes a tensor from a parameter that has no memory here")
        try:
            return func(*args, **kwargs)
        except Exception:  # such as .item()
            self.refused = self.refused or f"{name} reads a parameter that has no memory here"
            raise

    def _refusal(self, what: str) -> NotDivisibleError:
        self.refused = what
        return NotDivisibleError(what)


@functools.cache
def written(func: Any) -> tuple[tuple[int, str], ...]:
    """Return (position, name) of the arguments that an operation writes."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


class ZeroedMemory(TorchDispatchMode):
    """Fills uninitialized memory that this thread allocates with zeros, within ``with``.

    ``untouched``: use memory that the system provides with zeros at its first use. A tensor that is dropped before it
    is written, such as a parameter in a build without memory for the parameters, then takes no memory and no time.
    """

    def __init__(self, *, untouched: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._untouched = untouched
        # weak references: the memory of a dropped tensor is freed, and the key is not used again
        self._unwritten: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and record the memory that it allocates or writes."""
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket in _EMPTY:
            if type(result) is torch.Tensor and result.layout is torch.strided and result.numel():
                if self._untouched and result.device.type == "cpu" and result.nbytes >= _PAGES_FROM:
                    _place_in_new_pages(result)
                elif not result.is_meta:
                    result.zero_()
                storage = result.untyped_storage()
                self._unwritten[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            return result
        for position, name in written(func):
            value = args[position] if position < len(args) else (kwargs or {}).get(name)
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                    self._unwritten.pop(tensor.untyped_storage()._cdata, None)
        return result

    def note(self, model: nn.Module) -> str:
        """Return a note that names the parameters and buffers that were never written, or ""; reset the record."""
        names = [
            name
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
            if type(tensor) in (torch.Tensor, nn.Parameter)
            and tensor.layout is torch.strided
            and tensor.untyped_storage()._cdata in self._unwritten
        ]
        self._unwritten.clear()
        if not names:
            return ""
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return (
            f"{names[0]}{others}: never initialized by the model: it starts from zeros here, and from whatever memory "
            "holds in a plain script; initialize it in build_model, or load weights"
        )


def _place_in_new_pages(tensor: torch.Tensor) -> None:
    """Give a new tensor memory that was never written, which contains zeros."""
    pages = mmap.mmap(-1, tensor.untyped_storage().nbytes(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    storage = torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()
    tensor.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
