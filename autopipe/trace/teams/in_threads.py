"""Run the members of a team as threads on one batch, and compare them with the complete model."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from autopipe.ir.teams.axes import Axis
from autopipe.trace.axes import TeamOutcome
from autopipe.trace.axes.sums_over_members import in_order
from autopipe.trace.axes.verified import Whole
from autopipe.trace.graph.replay import replay
from autopipe.trace.result import Capture
from autopipe.trace.teams.member import as_member

logger = logging.getLogger(__name__)


class _Meeting:
    """One member of a team of threads, which exchange tensors in the order of the members."""

    def __init__(self, member: int, barrier: threading.Barrier, tensors: list[Tensor | None]) -> None:
        self.member, self.size = member, len(tensors)
        self._barrier, self._tensors = barrier, tensors

    def _each(self, tensor: Tensor) -> list[Tensor]:
        self._tensors[self.member] = tensor
        self._barrier.wait()
        each = [entry.clone() for entry in self._tensors if entry is not None]
        self._barrier.wait()
        return each

    def add(self, tensor: Tensor) -> None:
        """Sum a tensor over the members, in place."""
        tensor.copy_(in_order(self._each(tensor)))

    def add_parts(self, parts: Tensor) -> Tensor:
        """Return the sum of this member's entry."""
        return in_order([each[self.member] for each in self._each(parts)])

    def gather(self, part: Tensor) -> Tensor:
        """Return the tensors of all members."""
        return torch.stack(self._each(part))


def difference(
    complete: Capture, member: Capture, axes: Sequence[Axis], leaves: Mapping[str, Tensor], *, seed: int = 0
) -> str:
    """Return how a team differs from the complete model in its loss or a gradient on a batch, or "".

    ``member``: from ``member_of``, with ``axes``. ``leaves``: the tensors of the batch by input. A model without memory
    (on the meta device) is not run. Memory: a copy of the model for each member.
    """
    if any(parameter.is_meta for parameter in complete.module.parameters()):
        return ""
    try:
        outcome = _outcome(member, leaves, (seed, 0, 0))
    except Exception as error:  # whatever a call does with positions that it does not expect
        logger.info("a team with its own positions fails", exc_info=True)
        return f"a member fails: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return Whole(complete, leaves, seed).compared(axes, outcome, member.partial)


def _outcome(member: Capture, leaves: Mapping[str, Tensor], where: tuple[int, int, int]) -> TeamOutcome:
    size = member.team
    barrier, tensors = threading.Barrier(size), [None] * size
    outputs: list[tuple[Tensor, ...]] = [()] * size
    gradients: list[dict[str, Tensor | None]] = [{} for _ in range(size)]
    failures: list[Exception] = []
    copies = [as_member(member, _Meeting(index, barrier, tensors), copies=True) for index in range(size)]  # type: ignore[arg-type]  # filled by the members

    def run(index: int) -> None:
        try:
            module = copies[index].module
            outputs[index] = replay(module, {name: leaf.clone() for name, leaf in leaves.items()}, where)
            if outputs[index][0].requires_grad:
                outputs[index][0].backward()  # type: ignore[no-untyped-call]  # torch has no annotation for it
            aliases = member.graph.aliases
            for name, parameter in module.named_parameters():
                gradients[index][aliases.get(name, name)] = parameter.grad
        except Exception as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise next((error for error in failures if not isinstance(error, threading.BrokenBarrierError)), failures[0])
    each = {name: [of_member[name] for of_member in gradients] for name in gradients[0]}
    return TeamOutcome(tuple(map(list, zip(*outputs, strict=True))), each)
