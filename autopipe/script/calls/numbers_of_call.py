"""``NumbersOfCall``: the numbers that a forward reads from its tensors: decisions, logs, sizes that depend on the data.

The part of the forward that leads to the number runs in the script's process, with the weights of the moment and the
random numbers that the stages will draw.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from autopipe.script.devices import generators, set_generators
from autopipe.trace.numbers import Numbers
from autopipe.trace.record.real_values import RealValues
from autopipe.trace.record.recorder import Recorder
from autopipe.trace.record.values import ANSWERED
from autopipe.trace.tape.live import LiveModel
from autopipe.users_code import is_own_file
from autopipe.workload.batches.layouts import laid_out


class NumbersOfCall(RealValues):
    """Answers the reads of one call."""

    names = frozenset((*ANSWERED, "item", "numpy", "__array__", "__complex__", "__repr__"))

    def __init__(
        self,
        live: LiveModel,
        leaves: Mapping[str, Tensor],
        recorder: Recorder,
        record: Callable[[], None],
        states: dict[str, Tensor],
        gather: Callable[[], None],
    ) -> None:
        """``record``: records from now on. ``states``: of the generators before it. ``gather``: brings the weights."""
        self.faked_model, self._inputs, self._recorder, self._states = live, leaves, recorder, states
        self._record, self._gather, self._device = record, gather, live.device
        self.seed = None  # see ``RealValues``
        self._leaves, self._state, self._values = {}, {}, {}  # most calls read no number, fewer one of the weights
        self._has_weights = False

    def restore(self) -> None:
        """Restore the buffers that the run changed."""
        if self._has_weights:
            super().restore()

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a call returns on real tensors."""
        recorder = self._recorder
        name = "" if args[0].grad_fn is None else type(args[0].grad_fn).__name__
        with recorder.paused():
            self._record()
            args, kwargs = pytree.tree_map_only(FakeTensor, self._tensor, (args, kwargs))
            with _disable_current_modes():
                result = func(*args, **kwargs)
        return (
            result.replace("requires_grad=True)", f"grad_fn=<{name}>)") if name and isinstance(result, str) else result
        )

    def _tensor(self, fake: Tensor) -> Tensor:
        known = self._recorder.writer.known
        value: Tensor = self.value(known.node(fake), known.constants)
        with _disable_current_modes():
            return value.detach().requires_grad_(fake.requires_grad)

    def value(self, node: fx.Node, constants: Mapping[str, Tensor]) -> Any:
        """Return the real value of a recorded node."""
        with _disable_current_modes():
            self._leaves = self._leaves or {name: laid_out(leaf, leaf) for name, leaf in self._inputs.items()}
            if not self._has_weights and any(map(self._reads_weights, self.pending(node))):
                self._has_weights = True
                self._gather()
                values = self._values
                super().__init__(self.faked_model, self._leaves, seed=None)
                self._values = values
            outside = generators(self._device)
            set_generators(self._states, self._device)
            try:
                return super().value(node, constants)
            finally:
                self._states = generators(self._device)
                set_generators(outside, self._device)

    def pending(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes to run for the value of one: what it depends on, and all draws before the last one of it."""
        every = super().pending(node)
        if any(entry.meta.get("changed") for entry in every):
            return every
        needed: set[fx.Node] = {node}
        for entry in reversed(every):
            if entry in needed or (_draws(entry) and any(map(_draws, needed))):
                needed |= {entry, *entry.all_input_nodes}
        return [entry for entry in every if entry in needed]

    def _reads_weights(self, node: fx.Node) -> bool:
        names = self.faked_model.fake
        return node.op == "call_module" or (node.op == "get_attr" and str(node.target) in names)

    def _run(self, node: fx.Node, constants: Mapping[str, Tensor]) -> Any:
        numbers: Numbers = self._recorder.numbers
        if node.op == "placeholder" and node.name in numbers.inputs:
            return None
        source = node.args[0] if node.target == "item" else None
        if isinstance(source, fx.Node) and source.name in numbers.inputs:
            return numbers.all_values()[source.name]
        return super()._run(node, constants)

    @contextlib.contextmanager
    def sizes_as_text(self) -> Iterator[None]:
        """Give the script's code the text of sizes that depend on the data as numbers."""
        kind: Any = torch.SymInt
        before = {name: getattr(kind, name) for name in ("__repr__", "__str__", "__format__")}

        def text(name: str, number: Any, *form: str) -> str:
            if not is_own_file(sys._getframe(2).f_code.co_filename):
                return str(before[name](number, *form))
            node = self._recorder.writer.size_node(number.node.expr)
            value = self.number(node, {}) if isinstance(node, fx.Node) else node
            return format(value, *form)

        kind.__repr__ = lambda number: text("__repr__", number)
        kind.__str__ = lambda number: text("__str__", number)
        kind.__format__ = lambda number, form: text("__format__", number, form)
        try:
            yield
        finally:
            for name, original in before.items():
                setattr(kind, name, original)


def _draws(node: fx.Node) -> bool:
    return bool(node.meta.get("random", (0, 0))[1])
