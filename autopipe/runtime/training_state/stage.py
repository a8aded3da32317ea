"""``Training``: the optimizer and scheduler of one stage, stored in a checkpoint and restored from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from autopipe.bits import same_bits
from autopipe.errors import ArtifactError, RunError
from autopipe.runtime.checkpoint.checkpoint import Checkpoint
from autopipe.runtime.checkpoint.manifest import StageState
from autopipe.runtime.training_state.describe import Description, describe
from autopipe.runtime.training_state.merge import Source, groups_of, merge
from autopipe.runtime.training_state.nodes import LIVE, Node, UnstorableError, kind_of, malformed, tensor_names
from autopipe.runtime.training_state.restore import MisfitError, restore
from autopipe.runtime.training_state.unread import is_unread

_HOLDS = (
    "keep it as numbers, text, tensors, lists, dicts or generators, in optimizer.state, in param_groups or in "
    "attributes; a handle that is not training state, such as a log file, belongs in a global of the file"
)
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
        if groups_of(stage.state["optimizer"]) == groups:
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


def _stored(checkpoint: Checkpoint) -> list[StageState]:
    """Return the states of the stages that have an optimizer. Raises: ArtifactError if one is malformed."""
    stored = [stage for stage in checkpoint.stages if stage.state is not None]
    for stage in stored:
        for tree in (stage.state, stage.initial):
            if not isinstance(tree, dict) or "optimizer" not in tree or not set(tree) <= {"optimizer", "scheduler"}:
                raise _damaged(checkpoint, "a stage without the state of its optimizer")
            for node in tree.values():
                if text := malformed(node):
                    raise _damaged(checkpoint, text)
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


def edits(checkpoint: Checkpoint, training: Training, *, rates: bool) -> dict[str, str]:
    """Return the differences between what the hooks build now and at the start: path -> "was 0.1 and is 0.3".

    ``rates``: compare learning rates too. False if a new one was given.
    """
    stored = _stored(checkpoint)
    differences: dict[str, str] = {}
    live = training.initial()
    groups = groups_of(live["optimizer"])
    same = [stage for stage in stored if groups_of(stage.initial["optimizer"]) == groups]
    for root in ("optimizer", "scheduler"):
        before = [stage.initial[root] for stage in same or stored if root in stage.initial]
        if stored and bool(before) != (root in live):
            return {f"the {root}": "was there and is not" if before else "was not there and is"}
        if before:
            _compare(live[root], before, root, differences)
    return {
        path: text
        for path, text in differences.items()
        if rates or not path.endswith(tuple(f"[{r!r}]" for r in _RATES))
    }


def _compare(now: Node, before: list[Node], path: str, differences: dict[str, str]) -> None:
    """Record where ``now`` is equal to none of ``before``, the nodes of several stages."""
    if any(now == other for other in before) or now == LIVE:
        return
    alike = [other for other in before if kind_of(other) == kind_of(now) and _class_of(other) == _class_of(now)]
    if not alike or not isinstance(now, dict):
        differences[path] = f"was {_shown(before[0])} and is {_shown(now)}"
        return
    kind = kind_of(now)
    if kind == "groups":
        for index, group in enumerate(now["groups"]):
            for name in group["params"][:1]:
                values = [g["values"] for other in alike for g in other["groups"] if name in g["params"]]
                _entries(group["values"], values, f"{path}[{index}]", "[{!r}]", differences)
    elif kind in ("dict", "object"):
        field, shape = ("items", "[{!r}]") if kind == "dict" else ("attributes", ".{}")
        entries = [{str(key): value for key, value in other[field]} for other in alike]
        _entries({str(key): value for key, value in now[field]}, entries, path, shape, differences)
    elif kind in ("list", "tuple", "deque", "hooks"):
        same = [other for other in alike if len(other["items"]) == len(now["items"])]
        for index, item in enumerate(now["items"]):
            if same:
                _compare(item, [other["items"][index] for other in same], f"{path}[{index}]", differences)
    elif kind == "function":
        _entries(now["cells"], [other["cells"] for other in alike], path, ".{}", differences)
    elif kind in ("partial", "method"):
        fields = ("function", "arguments", "keywords") if kind == "partial" else ("self",)
        for field in fields:
            _compare(now[field], [other[field] for other in alike], f"{path}.{field}", differences)
    elif kind not in ("same", "parameter", "by_parameter"):
        differences[path] = f"was {_shown(before[0])} and is {_shown(now)}"


def _entries(
    now: Mapping[str, Node], before: list[dict[str, Node]], path: str, shape: str, differences: dict[str, str]
) -> None:
    for key in {**now, **(before[0] if before else {})}:
        others = [other[key] for other in before if key in other]
        place = path + shape.format(key)
        if not before:
            continue
        if key not in now or not others:
            differences[place] = "is new" if key in now else "is gone"
        else:
            _compare(now[key], others, place, differences)


def _class_of(node: Node) -> Any:
    return (node.get("class"), node.get("name") if node["is"] == "function" else "") if isinstance(node, dict) else ""


def _shown(node: Node) -> str:
    if not isinstance(node, dict):
        return repr(node)
    named = node.get("class") or node.get("name") or node.get("value") or node["is"]
    return str(named).rpartition(".")[2] if node["is"] in ("object", "function") else str(named)
