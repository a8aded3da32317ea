"""Train in stages with ranks as threads, and keep what is compared with plain training. Teams give complete tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopipe import sparse
from autopipe.ir.teams.axes import Place, Segment
from autopipe.measure.device import release
from autopipe.runtime.after_step.average import PREFIX
from autopipe.runtime.context import RunContext
from autopipe.runtime.job import Job, RunDirectory
from autopipe.runtime.session import RankSession
from autopipe.runtime.step.gradients import GradientHook
from autopipe.runtime.transport.threads import run_in_threads
from autopipe.trace.axes.combined import joined as joined_parts
from autopipe.workload import Workload

Gradients = dict[tuple[int, str], torch.Tensor | None]


@dataclass(slots=True)
class Trained:
    """The results of a run, in host memory: a GPU has room for one run at a time."""

    # by (step, name)
    gradients: Gradients = field(default_factory=dict)
    # the weights after the first step
    after_first: dict[str, torch.Tensor] = field(default_factory=dict)
    # the weights at the end
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    losses: tuple[float, ...] = ()

    def keep(self, step: int, parameters: Mapping[str, Any]) -> None:
        """Store the gradients of a step, and the weights before the second step."""
        for name, parameter in parameters.items():
            self.gradients[step, name] = None if parameter.grad is None else _copy(parameter.grad)
            if step == 1:
                self.after_first[name] = _copy(parameter)

    def finish(self, parameters: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], losses: Any) -> Trained:
        """Store the results at the end."""
        self.parameters = {name: tensor.detach().cpu() for name, tensor in parameters.items()}
        self.buffers = {name: tensor.detach().cpu() for name, tensor in buffers.items()}
        self.losses = tuple(losses)
        self.after_first = self.after_first or self.parameters
        return self


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory."""
    return tensor.detach().clone() if tensor.device.type == "cpu" else tensor.detach().cpu()


def fresh(items: Sequence[Any]) -> Iterator[Any]:
    """Iterate copies of the minibatches: a forward may change its batch in place, which the next run must not see."""
    for item in items:
        yield pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, item)


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Return whether two tensors are equal to the last bit, or both None."""
    if one is None or other is None:
        return one is other
    return sparse.equal(one, other)


def train_in_stages(
    workload: Workload, run: RunDirectory, job: Job, context: RunContext, items: Sequence[Any]
) -> tuple[Trained, list[tuple[float, ...]]]:
    """Train in stages, with ranks as threads. Return the results, and the shares of the parts of each minibatch."""
    size = context.plan.team
    members = [Trained() for _ in range(size)]

    def hook(process: int) -> GradientHook:
        trained = members[process % size]
        return lambda stage, step, parameters: trained.keep(step, parameters)

    sessions = run_in_threads(
        run,
        job,
        context,
        lambda session: session.train(),
        items=lambda epoch: fresh(items),
        on_gradients=hook,
    )
    losses = sessions[0].executor.stepper.losses
    for member, trained in enumerate(members):
        own = [session.tensors() for session in sessions[member::size]]
        tensors = {name: tensor for each in own for name, tensor in each.items()}
        trained.finish(tensors, tensors, [losses[step] for step in sorted(losses)])
    trained = members[0] if size == 1 else _of_team(members, sessions)
    parts = [workload.split(item, context.plan.num_microbatches) for item in fresh(items)]
    shares = [sessions[0].shares(item, part).factors for item, part in zip(items, parts, strict=True)]
    del sessions, tensors
    release(torch.device(job.device))
    return trained, shares


def _of_team(members: Sequence[Trained], sessions: Sequence[RankSession]) -> Trained:
    """Return the complete tensors of teams. One that should be equal on all members and is not is left out."""
    stages = [runner.stage for session in sessions for runner in session.executor.runners.values()]
    shards = {name: along for stage in stages for name, along in stage.SHARDS.items()}

    def joined(name: str, parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        tensors = [part for part in parts if part is not None]
        along = shards.get(name.removeprefix(PREFIX))
        if len(tensors) < len(parts) or along is None:
            return parts[0] if all(same(part, parts[0]) for part in parts) else None
        dimension, axis, segments = along
        return joined_parts(tensors, Place(name, dimension, tuple(Segment(*s) for s in segments)), axis)

    def of(values: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        named = {name: joined(name, [each.get(name) for each in values]) for name in values[0]}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    gradients = {key: joined(key[1], [each.gradients.get(key) for each in members]) for key in members[0].gradients}
    after_first, parameters, buffers = (
        of([getattr(each, field) for each in members]) for field in ("after_first", "parameters", "buffers")
    )
    return Trained(gradients, after_first, parameters, buffers, members[0].losses)
