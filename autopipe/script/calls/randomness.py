"""The draws of a forward, made here as well, so that the script's generator continues as in one process."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import PackedSequence

from autopipe.script.calls.cutting import Draw, Program
from autopipe.script.devices import COUNT, DEVICE, HOST, advanced, generators, moved, offset_of, set_generators
from autopipe.script.refusals import refused
from autopipe.trace.graph.replay import context_of

States = dict[str, Any]
"""The states of generators by place, and under COUNT the numbers that a GPU's will give."""


class Randomness:
    """The draws of one controller's programs.

    Each call that draws runs here on zeros of the shape that was recorded: it consumes as many numbers as the real one.
    For a GPU, whose generator is a seed and an offset, it does so once for each program: the counts do not change.
    """

    def __init__(self, device: torch.device) -> None:
        """``device``: of the script's model."""
        self._device = device
        self._counts: dict[int, list[tuple[int, int]]] = {}  # program -> (stage, numbers) of each draw on a GPU

    def states_of(self, program: Program, count: int, modules: nn.Module, inputs: dict[str, Tensor]) -> list[States]:
        """Return for each stage the generators that it draws from, before its first draw; advance ours past all.

        A stage that draws from a GPU's generator also gets how many numbers it will consume.
        ``inputs``: of the call of the model.

        Raises: RefusedError if a shape depends on other values than those.
        """
        states: list[States] = [{} for _ in range(count)]
        counts = self._counts.get(program.number)
        if counts is None:
            counts = self._repeated(program.draws, states, modules, inputs)
            if all(_is_static(draw.node) for draw in program.draws) and not any(HOST in state for state in states):
                self._counts[program.number] = counts
        elif counts:
            state = generators(self._device)[DEVICE]
            for stage, numbers in counts:
                states[stage].setdefault(DEVICE, state)
                state = advanced(state, numbers)
            set_generators({DEVICE: state}, self._device)
        for stage, numbers in counts:
            states[stage][COUNT] = states[stage].get(COUNT, 0) + numbers
        return states

    def _repeated(
        self, draws: tuple[Draw, ...], states: list[States], modules: nn.Module, inputs: dict[str, Tensor]
    ) -> list[tuple[int, int]]:
        """Draw on zeros; note the state before each stage's first draw, and return the counts of a GPU's numbers."""
        counts = []
        for draw in draws:
            before = generators(self._device)
            _repeat(draw.node, modules, inputs)
            for place, state in moved(before, self._device).items():
                states[draw.stage].setdefault(place, state)
                if place == DEVICE:
                    now = generators(self._device)[DEVICE]
                    counts.append((draw.stage, offset_of(now) - offset_of(state)))
        return counts

    def forget(self, program: Program) -> None:
        """Drop the counts of a program."""
        self._counts.pop(program.number, None)


def _is_static(node: fx.Node) -> bool:
    """Return whether the shapes of a node's inputs were recorded as numbers."""
    values = [entry.meta.get("val") for entry in node.all_input_nodes]
    return all(isinstance(value, Tensor) and all(type(size) is int for size in value.shape) for value in values)


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
    if node.target == "item" and isinstance(node.args[0], fx.Node) and node.args[0].name in inputs:
        return inputs[node.args[0].name].item()  # a number of the forward that changes
    if not exact and isinstance(value, Tensor) and all(type(size) is int for size in value.shape):
        form: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
        return torch.empty_strided(tuple(value.shape), tuple(value.stride()), **form).zero_()
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
