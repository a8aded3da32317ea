"""The draws of a forward, made here as well, so that the script's generator continues as in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from autopipe.script.calls.capture import Draw
from autopipe.trace.graph.replay import context_of


def states_of(draws: tuple[Draw, ...], count: int, modules: nn.Module) -> list[Tensor | None]:
    """Return for each stage the state of the generator before its first draw, None without one; advance it past all.

    Each call that draws runs on zeros of the shape that was recorded: it consumes as many numbers as the real one.
    """
    states: list[Tensor | None] = [None] * count
    for draw in draws:
        if states[draw.stage] is None:
            states[draw.stage] = torch.get_rng_state()
        _repeat(draw.node, modules)
    return states


def _repeat(node: fx.Node, modules: nn.Module) -> None:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda entry: _zeros(entry, modules))
    with context_of(node.meta), torch.no_grad():
        if node.op == "call_module":
            modules.get_submodule(str(node.target))(*args, **kwargs)
        elif node.op == "call_function":
            node.target(*args, **kwargs)  # type: ignore[operator]  # a function
        else:
            getattr(args[0], str(node.target))(*args[1:], **kwargs)


def _zeros(node: fx.Node, modules: nn.Module) -> Any:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return torch.empty_strided(tuple(value.shape), tuple(value.stride()), dtype=value.dtype).zero_()
    return value
