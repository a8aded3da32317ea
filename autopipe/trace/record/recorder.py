"""Record the model's forward, while it runs, as an ``fx.Graph`` of its calls.

The user's Python runs unchanged; a ``TorchFunctionMode`` intercepts every public torch call, and ``patches`` redirects
the calls of modules and of custom autograd functions. A call becomes a node if it returns a tensor or changes one in
place. Values are identified by the tensor object, so dataclasses, caches, dicts and hooks need no special support.

Information about a call that the graph does not contain is stored in ``node.meta``::

    val       the fake result              stack     modules around it, outermost first: (path, type, which call)
    grad      grad mode                    autocast  effective regions: (device, dtype, enabled, cache)
    source    (file, line)                 frame     number of the user frame that made the call
    at        the instruction in it        caller    source, frame and instruction of the call of that function
    random    (position, count) of draws   mutates   nodes whose memory it changes; written: buffers it changes
    length    of a result that is a tuple    checkpoint  the number of the user's checkpoint() around it
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from autopipe import guards
from autopipe.trace.explain import (
    AFTER_STEP,
    MORE_CALLS,
    TRANSFORMED,
    calling_frame,
    here,
    places_of,
    unsupported,
    where_short,
)
from autopipe.trace.numbers import Numbers, plain
from autopipe.trace.opaque.fakes import Fakes
from autopipe.trace.opaque.record import ModuleCalls
from autopipe.trace.record.faked_model import FakedModel
from autopipe.trace.record.fixed import NOT_FIXED, Fixed
from autopipe.trace.record.real_values import RealValues
from autopipe.trace.record.running import Performed, Running, Tape
from autopipe.trace.record.symbols import Symbols
from autopipe.trace.record.targets import Call, property_name, written
from autopipe.trace.record.values import (
    NEVER_RECORDED,
    OF_ITSELF,
    PLAIN_PROPERTIES,
    READS_LAYOUT,
    REFUSED,
    SILENT,
    SYMBOLIC,
    RandomCount,
    effective_autocast,
    is_answered,
    tensors_in,
    version_of,
)
from autopipe.trace.record.writer import GraphWriter, Pause

# Answer reads of numbers while a model is recorded: ``if x.max() > 3:``, ``n = mask.sum().item()``.
#
# A value that does not depend on the batch is computed. Another is refused, except with ``allow_data_dependent``: then
# it is that of the captured batch, and a guard is recorded that compares it at every step.


class Answers:
    """Answers the reads of one recording.

    ``reads``: with ``allow_data_dependent``, computes values on the captured batch. ``notes``: receives a note for each
    decision that is kept.
    """

    def __init__(self, writer: GraphWriter, pause: Pause, notes: list[str]) -> None:
        self.fixed = Fixed()
        self.reads: RealValues | None = None
        self._writer, self._pause, self._notes = writer, pause, notes

    def keep(self, reads: RealValues) -> None:
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


class Recorder(TorchFunctionMode):
    """Records one forward inside ``patches.following``. Its ``writer`` has the graph."""

    def __init__(self, faked_model: FakedModel, symbols: Symbols, *, watch: bool = False) -> None:
        super().__init__()
        self.faked_model, self.symbols, self.watch = faked_model, symbols, watch
        self.random = RandomCount()
        self.notes: list[str] = []
        self.asks_compiling = False
        self.custom_functions: list[type] = []
        self.construct = ""  # the running call, for messages
        self.operands: list[Tensor] = []  # of the running call
        self.most = 0  # maximum number of calls of a second recording; 0 for no limit
        self.comparison: Callable[[fx.Node], None] | None = None  # receives every call
        # the user's line and modules of the running call, if an exported program runs in place of the model
        self.given: tuple[tuple[str, int] | None, tuple[tuple[str, str, int], ...]] | None = None
        self.layout_read = ""  # which memory layout the forward reads, see ``ir.batch``
        # the user's calls of checkpoint(): how many there were, and those that run now, outermost first
        self.num_checkpoints = 0
        self.checkpoints: list[int] = []
        self.autocast: list[tuple[str, torch.dtype, bool, bool]] = []
        self.tape: Tape | None = None  # compares the calls with known ones, if the forward runs again and again
        self.reads: Any = None  # answers calls of its ``names``, which read numbers: ``script.calls.numbers_of_call``
        self.written: list[fx.Node] = []  # the nodes of the latest calls
        self.described: list[dict[str, Any]] | None = None  # metadata for the next nodes, of calls that are known
        self.numbers = Numbers(())  # those that are inputs
        self.fakes = Fakes(symbols.shape_env)
        self._pause = Pause()
        self.writer = GraphWriter(faked_model, symbols, self._pause, self._describe)
        self.answers = Answers(self.writer, self._pause, self.notes)
        self.modules = ModuleCalls(
            faked_model, self.writer, self.random, self.call, self.fakes, self._pause, watch=watch
        )

    @property
    def graph(self) -> fx.Graph:
        """The recorded calls."""
        return self.writer.graph

    @property
    def constants(self) -> dict[str, Tensor]:
        """Tensors that are neither parameters nor buffers, by attribute name."""
        return self.writer.known.constants

    @property
    def listening(self) -> bool:
        """Whether calls are recorded now: not inside a recorded call, nor in another thread."""
        return self._pause.listening

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if "generator" in kwargs and kwargs["generator"] is None:
            # the default; if it is passed, torch has no shape function for symbolic sizes
            kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
        name = getattr(func, "_opname", "") or getattr(func, "__name__", "")
        if self.listening:
            self.layout_read = max(self.layout_read, READS_LAYOUT.get(name, ""))
        is_plain = name == "__get__" and property_name(func) in PLAIN_PROPERTIES
        if not self.listening or is_plain or name in NEVER_RECORDED:
            return func(*args, **kwargs)
        if name in REFUSED and isinstance(args[0], Tensor):
            raise unsupported(f"{REFUSED[name][0]} cannot be cut into stages", REFUSED[name][1])
        if func is torch.autograd.grad:
            raise unsupported(f"torch.autograd.grad {TRANSFORMED}", "remove the call")
        if name == "__set__":
            return self._set(func, args)
        if self.tape is not None and name == "__get__" and property_name(func) == "_version":
            return self.tape.version()
        number = self.answers.fixed_number(name, args) if self.tape is None else self.tape.number(name, args)
        if number is not NOT_FIXED:
            return format(number, args[1]) if name == "__format__" else OF_ITSELF.get(name, lambda n: n)(number)
        if self.reads is not None and name in self.reads.names:
            return self.reads.answer(func, args, kwargs)
        if self.answers.reads is not None and is_answered(name, args):
            return self.answers.answer(func, name, args, kwargs)
        run = self.fakes.function(name) or func
        if (lifted := self.numbers.lifted(name, args, kwargs)) is not None:
            (args, kwargs), own = lifted, run
            run = lambda *a, **k: own(*plain(a), **plain(k))  # noqa: E731
        return self.call(
            lambda a, k: run(*a, **k), args, kwargs, lambda a, k: written(func, a, k), name=name, target=func
        )

    def _set(self, func: Any, args: tuple[Any, ...]) -> Any:
        attribute = property_name(func)
        if attribute == "requires_grad" and self.tape is not None:
            self.__torch_function__(Tensor.requires_grad_, (), args)
            return None
        if attribute == "requires_grad":
            args[0].requires_grad_(args[1])
            node = self.writer.append("call_method", "requires_grad_", (self.writer.known.node(args[0]), args[1]))
            self.writer.bind_in_place(args[0], node)
            return None
        if attribute == "data":
            if self.faked_model.is_parameter(args[0]):
                name = self.faked_model.state[id(args[0])]
                raise unsupported(f"the forward changes parameter {name} (x.data = y)", AFTER_STEP)
            if id(args[0]) in self.faked_model.state:
                value = self.__torch_function__(Tensor.detach, (), (args[1],))
                return self.faked_model.bind_buffer(self.faked_model.state[id(args[0])], value)
            raise unsupported(
                "x.data = y changes a tensor without autograd's knowledge", "use x.copy_(y) under torch.no_grad()"
            )
        return func(*args)

    def call(
        self,
        run: Callable[[Any, Any], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        form: Callable[[tuple[Any, ...], dict[str, Any]], Call],
        *,
        name: str,
        target: Any,
        state: Sequence[Tensor] = (),
        silent: Sequence[Tensor] = (),
        inner: list[Any] | None = None,
    ) -> Any:
        """Run and record one call. The arguments are those of ``Running``."""
        call = Running(run, args, kwargs, form, name, target, state, silent, inner)
        return self.write(call, self.perform(call)) if self.tape is None else self.tape.call(call)

    def paused(self) -> Pause:
        """Return a context in which nothing is recorded."""
        return self._pause

    def perform(self, call: Running) -> Performed:
        """Run a call on fakes."""
        self.construct = call.name
        args, kwargs = self.writer.known.faked(call.args), self.writer.known.faked(call.kwargs)
        first = self.random.count
        touched = self.operands = [*tensors_in((args, kwargs)), *call.state]
        with self._pause:
            versions = [version_of(tensor) for tensor in touched]
            out = call.run(args, kwargs)
            changed = [t for t, version in zip(touched, versions, strict=True) if version_of(t) != version]
        changed += self._written_silently(call.name, args, kwargs) if call.name in SILENT else call.silent
        self.construct, self.operands = "", []
        return Performed(args, kwargs, out, changed, (first, self.random.count - first))

    def write(self, call: Running, performed: Performed) -> Any:
        """Record a call, unless nothing depends on it. Return its result for the user's code."""
        args, kwargs, out, changed = performed.args, performed.kwargs, performed.out, performed.changed
        if not changed and next(tensors_in(out), None) is None and not dataclasses.is_dataclass(out):
            if isinstance(out, SYMBOLIC) and call.name == "item":
                node = self.writer.record(call.form(args, kwargs), [], (performed.drawn[0], 0))
                self.answers.bind_number(out, node)
            return out
        node = self.writer.record(call.form(args, kwargs), changed, performed.drawn)
        if call.name in ("__setitem__", "__delitem__"):
            return out
        in_place = call.name.endswith("_") and not call.name.endswith("__")
        return self.writer.bind(out, node, in_place or any(out is tensor for tensor in changed))

    def _written_silently(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Return the running statistics that a normalisation updates; torch does not report that change."""
        if not kwargs.get("training", kwargs.get("use_input_stats", args[5] if len(args) > 5 else True)):
            return []
        state = self.faked_model.state
        return [t for t in tensors_in((args, kwargs)) if id(t) in state and not isinstance(t, nn.Parameter)]

    def call_custom(self, function: type, apply: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``function.apply`` as one node, so that the user's own backward is kept."""
        name = f"{function.__module__}.{function.__qualname__}"
        if "<locals>" in name:
            raise unsupported(
                f"{name} is defined inside a function, so no stage could import it", "move it to the module"
            )
        self.custom_functions.append(function)
        inner: list[Any] = []
        run = apply if self.tape is None else self.tape.watched(apply, inner)
        return self.call(
            lambda a, k: run(*a, **k),
            args,
            kwargs,
            lambda a, k: Call("call_function", apply, a, k),
            name=name,
            target=function,
            inner=inner,
        )

    def alias(self, value: Tensor, of: Tensor) -> None:
        """Register ``value`` as another object for ``of``."""
        if self.tape is None:
            self.writer.alias(value, of)
        else:
            self.tape.alias(value, of)

    @contextlib.contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Mark the calls inside as one recompute unit: the user's call of ``torch.utils.checkpoint``."""
        self.num_checkpoints += 1
        self.checkpoints.append(self.num_checkpoints)
        try:
            yield
        finally:
            self.checkpoints.pop()

    def _describe(self, node: fx.Node) -> None:
        if self.tape is not None:
            self.written.append(node)
        if self.described is not None:
            node.meta.update(self.described.pop(0))
            return
        if self.watch:
            self.modules.refuse_drawn()
        if self.most and len(self.graph.nodes) > self.most:
            raise unsupported(MORE_CALLS, "")
        frame = calling_frame()
        if self.given is not None:
            source, stack = self.given
            if source is not None:
                node.meta["source"], node.meta["frame"] = source, id(node)
        else:
            stack = self.modules.stack
            if frame is not None:
                node.meta.update(places_of(frame))
        node.meta["stack"] = stack
        node.meta["grad"] = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if self.checkpoints:
            node.meta["checkpoint"] = self.checkpoints[0]
        node.meta["autocast"] = effective_autocast(self.autocast)
        if self.comparison is not None:
            self.comparison(node)
