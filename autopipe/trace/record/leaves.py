"""Leaf modules: modules of ``torch.nn`` that become one node of the graph.

A leaf keeps its behaviour in training and evaluation, its parametrizations and its running statistics. A user's block
is never a leaf: the graph contains its calls, and the model can be split between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def is_leaf(module: nn.Module, state: Mapping[int, Any]) -> bool:
    """Return whether a module is one node. ``state``: ids of the tensors that the graph knows as the model's own.

    A module with a user's forward hook is not a leaf, because the calls of the hook must be recorded. Neither is a
    module whose tensors were replaced (``torch.func.functional_call``), because a stage would have the original module.
    """
    place = type(module).__module__
    if isinstance(module, CONTAINERS) or place.startswith("torch.nn.modules.transformer"):
        return False
    if not place.startswith(("torch.nn.", "torch.ao.nn.")):
        return False
    for part in parts_of(module):
        if not all(map(_torchs_own, (*part._forward_hooks.values(), *part._forward_pre_hooks.values()))):
            return False
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None and id(tensor) not in state:
                return False
    return True


def parts_of(module: nn.Module) -> Iterable[nn.Module]:
    """Return a module and those in it."""
    return module.modules() if module._modules else (module,)


def has_plain_calls(module: nn.Module) -> bool:
    """Return whether the calls in a leaf may be recorded in its place, with its settings as their arguments.

    Recurrent layers and layers with parametrizations do more than call functions.
    """
    special = isinstance(module, nn.RNNBase) or nn.utils.parametrize.is_parametrized(module)
    return not special and not any(part._forward_pre_hooks or part._forward_hooks for part in parts_of(module))


def _torchs_own(hook: Any) -> bool:
    place = getattr(hook, "__module__", None) or type(hook).__module__
    return place.startswith("torch.nn.utils.")


def written_statistics(module: nn.Module) -> list[Tensor]:
    """Return the running statistics that a normalisation layer updates in training."""
    return [
        tensor
        for part in parts_of(module)
        if isinstance(part, _NormBase) and part.training
        for tensor in (part.running_mean, part.running_var)
        if tensor is not None
    ]
