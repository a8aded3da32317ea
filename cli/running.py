"""``autopipe check``, ``train``, ``eval``, ``export`` and ``plain``: the commands that run ranks or use a run."""

from __future__ import annotations

import importlib
import os
import shlex
from pathlib import Path
from typing import Any

import click

from autopipe.commands.options import train_settings
from autopipe.launch.registry import LAUNCHERS
from autopipe.options.commands import (
    CheckOptions,
    EvaluateOptions,
    ExportCommand,
    ExportOptions,
    PlainCommand,
    PlainOptions,
    TrainCommand,
)
from autopipe.options.commands import given as given_of
from autopipe.pipeline import Pipeline
from autopipe.workers.fork_server import preload

from . import failures, launching, options
from .terminal import Terminal

LOADING = {
    "safetensors": 'model.load_state_dict(safetensors.torch.load_file("{path}"))',
    "pt": 'model.load_state_dict(torch.load("{path}", weights_only=True))',
    "hf": 'from_pretrained("{path}") of transformers, after you copy the config.json of the model into the folder',
    "dcp": 'torch.distributed.checkpoint.load(model.state_dict(), checkpoint_id="{path}")',
}
LOADING_HF = 'from_pretrained("{path}") of the class of the model, as in transformers'
run_argument = click.argument("run", required=False, type=click.Path(file_okay=False, path_type=Path))


def import_torch() -> None:
    """Import torch, and let its threads wait for work without occupying cores, unless the user has set how they wait.

    On a machine that others use, threads that spin slow one another down several times. The processes that this one
    starts do not inherit it.
    """
    name = "OMP_WAIT_POLICY"
    if name in os.environ:
        return
    os.environ[name] = "PASSIVE"  # OpenMP reads it once
    try:
        importlib.import_module("torch")
    finally:
        del os.environ[name]


@click.command("check", cls=options.Command)
@click.argument("target", required=False)
@options.of(CheckOptions)
@options.output
def check_command(terminal: Terminal, target: str | None, **given: Any) -> int:
    """Train a few steps plainly and in stages, and compare every parameter.

    The exit code is 1 if they are not equal. On a CPU in float32, equal means bit for bit. Replicas and large tied
    parameters sum gradients in a different order than one process; the plain loop then uses that order. With bf16 or
    fp16, on a GPU, or with --compile, a tensor may differ by 1e-6 of its largest value, or by a multiple of the change
    that summing the microbatches in reverse order makes, or that the compiler makes in the plain loop: 4 times for the
    tensor itself, 16 times for the median tensor. The state of the optimizer is compared as well, and an evaluation if
    the model file has evaluation data.

    The plain loop runs the same microbatches. The report also says how much their gradient differs from that of the
    full batch. The model file is code, and it is run.
    """
    from autopipe.report import tables

    import_torch()
    with terminal.progress() as progress:
        report = Pipeline(target).check(**given_of(CheckOptions, given), on_progress=progress)
    terminal.notes(report.notes, report.warnings)
    terminal.table(*tables.check(report))
    terminal.document("check", report)
    if report.equal:
        terminal.next("autopipe train")
    return 0 if report.equal else 1


class Resuming(options.Command):
    """A command whose ``--resume`` may have no value, which means the newest checkpoint."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Add the value of a lone ``--resume``, so that click does not take the next word for it."""
        end = args.index("--") if "--" in args else len(args)
        words = list(args)
        for index in range(end):
            if args[index] == "--resume" and not "".join(args[index + 1 : index + 2]).isdecimal():
                words[index] = "--resume=newest"
        return super().parse_args(ctx, words)


