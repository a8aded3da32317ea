"""Digests of a model's initial values, by which a build in part is compared with a complete build.

A parameter or buffer counts with its dtype, its shape, every byte of its values, and whether it is trained. A module
counts with the numbers and tensors among its attributes, also within lists, tuples and dicts. Texts and other objects
do not count: a path or an identifier may differ in every process and changes no weight.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopipe import sparse
from autopipe.ir.initial_values import InitialValues
from autopipe.workload.batches.digests import digest_of

_DIGITS = 16  # hex digits of a digest: 64 bits
_OF_TORCH = frozenset(vars(nn.Module()))  # attributes that every module has
_NUMBERS = (bool, int, float, complex, np.ndarray, np.generic)


def initial_values(model: nn.Module, numbers: dict[str, int]) -> InitialValues:
    """Return the digests of a model that was built completely in this process, just now. ``numbers``: of parameters."""
    return InitialValues(builds_here(), digests_of(model), numbers)


def builds_here() -> str:
    """Return what the values of a build depend on besides the model: the host, torch and the number of threads."""
    return f"{platform.node()}, torch {torch.__version__}, {torch.get_num_threads()} threads"


def digests_of(model: nn.Module) -> dict[str, str]:
    """Return a digest of each parameter and buffer, by all its names, and of each inner module, by its path.

    A digest is "" where it cannot be computed, such as for a tensor without memory.
    """
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    distinct = {id(tensor): _digest((tensor.requires_grad, tensor)) for tensor in {id(t): t for _, t in named}.values()}
    digests = {name: distinct[id(tensor)] for name, tensor in named}
    for path, module in model.named_modules(remove_duplicate=False):
        if path:
            digests[path] = _digest({key: value for key, value in vars(module).items() if key not in _OF_TORCH})
    return digests


def _digest(values: Any) -> str:
    try:
        return digest_of(pytree.tree_map(_counted, values)).hex()[:_DIGITS]
    except Exception:  # a tensor without memory, or a type of the user's own
        return ""


def _counted(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return sparse.parts(leaf) if sparse.is_sparse(leaf) else leaf
    return leaf if isinstance(leaf, _NUMBERS) else None
