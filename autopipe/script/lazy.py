"""``Lazy``: a tensor whose number is on the last rank. What the script computes from it is recorded, and runs there.

Shape, dtype and whether it needs a gradient are known at once, from a fake tensor. A read (``item``, ``print``, a
comparison in an ``if``) waits for the number.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor
from torch.utils import _pytree as pytree

from autopipe.script.codec import UnsendableError, Value
from autopipe.script.devices import generators, moved, parsed
from autopipe.script.refusals import refused
from autopipe.script.settings import autocast_now
from autopipe.script.state.metadata import METADATA, METADATA_CALLS
from autopipe.script.state.parked import is_parked, plain_of
from autopipe.script.state.remote import is_remote, tracked
from autopipe.trace.record.fakes import fake_like
from autopipe.trace.record.targets import property_name, written
from autopipe.trace.record.values import RandomCount

if TYPE_CHECKING:
    from autopipe.script.controller import Controller

_READS = {
    "item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__complex__", "__format__",
    "__array__", "__contains__", "__reduce_ex__", "__deepcopy__", "equal", "allclose", "is_nonzero", "data_ptr",
    "untyped_storage", "storage", "__dlpack__", "__dlpack_device__", "tensor_split_sizes",
}  # fmt: skip
_LIKE = {"type_as", "view_as", "expand_as", "reshape_as"}  # of the second tensor they read only its form
_DRAWN_LIKE = {"rand_like", "randn_like", "randint_like"}  # so do these of their first, and have no gradient
_MOVES = {"to", "cuda", "cpu"}  # an argument of them may name a device by text or by its number
_REFUSED = {"register_hook", "retain_grad", "requires_grad_", "register_post_accumulate_grad_hook", "set_", "resize_"}


class Lazy(Tensor):
    """A value of the last rank. ``lz_calls``: the calls of the model that a backward from it reaches."""

    lz_controller: Controller
    lz_key: int
    lz_fake: Tensor
    lz_needs: bool
    lz_calls: frozenset[int]
    lz_name: str
    lz_read: tuple[int, int, Any] | None

    @staticmethod
    def make(controller: Controller, key: int, fake: Tensor, *, needs: bool, calls: frozenset[int], name: str) -> Lazy:
        """Return the tensor for value ``key``. ``fake``: has its shape and dtype. ``name``: of its grad_fn."""
        form: dict[str, Any] = {"strides": fake.stride(), "dtype": fake.dtype, "device": fake.device}
        lazy: Lazy = Tensor._make_wrapper_subclass(Lazy, fake.shape, **form)
        lazy.lz_controller, lazy.lz_key, lazy.lz_fake = controller, key, fake
        lazy.lz_needs, lazy.lz_calls, lazy.lz_name, lazy.lz_read = needs, calls if needs else frozenset(), name, None
        controller.holders.add(key, lazy.lz_calls)
        weakref.finalize(lazy, controller.holders.remove, key, lazy.lz_calls).atexit = False
        return lazy

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]  # the stub has no self
        return _text(self)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run what reached C++ without being recorded: on real values, if no gradient is lost by that."""
        leaves = pytree.tree_leaves((args, kwargs or {}))
        needy = torch.is_grad_enabled() and any(isinstance(leaf, Lazy) and leaf.lz_needs for leaf in leaves)
        if needy and "_local_scalar_dense" not in str(func) and "equal" not in str(func):
            raise refused(f"{func} of an output of the model cannot be recorded")
        real, more = pytree.tree_map(lambda v: value_of(v) if isinstance(v, Lazy) else v, (args, kwargs or {}))
        return func(*real, **more)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a call, or read."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__" and isinstance(args[0], Lazy):
            answer = _property(args[0], property_name(func), func)
            if answer is not NotImplemented:
                return answer
        elif name in ("__set__", "__delete__"):
            raise refused(f"an output of the model gets another {property_name(func)}")
        if name == "backward":
            return backward(args[0], *args[1:], **kwargs)
        if name in METADATA_CALLS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*(v.lz_fake if isinstance(v, Lazy) else v for v in args), **kwargs)
        if name in _REFUSED:
            raise refused(f"{name}() of an output of the model")
        first = args[0] if args and isinstance(args[0], Tensor) else None
        writes = first is not None and _in_place(name)
        if "out" in kwargs and kwargs["out"] is not None:
            raise refused(f"{name}(out=...) with an output of the model")
        if writes and not isinstance(first, Lazy):
            return _into_real(func, args, kwargs)
        if name in _READS:
            real, more = pytree.tree_map(lambda v: _readable(v) if isinstance(v, Lazy) else v, (args, kwargs))
            return func(*real, **more)
        if name in _LIKE and first is not None and not isinstance(first, Lazy):  # the result may share its memory
            return func(*map(_zeros, args), **kwargs)
        if name in _DRAWN_LIKE:
            return func(*map(_zeros, args), **kwargs)
        return _recorded(func, name, args, kwargs, writes=writes)


