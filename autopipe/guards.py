"""Check the assumptions of a capture at every step.

With ``--allow-data-dependent``, an ``if`` on the batch's data is captured as the branch that one batch took. The graph
has a call of ``expect`` at that place. A batch that would take the other branch stops the run, instead of training on
the wrong branch.
"""

from __future__ import annotations

from typing import Any

import torch

from autopipe.errors import RunError


def expect(value: Any, recorded: Any, where: str) -> None:
    """Compare a value of this batch with the value at capture.

    Raises: RunError naming the user's line and both values.
    """
    current = value
    if isinstance(value, torch.Tensor):
        current = value.item() if value.numel() == 1 else value.tolist()
    if isinstance(recorded, bool):
        current = bool(current)
    if current != recorded:
        raise RunError(
            f"this batch takes another branch of the model: the value is {current!r}, and was {recorded!r} at capture",
            where=where,
            remedy="make the line independent of the data (torch.where), or remove such batches",
        )
