"""Build a model with memory for some of its parameters only, and the same initial weights as a complete build.

The parameters are numbered in the order of their registration. A build in part replaces those that are not wanted by
placeholders as they are registered (``workload.model.placeholders``). Their initialization runs as in a complete build,
and draws the same random numbers, because all parameters share one generator; what it writes is lost. The peak is the
wanted parameters and twice the largest other one. A build for no parameter's sake leaves these draws out (``undrawn``).
An ``empty`` build places every parameter on the ``meta`` device, where no random numbers are drawn.

What is computed from the content of placeholders is followed through the build. A build that cannot be divided raises
``NotDivisibleError``: a tensor of the wanted part is computed from a placeholder, is a copy of one (``copy.deepcopy``),
or the build reads numbers from one. Where a complete build is possible, the caller also compares what was built with
its digests (``workload.model.digests``).

``ZeroedMemory``: memory that a build allocates and never writes (``nn.Parameter(torch.empty(n))``) has arbitrary
values. It is filled with zeros, which new memory usually contains, so that all processes start from the same weights.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from autopipe import sparse
from autopipe.draws import UncompiledMode, is_random
from autopipe.workload.model.placeholders import SharedPages, make_placeholder, new_pages

WORTH_BYTES = 256 << 20
"""A rank builds only its own parameters if the others take at least this much: a build may have to be repeated."""

# random operations that draw as many numbers for any values of their operands
_IN_PLACE = {"normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_"}
_COUNTED = frozenset(_IN_PLACE | {"rand_like", "randn_like", "randint_like"})
# operations that write every element of their first operand, and do not read it
_REPLACING = frozenset(_IN_PLACE | {"copy_", "fill_", "zero_"})
# methods and functions that read memory without an operation
_READERS = ("numpy", "__array__", "__dlpack__", "tolist")
_FROM_NUMBERS = ("tensor", "as_tensor", "asarray")

_EMPTY = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.empty_permuted,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}

_own_pages: dict[int, StorageWeakRef] = {}  # storages on pages of ``_place_in_new_pages``
_PAGES_FROM = 1 << 20  # bytes; smaller tensors are written, because a process may have only so many mappings


class NotDivisibleError(RuntimeError):
    """The wanted parameters cannot be built alone."""


class PartialBuild:
    """The parameters of one build, in the order of their registration.

    ``wanted``: their numbers, from an earlier build; None: all. ``empty``: place every parameter on the meta device.
    ``shifted``: draw extra random numbers with every parameter: only random buffers then change in an empty build.
    ``undrawn``: draw nothing for placeholders; a build that then draws anything else cannot be divided.
    """

    def __init__(
        self,
        wanted: frozenset[int] | None = None,
        *,
        empty: bool = False,
        shifted: bool = False,
        undrawn: bool = False,
    ) -> None:
        self._wanted, self._empty, self._shifted = wanted, empty, shifted
        self.count, self._pages = 0, SharedPages()  # of parameters, also of those that the model no longer has
        self._numbers = WeakTensorKeyDictionary()  # registered parameter -> number
        self._replaced = WeakTensorKeyDictionary()  # the user's parameter -> the one on ``meta``
        self.derived = _Derived(undrawn=undrawn)

    @property
    def is_complete(self) -> bool:
        """Whether every parameter has memory of its own."""
        return self._wanted is None and not self._empty

    def numbers(self, model: nn.Module) -> dict[str, int]:
        """Return the position of each parameter in the order of registration, by all its names; -1 if it has none."""
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
            with contextlib.nullcontext() if self._wanted is None else self.derived.followed():
                yield
        except Exception as error:
            if self.derived.refused:
                raise NotDivisibleError(self.derived.refused) from error
            raise
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]
        if self.derived.refused:
            raise NotDivisibleError(self.derived.refused)

    def refuse_derived(self, model: nn.Module, is_own: Callable[[str, Tensor], bool]) -> None:
        """Raise NotDivisibleError if the content of one of these tensors of a model depends on a placeholder's.

        ``is_own``: takes the name of a parameter, a buffer, or an attribute of a module, and the tensor.
        """
        for path, module in model.named_modules():
            others = {key: value for key, value in vars(module).items() if key not in ("_parameters", "_modules")}
            buffers = others.pop("_buffers")
            for name, tensor in (*module._parameters.items(), *buffers.items(), *_tensors_in(others)):
                whole_name = f"{path}.{name}".removeprefix(".")
                if tensor is None or not is_own(whole_name, tensor):
                    continue
                if self.derived.depends(tensor):
                    raise self.derived.refuse(whole_name)

    def _part(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter to register: itself, or one without memory of its own."""
        if parameter in self._numbers:
            return parameter
        if parameter in self._replaced:
            return self._replaced[parameter]  # type: ignore[no-any-return]
        if type(parameter) is not nn.Parameter:
            return parameter
        part = parameter
        if self._shifted:
            torch.rand(3)
        if self._empty and not parameter.is_meta:
            part = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            self._replaced[parameter] = part
        elif self._wanted is not None and self.count not in self._wanted and self.derived.can_share(parameter):
            self.derived.lose(parameter)  # what else uses its memory
            make_placeholder(parameter, self._pages)
            _add_to(self.derived.placeholders, parameter)
        self._numbers[part] = self.count
        self.count += 1
        return part


