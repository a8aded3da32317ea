"""What a captured model took for granted, checked at every step.

With ``--allow-data-dependent`` a model's ``if`` on its data is kept the way that one batch went. The graph then holds a
call of ``expect`` at that place, so that a batch which would have gone the other way stops the run, and never trains
on the wrong branch.
"""

from __future__ import annotations

from typing import Any

import torch

from autopipe.errors import RunError


def expect(value: Any, recorded: Any, where: str) -> None:
    """Compare what the batch says now with what it said when the model was captured.

    Raises: RunError naming the user's line and both values.
    """
    found = value
    if isinstance(value, torch.Tensor):
        found = value.item() if value.numel() == 1 else value.tolist()
    if isinstance(recorded, bool):
        found = bool(found)
    if found != recorded:
        raise RunError(
            f"this batch takes another way through the model: {found!r}, where {recorded!r} was captured",
            where=where,
            remedy="make the line independent of the data (torch.where), or leave such batches out",
        )
