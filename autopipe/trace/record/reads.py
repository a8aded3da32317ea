"""Compute the value of a data-dependent read by running the recorded part of the graph on the real batch.

Only with ``allow_data_dependent``. The graph stays symbolic in the batch size; a read returns the real value, and a
call of ``autopipe.guards.expect`` is recorded that compares the value at every step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

from autopipe import draws
from autopipe.trace.explain import here
from autopipe.trace.graph.replay import context_of
from autopipe.trace.record.faked_model import FakedModel
from autopipe.workload.batches.layouts import laid_out

WHERE = (0, 0)  # minibatch and microbatch of the captured batch


class Reads:
    """Runs recorded nodes on real tensors, each once and in order, up to the node that is read."""

    def __init__(self, faked_model: FakedModel, leaves: Mapping[str, Tensor], seed: int) -> None:
        self.faked_model, self.seed = faked_model, seed
        self._leaves = {name: laid_out(leaf, leaf) for name, leaf in leaves.items()}
        self._state: dict[str, Tensor] = {}
        self._buffers: list[tuple[Tensor, Tensor]] = []
        with faked_model.unfaked():
            for _, tensors in (("", faked_model.model.named_parameters()), ("", faked_model.model.named_buffers())):
                self._state.update(tensors)
            self._buffers = [(buffer, buffer.detach().clone()) for buffer in faked_model.model.buffers()]
        self._values: dict[fx.Node, Any] = {}

    def value(self, node: fx.Node, constants: Mapping[str, Tensor]) -> Any:
        """Return the real value of a recorded node."""
        pending = [entry for entry in node.graph.nodes if entry not in self._values and entry.op != "output"]
        if pending:
            with contextlib.ExitStack() as stack:
                stack.enter_context(_disable_current_modes())
                stack.enter_context(torch._C._DisablePythonDispatcher())
                stack.enter_context(self.faked_model.unfaked())
                stack.enter_context(torch.no_grad())
                for device in ("cpu", "cuda"):
                    if torch.is_autocast_enabled(device):
                        stack.enter_context(torch.autocast(device, enabled=False))
                for entry in pending:
                    self._values[entry] = self._run(entry, constants)
        return self._values[node]

    def number(self, node: fx.Node, constants: Mapping[str, Tensor]) -> Any:
        """Return the real value of a recorded node as a Python number, or nested lists."""
        value = self.value(node, constants)
        with _disable_current_modes():  # a fake tensor mode would treat the real tensor as fake
            if isinstance(value, Tensor):
                return value.item() if value.numel() == 1 else value.tolist()
        return value

    def _run(self, node: fx.Node, constants: Mapping[str, Tensor]) -> Any:
        if node.op == "placeholder":
            return self._leaves[str(node.target)]
        if node.op == "get_attr":
            target = str(node.target)
            return constants[target] if target in constants else self._state[target]
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda entry: self._values[entry])
        position, count = node.meta.get("random", (0, 0))
        with contextlib.ExitStack() as stack:
            stack.enter_context(context_of(node.meta))
            stack.enter_context(torch.no_grad())
            if node.meta.get("opaque"):
                stack.enter_context(draws.inside((self.seed, *WHERE), position))
            elif count:
                stack.enter_context(draws.at((self.seed, *WHERE), position, count))
            if node.op == "call_module":
                return self.faked_model.model.get_submodule(str(node.target))(*args, **kwargs)
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            assert callable(node.target)
            return node.target(*args, **kwargs)

    def restore(self) -> None:
        """Restore the buffers that the run changed."""
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)


_SIZES = (2, 3, 4, 5, 8, 17, 64, 100, 1024, 4096)  # batch sizes at which a comparison is tried


class FollowingShapeEnv(ShapeEnv):
    """A shape environment that records where the user's code fixed a size to a number.

    ``on_answer`` receives comparisons whose answer is kept: of data-dependent sizes whose values are known, and of the
    batch size if the answer is different for another batch.
    """

    def __init__(self, on_answer: Callable[[Any, Any], None] | None = None) -> None:
        super().__init__(allow_scalar_outputs=True)
        self.on_answer = on_answer
        self.fixed_at: dict[Any, str] = {}
        self.fixed_within: dict[Any, tuple[str, ...]] = {}  # the modules that were running at that point
        self.around: Callable[[], tuple[str, ...]] = tuple

    def _log_real_tensor_propagation(self, orig_expr: Any, unsound_result: Any) -> None:
        if self.on_answer is not None:
            self.on_answer(orig_expr, unsound_result)

    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a comparison, and report it if the answer does not hold for every batch size."""
        known = len(self.guards)
        answer = super().evaluate_expr(*args, **kwargs)
        for guard in self.guards[known:]:
            symbols = sorted(guard.expr.free_symbols, key=str)
            if self.fixed_at.keys() & set(symbols):
                continue  # refused after the recording
            holds = (guard.expr.subs(dict.fromkeys(symbols, size)) for size in _SIZES)
            if self.on_answer is not None and any(truth is sympy.false for truth in holds):  # sympy's false
                self.on_answer(guard.expr, True)
        return answer

    def _set_replacement(self, a: Any, *rest: Any, **more: Any) -> None:
        self.fixed_at.setdefault(a, here())
        self.fixed_within.setdefault(a, self.around())
        super()._set_replacement(a, *rest, **more)
