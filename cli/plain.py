"""``autopipe plain``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from . import documents, options, types
from .terminal import Terminal


@click.command("plain")
@click.argument("target", required=False)
@options.option(
    "-o",
    "--output",
    default=Path("loop.py"),
    show_default=True,
    type=click.Path(path_type=Path),
    help="The script to write.",
)
@options.option("--steps", type=types.COUNT, metavar="K", help="Number of steps. [default: those of the run, or 10]")
@options.option(
    "--clip-grad-norm", type=types.NUMBER, metavar="X", help="Largest gradient norm. [default: no clipping]"
)
@options.planning
@options.shapes
@options.output
def plain_command(
    terminal: Terminal, target: str | None, output: Path, steps: int | None, clip_grad_norm: float | None, **given: Any
) -> None:
    """Write the plain loop as a script that does not import autopipe: with data order, seeds, masks, microbatches.

    TARGET is a model, with the options of `train`, or the directory of a run, whose settings and steps are used.
    `python loop.py model.safetensors` trains and compares with exported weights. The model file is code, and it is run.
    """
    run = Path(target) if target is not None and (Path(target) / "job.json").is_file() else None
    pipe = options.pipeline(target if run is None else None, given)
    with terminal.progress() as progress:
        result = pipe.plain(output, run, steps=steps, clip_grad_norm=clip_grad_norm, on_progress=progress)
    terminal.notes(result.notes)
    terminal.table(f"{result.path}: {result.lines} lines, {result.steps} steps")
    terminal.document("plain", documents.fields_of(result))
    loop = f"python {shlex.quote(str(result.path))}"
    if run is None:
        terminal.next(loop)
    else:
        terminal.next(f"autopipe export {shlex.quote(str(run))} -o model.safetensors", f"{loop} model.safetensors")