def _tensors_in(attributes: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors among attributes, with the name of the attribute."""
    for name, value in attributes.items():
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, Tensor):
                yield name, leaf


class _Derived:
    """The memory of placeholders, and all memory whose content is computed from a lost content of theirs.

    A placeholder has its own content from an operation that writes all of it until another placeholder is written:
    an initializer may read what it has just drawn. ``undrawn``: leave out what is drawn for placeholders.
    """

    def __init__(self, *, undrawn: bool) -> None:
        self._undrawn = undrawn
        self.left_out: Tensor | None = None  # the state of the generator, if a draw was left out
        self.refused = ""  # also if the user's code catches the exception
        self.placeholders: dict[int, StorageWeakRef] = {}
        self._computed: dict[int, StorageWeakRef] = {}
        self._current: int | None = None  # the placeholder that has its own content

    def is_of_placeholder(self, tensor: Any) -> bool:
        """Return whether a value is a placeholder or a view of one."""
        strided = isinstance(tensor, Tensor) and tensor.layout is torch.strided
        return strided and _is_in(tensor, self.placeholders)

    def can_share(self, parameter: nn.Parameter) -> bool:
        """Return whether only tensors can use the memory of a parameter, and not numpy or another owner."""
        if parameter.device.type != "cpu" or parameter.layout is not torch.strided:
            return False
        own = parameter.untyped_storage().resizable() or _is_in(parameter, _own_pages)
        return own or _is_in(parameter, self.placeholders)

    def has(self, tensor: Tensor) -> bool:
        """Return whether the content of a tensor is not that of a complete build."""
        if self.is_of_placeholder(tensor):
            return bool(tensor.untyped_storage()._cdata != self._current)
        return any(_is_in(part, self._computed) for part in sparse.stored(tensor))

    def depends(self, tensor: Tensor) -> bool:
        """Return whether the content of a tensor is not that of a complete build, or may cease to be."""
        return self.is_of_placeholder(tensor) or self.has(tensor)

    def lose(self, tensor: Tensor) -> None:
        """Note that the content of a tensor and of what shares its memory is not that of a complete build any more."""
        for part in sparse.stored(tensor):
            _add_to(self._computed, part)

    def write(self, tensor: Tensor, *, replaced: bool, computed: bool) -> None:
        """Note that an operation has written a tensor.

        ``replaced``: all of it, whatever it contained. ``computed``: from a content that is lost.
        """
        if self.is_of_placeholder(tensor):
            storage = tensor.untyped_storage()
            if replaced and not computed and tensor.is_contiguous() and tensor.nbytes == storage.nbytes():
                self._current = storage._cdata
            elif computed or storage._cdata != self._current:
                self._current = None
        elif computed:
            self.lose(tensor)

    def leaves_out(self, name: str, target: Any, generator: Any) -> bool:
        """Return whether a draw is for a placeholder only, and left out. Raises: NotDivisibleError for a later one."""
        if self._undrawn and name in _IN_PLACE and generator is None and self.is_of_placeholder(target):
            self.left_out = torch.default_generator.get_state() if self.left_out is None else self.left_out
            self._current = None
            return True
        if self.left_out is not None:
            raise self.refuse(name)
        return False

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow what the operations in this block compute from placeholders. One thread at a time."""
        pickled = torch.Tensor._reduce_ex_internal

        def refused(tensor: Tensor, protocol: Any) -> Any:
            if self.depends(tensor):
                raise self.refuse("pickle")
            return pickled(tensor, protocol)  # type: ignore[no-untyped-call]  # untyped in torch

        torch.Tensor._reduce_ex_internal = refused  # type: ignore[method-assign]
        try:
            with _Operations(self), _Reads(self):
                yield
        finally:
            torch.Tensor._reduce_ex_internal = pickled  # type: ignore[method-assign]
        if self.left_out is not None and not torch.equal(self.left_out, torch.default_generator.get_state()):
            raise self.refuse("a draw of a thread, or a seed,")

    def refuse(self, name: str) -> NotDivisibleError:
        """Return the error for a number that the build reads."""
        self.refused = f"{name} depends on a parameter, or on random numbers, that this build does not have"
        return NotDivisibleError(self.refused)


def _add_to(storages: dict[int, StorageWeakRef], tensor: Tensor) -> None:
    storage = tensor.untyped_storage()
    storages[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _is_in(tensor: Tensor, storages: dict[int, StorageWeakRef]) -> bool:
    reference = storages.get(tensor.untyped_storage()._cdata)
    return reference is not None and not reference.expired()  # type: ignore[no-untyped-call]


class _Operations(UncompiledMode):
    """Notes what operations write, and refuses those that give numbers, or draw, by a content that is lost."""

    def __init__(self, derived: _Derived) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._derived = derived

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation."""
        kwargs = kwargs or {}
        name = func._schema.name.rpartition("::")[2]
        targets = [args[at] if at < len(args) else kwargs.get(key) for at, key in written(func)]
        replaced = name in _REPLACING
        creates = name.startswith("new_") or name.endswith("_like") or func._overloadpacket in _EMPTY
        form_only = replaced or creates  # of the first operand
        read = pytree.tree_leaves((args[1:] if form_only else args, kwargs))
        computed = any(isinstance(leaf, Tensor) and self._derived.has(leaf) for leaf in read)
        draws = is_random(func, args, kwargs)
        if computed and ((draws and name not in _COUNTED) or torch.Tag.dynamic_output_shape in func.tags):
            raise self._derived.refuse(name)
        if draws and self._derived.leaves_out(name, args[0], kwargs.get("generator")):
            return args[0]
        result = func(*args, **kwargs)
        results = [leaf for leaf in pytree.tree_leaves(result) if leaf is not None]
        if computed and not all(isinstance(leaf, Tensor) for leaf in results):  # such as of item()
            raise self._derived.refuse(name)
        for leaf in pytree.tree_leaves(targets):
            if isinstance(leaf, Tensor):
                self._derived.write(leaf, replaced=replaced, computed=computed)
        if computed:
            for leaf in results:
                if not self._derived.is_of_placeholder(leaf):
                    self._derived.write(leaf, replaced=False, computed=True)
        return result


class _Reads(TorchFunctionMode):
    """Refuses methods that give access to the memory of a placeholder without an operation."""

    def __init__(self, derived: _Derived) -> None:
        super().__init__()
        self._derived = derived

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch."""
        name = getattr(func, "__name__", "")
        read = args[:1] if name in _READERS else pytree.tree_leaves((args, kwargs)) if name in _FROM_NUMBERS else ()
        for tensor in read:
            if isinstance(tensor, Tensor) and self._derived.depends(tensor):
                raise self._derived.refuse(name)
        return func(*args, **(kwargs or {}))


@functools.cache
def written(func: Any) -> tuple[tuple[int, str], ...]:
    """Return (position, name) of the arguments that an operation writes."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


class ZeroedMemory(UncompiledMode):
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
                _add_to(self._unwritten, result)
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
    num_bytes = tensor.untyped_storage().nbytes()
    storage = torch.frombuffer(new_pages(num_bytes), dtype=torch.uint8, count=num_bytes).untyped_storage()
    tensor.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    for key in [key for key, reference in _own_pages.items() if reference.expired()]:  # type: ignore[no-untyped-call]
        del _own_pages[key]
    _add_to(_own_pages, tensor)
