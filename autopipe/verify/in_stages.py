"""Train in stages with ranks as threads, and keep what is compared with plain training. Teams give complete tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree

from autopipe import sparse
from autopipe.ir.teams.axes import Place, Segment
from autopipe.measure.device import release
from autopipe.runtime.batches.beside import Telling
from autopipe.runtime.checkpoint import state
from autopipe.runtime.context import RunContext
from autopipe.runtime.events import Silent
from autopipe.runtime.job import Job, RunDirectory
from autopipe.runtime.session import RankSession
from autopipe.runtime.step.gradients import GradientHook
from autopipe.runtime.step.loss_weights import Divisors
from autopipe.runtime.training_state.unread import is_unread
from autopipe.runtime.transport.threads import run_in_threads
from autopipe.trace.axes.sums_over_members import joined as joined_parts
from autopipe.verify.plain import PlainSettings, Subject, evaluation, parts_of
from autopipe.workload import Workload

logger = logging.getLogger(__name__)

Gradients = dict[tuple[int, str], torch.Tensor | None]
State = dict[str, torch.Tensor]
"""What an optimizer has for one parameter, by its path: momentum, number of steps, learning rate."""
AVERAGE = "ema."
_MODEL = "model."


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
    # before and after training
    evaluation: tuple[float, ...] = ()
    # by parameter, the state of its optimizer at the end
    states: dict[str, State] = field(default_factory=dict)
    # the tensors that the replicas and members of a stage should have alike, and have not
    unlike: set[str] = field(default_factory=set)

    # the buffers that changed in plain training
    moved: frozenset[str] = frozenset()
    # the steps that a loss scale skipped, because a gradient is not finite
    skipped: frozenset[int] = frozenset()

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

    def stored(self) -> dict[str, Any]:
        """Return the fields as values that ``torch.load`` reads without unpickling."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: [*value] if isinstance(value, (set, frozenset)) else value for name, value in values}

    @staticmethod
    def restored(values: Mapping[str, Any]) -> Trained:
        """Return what ``stored`` returned."""
        empty = Trained()
        return Trained(**{name: type(getattr(empty, name))(value) for name, value in values.items()})

    def note_skipped(self) -> None:
        """Note the steps with a gradient that is not finite."""
        every = self.gradients.items()
        self.skipped = frozenset(step for (step, _), gradient in every if gradient is not None and overflows(gradient))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory."""
    return tensor.detach().clone() if tensor.device.type == "cpu" else tensor.detach().cpu()


def overflows(gradient: torch.Tensor) -> bool:
    """Return whether a loss scale skips a step with this gradient."""
    return not bool(sparse.dense(gradient).isfinite().all())


def fresh(items: Iterable[Any]) -> Iterator[Any]:
    """Iterate copies of the minibatches: a forward may change its batch in place, which the next run must not see."""
    for item in items:
        yield pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, item)


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Return whether two tensors are equal to the last bit, or both None. Here NaN equals NaN."""
    if one is None or other is None:
        return one is other
    if sparse.equal(one, other):
        return True
    if one.shape != other.shape or one.layout is not other.layout:
        return False
    a, b = sparse.dense(one), sparse.dense(other)
    return bool(((a == b) | ((a != a) & (b != b))).all())  # noqa: PLR0124 - NaN is not itself


