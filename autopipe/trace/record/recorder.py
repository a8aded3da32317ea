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
    length    of a result that is a tuple
"""

from __future__ import annotations

import dataclasses
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from autopipe import guards
from autopipe.trace.explain import MORE_CALLS, TRANSFORMED, calling_frame, here, places_of, unsupported, where_short
from autopipe.trace.opaque.fakes import Fakes
from autopipe.trace.opaque.record import ModuleCalls
from autopipe.trace.record.faked_model import FakedModel
from autopipe.trace.record.fixed import NOT_FIXED, Fixed
from autopipe.trace.record.known import Known
from autopipe.trace.record.reads import Reads
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


class Recorder(ModuleCalls, TorchFunctionMode):
    """Records one forward inside ``patches.following``; ``graph`` and ``constants`` are the result."""

    def __init__(self, faked_model: FakedModel, symbols: Symbols, *, watch: bool = False) -> None:
        TorchFunctionMode.__init__(self)
        ModuleCalls.__init__(self, faked_model.model)
        self.faked_model, self.symbols, self.watch = faked_model, symbols, watch
        self.graph = fx.Graph()
        self.known = Known(self.graph, faked_model)
        self.random = RandomCount()
        self.notes: list[str] = []
        self.custom_functions: list[str] = []
        self.construct = ""  # the running call, for messages
        self.operands: list[Tensor] = []  # of the running call
        self.fakes = Fakes(symbols.shape_env)
        self.most = 0  # maximum number of calls of a second recording; 0 for no limit
        self.comparison: Callable[[fx.Node], None] | None = None  # receives every call
        # the user's line and modules of the running call, if an exported program runs in place of the model
        self.given: tuple[tuple[str, int] | None, tuple[tuple[str, str, int], ...]] | None = None
        self.fixed = Fixed()
        self.reads: Reads | None = None
        self.layout_read = ""  # which memory layout the forward reads, see ``ir.batch``
        self.autocast: list[tuple[str, torch.dtype, bool, bool]] = []
        self._owner = threading.get_ident()
        self._paused = 0
        self._frames: dict[int, Any] = {}

    @property
    def constants(self) -> dict[str, Tensor]:
        """Tensors that are neither parameters nor buffers, by attribute name."""
        return self.known.constants

    # --- inputs and outputs -------------------------------------------------------------------------------------------

    def add_input(self, name: str, value: Tensor) -> None:
        """Declare a tensor of the batch."""
        node = self.graph.placeholder(name)
        node.name = name  # fx would rename "input"
        node.meta["val"] = value
        self._track(value, node)
        self.symbols.declare(node, value)

    def set_output(self, values: tuple[Tensor, ...]) -> None:
        """Declare the outputs of the forward."""
        self.graph.output(tuple(self.known.node(value) for value in values))

    def append(self, kind: str, target: Any, args: tuple[Any, ...]) -> fx.Node:
        """Add a call that the user did not make (size arithmetic, the copy into a buffer) at the current place."""
        node: fx.Node = getattr(self.graph, kind)(target, args)
        self._tag(node)
        return node

    # --- calls of functions -------------------------------------------------------------------------------------------

    @property
    def listening(self) -> bool:
        """Whether calls are recorded now: not inside a recorded call, nor in another thread."""
        return not self._paused and threading.get_ident() == self._owner

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
            raise unsupported(f"torch.autograd.grad {TRANSFORMED}", "leave it out")
        if name == "__set__":
            return self._set(func, args)
        number = self._fixed_number(name, args)
        if number is not NOT_FIXED:
            return format(number, args[1]) if name == "__format__" else OF_ITSELF.get(name, lambda n: n)(number)
        if self.reads is not None and is_answered(name, args):
            return self._answer(func, name, args, kwargs)
        run = self.fakes.function(name) or func
        return self._call(lambda a, k: run(*a, **k), args, kwargs, lambda a, k: written(func, a, k), name=name)

    def _set(self, func: Any, args: tuple[Any, ...]) -> Any:
        attribute = property_name(func)
        if attribute == "requires_grad":
            args[0].requires_grad_(args[1])
            node = self.append("call_method", "requires_grad_", (self.known.node(args[0]), args[1]))
            self._bind_in_place(args[0], node)
            return None
        if attribute == "data":
            raise unsupported(
                "x.data = y changes a tensor without autograd's knowledge", "use x.copy_(y) under torch.no_grad()"
            )
        return func(*args)

    def _call(
        self,
        run: Callable[[Any, Any], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        form: Callable[[tuple[Any, ...], dict[str, Any]], Call],
        *,
        name: str,
        state: Iterable[Tensor] = (),
        silent: Sequence[Tensor] = (),
    ) -> Any:
        """Run and record one call. ``state``: other tensors that it may change; ``silent``: those that it changes."""
        self.construct = name
        args, kwargs = self.known.faked(args), self.known.faked(kwargs)
        touched = self.operands = [*tensors_in((args, kwargs)), *state]
        versions = [version_of(tensor) for tensor in touched]
        first = self.random.count
        self._paused += 1
        try:
            out = run(args, kwargs)
        finally:
            self._paused -= 1
        changed = [t for t, version in zip(touched, versions, strict=True) if version_of(t) != version]
        changed += self._written_silently(name, args, kwargs) if name in SILENT else silent
        self.construct, self.operands = "", []
        if not changed and next(tensors_in(out), None) is None and not dataclasses.is_dataclass(out):
            if isinstance(out, SYMBOLIC) and name == "item":
                self._bind_number(out, self._record(form(args, kwargs), [], (first, 0)))
            return out
        call = form(args, kwargs)
        node = self._record(call, changed, (first, self.random.count - first))
        if name in ("__setitem__", "__delitem__"):
            return out
        in_place = name.endswith("_") and not name.endswith("__")
        return self._bind(out, node, in_place or any(out is tensor for tensor in changed))

    def _written_silently(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Return the running statistics that a normalisation updates; torch does not report that change."""
        if not kwargs.get("training", kwargs.get("use_input_stats", args[5] if len(args) > 5 else True)):
            return []
        state = self.faked_model.state
        return [t for t in tensors_in((args, kwargs)) if id(t) in state and not isinstance(t, nn.Parameter)]

    def _record(self, call: Call, changed: list[Tensor], random: tuple[int, int]) -> fx.Node:
        args = self._argument(call.args)
        kwargs = {key: self._argument(value) for key, value in call.kwargs.items()}
        mutates = [self.known.node(tensor) for tensor in changed if self.known.has(tensor)]
        node: fx.Node = getattr(self.graph, call.kind)(call.target, args, kwargs)
        self._tag(node)
        node.meta["random"] = random
        node.meta["mutates"] = list(dict.fromkeys(entry for entry in mutates if entry.op != "get_attr"))
        node.meta["changed"] = changed
        return node

    # --- reads that depend on the data --------------------------------------------------------------------------------

    def _bind_number(self, out: Any, node: fx.Node) -> None:
        """Make ``node`` the source of a number that was read from a tensor with ``item()``."""
        self.symbols.bind(out.node.expr, node)
        if self.reads is not None:
            for symbol in out.node.expr.free_symbols:
                self._hint(symbol, self._real(self.reads.number, node))

    def _real(self, read: Callable[[fx.Node, dict[str, Tensor]], Any], node: fx.Node) -> Any:
        self._paused += 1
        try:
            return read(node, self.constants)
        finally:
            self._paused -= 1

    def _hint(self, symbol: Any, value: int | float) -> None:
        value = int(value) if isinstance(value, bool) else value
        self.symbols.shape_env.set_real_tensor_prop_unbacked_vals(symbol, value)

    def _fixed_number(self, name: str, args: tuple[Any, ...]) -> Any:
        """Return the value of a read that does not depend on the batch, or NOT_FIXED."""
        if not (name == "item" or (name in OF_ITSELF and is_answered(name, args))) or not self.known.has(args[0]):
            return NOT_FIXED
        self._paused += 1
        try:
            return self.fixed.number(self.known.node(args[0]))
        finally:
            self._paused -= 1

    def _answer(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a read with the value for the captured batch, and record a guard for it."""
        assert self.reads is not None
        if name in OF_ITSELF:
            node = self.known.node(args[0])
            answer = OF_ITSELF[name](self._real(self.reads.number, node))
        else:
            node = self._record(written(func, args, kwargs), [], (0, 0))
            answer = self._real(self.reads.number, node)
        self.expect(node, answer)
        return format(answer, args[1]) if name == "__format__" else answer

    def expect(self, node: fx.Node, answer: Any) -> None:
        """Record a guard: a value must equal that of the captured batch."""
        guard = self.append("call_function", guards.expect, (node, answer, where_short()))
        guard.meta["keep"] = True
        self.notes.append(f"kept as this batch decided it, and checked at every step: {here()}")

    def answered(self, expression: Any, result: Any) -> None:
        """Record a guard for the result of a comparison of sizes."""
        node = self._size_node(expression)
        if isinstance(node, fx.Node):
            self.expect(node, bool(result) if result in (True, False) else int(result))

    # --- calls of custom autograd functions ---------------------------------------------------------------------------

    def call_custom(self, function: type, apply: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``function.apply`` as one node, so that the user's own backward is kept."""
        name = f"{function.__module__}.{function.__qualname__}"
        if "<locals>" in name:
            raise unsupported(
                f"{name} is defined inside a function, so no stage could import it", "move it to the module"
            )
        self.custom_functions.append(name)
        return self._call(
            lambda a, k: apply(*a, **k), args, kwargs, lambda a, k: Call("call_function", apply, a, k), name=name
        )

    # --- values -------------------------------------------------------------------------------------------------------

    def _argument(self, value: Any) -> Any:
        """Return an argument in the form that ``fx`` takes: tensors and symbolic sizes as nodes."""
        if isinstance(value, Tensor):
            return self.known.node(value)
        if isinstance(value, SYMBOLIC):
            return self._size(value)
        if isinstance(value, (list, tuple)):
            if hasattr(value, "_fields") and next(tensors_in(value), None) is not None:
                return self.append("call_function", type(value), tuple(self._argument(item) for item in value))
            items = [self._argument(item) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, dict):
            return {key: self._argument(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(*(self._argument(item) for item in (value.start, value.stop, value.step)))
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, np.ndarray):
            with unset_fake_temporarily():
                real = torch.from_numpy(value.copy())
            return self.known.node(self.known.constant(real))
        if isinstance(value, torch.Generator):
            raise unsupported(
                "a torch.Generator that the model owns", "leave generator= out; every draw gets its own seed"
            )
        return value

    def _size(self, value: Any) -> Any:
        node = self._size_node(value.node.expr)
        return bool(node) if isinstance(value, torch.SymBool) and not isinstance(node, fx.Node) else node

    def _size_node(self, expression: Any) -> Any:
        try:
            return self.symbols.node(expression, self.append)
        except KeyError as error:
            raise unsupported(
                f"a size is computed with {error.args[0]}, which cannot be written as source text ({expression})",
                "compute it from x.shape with + - * // %",
            ) from None

    # --- results ------------------------------------------------------------------------------------------------------

    def _bind(self, out: Any, node: fx.Node, in_place: bool) -> Any:
        """Make ``node`` the source of the tensors in ``out``; return the result for the user's code."""
        if isinstance(out, Tensor):
            node.meta["val"] = out
            if in_place:
                self._bind_in_place(out, node)
                return out
            if self.known.has(out) or self.known.is_state(out):
                # x.contiguous() may return x itself; another object keeps the source of the user's x
                self._paused += 1
                out = node.meta["val"] = out.view_as(out)
                self._paused -= 1
            self._track(out, node)
            return out
        if isinstance(out, (list, tuple)):
            node.meta["length"] = len(out)
            for index, item in enumerate(out):
                self._bind_item(item, node, index)
        elif isinstance(out, dict):
            for key, item in out.items():
                self._bind_item(item, node, key)
        elif dataclasses.is_dataclass(out):
            self._bind_object(out, node)
        return out

    def _bind_item(self, item: Any, node: fx.Node, key: Any) -> None:
        if isinstance(item, Tensor) and self.known.has(item):
            return
        if self._is_unknown(item) or (next(tensors_in(item), None) is None and not dataclasses.is_dataclass(item)):
            return
        part = self.append("call_function", operator.getitem, (node, key))
        self._bind(item, part, in_place=True)

    def _bind_in_place(self, value: Tensor, node: fx.Node) -> None:
        if not self.known.is_state(value):
            self._track(value, node)

    def _track(self, value: Tensor, node: fx.Node) -> None:
        self.known.bind(value, node)
        if node.op == "placeholder":
            return
        for symbol, dimension in self.symbols.declare_made(node, value):
            if self.reads is not None:
                self._hint(symbol, self._real(self.reads.value, node).shape[dimension])

    def alias(self, value: Tensor, of: Tensor) -> None:
        """Register ``value`` as another object for ``of``."""
        self._track(value, self.known.node(of))

    def _tag(self, node: fx.Node) -> None:
        if self.watch:
            self.refuse_drawn()
        if self.most and len(self.graph.nodes) > self.most:
            raise unsupported(MORE_CALLS, "")
        frame = calling_frame()
        if self.given is not None:
            source, stack = self.given
            if source is not None:
                node.meta["source"], node.meta["frame"] = source, id(node)
        else:
            stack = tuple(self._stack)
            if frame is not None:
                node.meta.update(places_of(frame))
        node.meta["stack"] = stack
        node.meta["grad"] = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        node.meta["autocast"] = effective_autocast(self.autocast)
        if self.comparison is not None:
            self.comparison(node)