def _in_place(name: str) -> bool:
    return (
        (name.endswith("_") and not name.endswith("__"))
        or name == "__setitem__"
        or (name.startswith("__i") and name not in ("__invert__", "__int__", "__index__", "__iter__"))
    )


def _property(lazy: Lazy, name: str, func: Any) -> Any:
    match name:
        case "requires_grad":
            return lazy.lz_needs
        case "is_leaf":
            return not lazy.lz_needs
        case "grad_fn":
            return GradFn(lazy.lz_name) if lazy.lz_needs else None
        case "grad" | "_grad":
            return None
        case "data":
            return lazy.detach()
        case "_version" | "_backward_hooks" | "_base":
            return None if name != "_version" else 0
        case "device":
            return lazy.lz_fake.device
    if name in METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(lazy.lz_fake)
    return NotImplemented


class GradFn:
    """Stands for the ``grad_fn`` of a lazy tensor: it is on the last rank."""

    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:
        """Return the name of the backward."""
        return self._name

    def __getattr__(self, name: str) -> Any:
        raise refused(f"grad_fn.{name} of an output of the model")


def value_of(lazy: Lazy) -> Any:
    """Return the number, without its gradient. The value is kept until something is changed in place."""
    controller = lazy.lz_controller
    at = (lazy.lz_key, controller.changes)
    if lazy.lz_read is None or lazy.lz_read[:2] != at:
        lazy.lz_read = (*at, controller.fetch(lazy.lz_key))
    return lazy.lz_read[2]


def _readable(lazy: Lazy) -> Tensor:
    """Return a copy of the number that refuses what torch refuses for a tensor with a gradient, such as numpy()."""
    value: Tensor = value_of(lazy).clone()
    return value.requires_grad_() if lazy.lz_needs else value


def _into_real(func: Any, args: Any, kwargs: Any) -> Any:
    """Write into a tensor of the script: its gradient would be lost, so a backward through it is refused."""

    def real(value: Any) -> Any:
        if not isinstance(value, Lazy):
            return value
        number = value_of(value).clone()
        if value.lz_needs and torch.is_grad_enabled():
            return tracked(number, "a backward through a tensor into which an output of the model was written")
        return number

    args, kwargs = pytree.tree_map(real, (args, kwargs))
    return func(*args, **kwargs)


def _faked(controller: Controller, value: Any, grad: bool) -> Any:
    if isinstance(value, Lazy):
        fake = value.lz_fake.detach()
        if value.lz_needs and grad:
            fake.requires_grad_()
        return fake
    if is_parked(value):
        return fake_like(value)
    if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
        return controller.fakes.from_tensor(value.detach(), static_shapes=True)
    return value


