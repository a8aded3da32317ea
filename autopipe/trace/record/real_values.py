"""Compute the value of a data-dependent read by running the recorded part of the graph on the real batch.

Only with ``allow_data_dependent``. The graph stays symbolic in the batch size; a read returns the real value, and a
call of ``autopipe.guards.expect`` is recorded that compares the value at every step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from autopipe import draws
from autopipe.trace.graph.replay import context_of
from autopipe.trace.record.faked_model import FakedModel
from autopipe.trace.record.model_snapshot import BufferSnapshot
from autopipe.workload.batches.layouts import laid_out

WHERE = (0, 0)  # minibatch and microbatch of the captured batch


class RealValues:
    """Runs recorded nodes on real tensors, each once and in order. ``seed``: None to draw from the generators."""

    def __init__(self, faked_model: FakedModel, leaves: Mapping[str, Tensor], seed: Any) -> None:
        self.faked_model, self.seed = faked_model, seed
        self._leaves = {name: laid_out(leaf, leaf) for name, leaf in leaves.items()}
        self._state: dict[str, Tensor] = {}
        with faked_model.unfaked():
            for _, tensors in (("", faked_model.model.named_parameters()), ("", faked_model.model.named_buffers())):
                self._state.update(tensors)
            self._buffers = BufferSnapshot(faked_model.model.modules())
        self._values: dict[fx.Node, Any] = {}

    def value(self, node: fx.Node, constants: Mapping[str, Tensor]) -> Any:
        """Return the real value of a recorded node."""
        pending = self.pending(node)
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

    def pending(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes to run for the value of one, in order."""
        return [entry for entry in node.graph.nodes if entry not in self._values and entry.op != "output"]

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
            elif count and self.seed is not None:
                stack.enter_context(draws.at((self.seed, *WHERE), position, count))
            if node.op == "call_module":
                return self.faked_model.model.get_submodule(str(node.target))(*args, **kwargs)
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            assert callable(node.target)
            return node.target(*args, **kwargs)

    def restore(self) -> None:
        """Restore the buffers that the run changed."""
        self._buffers.restore()