class _Evaluations(Silent):
    """Keeps the losses of evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def event(self, kind: str, **fields: Any) -> None:
        """Keep the loss of an evaluation."""
        if kind == "evaluation":
            self.losses.append(fields["loss"])


def train_in_stages(
    workload: Workload,
    run: RunDirectory,
    job: Job,
    context: RunContext,
    items: Sequence[Any],
    *,
    evaluated: Sequence[Any] = (),
    reads: Telling | None = None,
) -> tuple[Trained, list[Divisors | None]]:
    """Train in stages, with ranks as threads. Return the results, and the divisors of the loss in each minibatch.

    ``evaluated``: minibatches that are evaluated before and after training. ``reads``: the process that reads
    ``items``, and sends the numbers of their microbatches with them.
    """
    reporters = [_Evaluations() for _ in range(context.plan.num_processes)]

    def body(session: RankSession) -> None:
        if evaluated:  # what this leaves behind, training shows
            session.evaluate(None, 0, items=lambda epoch: fresh(evaluated))
        session.train()
        if evaluated:
            session.evaluate(None, len(items), items=lambda epoch: fresh(evaluated))

    each = [Trained() for _ in range(context.plan.num_processes)]

    def hook(process: int) -> GradientHook:
        return lambda stage, step, parameters: each[process].keep(step, parameters)

    sessions = run_in_threads(
        run,
        job,
        context,
        body,
        items=lambda epoch: fresh(items),
        on_gradients=hook,
        reporters=reporters,
        reads=reads,
    )
    losses = sessions[0].executor.stepper.losses
    size = context.plan.team
    members = [_of_member(context, each[at::size], sessions[at::size]) for at in range(size)]
    trained = members[0] if size == 1 else _of_team(members, sessions)
    trained.losses = tuple(losses[step] for step in sorted(losses))
    trained.evaluation = tuple(loss for reporter in reporters for loss in reporter.losses)
    if context.plan.workload.precision == "fp16":
        trained.note_skipped()
    parts = [parts_of(workload, item, context.plan.num_microbatches) for item in fresh(items)]
    divisors = [sessions[0].divisors(item, part) for item, part in zip(items, parts, strict=True)]
    del sessions
    release(torch.device(job.device))
    return trained, divisors


def _of_member(context: RunContext, each: Sequence[Trained], sessions: Sequence[RankSession]) -> Trained:
    """Join the results of all ranks. Replicas must have the same; the first one's counters of batches count."""
    whole, aliases = Trained(), context.graph.aliases
    for stage in context.plan.stages:
        for replica, rank in enumerate(stage.ranks):
            session, of_rank = sessions[rank], each[rank]
            session.executor.settle()
            stepper, runner = session.executor.stepper, session.executor.runners[stage.index]
            own = stepper.owned(stage.index)
            averages = {} if stepper.averages is None else stepper.averages.of(stage.index)
            weights = {name: parameter.data for name, parameter in own.items()}
            weights |= {f"{AVERAGE}{name}": tensor for name, tensor in averages.items()}
            counted = {name.removeprefix(_MODEL) for name in state.counters(runner)} if replica else set()
            buffers = {aliases.get(n, n): tensor for n, tensor in state.buffers(runner).items() if n not in counted}
            gradients = {key: gradient for key, gradient in of_rank.gradients.items() if key[1] in own}
            whole.unlike |= {key[1] for key in _add(whole.gradients, gradients)}
            whole.unlike |= _add(whole.parameters, _on_host(weights))
            whole.unlike |= _add(whole.buffers, _on_host(buffers))
            first = {name: tensor for name, tensor in of_rank.after_first.items() if name in own}
            _add(whole.after_first, first or whole.parameters)
            training = stepper.training(stage.index)
            states = {} if training is None else states_of(training.optimizer, training.owned)
            for name, values in states.items():
                if whole.states.setdefault(name, values).keys() != values.keys() or _add(whole.states[name], values):
                    whole.unlike.add(name)
    return whole


_Key = TypeVar("_Key")


def _add(whole: dict[_Key, Any], more: Mapping[_Key, torch.Tensor | None]) -> set[_Key]:
    """Add tensors to those of other ranks, and return the keys of those that differ from theirs."""
    return {key for key, tensor in more.items() if not same(whole.setdefault(key, tensor), tensor)}


def _on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


