"""Two models that one backward trains, as in a GAN: which they are, for the error that refuses the script."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopipe.script.choosing import Choice
from autopipe.script.refusals import RefusedError
from autopipe.script.state.remote import is_remote

REMEDY = "run it with python: models that are trained through one another cannot run in stages yet"


def leaves_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves that a backward from these tensors reaches."""
    leaves: list[Tensor] = []
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        function: Any = waiting.pop()
        if hasattr(function, "variable"):
            leaves.append(function.variable)
        for following, _ in function.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return leaves


def names_of(choice: Choice, model: nn.Module, others: Iterable[Tensor]) -> str:
    """Return the names of the model and of another one that has one of the tensors; "" without another one."""
    ids = {id(other) for other in others}
    for module, name in list(choice.names.items()):
        if module is not model and any(id(parameter) in ids for parameter in module.parameters()):
            return f"{choice.names[model]} and {name} are trained together"
    return ""


def explain(error: RefusedError, choice: Choice, model: nn.Module, called: nn.Module, values: Any) -> None:
    """Name both models in an error that a call has raised. ``called``: that module, ``values``: its arguments."""
    if called is model:
        others = leaves_of(value for value in pytree.tree_leaves(values) if type(value) is Tensor)
    else:
        others = [p for p in called.parameters() if p.requires_grad and not is_remote(p)]
    names = names_of(choice, model, others)
    if names and names not in error.what:
        error.what = f"autopipe run: {names}: {error.what.removeprefix('autopipe run: ')}"
        error.remedy = REMEDY
