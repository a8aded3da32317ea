"""The draws of a forward, made here as well, so that the script's generator continues as in one process."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import PackedSequence

from autopipe.script.calls.capture import Draw
from autopipe.script.refusals import refused
from autopipe.trace.graph.replay import context_of


def states_of(
    draws: tuple[Draw, ...], count: int, modules: nn.Module, inputs: dict[str, Tensor]
) -> list[Tensor | None]:
    """Return for each stage the state of the generator before its first draw, None without one; advance it past all.

    Each call that draws runs on zeros of the shape that was recorded: it consumes as many numbers as the real one.
    ``inputs``: of the call of the model. Raises: RefusedError if the shape depends on other values than those.
    """
    states: list[Tensor | None] = [None] * count
    for draw in draws:
        if states[draw.stage] is None:
            states[draw.stage] = torch.get_rng_state()
        _repeat(draw.node, modules, inputs)
    return states


def _repeat(node: fx.Node, modules: nn.Module, inputs: dict[str, Tensor]) -> None:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda entry: _value(entry, inputs, exact=False))
    if getattr(node.target, "__name__", node.target) == "multinomial":  # it draws as many for any probabilities
        args = tuple(torch.ones_like(arg) if isinstance(arg, Tensor) else arg for arg in args)
        kwargs = {k: torch.ones_like(v) if isinstance(v, Tensor) and k == "input" else v for k, v in kwargs.items()}
    with context_of(node.meta), torch.no_grad():
        if node.op == "call_module":
            modules.get_submodule(str(node.target))(*args, **kwargs)
        else:
            _called(node, args, kwargs)


def _called(node: fx.Node, args: Any, kwargs: Any) -> Any:
    if node.op == "call_function":
        return node.target(*args, **kwargs)  # type: ignore[operator]  # a function
    return getattr(args[0], str(node.target))(*args[1:], **kwargs)


_PACK = "_pack_padded_sequence"


def _value(node: fx.Node, inputs: dict[str, Tensor], *, exact: bool) -> Any:
    """Return the value of a node, or zeros of its shape unless it must be ``exact``.

    Only the lengths of a packed sequence must be: they are its shape.
    """
    value = node.meta.get("val")
    if node.op == "placeholder" and node.name in inputs:
        return inputs[node.name]
    if not exact and isinstance(value, Tensor) and all(type(size) is int for size in value.shape):
        return torch.empty_strided(tuple(value.shape), tuple(value.stride()), dtype=value.dtype).zero_()
    packs = getattr(node.target, "__name__", "") == _PACK
    known = packs or node.target in (operator.getitem, PackedSequence) or (exact and not node.meta["random"][1])
    if node.op not in ("call_function", "call_method") or not known:
        raise refused(f"{node.name} depends on numbers of the forward, and so does the number of random draws after it")
    args = [
        fx.node.map_arg(arg, functools.partial(_value, inputs=inputs, exact=exact or (packs and place == 1)))
        for place, arg in enumerate(node.args)
    ]
    kwargs = fx.node.map_arg(node.kwargs, functools.partial(_value, inputs=inputs, exact=exact))
    with context_of(node.meta), torch.no_grad():
        return _called(node, args, kwargs)
