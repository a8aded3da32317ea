"""Plain training of a model file, which every run of autopipe must equal. Shares no code with autopipe.

The file is imported unchanged, and its hooks are called as in a script. For schedules with staleness, old weights are
kept, and minibatch t reads version max(t - delta, 0) of each parameter. Seeds of random operations are computed by
their definition: SplitMix64 over (seed, minibatch, microbatch, position of the ATen call).
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

from support.oracle_order import Order

M64 = 2**64


def splitmix(*parts: int) -> int:
    z = 0
    for part in parts:
        z = (z + part + 0x9E3779B97F4A7C15) % M64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % M64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % M64
        z = z ^ (z >> 31)
    return z // 2


class Seeds(TorchDispatchMode):
    """Seeds every op that torch tags as random, in the order of the calls."""

    def __init__(self, *where: int) -> None:
        super().__init__()
        self.where, self.count = where, itertools.count()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in str(func):
            torch.manual_seed(splitmix(*self.where, next(self.count)))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def own_places(model: torch.nn.Module, paths: Iterable[str], seeds: Seeds):
    """Give each call of these modules one position, and seed the draws inside by that position.

    The call itself is replaced, while the code under test uses hooks.
    """
    modules = {model.get_submodule(path) for path in paths}
    call = torch.nn.Module.__call__
    inside = []

    def placed(module, *args, **kwargs):
        if module not in modules or inside:
            return call(module, *args, **kwargs)
        seed = splitmix(*seeds.where, next(seeds.count))
        outer, states = (seeds.where, seeds.count), (random.getstate(), np.random.get_state())
        seeds.where, seeds.count = (seed, 0, 0), itertools.count()
        random.seed(seed)
        np.random.seed(seed % 2**32)
        inside.append(module)
        try:
            return call(module, *args, **kwargs)
        finally:
            inside.pop()
            seeds.where, seeds.count = outer
            random.setstate(states[0])
            np.random.set_state(states[1])

    torch.nn.Module.__call__ = placed
    try:
        yield
    finally:
        torch.nn.Module.__call__ = call


def load(path: Path) -> ModuleType:
    """Import a user's file."""
    spec = importlib.util.spec_from_file_location(f"oracle_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def chunks(value: Any, count: int) -> list[Any]:
    """Cut a batch: tensors by ``tensor_split``, tuples and dicts entry by entry, without empty parts.

    A value that is not a tensor is in every part.
    """
    if isinstance(value, torch.Tensor):
        return [part for part in torch.tensor_split(value, count) if part.shape[0]]
    if not isinstance(value, (dict, tuple)):
        return [value] * count
    if isinstance(value, dict):
        parts = {key: chunks(entry, count) for key, entry in value.items()}
        return [dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True)]
    return [tuple(row) for row in zip(*(chunks(entry, count) for entry in value), strict=True)]


def samples(value: Any) -> int:
    while not isinstance(value, torch.Tensor):
        value = next(iter(value.values())) if isinstance(value, dict) else value[0]
    return value.shape[0]


def by_owner(stages: Sequence[Sequence[str]], deltas: Sequence[int]) -> Callable[[str], int]:
    """Return the staleness of a parameter: that of the first stage that holds it, which owns it."""
    owner: dict[str, int] = {}
    for names, delta in zip(stages, deltas, strict=True):
        for name in names:
            owner.setdefault(name, delta)
    return owner.__getitem__


def loss_of(criterion: Any, model: torch.nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch).loss
    inputs, target = batch
    output = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    return criterion(output, target)


def train(
    path: Path,
    items: Iterable[Any],
    num_microbatches: int,
    *,
    seed: int = 0,
    staleness: Callable[[str], int] = lambda name: 0,
    arguments: Mapping[str, Any] | None = None,
    clip_norm: float = 0.0,
    order: Order | None = None,
    divisor: Callable[[Any], float] = samples,
    ema: float = 0.0,
    cut: Callable[[Any, int], list[Any]] = chunks,
    opaque: Iterable[str] = (),
) -> tuple[list[float], torch.nn.Module, list[dict[str, torch.Tensor]]]:
    """Return the losses, the trained model, and the gradients of every step.

    ``ema``: decay of averaged weights; ``vars(model)["averaged"]`` is torch's own ``AveragedModel``.

    ``order``: the order of sums of a plan, if it is not that of one process. ``divisor``: the divisor of the loss of a
    batch; a part has the weight divisor(part) / divisor(batch). ``cut``: cuts a batch into microbatches. ``opaque``:
    modules whose draws have their own positions.
    """
    torch.manual_seed(seed)
    module = load(path)
    torch.manual_seed(seed)
    build = next(
        getattr(module, n) for n in ("model", "build_model", "get_model", "create_model", "Model") if hasattr(module, n)
    )
    model = build if isinstance(build, torch.nn.Module) else build(**(arguments or {}))
    if len({module.training for module in model.modules()}) == 1:  # mixed modes are the user's choice
        model.train()
    parameters = dict(model.named_parameters())
    criterion = getattr(module, "loss", None)
    criterion = criterion() if isinstance(criterion, type) else criterion
    if isinstance(criterion, torch.nn.Module):  # its parameters are trained with the model
        parameters.update(criterion.named_parameters(prefix="loss"))
        vars(model)["criterion"] = criterion  # for comparisons; not as a child of the model
    make = getattr(module, "optimizer", None)
    optimizer = (
        make(list(parameters.items()))
        if make
        else torch.optim.AdamW([p for p in parameters.values() if p.requires_grad])
    )
    scheduler = module.scheduler(optimizer) if hasattr(module, "scheduler") else None
    if ema:
        vars(model)["averaged"] = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(ema))
    if order:
        order.start(model)
    versions = [{name: p.detach().clone() for name, p in parameters.items()}]
    losses, gradients = [], []
    for t, item in enumerate(items):
        for name, p in parameters.items():
            p.data = versions[max(t - staleness(name), 0)][name].clone()
        total, weights, n = 0.0, 0.0, divisor(item)
        for j, part in enumerate(cut(item, num_microbatches)):
            with (
                Seeds(seed, t, j) as seeds,
                own_places(model, opaque, seeds),
                order.begin(t, j) if order else contextlib.nullcontext(),
            ):
                loss = loss_of(criterion, model, part)
            weight = None
            if isinstance(loss, tuple):  # (mean, divisor of the mean)
                loss, weight = loss
                weights += float(weight)
            share = loss * (divisor(part) / n) if weight is None else loss * weight
            if divisor(part):  # otherwise the loss is 0 / 0
                share.backward()
                total += share.item()
            if order:
                order.end(t, j)
        if order:
            order.finish()
        if weights:
            total /= weights
            for p in parameters.values():
                if p.grad is not None:
                    p.grad /= weights
        losses.append(total)
        gradients.append({name: p.grad.clone() for name, p in parameters.items() if p.grad is not None})
        for name, p in parameters.items():
            p.data = versions[t][name].clone()
        if clip_norm:
            torch.nn.utils.clip_grad_norm_([p for p in parameters.values() if p.requires_grad], clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if hasattr(module, "after_step"):
            module.after_step(list(parameters.items()), t)
        if ema:
            vars(model)["averaged"].update_parameters(model)
        if scheduler is not None:
            scheduler.step()
        versions.append({name: p.detach().clone() for name, p in parameters.items()})
    return losses, model, gradients
