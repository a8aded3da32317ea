"""Wrappers for data parallelism around a model of one process and one GPU: they only call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopipe.script.refusals import refused


def install() -> None:
    """Let DataParallel on one GPU, and DistributedDataParallel of one process, call their model; refuse others."""
    one: Any = nn.DataParallel
    start = one.__init__

    def init(wrapper: Any, *args: Any, **kwargs: Any) -> None:
        start(wrapper, *args, **kwargs)
        if len(wrapper.device_ids) > 1:
            raise refused(f"DataParallel on the GPUs {wrapper.device_ids}", "the model without it")

    one.__init__, one.forward = init, _call
    several: Any = nn.parallel.DistributedDataParallel
    several.__init__, several.forward = _of_one_process, _call


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
