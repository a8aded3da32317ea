"""Wrappers around a model, which only call it: for data parallelism on one GPU, and those of ``torch.compile``."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopipe.script.refusals import refused

_compiled: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""What the script lets torch compile: a model, or parts of one."""


def is_compiled(model: nn.Module) -> bool:
    """Return whether the script compiles a model, a part of it, or what it is a part of: its stages are compiled."""
    inside = any(module in _compiled for module in model.modules())
    return inside or any(model is part for whole in _compiled for part in whole.modules())


def install(say: Callable[[str], None]) -> None:
    """Let wrappers call their model; refuse data parallelism over several GPUs or processes. ``say``: writes a note."""
    one: Any = nn.DataParallel
    start = one.__init__

    def init(wrapper: Any, *args: Any, **kwargs: Any) -> None:
        start(wrapper, *args, **kwargs)
        if len(wrapper.device_ids) > 1:
            raise refused(f"DataParallel on the GPUs {wrapper.device_ids}", "the model without it")

    one.__init__, one.forward = init, _call
    several: Any = nn.parallel.DistributedDataParallel
    several.__init__, several.forward = _of_one_process, _call
    module: Any = nn.Module
    compile_ = torch.compile

    @functools.wraps(compile_)
    def compiled(model: Any = None, **options: Any) -> Any:
        if callable(model) and not isinstance(model, nn.Module):
            name = getattr(model, "__qualname__", type(model).__name__)
            say(f"torch.compile: {name} is not compiled, only modules are")
            return model
        result: Any = compile_(model, **options)
        if model is not None and result is not model:
            _note_compiled(model, options, say)
            type(result).__call__ = _call_uncompiled
            result.forward, result.dynamo_ctx = model.__call__, _as_it_is
        return result

    def compile_in_place(model: nn.Module, **options: Any) -> None:
        compile_(nn.Identity(), **options)  # it checks the options
        _note_compiled(model, options, say)

    torch.compile, module.compile = compiled, compile_in_place


def _note_compiled(model: nn.Module, options: dict[str, Any], say: Callable[[str], None]) -> None:
    backend = options.get("backend", "inductor")
    if options.get("disable") or backend == "eager":
        return
    if backend != "inductor":
        raise refused(f"torch.compile(backend={backend!r}) of a model", "the backend inductor")
    for name in ("mode", "options", "fullgraph", "dynamic"):
        if options.get(name) not in (None, False, "default"):
            say(f"torch.compile: {name}={options[name]!r} is not used; each stage is compiled with the defaults")
    _compiled.add(model)


def _as_it_is(function: Any) -> Any:
    return function


def _call_uncompiled(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand for the call of what ``torch.compile`` has returned for a model."""
    if any((wrapper._forward_hooks, wrapper._forward_pre_hooks, wrapper._backward_hooks, wrapper._backward_pre_hooks)):
        raise refused("a hook on what torch.compile has returned", "a hook on the model itself")
    return wrapper._orig_mod(*args, **kwargs)


def _of_one_process(wrapper: Any, module: nn.Module, device_ids: Sequence[Any] | None = None, **options: Any) -> None:
    """Stand for ``DistributedDataParallel.__init__``."""
    if torch.distributed.get_world_size() > 1:
        raise refused("DistributedDataParallel: the script is one process of several", "start it as one process")
    if options.get("mixed_precision") is not None:
        raise refused("DistributedDataParallel(mixed_precision=...)", "torch.autocast")
    nn.Module.__init__(wrapper)
    wrapper.module, wrapper.device_ids = module, list(device_ids or ())
    wrapper.require_backward_grad_sync = True  # for ``no_sync``


def _call(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand for ``forward``, which moves the arguments to the GPU."""
    if wrapper.device_ids:
        device = next(wrapper.module.parameters()).device
        args, kwargs = pytree.tree_map(lambda v: v.to(device) if isinstance(v, Tensor) else v, (args, kwargs))
    return wrapper.module(*args, **kwargs)
