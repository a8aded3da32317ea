"""``autopipe run``: a training script whose model runs in stages."""

from __future__ import annotations

from pathlib import Path

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

    ``check``: optimizer steps to compare with the script in a process of its own. ``num_microbatches``: parts
    into which the batch of each training call is cut. ``timeout``: seconds.

    Raises: RunError if the script cannot be read.
    """
    return run_script(
        script,
        words,
        count=stages,
        timeout=timeout,
        folder=folder,
        steps=check,
        parts=num_microbatches,
        quiet=quiet,
    )
