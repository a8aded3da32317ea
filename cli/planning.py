"""profile, plan, generate, simulate: the commands that run no ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from . import documents, options, types
from .terminal import Terminal

FROM_PIPEDREAM = "--from-pipedream is not there yet"


@click.command("profile")
@click.argument("target")
@options.profiling
@options.output
def profile_command(terminal: Terminal, target: str, **given: Any) -> None:
    """Measure what each part of the model TARGET costs -> profile.json.

    TARGET is path/to/file.py[:ATTR] or package.module[:ATTR]. The file is code, and it is run.
    """
    from autopipe.report import tables
    from autopipe.workflow import steps

    settings = options.profile_settings(target, given)
    with terminal.progress() as progress:
        result = steps.profile(settings, progress)
    terminal.notes(result.notes, result.warnings)
    terminal.table(tables.profile_table(result.profile))
    terminal.document("profile", documents.profile(result))
    terminal.next("autopipe plan --gpus 2")


@click.command("plan")
@click.argument("target", required=False)
@options.planning
@options.option(
    "--from-pipedream", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="PipeDream's graph.txt."
)
@options.option("--explain", is_flag=True, help="Say what bounds the plan, and what its neighbours would cost.")
@options.output
def plan_command(
    terminal: Terminal, target: str | None, from_pipedream: Path | None, explain: bool, **given: Any
) -> None:
    """Cut the model into stages for N ranks -> plan.json.

    TARGET's file is code, and it is run. Without TARGET, the stored profile is planned on, and no model file is read:
    also for devices that are not here (--gpus 512 --gpu-memory 80GiB --link 400Gbit/s).
    """
    from autopipe.errors import PlanError
    from autopipe.report import plans, tables
    from autopipe.workflow import steps

    if from_pipedream is not None:
        raise PlanError(FROM_PIPEDREAM, remedy="plan from a model file: autopipe plan TARGET --gpus N")
    settings = options.plan_settings(target, given)
    with terminal.progress() as progress:
        result = steps.plan(settings, progress, explained=explain)
    terminal.notes(result.notes, result.warnings)
    terminal.table(
        tables.stage_table(result.plan, result.cluster), tables.prediction_lines(result.plan, result.profile)
    )
    terminal.table(*plans.comparison(result.comparison), *plans.explanation(result.explanation))
    terminal.document("plan", documents.plan(result))
    terminal.next("autopipe check, then autopipe train")


@click.command("generate")
@options.work_dir
@options.output
def generate_command(terminal: Terminal, work_dir: Path) -> None:
    """Write the stages of the stored plan as Python files -> stages/stage_0.py, ...

    What is written is what runs. The model file is code, and it is run.
    """
    from autopipe.workflow import steps

    with terminal.progress() as progress:
        result = steps.generate(work_dir, progress)
    terminal.notes(result.notes)
    terminal.table(*result.files)
    terminal.document("generate", documents.generate(result))
    terminal.next("autopipe check")


@click.command("simulate")
@options.option("--schedule", type=types.SCHEDULE, metavar="NAME", help="Another schedule than the plan's.")
@options.work_dir
@options.output
def simulate_command(terminal: Terminal, schedule: str | None, work_dir: Path) -> None:
    """Play the stored plan through, without running the model -> timeline.json."""
    from autopipe.report import tables
    from autopipe.workflow import steps

    result = steps.simulate(work_dir, None if schedule == "auto" else schedule)
    terminal.notes(result.notes)
    terminal.table(*tables.simulation(result.plan, result.timeline, result.grid))
    terminal.document("simulate", documents.simulate(result))
    terminal.next("autopipe train")
