"""Compare the captured graph with the user's model: loss, every gradient and every buffer, on real numbers.

Both run the same microbatches in turn, each with random numbers of its own. A difference is an error, never a warning:
most wrong captures compute the right loss and wrong gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopipe import draws, sparse
from autopipe.errors import AutopipeError, RunError, TraceError
from autopipe.ir.graph import Graph
from autopipe.trace.explain import failed_on_real_numbers, short_path
from autopipe.trace.graph.replay import replay
from autopipe.trace.loss.steady import Gradients
from autopipe.trace.record.model_snapshot import buffers_restored, left_as_it_was
from autopipe.workload import Item, Workload
from autopipe.workload.batches.layouts import copied_item

LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 2e-4
BUFFER_TOLERANCE = 1e-4
_SHOWN = 4  # hooks listed in an error


@dataclass(frozen=True, slots=True)
class Forward:
    """What a forward computed."""

    terms: list[Tensor]  # which add up to the loss; each has a backward of its own
    weight: Tensor | None
    draws: int


@dataclass(frozen=True)
class Outcome:
    """The outcome of one microbatch."""

    values: dict[str, Tensor | None]  # by readable name: "loss", "gradient of w", "buffer b"
    draws: int  # random draws that the forward made


def verify(
    workload: Workload, model: nn.Module, module: fx.GraphModule, graph: Graph, items: list[Item]
) -> tuple[bool, list[str]]:
    """Compare the graph with the model on ``items``. Return whether every bit is equal, and notes.

    The model is restored. A guard (``autopipe.guards``) may stop any microbatch except the first: the graph then
    detects by itself that it does not apply.

    Raises: TraceError with the first value that differs, and both numbers.
    """
    wheres = [(workload.spec.seed + index, 0, index) for index in range(len(items))]
    runs = list(zip(items, wheres, strict=True))
    total = max((n.random_position + n.num_random for n in graph.nodes), default=0)

    def eager(item: Item, where: tuple[int, int, int]) -> Forward:
        with draws.flat_checkpoints(), draws.Draws(*where) as drawn:
            loss, weight = workload.loss(model, item)
        return Forward([loss], weight, drawn.position)

    def captured(item: Item, where: tuple[int, int, int]) -> Forward:
        loss, *weight = replay(module, workload.leaves(item), where)
        return Forward([loss], weight[0] if weight else None, total)

    with left_as_it_was(model):
        wanted = [run_once(model, eager, item, where, "the model itself failed") for item, where in runs]
    exact, notes = True, []
    with left_as_it_was(model):
        for (item, where), left in zip(runs, wanted, strict=True):
            label = f"batch of {workload.num_samples(item)}, seed {where[0]}"
            try:
                right = run_once(model, captured, item, where, "the captured graph failed")
            except RunError as stopped:
                if where == wheres[0]:
                    raise TraceError(stopped.what, where=stopped.where, remedy=stopped.remedy) from stopped
                notes.append(f"{label}: {stopped.what} ({stopped.where})")
                continue
            try:
                exact &= _compare(left, right, label, graph)
            except TraceError as error:
                raise _with_hooks(error, model) from error
    return exact, notes


def _with_hooks(error: TraceError, model: nn.Module) -> TraceError:
    """Name the backward hooks if a gradient differs: stages do not run the hooks of a split module."""
    hooks = hooks_of(model)
    if not hooks or "gradient" not in error.what:
        return error
    return TraceError(
        f"{error.what}; the model has hooks that may change gradients: {', '.join(hooks[:_SHOWN])}",
        where=error.where,
        remedy="remove the hook, or change the gradient in a torch.autograd.Function in the forward",
    )


def run_once(
    model: nn.Module,
    forward: Callable[[Item, tuple[int, int, int]], Forward],
    item: Item,
    where: tuple[int, int, int],
    failed: str,
) -> Outcome:
    """Run one forward and its backward, and return loss, gradients and buffers. The buffers are restored.

    ``where``: (run seed, minibatch, microbatch). ``failed``: what to say if it raises.
    """
    try:
        with buffers_restored(model), Gradients(model) as gradients:  # every microbatch starts from the same state
            computed = forward(copied_item(item), where)
            for term in computed.terms:
                if term.requires_grad:
                    term.backward()  # type: ignore[no-untyped-call]  # torch has no annotation for it
            after = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    except (AutopipeError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise failed_on_real_numbers(failed, error) from error
    terms = [term.detach() for term in computed.terms]
    values: dict[str, Tensor | None] = {"loss": terms[0].clone() if len(terms) == 1 else torch.stack(terms).sum()}
    if computed.weight is not None:
        values["weight of the loss"] = computed.weight.detach().clone()
    values.update({f"gradient of {name}": gradient for name, gradient in gradients.taken().items()})
    values.update({f"buffer {name}": buffer for name, buffer in after.items()})
    return Outcome(values, computed.draws)


def _compare(wanted: Outcome, actual: Outcome, label: str, graph: Graph) -> bool:
    if wanted.draws != actual.draws:
        raise TraceError(
            f"the model makes {wanted.draws} random draws in a forward, the captured graph {actual.draws} ({label})",
            remedy="draw random numbers with torch operations only",
        )
    exact = True
    for name, value in wanted.values.items():
        other = actual.values.get(name)
        exact &= compare(name, value, other, label, _first_user(graph, name))
    return exact


def hooks_of(model: nn.Module) -> list[str]:
    """Describe the module and parameter hooks that may change gradients, each with its function and line."""
    descriptions = []
    for path, module in model.named_modules():
        hooks = (*module._backward_hooks.values(), *module._backward_pre_hooks.values())
        descriptions += [f"{_function(hook)} on {path or 'the model'}" for hook in hooks]
    for path, parameter in model.named_parameters():
        of_parameter = getattr(parameter, "_backward_hooks", None) or {}
        descriptions += [f"{_function(hook)} on {path}" for hook in of_parameter.values()]
    return descriptions


def _function(hook: Any) -> str:
    """Return the name of a function with its file and line."""
    hook = getattr(hook, "func", hook)
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    name = getattr(hook, "__qualname__", type(hook).__qualname__).rpartition("<locals>.")[2]
    return f"{name} ({short_path(code.co_filename)}:{code.co_firstlineno})" if code is not None else name


def _first_user(graph: Graph, name: str) -> str:
    state = name.rpartition(" ")[2]
    users = [node.place for node in graph.nodes if state in node.parameters or state in node.buffers]
    return next((source for source in users if source), "")


def _tolerance(name: str) -> float:
    if name.startswith("gradient"):
        return GRADIENT_TOLERANCE
    return BUFFER_TOLERANCE if name.startswith("buffer") else LOSS_TOLERANCE


def _is_close(wanted: Tensor, actual: Tensor, tolerance: float) -> bool:
    """Return whether all elements of two tensors are finite and close. It is quick; False also where it does not apply.

    ``tolerance``: relative to the largest element.
    """
    floats = all(value.layout == torch.strided and value.is_floating_point() for value in (wanted, actual))
    if not floats or wanted.shape != actual.shape or not wanted.numel():
        return False
    return 0 < largest_of(wanted - actual) <= tolerance * max(largest_of(wanted), 1e-6) < math.inf


def largest_of(tensor: Tensor) -> float:
    """Return the size of the largest element of a tensor; NaN if there is one, 0 without elements."""
    if not tensor.numel():
        return 0.0
    if tensor.layout != torch.strided or not tensor.is_floating_point():
        return float(torch.linalg.vector_norm(sparse.wide(tensor), ord=math.inf))
    least, most = torch.aminmax(tensor)
    return float(torch.maximum(-least, most))


def compare(name: str, wanted: Tensor | None, actual: Tensor | None, label: str, where: str) -> bool:
    """Return whether every bit of a value of the model is that of the graph.

    ``name``: "loss", "gradient of ..." or "buffer ...": it decides the tolerance. ``label``: of the run. ``where``: a
    line.

    Raises: TraceError if the difference is larger than the tolerance.
    """
    remedy = "what the model does there depends on something outside of its inputs, parameters and buffers"
    if wanted is None or actual is None:
        if wanted is actual:
            return True
        sides = ("none", "one") if wanted is None else ("one", "none")
        raise TraceError(
            f"{name}: the model has {sides[0]}, the captured graph has {sides[1]} ({label})", where=where, remedy=remedy
        )
    if sparse.equal(wanted, actual):
        return True
    if _is_close(wanted, actual, _tolerance(name)):
        return False
    a, b = sparse.wide(wanted), sparse.wide(actual)
    if a.shape == b.shape:
        difference = (a - b).abs().masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0)
        finite = a.abs()[a.isfinite()]
        scale = max(float(finite.max()) if finite.numel() else 0.0, 1e-6)
        if bool((difference <= _tolerance(name) * scale).all()):
            return bool((difference == 0).all())
        index = int(difference.nan_to_num(float("inf")).argmax())
        numbers = f"{a.flatten()[index].item():.9g} and {b.flatten()[index].item():.9g}"
    else:
        numbers = f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
    raise TraceError(
        f"the captured graph is not the model: {name} differs, {numbers} ({label})", where=where, remedy=remedy
    )
