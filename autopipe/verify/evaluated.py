"""Evaluation in stages, compared with the user's model in evaluation mode, at the weights and buffers of the stages."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from autopipe.verify.in_stages import Trained, fresh, same
from autopipe.verify.plain import PlainSettings, Subject, evaluation
from autopipe.workload import Workload

logger = logging.getLogger(__name__)


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
