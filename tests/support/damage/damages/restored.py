"""Damage to what is restored, to the position in the data, to evaluation, and to what begins after the first steps."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable
from typing import Any

from support.damage.damages.gradients import ONE
from support.damage.registry import Ran, add, damages

WEIGHTS = "runtime.checkpoint.state", "restore_weights"
TRAINING = "runtime.checkpoint.state", "restore_training"


def in_rank() -> bool:
    """Return whether this process is a rank, not that of a command or an audit."""
    return multiprocessing.current_process().name.startswith("rank ")


def _one_weight(when: Callable[[], bool]) -> Callable[..., Any]:
    def replace(restore: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
        def damaged(checkpoint: Any, runner: Any, **options: Any) -> None:
            restore(checkpoint, runner, **options)
            for name, parameter in runner.versions.masters.items():
                if name in ONE and when():
                    ran()
                    parameter.data.mul_(1.01)

        return damaged

    return replace


add("restore_one", *WEIGHTS, _one_weight(lambda: True))
add("restore_one_rank", *WEIGHTS, _one_weight(in_rank))


def _buffers(when: Callable[[], bool]) -> Callable[..., Any]:
    def replace(restore: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
        def damaged(checkpoint: Any, runner: Any, **options: Any) -> None:
            restore(checkpoint, runner, **options)
            for name, buffer in runner.stage.named_buffers():
                if "running_" in name and when():
                    ran()
                    buffer.data.mul_(1.5)

        return damaged

    return replace


add("resume_buffers", *WEIGHTS, _buffers(lambda: True))
add("resume_buffers_rank", *WEIGHTS, _buffers(in_rank))


def _training(change: Callable[[Any], bool], when: Callable[[], bool] = lambda: True) -> Callable[..., Any]:
    """Return a damage of the restored optimizer and scheduler. ``change``: a ``Training`` -> whether it changed."""

    def replace(restore: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
        def damaged(checkpoint: Any, training: Any, *others: Any) -> None:
            restore(checkpoint, training, *others)
            if when() and change(training):
                ran()

        return damaged

    return replace


def _without_momentum(training: Any) -> bool:
    for state in training.optimizer.state.values():
        state["exp_avg"].zero_()
    return bool(training.optimizer.state)


def _half_rates(training: Any) -> bool:
    for group in training.optimizer.param_groups:
        group["lr"] *= 0.5
    return True


def _scheduler_from_start(training: Any) -> bool:
    training.scheduler.last_epoch = 0
    return True


add("restore_opt", *TRAINING, _training(_without_momentum))
add("restore_opt_rank", *TRAINING, _training(_without_momentum, in_rank))
add("restore_sched", *TRAINING, _training(_half_rates))
add("restore_sched_rank", *TRAINING, _training(_half_rates, in_rank))
add("restore_sched_start", *TRAINING, _training(_scheduler_from_start, in_rank))


@damages("runtime.after_step.average", "Averages.restore")
def restore_ema(restore: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Restore averages wrongly."""

    def damaged(self: Any, stage: int, *others: Any) -> None:
        restore(self, stage, *others)
        for tensor in self._values[stage].values():
            ran()
            tensor.mul_(1.01)

    return damaged


