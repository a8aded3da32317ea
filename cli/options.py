"""The options that several commands share, as decorators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from autopipe.commands import options as table
from autopipe.commands.settings import MAX_SHAPES, WORK_DIRECTORY, PlanSettings
from autopipe.pipeline import Pipeline

from . import types
from .terminal import Terminal

Function = TypeVar("Function", bound=Callable[..., Any])


class Option(click.Option):
    """An option whose variable is ``AUTOPIPE_<COMMAND>_<NAME>``, or ``AUTOPIPE_<NAME>`` for every command."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Return the value of the command's own variable, else of the shared one."""
        import os

        own = super().resolve_envvar_value(ctx)
        return own if own is not None else os.environ.get(f"AUTOPIPE_{(self.name or '').upper()}") or None


option = functools.partial(click.option, cls=Option)


def _set_json(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    terminal = ctx.ensure_object(Terminal)
    terminal.json = bool(value)
    if terminal.json:
        terminal.reserve()  # before the user's code is imported


def _set_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    terminal = ctx.ensure_object(Terminal)
    terminal.debug = terminal.debug or value


def _add_verbosity(sign: int) -> Callable[[click.Context, click.Parameter, int], None]:
    def callback(ctx: click.Context, param: click.Parameter, value: int) -> None:
        terminal = ctx.ensure_object(Terminal)
        terminal.verbosity += sign * value
        terminal.start_log()

    return callback


def _apply(function: Function, *decorators: Callable[[Any], Any]) -> Function:
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


def verbosity(function: Function) -> Function:
    """Add -v, -q and --debug."""
    return _apply(
        function,
        option(
            "-v",
            "--verbose",
            count=True,
            expose_value=False,
            callback=_add_verbosity(1),
            help="Verbose output; repeat for more.",
        ),
        option(
            "-q",
            "--quiet",
            count=True,
            expose_value=False,
            callback=_add_verbosity(-1),
            help="Print only results and errors.",
        ),
        option(
            "--debug", is_flag=True, expose_value=False, callback=_set_debug, help="Print the traceback of an error."
        ),
    )


def output(function: Function) -> Function:
    """Add --json and the options of ``verbosity``; the function takes the ``Terminal`` as its first argument."""
    with_json = option(
        "--json",
        is_flag=True,
        expose_value=False,
        callback=_set_json,
        help="Print one JSON document on stdout instead of tables.",
    )
    return _apply(click.pass_obj(function), with_json, verbosity)  # type: ignore[return-value]  # same function, wrapped


work_dir = option(
    "--work-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=WORK_DIRECTORY,
    show_default=True,
    help="Directory of the artifacts.",
)

model_options: tuple[Callable[[Any], Any], ...] = (
    option("--arg", type=types.PAIR, multiple=True, help="Argument of the model, name=value. Repeatable."),
    option("--input", "input", multiple=True, help='Synthetic input, e.g. "x:i64[8,128]<1000". Repeatable.'),
    option("--loss", metavar="TARGET", help="(output, target) -> scalar, e.g. torch.nn:CrossEntropyLoss."),
    option("--data", metavar="TARGET", help="Training data that replaces the file's `data`."),
    option("--eval-data", metavar="TARGET", help="Held-out data that replaces the file's `evaluate_data`."),
    option("--optimizer", metavar="NAME|TARGET", help="Name, e.g. adamw, or a function of the named parameters."),
    option("--after-step", metavar="TARGET", help="(named_parameters, step), called after each optimizer step."),
    option(
        "--lr", type=types.NUMBER, metavar="RATE", help="Learning rate. [default: the optimizer's own; 1e-3 for AdamW]"
    ),
    option(
        "--precision",
        type=types.one_of("precision", *table.CHOICES["precision"]),
        help="Precision of forward and loss: bf16 and fp16 run under autocast, fp16 with loss scaling. [default: fp32]",
    ),
    option(
        "--seed",
        type=types.SEED,
        metavar="N",
        help="Seed of the initial weights and of every random operation. [default: 0]",
    ),
)
profile_options: tuple[Callable[[Any], Any], ...] = (
    option(
        "--device", type=types.one_of("device", *table.CHOICES["device"]), help="Device of the ranks. [default: auto]"
    ),
    option(
        "--microbatch-sizes",
        type=types.SIZES,
        help="Microbatch sizes to measure. [default: 1,2,4,8, and up to a quarter of a large minibatch]",
    ),
    option("--threads-per-rank", type=types.COUNT, help="Threads of each rank on a CPU. [default: 1]"),
    option(
        "--allow-data-dependent",
        is_flag=True,
        help="Accept branches that depend on the data, and always use the one that the first batch took.",
    ),
    option(
        "--opaque",
        metavar="auto|never|MODULE",
        help="Modules that run as the user's own code and are not cut. auto: those that cannot be captured as one "
        "graph. MODULE: also these paths, separated by commas. [default: auto]",
    ),
    option(
        "--tensor-parallel",
        type=types.TEAM,
        metavar="auto|N",
        help="Shard the products, embeddings and attention heads of every stage over teams of N ranks, on one host. "
        "Results equal plain training within rounding, not bit for bit. auto: as many as make training fastest. "
        "[default: 1, or as in the stored profile]",
    ),
    option(
        "--sequence-parallel/--no-sequence-parallel",
        default=None,
        help="With --tensor-parallel: between the sharded products, each rank of a team has its own positions of the "
        "sequence, and 1/N of their memory. [default: no, or as in the stored profile]",
    ),
    option("--no-verify", is_flag=True, help="Do not compare the captured model with the original."),
)
order_options: tuple[Callable[[Any], Any], ...] = (
    option(
        "--vertical-sync/--no-vertical-sync",
        default=None,
        help="pipedream: all stages use one version of the weights for a minibatch. [default: no]",
    ),
    option(
        "--stages-per-rank",
        type=types.COUNT,
        metavar="V",
        help="interleaved, zero-bubble: number of stages on each rank.",
    ),
    option(
        "--warmup-depth",
        type=types.COUNT,
        metavar="D",
        help="eager-1f1b, pipedream, 2bw: microbatches in flight, as a multiple of 1f1b's. More hide slow links. "
        "[default: eager-1f1b 2, pipedream 1, 2bw the fastest of 1 to 3]",
    ),
    option(
        "--schedule-file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Your own schedule: one line for each rank, with cells such as 1F0 (stage; F, B, I or W; microbatch) "
        "separated by commas.",
    ),
)
plan_options: tuple[Callable[[Any], Any], ...] = (
    option("--gpus", type=types.RANKS, metavar="N", help="Number of ranks; on a CPU, processes."),
    option("--batch-size", type=types.COUNT, metavar="B", help="Samples per optimizer step."),
    option("--schedule", type=types.SCHEDULE, metavar="auto|NAME", help="Pipeline schedule. [default: auto]"),
    *order_options,
    option(
        "--cluster",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="File that describes devices and links.",
    ),
    option("--gpu-memory", type=types.BYTES, metavar="SIZE", help="Memory per device, e.g. 24GiB."),
    option("--link", type=types.RATE, metavar="RATE", help="Bandwidth between devices, e.g. 25Gbit/s."),
    option(
        "--device-name",
        metavar="NAME",
        help="Estimate the plan for this device, e.g. H100-SXM, from its datasheet. If the profile's device has a "
        "datasheet too, its times are scaled; otherwise, as on a CPU, they are computed from operations and bytes.",
    ),
    option(
        "--replicas",
        type=types.one_of("replicas setting", *table.CHOICES["replicas"]),
        help="auto: the fastest plan; a stage may run on several ranks, each with a share of the microbatches. "
        "Gradients are then summed per replica first, an order that check proves bit for bit, and BatchNorm's running "
        "statistics are averaged. never: one rank per stage, equal bit for bit to the training of one process. "
        "[default: auto; never if statistics would be averaged, and under --launcher env and slurm]",
    ),
    option(
        "--ema",
        type=click.FloatRange(0, 1, max_open=True),
        metavar="DECAY",
        help="Keep averaged weights in float32: after each step average.lerp_(weight, 1 - DECAY), as torch's "
        "AveragedModel does. Buffers are not averaged. 0: no averages. [default: 0, or as in the resumed run]",
    ),
    option("--num-microbatches", type=types.COUNT, metavar="M", help="Microbatches per minibatch."),
    option("--microbatch-size", type=types.COUNT, metavar="b", help="Samples per microbatch."),
    option(
        "--recompute",
        type=types.one_of("recompute setting", *table.CHOICES["recompute"]),
        help="Recompute forwards to save memory. never: keep all activations. block: recompute each stage in parts, "
        "one at a time. stage: each stage as a whole. auto: for each stage, the fastest of these that fits; your own "
        "checkpoint() calls remain recomputed. always: block, or stage where that does not fit. [default: auto]",
    ),
    option(
        "--exact-ties",
        type=types.one_of("setting of exact ties", *table.CHOICES["exact_ties"]),
        help="always: send the gradient of a tied parameter with every microbatch, which keeps one process's order of "
        "sums at any size. auto: only if it is small; otherwise the stages' sums are added once per step. [default: "
        "auto]",
    ),
    option(
        "--shard-optimizer",
        type=types.one_of("setting of the optimizer state", *table.CHOICES["shard_optimizer"]),
        help="auto: the replicas of a stage divide its optimizer state, where the plan would otherwise not fit or be "
        "slower; each steps a part of the parameters and sends the new values to the others. Results are the same bit "
        "for bit. never: every replica has the complete state. [default: auto]",
    ),
)


def model(function: Function) -> Function:
    """Add the options of the user's model."""
    return _apply(function, *model_options)


def profiling(function: Function) -> Function:
    """Add the options of model and measurement."""
    return _apply(function, *model_options, *profile_options, work_dir)


def ordering(function: Function) -> Function:
    """Add the options of schedules."""
    return _apply(function, *order_options)


def planning(function: Function) -> Function:
    """Add the options of model, measurement and plan."""
    return _apply(function, *plan_options, *model_options, *profile_options, work_dir)


def shapes(function: Function) -> Function:
    """Add ``--max-shapes``, for the commands whose ranks read the data."""
    max_shapes = option(
        "--max-shapes",
        type=types.COUNT_OR_NONE,
        default=MAX_SHAPES,
        show_default=True,
        help="Further shapes of the batch, such as image sizes, for which stage code is generated while training "
        "before a warning.",
    )
    return _apply(function, max_shapes)


compiling = option(
    "--compile/--no-compile",
    default=None,
    help="Compile every stage with torch.compile. Results then equal plain training within rounding, not bit for bit; "
    "not with zero-bubble. [default: no, or as in the resumed run]",
)


deferring = option(
    "--deferred-batch-norm", is_flag=True, help="Update BatchNorm's running statistics once per minibatch."
)


def pipeline(target: str | None, given: dict[str, Any]) -> Pipeline:
    """Return the pipeline of the options that ``planning`` adds.

    Raises: click.UsageError if two of them exclude each other.
    """
    refuse_exclusive(given)
    return Pipeline(target, **of(table.PipelineOptions, given))


def plan_settings(target: str | None, given: dict[str, Any]) -> PlanSettings:
    """Return the settings of the options that ``planning`` adds.

    Raises: click.UsageError if two of them exclude each other.
    """
    refuse_exclusive(given)
    return table.plan_settings(target, of(table.PipelineOptions, given))


def of(kind: type, given: dict[str, Any]) -> Any:
    """Return the given options that are keys of ``kind``, a typed dictionary of ``autopipe.commands.options``."""
    return {name: value for name, value in given.items() if name in kind.__annotations__ and value is not None}


def refuse_exclusive(given: dict[str, Any]) -> None:
    """Refuse two options that exclude each other. Raises: click.UsageError."""
    pair = table.exclusive_pair(given)
    if pair is not None:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in pair)
        raise click.UsageError(f"{names} exclude each other; give one")
