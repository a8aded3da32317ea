"""Proofs that a checkpoint holds what was trained, and that a rank that resumes holds what is in the checkpoint.

::

    saving      live objects --> checksums --------------------------------+
                     |                                                     +-- equal?
                     +--> collect, cut, share, copy, write --> file, mapped +
    restoring   live objects, once restored --------------------------------- equal, bit for bit?
                file, mapped -----------------------------------------------+

Neither trusts what saves and restores: the live tensors are listed here again, and the file is mapped as a whole, not
read through ``Checkpoint``. Cost: the sums, 5 GB/s on one core, before a checkpoint is copied, and again in the
background; one more pass over memory when a run resumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from autopipe import sparse
from autopipe.bits import same_bits
from autopipe.errors import RunError
from autopipe.runtime.after_step.average import PREFIX
from autopipe.runtime.checkpoint.checkpoint import Checkpoint
from autopipe.runtime.checkpoint.checksums import Sums
from autopipe.runtime.checkpoint.members import own_part, sliced
from autopipe.runtime.stage_runner import StageRunner
from autopipe.runtime.step.stepper import Stepper
from autopipe.runtime.training_state.describe import Description, describe
from autopipe.runtime.training_state.differing import differing
from autopipe.runtime.training_state.nodes import Node, kind_of, tensor_names
from autopipe.runtime.training_state.stage import Training, tree_for

NOT_AS_WRITTEN = (
    "resume from an earlier checkpoint (--resume STEP); if it happens again, test the memory and the disk of this "
    "machine, and look for code that changes weights or optimizers while a checkpoint is made or restored"
)
"""The remedy."""


def tensors_on_disk(path: Path) -> dict[str, torch.Tensor]:
    """Map a file of tensors into memory. Raises: OSError."""
    with path.open("rb") as file:  # safetensors reads no path that is not UTF-8
        tensors: dict[str, torch.Tensor] = load_file(f"/proc/self/fd/{file.fileno()}")
    return tensors


def live_tensors(
    runner: StageRunner, parameters: Mapping[str, nn.Parameter], averages: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the tensors of a stage, by their names in a checkpoint, without those of its optimizer."""
    stage, versions = runner.stage, runner.versions
    tensors = {f"model.{name}": parameter.data for name, parameter in parameters.items()}
    tensors |= {f"model.{name}": own for name, own in stage.named_buffers() if name not in stage.constants}
    tensors |= {f"{PREFIX}{name}": average for name, average in averages.items()}
    for version in versions.versions:
        if version != versions.newest:
            older = versions.tensors(version)
            tensors |= {f"version.{version}.{name}": older[name] for name in parameters if name in older}
    return tensors


# -- saving ------------------------------------------------------------------------------------------------------------


def sums_of(
    collected: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], training: Training | None
) -> Sums:
    """Start to sum collected tensors where the rank has them. ``weights``: the ``live_tensors`` of the stage.

    The state of an optimizer that is not a tensor of one parameter is summed as it was collected.
    """
    live = dict(weights)
    for name, parameter in {} if training is None else training.owned.items():
        state = training.optimizer.state.get(parameter, {}) if training is not None else {}
        live |= {f"optimizer.state[{name}][{key!r}]": own for key, own in state.items() if torch.is_tensor(own)}
    return Sums({name: _unpadded(live.get(name, tensor), tensor.shape) for name, tensor in collected.items()})


