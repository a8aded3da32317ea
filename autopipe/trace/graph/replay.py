"""Run a captured graph node by node, with the grad mode, autocast and random draws of the forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from autopipe import draws


@contextlib.contextmanager
def context_of(meta: Mapping[str, Any]) -> Iterator[None]:
    """Enter the grad mode and the autocast regions in which a node was recorded."""
    with contextlib.ExitStack() as stack:
        if not meta.get("grad", True):
            stack.enter_context(torch.no_grad())
        for device, dtype, enabled, cache in meta.get("autocast", ()):
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache))
        yield


class Replay(fx.Interpreter):
    """Runs the graph on real tensors. ``where``: (run seed, minibatch, microbatch), which seed the random draws."""

    def __init__(self, module: fx.GraphModule, where: tuple[int, int, int]) -> None:
        super().__init__(module)
        self.where = where

    def run_node(self, n: fx.Node) -> Any:
        """Run one node in its context."""
        if n.op in ("placeholder", "get_attr", "output"):
            return super().run_node(n)
        position, count = n.meta.get("random", (0, 0))
        with contextlib.ExitStack() as stack:
            if not n.meta.get("grad", True) or n.meta.get("autocast"):
                stack.enter_context(context_of(n.meta))
            if n.meta.get("opaque"):
                stack.enter_context(draws.inside(self.where, position))
            elif count:
                stack.enter_context(draws.at(self.where, position, count))
            return super().run_node(n)


def replay(module: fx.GraphModule, leaves: Mapping[str, Tensor], where: tuple[int, int, int]) -> tuple[Tensor, ...]:
    """Return the outputs of the graph for a batch: the loss, and its weight if it has one."""
    inputs = [leaves[node.name] for node in module.graph.nodes if node.op == "placeholder"]
    outputs: tuple[Tensor, ...] = Replay(module, where).run(*inputs)
    return outputs
