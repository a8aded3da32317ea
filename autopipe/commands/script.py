"""``autopipe run``: a training script whose model runs in stages."""

from __future__ import annotations

from pathlib import Path

from autopipe.errors import RunError
from autopipe.script.runner import INTERRUPTED, end_by_interrupt, run_script

__all__ = ["INTERRUPTED", "end_by_interrupt", "run"]


def run(
    script: Path,
    words: list[str],
    *,
    stages: int,
    check: int,
    num_microbatches: int,
    timeout: float,
    folder: Path | None,
    quiet: bool,
) -> int:
    """Run a script with its arguments, and return its exit code.

    ``check``: optimizer steps to compare with the script in a process of its own. ``timeout``: seconds.

    Raises: RunError for parts of a batch, which are not possible yet, and if the script cannot be read.
    """
    if num_microbatches > 1:
        raise RunError(
            f"--num-microbatches {num_microbatches}: the batch of a script cannot be cut yet",
            remedy="accumulate gradients over smaller batches in the script: they overlap, with the same numbers",
        )
    return run_script(script, words, count=stages, timeout=timeout, folder=folder, steps=check, quiet=quiet)