def _unpadded(live: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return a tensor without what pads it because a team cannot divide it."""
    return live if live.shape == shape else live[tuple(slice(0, length) for length in shape)]


def refuse_other_file(path: Path, sums: Mapping[str, int]) -> None:
    """Refuse a file that does not hold what a rank summed. Raises: RunError naming the first tensor that differs."""
    on_disk = tensors_on_disk(path)
    written = Sums({name: on_disk[name] for name in sums if name in on_disk}).finish()
    for name, number in sums.items():
        if written.get(name) != number:
            raise RunError(
                f"{name} in the checkpoint is not what was trained: the file differs from the memory of the rank",
                where=str(path),
                remedy=NOT_AS_WRITTEN,
            )


def refuse_missing(written: Mapping[str, Any], weights: Mapping[str, torch.Tensor], stage: int) -> None:
    """Refuse a checkpoint without one of the ``live_tensors`` of a stage. Raises: RunError naming it."""
    for name in sorted(weights.keys() - written.keys()):
        raise RunError(f"the checkpoint of stage {stage} would lack {name}, which the stage has", remedy=NOT_AS_WRITTEN)


# -- restoring ---------------------------------------------------------------------------------------------------------


def refuse_other_weights(source: Checkpoint, runner: StageRunner, *, averaged: bool) -> None:
    """Refuse a stage whose weights, restored for evaluation, are not those of the checkpoint.

    ``averaged``: they are its averages. Raises: RunError naming the first tensor that differs.
    """
    stored = _Stored(source)
    for name, tensor in live_tensors(runner, runner.versions.masters, {}).items():
        average = name.replace("model.", PREFIX, 1)
        stored.refuse_other(runner, average if averaged and average in source.names else name, tensor)


@dataclass(slots=True)
class RestoreProof:
    """Compares what a rank holds with the checkpoint that it resumes from, before its first step."""

    stepper: Stepper
    # what the hooks built for each stage
    _built: dict[int, Mapping[str, Node]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Describe what the hooks built. Nothing may be restored yet."""
        trainings = {stage: self.stepper.training(stage) for stage in self.stepper.runners}
        self._built = {stage: training.initial() for stage, training in trainings.items() if training is not None}

    def refuse_differences(self, source: Checkpoint) -> None:
        """Compare every stage, and the scale of the loss. Raises: RunError naming the first value that differs."""
        manifest, scaler, averages = source.manifest, self.stepper.scaler, self.stepper.averages
        scale = None if scaler is None or not manifest.scale else (scaler.scale, scaler.good_steps)
        if scale is not None and scale != (expected := (manifest.scale, manifest.good_steps)):
            raise _not_restored(f"the scale of the loss and its steps are {scale}, not {expected}", source)
        stored = _Stored(source)
        for stage, runner in self.stepper.runners.items():
            if runner.versions.newest != manifest.step:
                what = f"stage {stage} continues from step {runner.versions.newest}, not {manifest.step}"
                raise _not_restored(what, source)
            averaged = {} if averages is None else averages.of(stage)
            for name, tensor in live_tensors(runner, self.stepper.parameters(stage), averaged).items():
                stored.refuse_other(runner, name, tensor)
            training = self.stepper.training(stage)
            if training is not None:
                stored.refuse_other_state(runner, training, self._built[stage])


@dataclass(slots=True)
class _Stored:
    """What is in a checkpoint, from its files."""

    source: Checkpoint
    _mapped: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)

    def refuse_other(self, runner: StageRunner, name: str, live: torch.Tensor) -> None:
        """Refuse a tensor that differs from the one in the checkpoint in any bit. Raises: RunError."""
        if not self._same(runner, name, live):
            raise _not_restored(f"{name} differs from the file", self.source, *self.source.slices(name))

    def refuse_other_state(self, runner: StageRunner, training: Training, built: Mapping[str, Node]) -> None:
        """Refuse an optimizer and a scheduler that are not as in the checkpoint. Raises: RunError.

        ``built``: what the hooks built.
        """
        tree = tree_for(self.source, training, built)
        names = [name for node in tree.values() for name in tensor_names(node)]
        stored = Description(tree, {name: self._part(runner, name) for name in names})
        live, owned = describe(training.roots, training.owned), training.owned
        # what only the checkpoint has; its tensors need no second comparison
        swapped = ((path, two, one) for path, one, two in differing(Description(tree), live, owned))
        for path, one, two in chain(differing(live, stored, owned), swapped):
            if "code" not in (kind_of(one), kind_of(two)):
                raise _not_restored(f"{path} is {_shown(one)}, and {_shown(two)} in the checkpoint", self.source)

    def _same(self, runner: StageRunner, name: str, live: torch.Tensor) -> bool:
        files = self.source.slices(name)
        stored, slices = sliced(runner.stage, {name: live})
        own = slices.get(name)
        file = next((file for file, part in files.items() if part == own), None)
        if own is not None and file is not None:
            return _bits_equal(stored[name], self._map(file)[name])
        if sparse.is_sparse(live):
            parts = sparse.encoded({name: live}).items()
            return any(
                all(key in own and _bits_equal(part, own[key]) for key, part in parts) for own in map(self._map, files)
            )
        return _bits_equal(live, self._part(runner, name))

    def _part(self, runner: StageRunner, name: str) -> torch.Tensor:
        """Return this member's part of a dense tensor."""
        whole = next((file for file, part in self.source.slices(name).items() if part is None), None)
        tensor = self.source.read([name])[name] if whole is None else self._map(whole)[name]
        return own_part(runner.stage, name, tensor)

    def _map(self, file: str) -> dict[str, torch.Tensor]:
        if file not in self._mapped:
            self._mapped[file] = tensors_on_disk(self.source.directory / file)
        return self._mapped[file]


def _bits_equal(live: torch.Tensor, stored: torch.Tensor) -> bool:
    return same_bits(live, stored.to(live.device, live.dtype))


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {list(value.shape)}" if value.numel() != 1 else str(value.item())
    return str(value["is"]) if isinstance(value, dict) else repr(value)


def _not_restored(what: str, source: Checkpoint, *files: str) -> RunError:
    return RunError(
        f"the checkpoint was not restored as it was written: {what}",
        where=str(source.directory / files[0] if files else source.directory),
        remedy=NOT_AS_WRITTEN,
    )
