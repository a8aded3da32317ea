"""Does the user's optimizer step a parameter by itself? Asked without a forward, with gradients made up.

An optimizer is built over the parameters of one stage. Where it looks at more than each parameter alone (a norm over
all gradients, a rate by position in the list, one scale for everything), a stage steps otherwise than one process does.
One step of training may not show it: a warm-up begins with a rate of 0, and a clip or a scale may act later. So the
optimizer is built once over all parameters and once over each stage's, both are given the same gradients of several
sizes for a dozen steps, at rates that are not 0, and the weights are compared after every step.

Nothing but the optimizer runs. Large models are probed on tensors whose dimensions are cut down.
"""

from __future__ import annotations

import logging
import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from autopipe.draws import exclusive
from autopipe.workload import Workload
from autopipe.workload.batches.isolation import PrivateRandom

log = logging.getLogger(__name__)

# by step: how large the gradients are; None: some parameters have none
SCALES: tuple[float | None, ...] = (1.0, 1e-3, 1e3, 1.0, 1.0, 1e-3, 1e3, 1.0, 0.0, 1.0, None, 1.0)
# beyond so many bytes of parameters, every dimension of every tensor is cut down to so many elements
WHOLE_BYTES, CUT = 4 * 2**20, 16
# a learning rate in place of 0
_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Finding:
    """``parameter`` of ``stage`` was stepped otherwise in step ``step`` (from 1), by ``error`` relative to it.

    ``draws``: the optimizer draws random numbers in its steps.
    """

    parameter: str
    stage: int
    step: int
    error: float
    draws: bool


class _Stepped:
    """Some of the parameters, copied, with an optimizer and a scheduler of their own."""

    def __init__(self, workload: Workload, parameters: Mapping[str, nn.Parameter], *, cut: bool) -> None:
        self.parameters = {name: _copy(parameter, cut=cut) for name, parameter in parameters.items()}
        self.optimizer: Optimizer | None = workload.optimizer(list(self.parameters.items()))
        self.scheduler: LRScheduler | None = None
        if self.optimizer is not None:
            try:
                self.scheduler = workload.scheduler(self.optimizer)
            except Exception as error:  # a run shows it, and says more
                log.info("the scheduler was left out of the probe: %s", error)
        self.random = PrivateRandom(0)
        self.drew = False

    def step(self, number: int, scale: float | None) -> None:
        """Carry out one step."""
        if self.optimizer is None:
            return
        for name, parameter in self.parameters.items():
            parameter.grad = _gradient(name, parameter, number, scale)
        for group in self.optimizer.param_groups:
            _enliven(group)
        with self.random.active():
            before = _generators()
            self.optimizer.step()
            self.drew |= before != _generators()
        self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None:
            try:
                self.scheduler.step()
            except Exception:
                self.scheduler = None


def probe(workload: Workload, stages: Sequence[Sequence[str]], model: nn.Module | None = None) -> Finding | None:
    """Return where an optimizer over the parameters of one stage steps otherwise than one over all; None: nowhere.

    ``stages``: by stage, the names of the parameters that it steps. ``model``: a build of it; None: one is made.
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
        whole = _Stepped(workload, {name: p for name, p in trained.items() if name in owned_by}, cut=cut)
        parts = [_Stepped(workload, names, cut=cut) for names in owned if names]
        del trained, owned
        for number, scale in enumerate(SCALES, start=1):
            try:
                for stepped in (whole, *parts):
                    stepped.step(number, scale)
            except Exception as error:  # gradients that it never gets in training: nothing is proven by them
                log.info("the probe of the optimizer ended in step %d: %s", number, error)
                return None
            for part in parts:
                for name, parameter in part.parameters.items():
                    ours, expected = parameter.detach(), whole.parameters[name].detach()
                    if not torch.equal(ours.nan_to_num(), expected.nan_to_num()):
                        off = float((ours - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
                        return Finding(name, owned_by[name], number, off, whole.drew)
    return None


def _generators() -> tuple[bytes, str, int]:
    """Return what changes as soon as one of the global generators is drawn from."""
    return torch.get_rng_state().numpy().tobytes(), str(np.random.get_state()), hash(random.getstate())


def _copy(parameter: nn.Parameter, *, cut: bool) -> nn.Parameter:
    """Return a parameter with the same value and the same attributes of the user's, on the CPU."""
    data = parameter.detach()
    if cut:
        data = data[tuple(slice(0, CUT) for _ in range(data.dim()))]
    copy = nn.Parameter(data.to("cpu").clone(), requires_grad=True)
    copy.__dict__.update(parameter.__dict__)
    return copy


def _gradient(name: str, parameter: nn.Parameter, number: int, scale: float | None) -> torch.Tensor | None:
    """Return a gradient that depends on name and step alone."""
    seed = zlib.crc32(f"{name} {number}".encode())
    if scale is None and seed % 3 == 0:
        return None
    values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    return (values * (1.0 if scale is None else scale)).to(parameter.dtype)


def _enliven(group: dict[str, Any]) -> None:
    """Give a group a learning rate where it has 0: at that rate every optimizer is the same."""
    rate = group.get("lr")
    if rate is None or float(rate) != 0:
        return
    other = float(group.get("initial_lr", 0.0)) or _RATE
    group["lr"] = torch.full_like(rate, other) if isinstance(rate, torch.Tensor) else other
