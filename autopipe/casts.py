"""16-bit casts of weights under autocast: which weights a forward reads through one cast alone, and that cast.

Autocast casts a float32 weight in each forward, and each autograd graph keeps its own copy. A stage has several
microbatches in flight, all with the same weights, so one cast for each version of the weights serves them all. Autograd
casts the gradient of each microbatch back to float32 and adds it there, as without a shared cast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

HALF = (torch.bfloat16, torch.float16)
_SOON = 2**62  # a sequence number: autograd runs the nodes with larger numbers first


class CastObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no annotation for it
    """Observes how a forward reads parameters, and computes each cast of a weight once.

    Args:
        casts: id of a parameter -> a cast of it that exists already. It is shared with the forward.

    """

    def __init__(self, casts: Mapping[int, Tensor] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation for it
        self._casts: dict[int, Tensor] = dict(casts or {})
        self._parameters: dict[int, nn.Parameter] = {}  # kept alive, because an id is valid only while its object lives
        self._num_casts: Counter[int] = Counter()
        self._read_otherwise: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation. A cast returns a view of the cast that exists, if there is one."""
        keywords = kwargs or {}
        if func.namespace == "prim":  # a fake tensor is asked for its device
            return func(*args, **keywords)
        read = [leaf for leaf in pytree.tree_leaves((args, keywords)) if isinstance(leaf, nn.Parameter)]
        if not read:
            return func(*args, **keywords)
        if not _is_cast(func, args, keywords):
            self._read_otherwise.update(map(id, read))
            return func(*args, **keywords)
        parameter = read[0]
        self._parameters[id(parameter)] = parameter
        self._num_casts[id(parameter)] += 1
        cast = self._casts.get(id(parameter))
        if cast is None or cast.dtype != keywords["dtype"]:
            cast = self._casts[id(parameter)] = func(*args, **keywords)
        return cast.detach()

    def only_cast(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the parameters that were read through one cast alone, with the data of the cast.

        Several casts of a trained weight have a gradient each, which autograd adds in float32. One shared cast would
        add them in 16 bits. A frozen weight may be cast several times.
        """
        return [
            (parameter, self._casts[key])
            for key, parameter in self._parameters.items()
            if key not in self._read_otherwise and (self._num_casts[key] == 1 or not parameter.requires_grad)
        ]


def _is_cast(func: Any, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> bool:
    """Return whether an operation casts a float32 parameter to 16 bits and does nothing else."""
    return (
        func is torch.ops.aten._to_copy.default
        and len(args) == 1
        and args[0].dtype == torch.float32
        and keywords.keys() == {"dtype"}
        and keywords["dtype"] in HALF
    )


def shared_cast(parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """Return a cast that the forwards of several microbatches read instead of a parameter.

    Its gradient reaches the parameter. Its autograd node keeps no tensor, so every backward may pass through it.
    """
    with torch.enable_grad():
        cast = parameter.to(dtype)
    if cast.grad_fn is not None:
        # an older node than those of the forward, it would run after all of them, and keep the gradients until then
        cast.grad_fn._set_sequence_nr(_SOON)  # type: ignore[attr-defined]  # missing in torch's annotations
    return cast


def replace(module: nn.Module, key: str, tensor: Tensor) -> None:
    """Let a module read ``tensor`` in the place of its parameter ``key``."""
    module._parameters[key] = tensor  # type: ignore[assignment]  # as torch.func.functional_call does


def is_replaceable(module: nn.Module) -> bool:
    """Return whether a module reads its parameters where ``replace`` puts them. A recurrent layer keeps a list."""
    return type(module).__setattr__ is nn.Module.__setattr__
