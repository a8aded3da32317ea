"""``Training``: the optimizer and scheduler of one stage, stored in a checkpoint and restored from it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from autopipe.bits import same_bits
from autopipe.errors import ArtifactError, RunError
from autopipe.runtime.checkpoint.checkpoint import Checkpoint
from autopipe.runtime.checkpoint.manifest import StageState
from autopipe.runtime.training_state.describe import Description, describe
from autopipe.runtime.training_state.differing import ABSENT, differing
from autopipe.runtime.training_state.earlier_format import upgraded
from autopipe.runtime.training_state.merge import Source, merge
from autopipe.runtime.training_state.nodes import (
    SEQUENCES,
    Node,
    UnstorableError,
    groups_of,
    malformed,
    tensor_names,
)
from autopipe.runtime.training_state.restore import MisfitError, restore
from autopipe.runtime.training_state.unread import is_unread

_HOLDS = "keep it in optimizer.state, in param_groups or in a state_dict() as numbers, text, tensors, lists or dicts"
_RATES = ("lr", "initial_lr")


@dataclass(frozen=True, slots=True)
class Training:
    """The optimizer and scheduler of one stage."""

    # the parameters that the optimizer steps, under the model's own names
    owned: Mapping[str, nn.Parameter]
    optimizer: Optimizer
    scheduler: LRScheduler | None

    @property
    def roots(self) -> dict[str, object]:
        """The objects that are described and restored."""
        return {"optimizer": self.optimizer, "scheduler": self.scheduler}

    def is_unread(self, path: str) -> bool:
        """Return whether no code of the optimizer and the scheduler reads the value at a path."""
        return is_unread(path, self.optimizer, self.scheduler)

    def initial(self) -> dict[str, Node]:
        """Describe what the hooks have built, before the first step. Raises: RunError as ``state`` does."""
        return _described(self, "", values=False).tree

    def state(self, place: str, initial: Mapping[str, Node]) -> tuple[StageState, dict[str, torch.Tensor]]:
        """Return the state for a checkpoint, and the tensors that it names.

        ``place`` of the stage is added to the names of tensors that belong to no parameter.

        Raises: RunError naming the first value that a checkpoint cannot hold.
        """
        described = _described(self, f"@{place}", values=True)
        return StageState(tuple(self.owned), described.tree, dict(initial)), described.tensors


def _described(training: Training, suffix: str, *, values: bool) -> Description:
    try:
        return describe(training.roots, training.owned, suffix, values=values)
    except UnstorableError as error:
        raise unstorable(error) from None


def unstorable(error: UnstorableError) -> RunError:
    """Return the refusal of a state that a checkpoint cannot hold."""
    return RunError(
        f"a checkpoint cannot hold the complete training state: {error.path} {error.why}",
        where=error.path,
        remedy=error.remedy or _HOLDS,
    )


def restore_training(
    checkpoint: Checkpoint,
    training: Training,
    own: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, tensor: tensor,
) -> None:
    """Restore the optimizer and scheduler of a stage from a checkpoint. ``own``: takes this member's part of a tensor.

    Raises: RunError if the state does not fit what the hooks build now; ArtifactError for a damaged checkpoint.
    """
    tree = tree_for(checkpoint, training)
    read = checkpoint.read([name for node in tree.values() for name in tensor_names(node)])
    tensors = {name: own(name, tensor) for name, tensor in read.items()}
    try:
        restore(tree, training.roots, training.owned, tensors)
    except MisfitError as error:
        raise _misfit(error, checkpoint) from None
    except (ValueError, TypeError, KeyError, RuntimeError) as error:  # such as numbers of the wrong size
        raise _damaged(checkpoint, f"{type(error).__name__}: {error}") from error


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of every group of an optimizer. A tensor is changed in place."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def tree_for(checkpoint: Checkpoint, training: Training, built: Mapping[str, Node] | None = None) -> dict[str, Node]:
    """Return the description for a stage: that of the stage with the same parameters, else all of them merged.

    ``built``: what the hooks built, None: what they have built now.

    Raises: RunError if the stages of the checkpoint differ in state that belongs to no parameter.
    """
    refuse_partial(checkpoint)
    live = training.initial() if built is None else built
    stored = _stored(checkpoint)
    groups = groups_of(live["optimizer"])
    for stage in stored:
        if _has_groups(stage.state, live) and (groups or stage.owned == tuple(training.owned)):
            return dict(stage.state)

    def same(first: str, second: str) -> bool:
        read = checkpoint.read([first, second])
        return same_bits(read[first], read[second])

    if not stored:
        raise _misfit(MisfitError("the optimizer", "is not in the checkpoint: it trained nothing"), checkpoint)
    try:
        sources = [Source(stage.state, stage.initial) for stage in stored]
        return merge(sources, live, list(training.owned), same, training.is_unread)
    except MisfitError as error:
        raise _misfit(error, checkpoint) from None


def _has_groups(stored: Mapping[str, Node], live: Mapping[str, Node]) -> bool:
    """Return whether a stored optimizer has the groups of parameters of that of the hooks."""
    return groups_of(stored["optimizer"]) == groups_of(live["optimizer"])


def _stored(checkpoint: Checkpoint) -> list[StageState]:
    """Return the states of the stages that have an optimizer.

    Raises: ArtifactError if one is malformed; RunError for one of an earlier version that cannot be read.
    """
    stored = []
    for stage in checkpoint.stages:
        if stage.state is None:
            continue
        for tree in (stage.state, stage.initial):
            if not isinstance(tree, dict) or "optimizer" not in tree or not set(tree) <= {"optimizer", "scheduler"}:
                raise _damaged(checkpoint, "a stage without the state of its optimizer")
        try:
            state, initial = upgraded(stage.state), upgraded(stage.initial)
        except MisfitError as error:
            raise _misfit(error, checkpoint) from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _damaged(checkpoint, f"{type(error).__name__}: {error}") from error
        for node in (*state.values(), *initial.values()):
            if text := malformed(node):
                raise _damaged(checkpoint, text)
        stored.append(StageState(stage.owned, state, initial))
    return stored


def _damaged(checkpoint: Checkpoint, what: str) -> ArtifactError:
    return ArtifactError(
        f"manifest.json is damaged: the training state has {what}",
        where=str(checkpoint.directory / "manifest.json"),
        remedy="resume from an earlier checkpoint (--resume STEP)",
    )


def refuse_partial(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint with only a part of the optimizer state. Raises: RunError."""
    if checkpoint.manifest.options is None:
        raise RunError(
            "the checkpoint was written by an earlier version, which did not store the complete state of optimizers "
            "and schedulers: resuming from it would not be the same training",
            where=str(checkpoint.directory),
            remedy=f"start a new run from its weights: autopipe train TARGET --init-from {checkpoint.directory}",
        )


