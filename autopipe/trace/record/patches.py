"""Patch torch while a model is recorded, and restore it afterwards.

Calls of modules and of custom autograd functions are redirected. ``torch.compiler.is_compiling()`` returns True, so
that model libraries avoid data-dependent shortcuts (transformers would drop an all-ones mask). User-level
``checkpoint()`` runs its function once, and its calls are marked as one recompute unit. Reads of ``module.training`` in
user code are recorded. Torch's log of a failed fake call is suppressed, since the error contains it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributions
import torch.utils.checkpoint
from torch import nn

from autopipe.trace.explain import calling_frame, here, short_path, unsupported, users_frame
from autopipe.trace.record.caches import users_namespaces
from autopipe.trace.record.module_hooks import GETTERS, refusing
from autopipe.trace.record.recorder import Recorder
from autopipe.trace.record.values import SYMBOLIC

_AUTOCAST = torch.amp.autocast_mode.autocast
_FAKES = logging.getLogger("torch._subclasses.fake_tensor")


class TrainingReads:
    """Replaces ``nn.Module.training`` and records whether any code outside leaf modules reads it."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.seen = False

    def __get__(self, module: Any, owner: Any) -> Any:
        if module is None:
            return self
        if self.recorder.listening:
            self.seen = True
        return vars(module)["training"]

    def __set__(self, module: Any, value: bool) -> None:
        vars(module)["training"] = value


@contextlib.contextmanager
def following(recorder: Recorder) -> Iterator[TrainingReads]:
    """Redirect the calls of modules, custom functions and autocast regions to the recorder."""
    call, change_all = nn.Module.__call__, nn.Module._apply
    apply = torch.autograd.Function.__dict__["apply"]
    enter: Any = _AUTOCAST.__enter__
    leave: Any = _AUTOCAST.__exit__
    reads = TrainingReads(recorder)

    def module_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recorder.modules.call(call, module, *args, **kwargs)

    def function_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        original = types.MethodType(apply.__func__, cls)
        if not recorder.listening:
            return original(*args, **kwargs)
        if cls is torch.utils.checkpoint.CheckpointFunction:
            with recorder.checkpoint():
                return args[0](*args[2:])
        if cls is torch.nn.modules._functions.BackwardHookFunction:
            out = original(*args, **kwargs)
            for value, of in zip(out if isinstance(out, tuple) else (out,), args, strict=True):
                recorder.alias(value, of)
            recorder.notes.append(f"a backward hook of a module only observes, and is not run in stages ({here()})")
            return out
        return recorder.call_custom(cls, original, *args, **kwargs)

    def module_apply(module: nn.Module, change: Any, *args: Any, **kwargs: Any) -> Any:
        # module.to(dtype) in the forward would replace the model's tensors
        if not recorder.listening:
            return change_all(module, change, *args, **kwargs)  # type: ignore[no-untyped-call]  # torch has no annotation for it
        with torch._C.DisableTorchFunction():
            for tensor in (*module.parameters(), *module.buffers()):
                now = change(tensor)
                if now is not tensor and (now.dtype, now.device) != (tensor.dtype, tensor.device):
                    raise unsupported(
                        f"the forward moves or converts {type(module).__name__}: {tensor.dtype} to {now.dtype}",
                        "do it where the model is built",
                    )
        return module

    def checkpoint_once(
        fn: Any, preserve_rng_state: bool = True, context_fn: Any = None, *args: Any, **kwargs: Any
    ) -> Iterator[None]:
        if context_fn not in (None, torch.utils.checkpoint.noop_context_fn):
            selective = f"a selective checkpoint() is recomputed as a whole ({here()})"
            if selective not in recorder.notes:
                recorder.notes.append(selective)
        with recorder.checkpoint() if recorder.listening else contextlib.nullcontext():
            yield

    def autocast_enter(self: Any) -> Any:
        if recorder.listening:
            recorder.autocast.append((self.device, self.fast_dtype, self._enabled, self._cache_enabled))
        return enter(self)

    def autocast_exit(self: Any, *error: Any) -> Any:
        if recorder.listening and recorder.autocast:
            recorder.autocast.pop()
        return leave(self, *error)

    def asked_compiling() -> None:
        recorder.asks_compiling = recorder.asks_compiling or recorder.listening

    def symbolic_len(value: Any) -> Any:
        # len() converts a symbolic size to a number; the user's len(x) means x.shape[0]
        if isinstance(value, torch.Tensor) and value.dim() and recorder.listening:
            return value.shape[0]
        return len(value)

    replaced: list[tuple[Any, str, Any]] = [
        (nn.Module, "__call__", module_call),
        (nn.Module, "_apply", module_apply),
        *((nn.Module, name, refusing(recorder, vars(nn.Module)[name])) for name in GETTERS),
        (torch.autograd.Function, "apply", classmethod(function_apply)),
        (_AUTOCAST, "__enter__", autocast_enter),
        (_AUTOCAST, "__exit__", autocast_exit),
        (torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", checkpoint_once),
        (nn.Module, "training", reads),
        *((kind, "__format__", lambda number, _: str(number)) for kind in SYMBOLIC),  # it is printed with a format
        (torch.distributions.Distribution, "_validate_args", False),  # validation reads the data
        (_FAKES, "disabled", True),  # suppress torch's traceback; the error reports the failure
    ]
    with contextlib.ExitStack() as stack:
        namespaces = users_namespaces(recorder.faked_model.model)
        replaced += [(namespace, "len", symbolic_len) for namespace in namespaces if "len" not in vars(namespace)]
        for owner, name, value in replaced:
            stack.callback(_restore, owner, name, vars(owner).get(name, _ABSENT))
            setattr(owner, name, value)
        stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
        stack.enter_context(as_compiled(called=asked_compiling))
        yield reads


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """Suppress torch's log of a traceback when a fake call fails; the error reports the failure."""
    before = _FAKES.disabled
    _FAKES.disabled = True
    try:
        yield
    finally:
        _FAKES.disabled = before


_ABSENT = object()


def _restore(owner: Any, name: str, before: Any) -> None:
    if before is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, before)


@contextlib.contextmanager
def as_compiled(
    asked: list[str] | None = None, only: str = "", called: Callable[[], None] | None = None
) -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` return True in this thread.

    ``called``: runs at each call. ``asked``: a list to which every calling place (``file:line``) is added. ``only``: if
    not "", the only calling place for which it returns True.
    """
    thread = threading.get_ident()

    def yes() -> bool:
        if threading.get_ident() != thread:
            return before[0]()
        place = ""
        if called is not None:
            called()
        if asked is not None:
            frame = calling_frame()
            while frame is not None and frame.f_code.co_name.startswith(
                "is_"
            ):  # a helper that returns the answer to its caller
                frame = users_frame(frame.f_back)
            place = f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else ""
            if place and place not in asked:
                asked.append(place)
        return not only or place == only

    before = torch.compiler.is_compiling, torch.compiler.is_exporting
    torch.compiler.is_compiling = torch.compiler.is_exporting = yes
    try:
        yield
    finally:
        torch.compiler.is_compiling, torch.compiler.is_exporting = before