@click.command("train", cls=Resuming)
@click.argument("target", required=False)
@options.of(TrainCommand)
@options.output
def train_command(terminal: Terminal, target: str | None, **given: Any) -> int:
    """Train in stages, after running every step that is missing or stale.

    Without TARGET, the stored plan is used. The model file is code, and it is run.

    The last line says how many steps are proven to equal plain training.
    """
    settings = train_settings(target, given_of(TrainCommand, given), launch=launching.settings(given))
    if LAUNCHERS[settings.launch.name].load is None:  # the command runs again elsewhere
        return launching.start(terminal, settings, dict(given["slurm_option"]))
    if not settings.launch.dry_run:
        preload()  # before torch is imported here
        import_torch()
    from autopipe.commands.training import external_ranks
    from autopipe.commands.training.external_ranks import placed, rehearse

    settings = external_ranks.with_identity(settings, os.environ)
    if settings.launch.dry_run:
        launching.show(terminal, rehearse(settings))
        return 0
    if external_ranks.is_follower(settings):
        terminal.json = False  # rank 0 prints the one document
        return external_ranks.follow(settings)
    from autopipe.commands.training import runs
    from autopipe.report import run_tables

    from .live import watching

    with external_ranks.lead(settings) as (led, rendezvous), watching(terminal, given["events"]) as events:
        result = runs.train(placed(led), events, rendezvous)
    terminal.table(*run_tables.result_tables(result))
    terminal.document("train", result)
    if result.stopped:
        terminal.say(f"stopped cleanly at step {result.step}, with a checkpoint")
        terminal.next("the same command with --resume")
        terminal.say(run_tables.proven(result))
        return failures.STOPPED
    if result.stopped_by:
        terminal.say(f"{result.stopped_by} ended the run at step {result.step}, with a checkpoint")
    terminal.next(f"autopipe export {shlex.quote(result.run_dir)} -o model.safetensors")
    if result.unproven:
        terminal.notes((), (run_tables.proven(result),))
    elif result.losses:
        terminal.say(run_tables.proven(result))
    return 1 if result.unproven else 0


@click.command("eval", cls=options.Command)
@run_argument
@options.of(EvaluateOptions)
@options.output
def eval_command(terminal: Terminal, run: Path | None, **given: Any) -> None:
    """Evaluate RUN (default: the newest) on held-out data, from its newest checkpoint.

    The model file of the run is code, and it is run if only you can write it and the run, or if you name it now.
    """
    from autopipe.report import tables

    _refuse_without_target(given)
    result = Pipeline().evaluate(run, **given_of(EvaluateOptions, given))
    terminal.table(tables.evaluation(result))
    terminal.document("eval", result)
    terminal.next(f"autopipe export {shlex.quote(result.run_dir)} -o model.safetensors")


@click.command("export", cls=options.Command)
@run_argument
@options.of(ExportCommand)
@options.output
def export_command(terminal: Terminal, run: Path | None, output: Path, **given: Any) -> None:
    """Write the weights of RUN (default: the newest) as one file, or as a folder.

    The unmodified model loads it with strict=True. The reported number counts the names in the state_dict: a tied
    weight has two, a non-persistent buffer none. `check` counts each tensor once.

    The model file of the run is code, and it is run if only you can write it and the run, or if you name it now.
    """
    from autopipe.report import tables

    _refuse_without_target(given)
    result = Pipeline().export(output, run, **given_of(ExportOptions, given))
    terminal.table(tables.exported(result))
    terminal.document("export", result)
    from autopipe.commands.exporting import CONFIG  # it imports torch

    has_config = (Path(result.path) / CONFIG).is_file()  # transformers can load it as it is
    terminal.next((LOADING_HF if has_config else LOADING[result.format]).format(path=result.path))


@click.command("plain", cls=options.Command)
@click.argument("target", required=False)
@options.of(PlainCommand)
@options.output
def plain_command(terminal: Terminal, target: str | None, output: Path, **given: Any) -> None:
    """Write the plain loop as a script that does not import autopipe: with data order, seeds, masks, microbatches.

    TARGET is a model, with the options of `train`, or the directory of a run, whose settings and steps are used.
    `python loop.py model.safetensors` trains and compares with exported weights. The model file is code, and it is run.
    """
    run = Path(target) if target is not None and (Path(target) / "job.json").is_file() else None
    pipe = Pipeline(target if run is None else None)
    with terminal.progress() as progress:
        result = pipe.plain(output, run, **given_of(PlainOptions, given), on_progress=progress)
    terminal.notes(result.notes)
    terminal.table(f"{result.path}: {result.lines} lines, {result.steps} steps")
    terminal.document("plain", result)
    loop = f"python {shlex.quote(str(result.path))}"
    if run is None:
        terminal.next(loop)
    else:
        terminal.next(f"autopipe export {shlex.quote(str(run))} -o model.safetensors", f"{loop} model.safetensors")


def _refuse_without_target(given: dict[str, Any]) -> None:
    """Refuse the options that belong to ``--target`` without it. Raises: click.UsageError."""
    if (given["arg"] or given.get("loss")) and not given["target"]:
        raise click.UsageError("--arg and --loss belong to --target; name the model too")
