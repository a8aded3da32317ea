"""What a member of a team writes into a checkpoint, and reads from it.

Tensors have the names and shapes of the complete model. A tensor that is cut over the members is written as a slice by
each of them, without padding, and cut again when it is read, over as many members as there are then.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from autopipe.ir.teams.axes import Place, Segment
from autopipe.runtime.after_step.average import PREFIX
from autopipe.runtime.checkpoint.manifest import TensorSlice
from autopipe.stage import Stage
from autopipe.team import cut

_VERSION = re.compile(r"version\.\d+\.")
_OF_PARAMETER = re.compile(r"\[([^\[\]'\"]+)\]")


def _tensor_of(key: str) -> str:
    """Return the parameter or buffer that a tensor of a checkpoint belongs to, or ""."""
    for prefix in ("model.", PREFIX):
        if key.startswith(prefix):
            return key.removeprefix(prefix)
    if version := _VERSION.match(key):
        return key[version.end() :]
    of_optimizer = _OF_PARAMETER.search(key)
    return of_optimizer[1] if of_optimizer else ""


def _place(stage: Stage, key: str) -> tuple[Place, int] | None:
    """Return where a tensor of a checkpoint is cut, and the size of the axis."""
    along = stage.SHARDS.get(_tensor_of(key))
    if along is None:
        return None
    dimension, size, segments = along
    return Place(key, dimension, tuple(Segment(*segment) for segment in segments)), size


def sliced(stage: Stage, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, TensorSlice]]:
    """Return the tensors without padding, and which slice of a tensor this member has, for those that are cut."""
    stored, slices, team = dict(tensors), dict[str, TensorSlice](), stage._autopipe_team
    if not stage.SHARDS:
        return stored, slices
    parameters = {**dict(stage.named_parameters()), **dict(stage.named_buffers())}
    for key, tensor in tensors.items():
        cut_at = _place(stage, key)
        if cut_at is None or tensor.shape != parameters[_tensor_of(key)].shape:
            continue  # state of an optimizer that is not one number for each of the parameter
        place, size = cut_at
        whole = place.whole(tensor.shape[place.dimension], size, team.size)
        if size % team.size:  # the whole dimension, in one range for each member
            ((start, stop),) = place.ranges(whole, size, team.member, team.size)
            stored[key] = tensor.narrow(place.dimension, 0, stop - start)
            slices[key] = TensorSlice(place.dimension, team.member, team.size)
            continue
        lengths = [(segment.length or whole, segment.inner) for segment in place.segments]
        segments = tuple((length, length // (size * inner)) for length, inner in lengths)
        slices[key] = TensorSlice(place.dimension, team.member, team.size, segments=segments)
    return stored, slices


def own_part(stage: Stage, key: str, whole: torch.Tensor) -> torch.Tensor:
    """Return this member's part of a tensor of a checkpoint."""
    place = _place(stage, key)
    if place is None or whole.dim() <= place[0].dimension:
        return whole
    team = stage._autopipe_team
    return cut(whole, *place, team.member, team.size)
