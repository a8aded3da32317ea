"""Check that the user's optimizer steps each parameter independently of the others, with synthetic gradients.

In a pipeline, an optimizer is built over the parameters of one stage. If it uses more than each parameter alone (a norm
over all gradients, a rate by position in the list, one scale for all), a stage steps differently from one process. The
members of a team have parts of tensors, and differ if a step looks beyond each element (a norm or a factorization). One
step of training may not show this: a warm-up starts at a rate of 0, and a clip or a scale may act later. So the
optimizer is built over all parameters and over those of each stage. Both get the same gradients of several sizes for a
dozen steps, at rates other than 0, and the weights are compared after every step. State is compared, too: an optimizer
may keep a norm over all gradients for many steps before it skips or clips by it.

Only the optimizer runs. Large models are probed on tensors with truncated dimensions.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from autopipe.draws import exclusive, states_of_generators
from autopipe.runtime.training_state.describe import Description, describe, named_state
from autopipe.runtime.training_state.differing import differing, distance
from autopipe.runtime.training_state.nodes import UnstorableError
from autopipe.runtime.training_state.unread import is_unread
from autopipe.workload import Workload
from autopipe.workload.batches.isolation import PrivateRandom

log = logging.getLogger(__name__)

# the size of the gradients by step; None: some parameters have no gradient
SCALES: tuple[float | None, ...] = (1.0, 1e-3, 1e3, 1.0, 1.0, 1e-3, 1e3, 1.0, 0.0, 1.0, None, 1.0)
# above WHOLE_BYTES of parameters, every dimension of every tensor is truncated to CUT elements
WHOLE_BYTES, CUT = 4 * 2**20, 16
# of the largest value of a tensor
_ROUNDING = 1e-5
# after which steps states are compared: describing them takes longer than a step
_COMPARED_STATES = (1, 2, len(SCALES))
# the learning rate that replaces 0
_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Finding:
    """A parameter that is stepped differently."""

    parameter: str
    stage: int
    # from 1
    step: int
    # relative to the largest value of the parameter, or of the value in the state
    error: float
    # whether the optimizer draws random numbers
    draws: bool
    # the path of a value of the state that differs, "" if the weights do
    state: str = ""


Part = Callable[[str, torch.Tensor], torch.Tensor]
"""Returns a member's part of a tensor that has the shape of a parameter."""


