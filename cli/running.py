"""``autopipe check``, ``train``, ``eval`` and ``export``: the commands that run ranks or use a run."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import click

from autopipe.commands import options as table
from autopipe.commands.metrics.registry import LOGGERS
from autopipe.commands.settings import EXPORT_FORMATS
from autopipe.launch.registry import LAUNCHERS
from autopipe.pipeline import Pipeline
from autopipe.runtime.job import DATA_READERS

from . import documents, failures, launching, options, submitting, types
from .terminal import Terminal

LOADING = {
    "safetensors": 'model.load_state_dict(safetensors.torch.load_file("{path}"))',
    "pt": 'model.load_state_dict(torch.load("{path}", weights_only=True))',
    "hf": 'from_pretrained("{path}") of transformers, after you copy the config.json of the model into the folder',
    "dcp": 'torch.distributed.checkpoint.load(model.state_dict(), checkpoint_id="{path}")',
}
LOADING_HF = 'from_pretrained("{path}") of the class of the model, as in transformers'
named_again = (
    options.option("--target", metavar="TARGET", help="The model; required if the run was not made by you."),
    options.option("--arg", type=types.PAIR, multiple=True, help="Argument of --target, name=value. Repeatable."),
)
run_argument = click.argument("run", required=False, type=click.Path(file_okay=False, path_type=Path))


@click.command("check")
@click.argument("target", required=False)
@options.planning
@options.shapes
@options.option(
    "--steps",
    type=types.COUNT,
    metavar="K",
    help="Optimizer steps to compare. [default: 3, or the staleness of the schedule and 2]",
)
@options.option("--full-batch", is_flag=True, help="Also compare every parameter with one step of the full batch.")
@options.option("--clip-grad-norm", type=types.NUMBER, default=0.0, metavar="X", help="Largest gradient norm.")
@options.compiling
@options.deferring
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

    launching.fork_early(terminal)
    pipe = options.pipeline(target, given)
    wanted = {name: given[name] for name in ("steps", "full_batch", "clip_grad_norm", "compile", "deferred_batch_norm")}
    with terminal.progress() as progress:
        report = pipe.check(**wanted, on_progress=progress)
    terminal.notes(report.notes, report.warnings)
    terminal.table(*tables.check(report))
    terminal.document("check", documents.check(report))
    if report.equal:
        terminal.next("autopipe train")
    return 0 if report.equal else 1


class Resuming(click.Command):
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
@options.planning
@options.shapes
@options.option("--steps", type=types.COUNT, metavar="K", help="Optimizer steps.")
@options.option("--epochs", type=types.COUNT, metavar="E", help="Passes over the data. [default: 1]")
@options.option(
    "--clip-grad-norm", type=types.NUMBER, metavar="X", help="Largest gradient norm. [default: no clipping]"
)
@options.option(
    "--checkpoint-every",
    type=types.COUNT_OR_NONE,
    metavar="K",
    help="Steps between checkpoints; 0: at the end only. [default: about 10 minutes by the plan's prediction]",
)
@options.option(
    "--eval-every", type=types.COUNT_OR_NONE, default=0, metavar="K", help="Steps between evaluations; 0: never."
)
@options.option(
    "--audit-every",
    type=types.AUDITS,
    default="auto",
    show_default=True,
    metavar="K|auto|0",
    help="Every K steps, from a random one on, compare one step with plain training from the run's own state, in "
    "another process. The exit code is 1 if it differs, or if all are skipped. auto: so often that it takes at most "
    "0.5 % of the time, and, with --check, the second step; 0: never.",
)
@options.option(
    "--check/--no-check",
    default=True,
    show_default=True,
    help="Compare the first steps of a new plan with plain training, and probe its optimizer.",
)
@options.compiling
@options.deferring
@options.option(
    "--keep-checkpoints", type=types.COUNT_OR_NONE, default=3, show_default=True, help="Number to keep; 0: all."
)
@options.option(
    "--resume",
    type=types.RESUME,
    metavar="[STEP]",
    help="Resume from a checkpoint; without STEP, the newest. Options that are not given keep the values of the run.",
)
@options.option(
    "--max-restarts",
    type=types.COUNT_OR_NONE,
    metavar="N",
    help="If a rank fails, resume from the last checkpoint, up to N times. [default: 0; 3 with --elastic]",
)
@options.option("--elastic", is_flag=True, help="After a failure, continue on the remaining ranks with a new plan.")
@options.option(
    "--on-nonfinite",
    type=types.one_of("policy", *table.CHOICES["on_nonfinite"]),
    default="stop",
    show_default=True,
    help="Reaction to a NaN or infinite loss or gradient; skip: all ranks skip the step.",
)
@options.option(
    "--init-from",
    type=click.Path(exists=True, path_type=Path),
    metavar="PATH",
    help="Initial weights: .safetensors, a state_dict (.pt), a Hugging Face folder, or a checkpoint. Each rank reads "
    "its own part. Ignored with --resume.",
)
@options.option("--trust", is_flag=True, help="Read --init-from even if its format can run code (torch DCP).")
@options.option(
    "--data-reader",
    type=types.one_of("reader", *DATA_READERS),
    default="one",
    show_default=True,
    help="Which ranks read the data: one (rank 0) for all, or each rank all of it.",
)
@options.option("--allow-other-data", is_flag=True, help="Let --resume continue although the data has changed.")
@launching.launching
@options.option("--run-dir", type=click.Path(file_okay=False, path_type=Path), help="Directory of the run.")
@options.option(
    "--events",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE|-",
    help="Also add every event to FILE, one line of JSON each; -: to standard error, instead of the progress there.",
)
@options.option("--timeline", is_flag=True, help="Record the timeline of every rank.")
@options.option("--measure-memory", is_flag=True, help="Measure the peak memory of each stage; slows the ranks down.")
@options.option(
    "--on-step", metavar="TARGET", help="(step, metrics), called by this process for each step; 'stop' ends the run."
)
@options.option("--on-evaluate", metavar="TARGET", help="(step, metrics), called for each evaluation, in the same way.")
@options.option(
    "--log",
    type=types.one_of("logger", *LOGGERS),
    multiple=True,
    help="Also record the metrics with this tool, which must be installed. Repeatable.",
)
@options.output
def train_command(terminal: Terminal, target: str | None, **given: Any) -> int:
    """Train in stages, after running every step that is missing or stale.

    Without TARGET, the stored plan is used. The model file is code, and it is run.

    The last line says how many steps are proven to equal plain training.
    """
    options.refuse_exclusive(given)
    given_options = options.of(table.TrainOptions, given)
    settings = table.train_settings(target, given_options, launch=launching.settings(given))
    if LAUNCHERS[settings.launch.name].load is None:  # the command runs again elsewhere
        return submitting.start(terminal, settings, dict(given["slurm_option"]))
    with launching.uncollected():
        from autopipe.commands.training import together
        from autopipe.commands.training.placement import placed, rehearse

    settings = together.with_identity(settings, os.environ)
    if settings.launch.dry_run:
        launching.show(terminal, rehearse(settings))
        return 0
    if together.is_follower(settings):
        terminal.json = False  # rank 0 prints the one document
        return together.follow(settings)
    launching.fork_early(terminal)
    with launching.uncollected():
        from autopipe.commands.training import runs
        from autopipe.report import training

        from .live import watching

    with together.lead(settings) as (led, rendezvous), watching(terminal, given["events"]) as events:
        result = runs.train(placed(led), events, rendezvous)
    terminal.table(*training.tables_of(result))
    terminal.document("train", documents.train(result))
    if result.stopped:
        terminal.say(f"stopped cleanly at step {result.step}, with a checkpoint")
        terminal.next("the same command with --resume")
        terminal.say(training.proven(result))
        return failures.STOPPED
    if result.stopped_by:
        terminal.say(f"{result.stopped_by} ended the run at step {result.step}, with a checkpoint")
    terminal.next(f"autopipe export {shlex.quote(result.run_dir)} -o model.safetensors")
    if result.unproven:
        terminal.notes((), (training.proven(result),))
    elif result.losses:
        terminal.say(training.proven(result))
    return 1 if result.unproven else 0


@click.command("eval")
@run_argument
@options.option("--batch-size", type=types.COUNT, metavar="B", help="Samples per batch.")
@options.option("--eval-data", metavar="TARGET", help="Held-out data that replaces the file's `evaluate_data`.")
@options.option("--ema", "averaged", is_flag=True, help="Evaluate the averaged weights of `train --ema`.")
@named_again[0]
@named_again[1]
@options.option("--loss", metavar="TARGET", help="Loss of --target that replaces the file's `loss`.")
@options.work_dir
@options.output
def eval_command(
    terminal: Terminal,
    run: Path | None,
    batch_size: int | None,
    eval_data: str | None,
    averaged: bool,
    work_dir: Path,
    **given: Any,
) -> None:
    """Evaluate RUN (default: the newest) on held-out data, from its newest checkpoint.

    The model file of the run is code, and it is run if you have named it on this machine, unchanged, or name it now.
    """
    from autopipe.report import tables

    _refuse_without_target(given)
    launching.fork_early(terminal)
    pipe = Pipeline(work_dir=work_dir)
    result = pipe.evaluate(
        run, batch_size=batch_size, eval_data=eval_data, averaged=averaged, **options.of(table.EvaluateOptions, given)
    )
    terminal.table(tables.evaluation(result))
    terminal.document("eval", documents.fields_of(result))
    terminal.next(f"autopipe export {shlex.quote(result.run_dir)} -o model.safetensors")


@click.command("export")
@run_argument
@options.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="The file; .safetensors or .pt selects the format. A name without a suffix is a folder in torch's DCP format.",
)
@options.option(
    "--format",
    type=types.one_of("format", *EXPORT_FORMATS),
    help="hf: a folder of safetensors files with an index, as Hugging Face uses. [default: by the name]",
)
@options.option("--step", type=types.COUNT_OR_NONE, help="Step of the checkpoint. [default: the newest]")
@options.option("--ema", "averaged", is_flag=True, help="Write the averaged weights of `train --ema`.")
@named_again[0]
@named_again[1]
@options.work_dir
@options.output
def export_command(
    terminal: Terminal,
    run: Path | None,
    output: Path,
    format: str | None,
    step: int | None,
    averaged: bool,
    work_dir: Path,
    **given: Any,
) -> None:
    """Write the weights of RUN (default: the newest) as one file, or as a folder.

    The unmodified model loads it with strict=True. The reported number counts the names in the state_dict: a tied
    weight has two, a non-persistent buffer none. `check` counts each tensor once.

    The model file of the run is code, and it is run if you have named it on this machine, unchanged, or name it now.
    """
    from autopipe.report import tables

    _refuse_without_target(given)
    pipe = Pipeline(work_dir=work_dir)
    result = pipe.export(
        output, run, step=step, format=format, averaged=averaged, **options.of(table.ExportOptions, given)
    )
    terminal.table(tables.exported(result))
    terminal.document("export", documents.fields_of(result))
    from autopipe.commands.exporting import CONFIG  # it imports torch

    has_config = (Path(result.path) / CONFIG).is_file()  # transformers can load it as it is
    terminal.next((LOADING_HF if has_config else LOADING[result.format]).format(path=result.path))


def _refuse_without_target(given: dict[str, Any]) -> None:
    """Refuse the options that belong to ``--target`` without it. Raises: click.UsageError."""
    if (given["arg"] or given.get("loss")) and not given["target"]:
        raise click.UsageError("--arg and --loss belong to --target; name the model too")