def _of_team(members: Sequence[Trained], sessions: Sequence[RankSession]) -> Trained:
    """Return the complete tensors of teams."""
    stages = [runner.stage for session in sessions for runner in session.executor.runners.values()]
    shards = {name: along for stage in stages for name, along in stage.SHARDS.items()}
    shapes = {name: tensor.shape for name, tensor in members[0].parameters.items()}
    unlike = set().union(*(member.unlike for member in members))

    def joined(name: str, parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        tensors = [part for part in parts if part is not None]
        along = shards.get(name)
        if len(tensors) < len(parts) or along is None:
            if not all(same(part, parts[0]) for part in parts):
                unlike.add(name)
            return parts[0]
        dimension, axis, segments = along
        return joined_parts(tensors, Place(name, dimension, tuple(Segment(*s) for s in segments)), axis)

    def of(values: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        named = {n: joined(n.removeprefix(AVERAGE), [each.get(n) for each in values]) for n in values[0]}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def of_states(name: str) -> State:
        values = [member.states.get(name, {}) for member in members]
        if any(each.keys() != values[0].keys() for each in values):
            unlike.add(name)
        whole: State = {}
        for key, first in values[0].items():
            parts = [each.get(key) for each in values]
            if first.shape == shapes.get(name):
                complete = joined(name, parts)
                whole[key] = first if complete is None else complete
                continue
            whole[key] = first
            if not all(same(part, first) for part in parts):
                unlike.add(name)
        return whole

    gradients = {key: joined(key[1], [each.gradients.get(key) for each in members]) for key in members[0].gradients}
    after_first, parameters, buffers = (
        of([getattr(each, field) for each in members]) for field in ("after_first", "parameters", "buffers")
    )
    states = {name: of_states(name) for name in members[0].states}
    return Trained(gradients, after_first, parameters, buffers, states=states, unlike=unlike)


def states_of(
    optimizer: torch.optim.Optimizer | None, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, State]:
    """Return the tensors and numbers that an optimizer has for each of some parameters, and those of its group.

    A value of a group that no code reads, such as a norm for the log, is left out.
    """
    states: dict[str, State] = {}
    groups = [] if optimizer is None else optimizer.param_groups
    of_parameter = {id(parameter): group for group in groups for parameter in group["params"]}
    for name, parameter in parameters.items():
        group = of_parameter.get(id(parameter))
        if optimizer is None or group is None:
            continue
        numbers = {
            key: value
            for key, value in group.items()
            if isinstance(value, (int, float, tuple, torch.Tensor))
            and (
                key in optimizer.defaults
                or not is_unread(f"optimizer.param_groups[0][{key!r}]", optimizer, LRScheduler)
            )
        }
        values: State = {}
        for kind, entries in (("state", optimizer.state.get(parameter, {})), ("group", numbers)):
            for path, value in pytree.tree_flatten_with_path(entries)[0]:
                if isinstance(value, (int, float, torch.Tensor)):
                    tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
                    values[kind + pytree.keystr(path)] = _copy(tensor)
        states[name] = values
    return states


def can_be_compared(workload: Workload, item: Any, settings: PlainSettings, device: torch.device) -> bool:
    """Return whether the user's model evaluates the minibatch, without random numbers and changes of its buffers."""
    try:
        subject = Subject(workload, device)
        before = {name: buffer.clone() for name, buffer in subject.buffers().items()}
        seeds = [settings.seed, settings.seed + 1] if settings.draws else [settings.seed]
        losses = [
            evaluation(subject, one, replace(settings, seed=seed), device) for seed in seeds for one in fresh([item])
        ]
    except Exception as error:  # a user who never evaluates does not see it
        logger.info("evaluation is not compared: %s", error)
        return False
    changed = [name for name, buffer in subject.buffers().items() if not same(before[name], buffer)]
    return len({*losses}) == 1 and not changed


def plain_evaluation(
    workload: Workload, item: Any, trained: Trained, settings: PlainSettings, device: torch.device
) -> float:
    """Return the loss of the user's model with the weights and buffers of a run in stages."""
    subject = Subject(workload, device)
    with torch.no_grad():
        for name, tensor in {**subject.buffers(), **subject.parameters}.items():
            value = trained.parameters.get(name, trained.buffers.get(name))
            if value is not None:
                tensor.data = torch.empty_like(tensor).copy_(value) if value.layout is torch.strided else value
    (one,) = fresh([item])
    return evaluation(subject, one, settings, device)