@damages("runtime.checkpoint.state", "restore_versions")
def restore_versions_newest(restore: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Restore older versions with the newest values."""

    def damaged(checkpoint: Any, versions: Any, step: int, *others: Any) -> None:
        restore(checkpoint, versions, step, *others)
        newest = versions.tensors(step)
        for version in versions.versions:
            for name, leaf in versions._leaves[version].items() if version != step else ():
                ran()
                leaf.data = newest[name].clone()

    return damaged


@damages("runtime.session", "RankSession._resume")
def restore_scale(resume: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Restore the loss scale of float16 wrongly."""

    def damaged(self: Any) -> Any:
        place = resume(self)
        if self.executor.stepper.scaler is not None:
            ran()
            self.executor.stepper.scaler.good_steps += 1000
        return place

    return damaged


def _read(change: Callable[[dict[str, Any]], bool]) -> Callable[..., Any]:
    """Return a damage of what ranks read from a checkpoint. ``change``: tensors by name -> whether it changed one."""

    def replace(read: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
        def damaged(self: Any, names: list[str]) -> Any:
            tensors = read(self, names)
            if in_rank() and change(tensors):
                ran()
            return tensors

        return damaged

    return replace


def _one_read(tensors: dict[str, Any]) -> bool:
    own = [name for name in tensors if name.removeprefix("model.") in ONE]
    tensors.update({name: tensors[name] * 1.01 for name in own})
    return bool(own)


def _exchanged(tensors: dict[str, Any]) -> bool:
    """Exchange the two averages of the gradients of a parameter."""
    first = [name for name in tensors if name.endswith("['exp_avg']")]
    for name in first:
        other = name.replace("exp_avg", "exp_avg_sq")
        tensors[name], tensors[other] = tensors[other], tensors[name]
    return bool(first)


def _one_average(tensors: dict[str, Any]) -> bool:
    own = [name for name in tensors if name.removeprefix("average.") in ONE]
    tensors.update({name: tensors[name] * 1.01 for name in own})
    return bool(own)


READ = "runtime.checkpoint.checkpoint", "Checkpoint.read"
add("read_one", *READ, _read(_one_read))
add("read_average", *READ, _read(_one_average))
add("read_exchanged", *READ, _read(_exchanged))


# -- the position in the data ------------------------------------------------------------------------------------------


@damages("runtime.batches.source", "Source.read")
def batch_skipped(read: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Skip a minibatch in the middle of the run, on every rank."""

    def damaged(self: Any, step: int, most: int) -> Any:
        if step == 3 and in_rank():
            ran()
            self._next()
        return read(self, step, most)

    return damaged


@damages("runtime.batches.source", "Source.read")
def batch_repeated(read: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Give the minibatch of the previous step once more, on every rank."""
    last: list[Any] = []

    def damaged(self: Any, step: int, most: int) -> Any:
        if not in_rank():
            return read(self, step, most)
        if step >= 3 and last:
            ran()
            self._iterator = _chained(last.pop(), self._iterator)
        taken = read(self, step, most)
        last[:] = [taken[-1].item] if step < 3 and taken else []
        return taken

    return damaged


@damages("workload.workload", "Workload.items")
def batches_exchanged(items: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Give each two minibatches in the other order, on every rank."""

    def damaged(self: Any, *args: Any, **kwargs: Any) -> Any:
        minibatches = iter(items(self, *args, **kwargs))
        for first in minibatches:
            second = next(minibatches, None) if in_rank() else None
            if second is not None:
                ran()
                yield second
            yield first

    return damaged


def _chained(first: Any, rest: Any) -> Any:
    yield first
    yield from rest


@damages("runtime.batches.source", "Source.seek")
def resume_skips(seek: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Skip a minibatch after the position where a run resumes."""

    def damaged(self: Any, place: Any, *, compare: bool = True) -> None:
        seek(self, place, compare=compare)
        if place.position and in_rank():
            ran()
            self._next()

    return damaged


# -- evaluation --------------------------------------------------------------------------------------------------------


@damages("runtime.session", "RankSession._eval_mode")
def eval_train_mode(eval_mode: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Evaluate in training mode."""

    @contextlib.contextmanager
    def damaged(self: Any) -> Any:
        with eval_mode(self):
            for runner in self.executor.runners.values():
                ran()
                runner.stage.train()
            yield

    return damaged


@damages("runtime.session", "RankSession._eval_mode")
def eval_other_weights(eval_mode: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Evaluate with the averages in place of the weights."""

    @contextlib.contextmanager
    def damaged(self: Any) -> Any:
        kept = []
        averages = self.executor.stepper.averages
        for stage, runner in self.executor.runners.items() if averages is not None else ():
            for name, value in averages.of(stage).items():
                ran()
                kept.append((runner.versions.masters[name], runner.versions.masters[name].data))
                runner.versions.masters[name].data = value.to(kept[-1][1].dtype)
        with eval_mode(self):
            yield
        for parameter, data in kept:
            parameter.data = data

    return damaged


@damages("runtime.stage_runner", "StageRunner.evaluate")
def eval_loss_factor(evaluate: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Count the first microbatch of an evaluation twice."""

    def damaged(self: Any, key: Any, inputs: Any, received: Any, factor: float, recording: str = "") -> Any:
        if key[1] == 0:
            ran()
            factor = factor * 2
        return evaluate(self, key, inputs, received, factor, recording)

    return damaged


@damages("runtime.stage_runner", "StageRunner.evaluate")
def eval_moves_buffers(evaluate: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Let an evaluation change the running statistics."""

    def damaged(self: Any, *arguments: Any) -> Any:
        for name, buffer in self.stage.named_buffers():
            if "running_mean" in name:
                ran()
                buffer.add_(0.1)
        return evaluate(self, *arguments)

    return damaged


@damages("runtime.session", "RankSession._eval_mode")
def eval_old_version(eval_mode: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Evaluate with the oldest version of the weights."""

    @contextlib.contextmanager
    def damaged(self: Any) -> Any:
        with eval_mode(self):
            for runner in self.executor.runners.values():
                versions = runner.versions
                if len(versions.versions) > 1:
                    ran()
                    versions.use(versions.versions[0])
            yield

    return damaged
