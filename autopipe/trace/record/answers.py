"""Answer reads of numbers while a model is recorded: ``if x.max() > 3:``, ``n = mask.sum().item()``.

A value that does not depend on the batch is computed. Another is refused, except with ``allow_data_dependent``: then it
is that of the captured batch, and a guard is recorded that compares it at every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from autopipe import guards
from autopipe.trace.explain import here, where_short
from autopipe.trace.record.fixed import NOT_FIXED, Fixed
from autopipe.trace.record.reads import Reads
from autopipe.trace.record.targets import written
from autopipe.trace.record.values import OF_ITSELF, is_answered
from autopipe.trace.record.writer import GraphWriter, Pause


class Answers:
    """Answers the reads of one recording.

    ``reads``: with ``allow_data_dependent``, computes values on the captured batch. ``notes``: receives a note for each
    decision that is kept.
    """

    def __init__(self, writer: GraphWriter, pause: Pause, notes: list[str]) -> None:
        self.fixed = Fixed()
        self.reads: Reads | None = None
        self._writer, self._pause, self._notes = writer, pause, notes

    def keep(self, reads: Reads) -> None:
        """Keep data-dependent decisions as the captured batch makes them."""
        self.reads, self._writer.on_size = reads, self._on_size

    def fixed_number(self, name: str, args: tuple[Any, ...]) -> Any:
        """Return the value of a read that does not depend on the batch, or NOT_FIXED."""
        known = self._writer.known
        if not (name == "item" or (name in OF_ITSELF and is_answered(name, args))) or not known.has(args[0]):
            return NOT_FIXED
        with self._pause:
            return self.fixed.number(known.node(args[0]))

    def answer(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a read with the value for the captured batch, and record a guard for it."""
        assert self.reads is not None
        if name in OF_ITSELF:
            node = self._writer.known.node(args[0])
            answer = OF_ITSELF[name](self._real(self.reads.number, node))
        else:
            node = self._writer.record(written(func, args, kwargs), [], (0, 0))
            answer = self._real(self.reads.number, node)
        self._expect(node, answer)
        return format(answer, args[1]) if name == "__format__" else answer

    def bind_number(self, number: Any, node: fx.Node) -> None:
        """Make ``node`` the source of a symbolic number that was read from a tensor with ``item()``."""
        self._writer.symbols.bind(number.node.expr, node)
        if self.reads is not None:
            for symbol in number.node.expr.free_symbols:
                self._hint(symbol, self._real(self.reads.number, node))

    def on_comparison(self, expression: Any, result: Any) -> None:
        """Record a guard for the result of a comparison of sizes."""
        node = self._writer.size_node(expression)
        if isinstance(node, fx.Node):
            self._expect(node, bool(result) if result in (True, False) else int(result))

    def _on_size(self, symbol: Any, node: fx.Node, dimension: int) -> None:
        assert self.reads is not None
        self._hint(symbol, self._real(self.reads.value, node).shape[dimension])

    def _expect(self, node: fx.Node, answer: Any) -> None:
        """Record a guard: a value must equal that of the captured batch."""
        guard = self._writer.append("call_function", guards.expect, (node, answer, where_short()))
        guard.meta["keep"] = True
        self._notes.append(f"kept as this batch decided it, and checked at every step: {here()}")

    def _real(self, read: Callable[[fx.Node, dict[str, Tensor]], Any], node: fx.Node) -> Any:
        with self._pause:
            return read(node, self._writer.known.constants)

    def _hint(self, symbol: Any, value: int | float) -> None:
        value = int(value) if isinstance(value, bool) else value
        self._writer.symbols.shape_env.set_real_tensor_prop_unbacked_vals(symbol, value)