def _recorded(  # noqa: PLR0915 - one call, step by step
    func: Any, name: str, args: Any, kwargs: Any, *, writes: bool
) -> Any:
    leaves = pytree.tree_leaves((args, kwargs))
    lazies = [leaf for leaf in leaves if isinstance(leaf, Lazy)]
    others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, Lazy)]
    controller, grad = lazies[0].lz_controller, torch.is_grad_enabled()
    needy = grad and any(lazy.lz_needs for lazy in lazies)
    if grad and any(is_remote(leaf) and leaf.requires_grad for leaf in others):
        raise refused(f"{name}() of an output of the model and a parameter of the model, with a gradient")
    if any(map(is_remote, others)):
        return _on_numbers(func, args, kwargs)
    if grad and any(leaf.requires_grad for leaf in others):
        if needy or (writes and isinstance(args[0], Lazy)):
            raise refused(
                f"{name}() of an output of the model and another tensor that needs a gradient",
                "the other tensor's module as a part of the model, or the output's detach()",
            )
        return _on_numbers(func, args, kwargs)
    inplace = writes or bool(kwargs.get("inplace"))
    if inplace and isinstance(args[0], Lazy) and args[0].lz_key in controller.shared:
        raise refused(f"{name}() changes an output of the model that shares memory with another one")
    call = written(func, args, kwargs)
    drawn = RandomCount()
    fakes = pytree.tree_map(lambda v: _faked(controller, v, grad), (args, kwargs))
    before = [_version(fake) for fake in pytree.tree_leaves(fakes)]
    dynamic = False
    result: Any = None
    try:
        with torch._C.DisableTorchFunctionSubclass(), controller.fakes, drawn:
            targets = fakes[0]
            if inplace and isinstance(targets[0], Tensor) and targets[0].requires_grad:
                targets = (targets[0].clone(), *targets[1:])
            result = func(*targets, **fakes[1])
    except (DynamicOutputShapeException, NotImplementedError):
        dynamic = True
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    if drawn.count and name not in _MASKS:  # the draws are made here, on the numbers
        if inplace or any(tensor.requires_grad for tensor in tensors):
            raise refused(f"{name}() of an output of the model, which draws random numbers", "draw from its detach()")
        return _on_numbers(func, args, kwargs)
    now = [_version(fake) for fake in pytree.tree_leaves(fakes)]
    changed = [leaf for leaf, old, new in zip(leaves, before, now, strict=True) if old != new]
    if name == "batch_norm" and kwargs.get("training", True):
        changed += others  # its running statistics, whose versions do not tell
    if any(not isinstance(leaf, Lazy) for leaf in changed):
        if needy:
            raise refused(f"{name}() of an output of the model changes another tensor", "call it in the forward")
        return _on_numbers(func, args, kwargs)
    controller.changes += inplace
    states = _draw(controller, func, args, kwargs) if drawn.count else {}
    if not (tensors or dynamic or writes or result is None):
        return _on_numbers(func, args, kwargs)
    regions = autocast_now()
    keys = [controller.new_key() for _ in (tensors if not dynamic else [0])]
    extra = controller.new_key()
    moves = name in _MOVES

    def sendable(value: Any, key: str = "") -> Any:
        if isinstance(value, Lazy):
            return Value(value.lz_key)
        return parsed(value, controller.device) if moves or key == "device" else _plain(value)

    positional = pytree.tree_map(sendable, call.args)
    named = {key: pytree.tree_map(functools.partial(sendable, key=key), value) for key, value in call.kwargs.items()}
    sent = positional, named
    try:
        controller.tail(extra, call.kind, call.target, sent, [grad, regions, states], keys)
    except UnsendableError as error:
        raise refused(f"{name}() of an output of the model: {error}") from None
    calls = frozenset().union(*(lazy.lz_calls for lazy in lazies))
    if dynamic:
        ((shape, stride, dtype, device, needs),) = controller.describe(keys)
        with controller.fakes:
            fake = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        return Lazy.make(controller, keys[0], fake, needs=needs, calls=calls, name="IndexBackward0")
    if writes:
        return _changed(args[0], keys, tensors, extra, calls, controller, name)
    numbers = iter(keys)

    def lazy_of(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        title = value.grad_fn.name() if value.grad_fn is not None else ""
        needs = value.requires_grad
        with controller.fakes, torch._C.DisableTorchFunctionSubclass():
            fake = value.detach()
        return Lazy.make(controller, next(numbers), fake, needs=needs, calls=calls, name=title)

    return pytree.tree_map(lazy_of, result)


def _version(value: Any) -> int:
    """Return how often a tensor was changed in place; 0 for a tensor of inference mode, which does not count it."""
    return value._version if isinstance(value, FakeTensor) and not value.is_inference() else 0


def _changed(
    lazy: Any,
    keys: list[int],
    tensors: list[Tensor],
    extra: int,
    calls: frozenset[int],
    controller: Controller,
    name: str,
) -> Any:
    """Note that a value was changed in place."""
    further: frozenset[int] = frozenset()
    if tensors and tensors[0].requires_grad:
        lazy.lz_needs, lazy.lz_name = True, tensors[0].grad_fn.name() if tensors[0].grad_fn is not None else ""
        further = calls - lazy.lz_calls
    elif name == "__setitem__" and calls:
        lazy.lz_needs = True
        further = calls - lazy.lz_calls
    if further:
        lazy.lz_calls = lazy.lz_calls | further
        controller.holders.reach(further)
        weakref.finalize(lazy, controller.holders.leave, further).atexit = False
    return None if name == "__setitem__" else lazy


def _plain(value: Any) -> Any:
    return plain_of(value) if isinstance(value, Tensor) and not is_parked(value) else value


def _on_numbers(func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = pytree.tree_map(lambda v: _readable(v) if isinstance(v, Lazy) else v, (args, kwargs))
    return func(*args, **kwargs)


# these consume as many numbers for zeros as for any values
_MASKS = {
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
    "native_dropout", "scaled_dot_product_attention", "multi_head_attention_forward", "gumbel_softmax",
    "dropout_", "alpha_dropout_", "feature_dropout_", "feature_alpha_dropout_", "bernoulli_", "normal_", "uniform_",
    "random_", "exponential_", "geometric_", "cauchy_", "log_normal_", "lstm", "gru", "rnn_tanh", "rnn_relu",
}  # fmt: skip


def _zeros(value: Any) -> Any:
    """Return a tensor of zeros in the form of a lazy one; any other value as it is."""
    if not isinstance(value, Lazy):
        return value
    fake = value.lz_fake
    form: dict[str, Any] = {"dtype": fake.dtype, "device": fake.device}
    return torch.empty_strided(tuple(fake.shape), tuple(fake.stride()), **form).zero_()


def _draw(controller: Controller, func: Any, args: Any, kwargs: Any) -> dict[str, Tensor]:
    """Make the same draws here, on zeros, so that the script's generators continue as in one process.

    Return the states before, of those that have moved.
    """
    args, kwargs = pytree.tree_map(_zeros, (args, kwargs))
    before = generators(controller.device)
    with torch.no_grad():
        func(*args, **kwargs)
    return moved(before, controller.device)


def backward(
    loss: Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    """Queue the backward of a lazy loss."""
    if not isinstance(loss, Lazy):
        raise refused("a backward of this tensor with gradients that are outputs of the model")
    if create_graph or inputs is not None:
        raise refused("backward(create_graph=True) or backward(inputs=...) through the model")
    if not loss.lz_needs:
        raise RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn")
    if gradient is None and loss.lz_fake.numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    if isinstance(gradient, Lazy):
        gradient = Value(gradient.lz_key)
    loss.lz_controller.backward(loss.lz_key, sorted(loss.lz_calls, reverse=True), gradient, retain=bool(retain_graph))


def _text(lazy: Lazy) -> str:
    """Return what torch prints for the tensor, with the name of its grad_fn."""
    value: Tensor = value_of(lazy)
    if not lazy.lz_needs:
        return repr(value)
    printing: Any = torch._tensor_str
    suffixes = [f"grad_fn=<{lazy.lz_name}>"]
    if value.dtype not in (torch.get_default_dtype(), torch.int64, torch.bool):
        suffixes.insert(0, f"dtype={value.dtype}")
    kind = value.device.type
    if kind != torch._C._get_default_device() or (kind == "cuda" and value.device.index != torch.cuda.current_device()):
        suffixes.insert(0, f"device='{value.device}'")
    text = printing._tensor_str(value, len("tensor("))
    return str(printing._add_suffixes("tensor(" + text, suffixes, len("tensor("), force_newline=False))


def contains_lazy(values: Iterable[Any]) -> bool:
    """Return whether a lazy tensor is among values, also inside containers."""
    return any(isinstance(leaf, Lazy) for leaf in pytree.tree_leaves(list(values)))
