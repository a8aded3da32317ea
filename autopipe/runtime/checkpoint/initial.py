"""A stage with its first weights: of the model as its file builds it, or read from somewhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from autopipe import sparse
from autopipe.draws import exclusive
from autopipe.errors import AutopipeError
from autopipe.ir.graph import Graph
from autopipe.runtime.checkpoint.weight_files import Matched, open_weights
from autopipe.stage import Stage
from autopipe.workload import Workload


def weights_of(init_from: str, graph: Graph, workload: Workload, *, trust: bool) -> Matched:
    """Open the weights that a run starts from. Raises: RunError, ArtifactError."""
    own = workload.own_loss.among(graph.parameters)
    return Matched(open_weights(Path(init_from), trust=trust), graph, init_from, own)


def built(
    cls: type[Stage], workload: Workload, constants: Mapping[str, torch.Tensor], weights: Matched | None, graph: Graph
) -> Stage:
    """Return a stage of a new model. With ``weights`` only this stage's parameters ever take memory, and are read."""
    if weights is not None:
        stage = _filled(cls, workload, constants, weights, graph)
        if stage is not None:
            return stage
    with exclusive():
        stage = cls.adopt(workload.build_model(), constants)
    if weights is not None:
        _fill(stage, weights, graph)
    return stage


def _filled(
    cls: type[Stage], workload: Workload, constants: Mapping[str, torch.Tensor], weights: Matched, graph: Graph
) -> Stage | None:
    """Build without memory for parameters; None where the model cannot be built so, or needs what no file holds."""
    try:
        with exclusive():
            stage = cls.adopt(workload.build_model(empty=True), constants)
        kept = _fill(stage, weights, graph)
        if any(tensor.is_meta for tensor in (*stage.parameters(), *stage.buffers())):
            return None
        kept = [name for name in kept if name not in cls.CONSTANTS]
        return None if kept and _random(cls, workload, constants, stage, kept) else stage
    except AutopipeError:
        return None


def _random(
    cls: type[Stage], workload: Workload, constants: Mapping[str, torch.Tensor], stage: Stage, names: Sequence[str]
) -> bool:
    """Whether one of the named buffers, which the model made itself, holds random numbers."""
    with exclusive():
        other = cls.adopt(workload.build_model(empty=True, shifted=True), constants)
    before, after = dict(stage.named_buffers()), dict(other.named_buffers())
    return any(not sparse.equal(before[name], after[name]) for name in names)


def _fill(stage: Stage, weights: Matched, graph: Graph) -> list[str]:
    """Exchange what a stage holds for what was read; a tensor with several names stays one.

    Returns the buffers, by name, that were not there to read.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    first: dict[int, str] = {}
    for path, module in stage.named_modules(remove_duplicate=False):
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                places.setdefault(id(tensor), []).append((module, key))
                full = f"{path}.{key}" if path else key
                first.setdefault(id(tensor), graph.aliases.get(full, full))
    read = weights.read(set(first.values()))
    left = []
    for identity, name in first.items():
        if name not in read:
            left.append(name)
            continue
        module, key = places[identity][0]
        old = module._parameters.get(key)
        if old is None:
            buffer = module._buffers[key]
            assert buffer is not None
            value = read[name].to(buffer.dtype)
            for owner, place in places[identity]:
                owner._buffers[place] = value
            continue
        new = nn.Parameter(_like(old, read[name]), requires_grad=old.requires_grad)
        for owner, place in places[identity]:
            setattr(owner, place, new)  # not owner._parameters: an LSTM keeps a list of its weights
    return left


def _like(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the value in the dtype and with the strides of what it replaces."""
    return torch.empty_like(old, device="cpu", dtype=old.dtype, requires_grad=False).copy_(value)