def _complete(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Stepped:
    """Copies of some parameters, or of a member's parts of them, with their own optimizer and scheduler."""

    def __init__(
        self, workload: Workload, parameters: Mapping[str, nn.Parameter], *, cut: bool, part: Part = _complete
    ) -> None:
        whole = {name: _copy(parameter, cut=cut) for name, parameter in parameters.items()}
        self.part, self.shapes = part, {name: parameter.shape for name, parameter in whole.items()}
        self.parameters = whole if part is _complete else {n: _as_parameter(part(n, p), p) for n, p in whole.items()}
        self.optimizer: Optimizer | None = workload.optimizer(list(self.parameters.items()))
        self.scheduler: LRScheduler | None = None
        if self.optimizer is not None:
            try:
                self.scheduler = workload.scheduler(self.optimizer)
            except Exception as error:  # a run reports it in detail
                log.info("the scheduler was left out of the probe: %s", error)
        self.random = PrivateRandom(0)
        self.drew = False

    def described(self) -> Description | None:
        """Describe the state; None if it cannot be described."""
        if self.optimizer is None:
            return None
        try:
            return describe({"optimizer": _All(self.optimizer), "scheduler": self.scheduler}, self.parameters)
        except (UnstorableError, RecursionError) as error:  # commands that save refuse it
            log.info("the state of the optimizer was left out of the probe: %s", error)
            return None

    def step(self, number: int, scale: float | None) -> None:
        """Take one step."""
        if self.optimizer is None:
            return
        for name, parameter in self.parameters.items():
            gradient = _gradient(name, self.shapes[name], parameter.dtype, number, scale)
            parameter.grad = None if gradient is None else self.part(name, gradient).clone()
        for group in self.optimizer.param_groups:
            _replace_zero_rate(group)
        with self.random.active():
            before = states_of_generators()
            self.optimizer.step()
            self.drew |= before != states_of_generators()
        self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None:
            try:
                self.scheduler.step()
            except Exception:
                self.scheduler = None


class _All:
    """What an optimizer has: its state_dict, and its attributes, which a run may not resume without."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return both, with the parameters in place of their numbers."""
        return {**vars(self.optimizer), **named_state(self.optimizer, "optimizer")}


def probe(workload: Workload, stages: Sequence[Sequence[str]], model: nn.Module | None = None) -> Finding | None:
    """Return the first difference between an optimizer over one stage and one over all parameters, or None.

    ``stages``: by stage, the names of the parameters that it steps. ``model``: the model, built if None.

    Raises: ModelFileError as the optimizer hook does.
    """
    with exclusive():
        model = workload.build_model() if model is None else model
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        owned = [{name: trained[name] for name in names if name in trained} for names in stages]
        owned_by = {name: index for index, names in enumerate(owned) for name in names}
        if len(set(owned_by.values())) < 2:
            return None
        cut = sum(p.numel() * p.element_size() for p in trained.values()) > WHOLE_BYTES
        every = {name: p for name, p in trained.items() if name in owned_by}
        whole = _Stepped(workload, every, cut=cut)
        parts = [_Stepped(workload, names, cut=cut) for names in owned if names]
        states = [_States.of(part, whole) for part in parts] if workload.stepping.is_customized else []
        for number, scale in enumerate(SCALES, start=1):
            try:
                for stepped in (whole, *parts):
                    stepped.step(number, scale)
            except Exception as error:  # it may never get such gradients in training, so this proves nothing
                log.info("the probe of the optimizer ended in step %d: %s", number, error)
                return None
            for part in parts:
                for name, parameter in part.parameters.items():
                    ours, expected = parameter.detach(), whole.parameters[name].detach()
                    if not torch.equal(ours.nan_to_num(), expected.nan_to_num()):
                        off = float((ours - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
                        return Finding(name, owned_by[name], number, off, whole.drew)
            findings = [finding for each in states for finding in each.findings(number, owned_by)]
            if findings:
                again = _Stepped(workload, every, cut=cut)
                for earlier, its_scale in enumerate(SCALES[:number], start=1):
                    again.step(earlier, its_scale)
                # what differs between two optimizers over all parameters, such as a time, does not depend on stages
                varying = {path for path, *_ in _States(again, whole, set()).differing()}
                if repeated := [finding for finding in findings if finding.state not in varying]:
                    return repeated[0]
    return None


@dataclass(slots=True)
class _States:
    """The state of an optimizer over a part of the parameters, compared with that of one over all."""

    part: _Stepped
    whole: _Stepped
    # paths that differ before the first step, such as the number of parameters
    before: set[str]

    @staticmethod
    def of(part: _Stepped, whole: _Stepped) -> _States:
        """Compare before the first step."""
        states = _States(part, whole, set())
        states.before = {path for path, *_ in states.differing()}
        return states

    def differing(self) -> Iterator[tuple[str, Any, Any]]:
        """Iterate what differs now and did not before the first step: (path, value, value over all)."""
        ours, theirs = self.part.described(), self.whole.described()
        for path, one, two in differing(ours, theirs, self.part.parameters) if ours and theirs else ():
            if not any(path == known or path.startswith((f"{known}[", f"{known}.")) for known in self.before):
                yield path, one, two

    def findings(self, number: int, owned_by: Mapping[str, int]) -> list[Finding]:
        """Return the differences that matter after a step of the probe, if states are compared after it."""
        name = next(iter(self.part.parameters))
        return [
            Finding(name, owned_by[name], number, min(distance(one, two), 1.0), self.whole.drew, path)
            for path, one, two in (self.differing() if number in _COMPARED_STATES else ())
            if not is_unread(path, self.part.optimizer, self.part.scheduler)
        ]


def probe_members(
    workload: Workload, dimensions: Mapping[str, int], size: int, model: nn.Module | None = None
) -> Finding | None:
    """Return the first difference between an optimizer over a member's parts and one over complete parameters, or None.

    ``dimensions``: the parameters that the ``size`` members of a team cut, and along which dimension. ``model``: the
    model, built if None. Kernels may round the last elements of a tensor in another way, within ``_ROUNDING``.

    Raises: ModelFileError as the optimizer hook does.
    """

    def part(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.tensor_split(size, dimensions[name])[0] if name in dimensions else tensor

    with exclusive():
        model = workload.build_model() if model is None else model
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        cut = sum(p.numel() * p.element_size() for p in trained.values()) > WHOLE_BYTES
        whole, member = (_Stepped(workload, trained, cut=cut, part=each) for each in (_complete, part))
        for number, scale in enumerate(SCALES, start=1):
            try:
                whole.step(number, scale)
                member.step(number, scale)
            except Exception as error:
                log.info("the probe of the optimizer ended in step %d: %s", number, error)
                return None
            for name, parameter in member.parameters.items():
                ours, expected = parameter.detach(), part(name, whole.parameters[name].detach())
                off = float((ours - expected).nan_to_num().abs().max() / expected.abs().max().clamp_min(1e-30))
                if off > _ROUNDING:
                    return Finding(name, -1, number, off, whole.drew)
    return None


def _copy(parameter: nn.Parameter, *, cut: bool) -> nn.Parameter:
    """Return a copy of a parameter on the CPU, with its Python attributes."""
    data = parameter.detach()
    if cut:
        data = data[tuple(slice(0, CUT) for _ in range(data.dim()))]
    copy = nn.Parameter(data.to("cpu").clone(), requires_grad=True)
    copy.__dict__.update(parameter.__dict__)
    return copy


def _as_parameter(part: torch.Tensor, whole: nn.Parameter) -> nn.Parameter:
    """Return a part of a parameter as one with its Python attributes."""
    parameter = nn.Parameter(part.detach().clone())
    parameter.__dict__.update(whole.__dict__)
    return parameter


def _gradient(
    name: str, shape: torch.Size, dtype: torch.dtype, number: int, scale: float | None
) -> torch.Tensor | None:
    """Return a gradient that depends only on name and step."""
    seed = zlib.crc32(f"{name} {number}".encode())
    if scale is None and seed % 3 == 0:
        return None
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (values * (1.0 if scale is None else scale)).to(dtype)


def _replace_zero_rate(group: dict[str, Any]) -> None:
    """Replace a learning rate of 0, at which all optimizers are equal."""
    rate = group.get("lr")
    if rate is None or float(rate) != 0:
        return
    other = float(group.get("initial_lr", 0.0)) or _RATE
    group["lr"] = torch.full_like(rate, other) if isinstance(rate, torch.Tensor) else other