def _misfit(error: MisfitError, checkpoint: Checkpoint) -> RunError:
    return RunError(
        f"the training state cannot be restored: {error.path} {error.why}",
        where=str(checkpoint.directory),
        remedy="restore optimizer, scheduler and stages as they were when the checkpoint was written, or start a new "
        "run from its weights with --init-from",
    )


# -- changes of the hooks since the run began --------------------------------------------------------------------------


def edits(checkpoint: Checkpoint, build: Callable[[Sequence[str]], Training | None], *, rates: bool) -> dict[str, str]:
    """Return the differences between what the hooks build now and at the start: path -> "was 0.1 and is 0.3".

    ``build``: returns what the hooks build for the parameters of a stage of the run, None for no optimizer. ``rates``:
    compare learning rates, too. False if a new one was given.
    """
    differences: dict[str, str] = {}
    for stage in _stored(checkpoint):
        training = build(stage.owned)
        live = {} if training is None else training.initial()
        for root in ("optimizer", "scheduler"):
            if (root in stage.initial) != (root in live):
                return {f"the {root}": "was not there and is" if root in live else "was there and is not"}
        differences |= _edits(stage.initial, live, stage.owned)
    return {
        path: text
        for path, text in differences.items()
        if rates or not path.endswith(tuple(f"[{rate!r}]" for rate in _RATES))
    }


def _edits(before: Mapping[str, Node], now: Mapping[str, Node], owned: Collection[str]) -> dict[str, str]:
    start, live = Description(dict(before)), Description(dict(now))
    gone = {path: "is gone" for path, _, after in differing(start, live, owned) if after == ABSENT}
    edited = {
        path: "is new" if was == ABSENT else f"was {_shown(was)} and is {_shown(is_now)}"
        for path, is_now, was in differing(live, start, owned)
    }
    return gone | edited


def _shown(node: Node) -> str:
    if not isinstance(node, dict):
        return repr(node)
    if node["is"] in SEQUENCES:
        return f"a {node['is']} of {len(node['items'])}"
    text = str(node.get("class") or node.get("name") or node.get("value") or node["is"])
    return text.rpartition(".")[2] if node["is"] == "state" else text
