"""The state of a run before and after an audited step, and how it is compared with that of a plain step.

Both states are checkpoints, which any plan could resume from: weights, buffers, averages, older weights, the states of
the optimizers and schedulers of all stages, and the scale of the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autopipe import sparse
from autopipe.runtime.after_step.average import PREFIX
from autopipe.runtime.audit.files import AuditFiles
from autopipe.runtime.checkpoint.checkpoint import Checkpoint
from autopipe.runtime.checkpoint.manifest import StageState
from autopipe.runtime.training_state.describe import Description, describe
from autopipe.runtime.training_state.differing import differing, distance
from autopipe.runtime.training_state.nodes import tensor_names
from autopipe.runtime.training_state.unread import is_unread
from autopipe.verify.comparison import TensorDifference, relative_error
from autopipe.verify.plain import PlainRun

_MODEL, _VERSION = "model.", "version."


@dataclass(frozen=True, slots=True)
class PlainStep:
    """The result of a plain step."""

    # parameters, buffers and averages, by the names of a checkpoint
    tensors: dict[str, torch.Tensor]
    loss: float
    # of the optimizer and the scheduler over all parameters, before and after the step
    states: tuple[Description, Description]
    # of the loss in fp16, 0 otherwise
    scale: float = 0.0
    # the classes of the optimizer and the scheduler
    classes: tuple[type, ...] = ()

    @staticmethod
    def of(run: PlainRun, before: Description) -> PlainStep:
        """Copy the results of a run of one step to the host."""
        subject = run.subject
        tensors = {f"{_MODEL}{name}": parameter.data.cpu() for name, parameter in subject.parameters.items()}
        tensors.update({f"{_MODEL}{name}": buffer.detach().cpu() for name, buffer in subject.buffers().items()})
        tensors.update({f"{PREFIX}{name}": average.cpu() for name, average in run.averages.items()})
        after = state_of(subject.parameters, run.optimizer, run.scheduler)
        scale = 0.0 if run.scaler is None else float(run.scaler.get_scale())
        classes = tuple(type(hook) for hook in (run.optimizer, run.scheduler) if hook is not None)
        return PlainStep(tensors, run.losses[0], (before, after), scale, classes)

    def errors_of(self, other: PlainStep) -> dict[str, float]:
        """Return by how much another plain step differs, by tensor and by the path of a state."""
        names = [name.removeprefix(_MODEL) for name in self.tensors]
        paths = {path: distance(one, two) for path, one, two in differing(other.states[1], self.states[1], names)}
        return paths | {name: relative_error(other.tensors[name], tensor) for name, tensor in self.tensors.items()}


def state_of(parameters: Mapping[str, torch.nn.Parameter], optimizer: Any, scheduler: Any) -> Description:
    """Describe an optimizer and its scheduler, with copies of their tensors."""
    described = describe({"optimizer": optimizer, "scheduler": scheduler}, parameters)
    return Description(described.tree, {name: tensor.cpu().clone() for name, tensor in described.tensors.items()})


@dataclass(slots=True)
class RunStep:
    """The state of the run before and after the step."""

    before: Checkpoint
    after: Checkpoint
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    @staticmethod
    def read(files: AuditFiles) -> RunStep:
        """Read both. Raises: ArtifactError if a file is damaged."""
        before, after = Checkpoint(files.before), Checkpoint(files.checkpoint_after)
        names = [name for name in after.names if name.startswith((_MODEL, PREFIX))]
        return RunStep(before, after, after.read(names))

    @property
    def skipped(self) -> bool:
        """Whether the loss scale skipped the step, because a gradient was not finite."""
        return self.after.manifest.scale < self.before.manifest.scale

    def state_differences(
        self, plain: PlainStep, noise: Mapping[str, float], reordered: Mapping[str, float]
    ) -> Iterator[TensorDifference]:
        """Compare what is in no weight: the state of each stage's optimizer, older weights, the scale of the loss.

        What differs before the step, such as a value that belongs to one stage, is left out, and so is a value that no
        code reads, such as a norm for the log. ``noise`` and ``reordered``: as in ``TensorDifference``, by path.
        """
        scale = self.after.manifest.scale
        if scale and scale != plain.scale:
            yield TensorDifference("the scale of the loss", distance(scale, plain.scale), False, -1)
        for name, expected in self._older():
            if not sparse.equal(*self._pair(name, expected)):
                yield TensorDifference(name, float("inf"), False, -1)
        stages = zip(self.before.stages, self.after.stages, strict=True)
        for index, (begun, ended) in enumerate(stages):
            if ended.state is None:
                continue
            known = {path for path, *_ in _differing(self.before, begun, plain.states[0])}
            for path, one, two in _differing(self.after, ended, plain.states[1]):
                if not path.startswith("optimizer.state") and is_unread(path, *plain.classes):
                    continue
                if not any(path == each or path.startswith((f"{each}[", f"{each}.")) for each in known):
                    own = noise.get(path, 0.0), reordered.get(path, 0.0)
                    error, owner = distance(one, two), self._stage(index)
                    yield TensorDifference(path, error, False, owner, own[0], reordered=own[1])

    def _stage(self, index: int) -> int:
        """Return the stage of a file of the checkpoint."""
        return int(self.after.manifest.files[index].file.split("-")[1])

    def _older(self) -> Iterator[tuple[str, str]]:
        """Iterate the older weights after the step, each with its name before the step."""
        step = self.before.manifest.step
        for name in self.after.names:
            if name.startswith(_VERSION):
                version, _, parameter = name.removeprefix(_VERSION).partition(".")
                yield name, f"{_MODEL}{parameter}" if int(version) == step else name

    def _pair(self, name: str, expected: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self.after.read([name])[name], self.before.read([expected])[expected]


def _differing(source: Checkpoint, stage: StageState, whole: Description) -> Iterator[tuple[str, Any, Any]]:
    names = [name for node in stage.state.values() for name in tensor_names(node)]
    yield from differing(Description(stage.state, source.read(names)), whole, stage.owned)
