"""``autopipe profile``, ``plan``, ``generate`` and ``simulate``: the commands that run no ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autopipe.commands.options import plan_settings
from autopipe.options.commands import (
    PlanCommand,
    PlanOptions,
    ProfileCommand,
    ProfileOptions,
    SimulateOptions,
    WorkOptions,
)
from autopipe.options.commands import given as given_of
from autopipe.pipeline import Pipeline

from . import documents, options
from .terminal import Terminal

if TYPE_CHECKING:
    from autopipe.commands.settings import PlanSettings
    from autopipe.report.results import PlanResult


@click.command("profile", cls=options.Command)
@click.argument("target")
@options.of(ProfileCommand)
@options.output
def profile_command(terminal: Terminal, target: str, links: bool, estimate: bool, **given: Any) -> None:
    """Measure the cost of each part of the model TARGET -> profile.json.

    TARGET is path/to/file.py[:ATTR] or package.module[:ATTR]. The file is code, and it is run. A model whose weights
    exceed this machine's memory is counted as with --estimate, before they are allocated.
    """
    from autopipe.commands.calibration.links import measure as measure_links
    from autopipe.ir.profile import COUNTED
    from autopipe.report import plans, profiles, tables

    pipe = Pipeline(target, **given_of(ProfileOptions, given))
    work_dir = given["work_dir"]
    if estimate:
        for name, value in (("--links", links or None), ("--device", given["device"])):
            if value is not None:
                raise click.UsageError(f"{name} and --estimate exclude each other, because --estimate times nothing")
    with terminal.progress() as progress:
        result = pipe.profile(estimate=estimate, on_progress=progress)
        kind = result.profile.device.kind
        measured = measure_links(work_dir, kind, progress) if links and kind != COUNTED else None
    terminal.notes(result.notes, result.warnings)
    if result.profile.device.kind == COUNTED:
        terminal.table(
            *profiles.estimate(result.profile),
            profiles.sharding_line(result.profile.graph, result.profile.workload.team),
        )
        terminal.document("profile", documents.profile(result))
        terminal.next("autopipe plan --gpus 16 --device-name H100-SXM", work_dir=work_dir)
        return
    terminal.table(tables.profile_table(result.profile), tables.block_table(result.profile))
    terminal.table(
        tables.optimizer_line(result.profile),
        profiles.sharding_line(result.profile.graph, result.profile.workload.team),
        *plans.links(measured),
    )
    terminal.document("profile", documents.profile(result) | documents.links(measured))
    terminal.next("autopipe plan --gpus 2", work_dir=work_dir)


@click.command("plan", cls=options.Command)
@click.argument("target", required=False)
@options.of(PlanCommand)
@options.output
def plan_command(
    terminal: Terminal,
    target: str | None,
    sweep_gpus: tuple[int, ...] | None,
    explain: bool,
    **given: Any,
) -> None:
    """Cut the model into stages for N ranks -> plan.json.

    A plan for devices that this machine does not have answers a question: it is stored apart, and changes nothing.

    TARGET's file is code, and it is run. Without TARGET, the plan is made from the stored profile and no model file is
    read, which also works for devices of other machines (--gpus 512 --gpu-memory 80GiB --link 400Gbit/s). With
    --device-name, or a datasheet in the cluster file, times are estimated for that device, even from a profile taken on
    a CPU, and TARGET is counted and not measured if this machine has no GPU. --sweep-gpus writes nothing.
    """
    settings = plan_settings(target, given_of(PlanOptions, given))
    if sweep_gpus is not None:
        _sweep(terminal, settings, sweep_gpus)
        return
    with terminal.progress() as progress:
        result = options.pipeline(target, given).plan(explain=explain, on_progress=progress)
    _show(terminal, result)
    if result.question:
        ranks = f"--gpus {result.cluster.num_devices}"
        terminal.say(f"an answer to a question ({result.question}): check, train and --resume do not use it")
        terminal.next(
            "autopipe simulate",
            f"on such devices autopipe train {result.plan.workload.target} {ranks}",
            work_dir=settings.work_dir,
            separator=", or ",
        )
    else:
        terminal.next("autopipe check", "autopipe train", work_dir=settings.work_dir)


def _show(terminal: Terminal, result: PlanResult) -> None:
    from autopipe.report import plans, tables

    plan, profile, cluster = result.plan, result.profile, result.cluster
    estimated = bool(cluster.devices[0].datasheet)
    numbers = plans.fit(plan, profile, cluster) if estimated else None
    if numbers is not None:
        terminal.table(plans.fit_lines(numbers, plan))
    terminal.notes(result.notes, result.warnings)
    alone = result.comparison.alone if result.comparison else None
    terminal.table(tables.stage_table(plan, cluster), tables.prediction_lines(plan, alone, estimated=estimated))
    if numbers is not None and (drawing := plans.picture(plan, profile, cluster)):
        terminal.table(drawing)
    terminal.table(*plans.comparison(result.comparison), *plans.explanation(result.explanation))
    terminal.document("plan", documents.plan(result) | ({} if numbers is None else {"fit": numbers.document()}))


def _sweep(terminal: Terminal, settings: PlanSettings, counts: tuple[int, ...]) -> None:
    from autopipe.commands.planning import scaling
    from autopipe.report import plans

    with terminal.progress() as progress:
        result = scaling.sweep_gpus(settings, counts, progress)
    terminal.notes(result.notes)
    terminal.table(*plans.scaling(result))
    terminal.document("plan", documents.scaling(result))


@click.command("generate", cls=options.Command)
@options.of(WorkOptions)
@options.output
def generate_command(terminal: Terminal, work_dir: Path) -> None:
    """Write the stages of the stored plan as Python files -> stages/stage_0.py, ...

    These files are the code that runs. The model file is code, and it is run.
    """
    with terminal.progress() as progress:
        result = Pipeline(work_dir=work_dir).generate(on_progress=progress)
    terminal.notes(result.notes)
    terminal.table(*result.files)
    terminal.document("generate", documents.generate(result))
    terminal.next("autopipe check", work_dir=work_dir)


@click.command("simulate", cls=options.Command)
@options.of(SimulateOptions)
@options.output
def simulate_command(terminal: Terminal, work_dir: Path, **given: Any) -> None:
    """Simulate the stored plan without running the model -> timeline.json.

    The timeline is of one minibatch, with the peak bytes of each rank. If steps overlap (pipedream, 2bw), it is the
    first minibatch alone, and the printed step time is that of the steady state.
    """
    from autopipe.report import tables

    result = Pipeline(work_dir=work_dir).simulate(**given_of(SimulateOptions, given))
    terminal.notes(result.notes, (result.memory_shortfall,) if result.memory_shortfall else ())
    terminal.table(*tables.simulation(result, terminal.width if terminal.is_terminal else 0))
    terminal.document("simulate", documents.simulate(result))
    if result.trace:
        terminal.say(f"wrote {result.path} and {result.trace}, which ui.perfetto.dev opens")
    else:
        terminal.say(f"wrote {result.path} (--trace FILE writes it for ui.perfetto.dev as well)")
    if result.memory_shortfall:
        command = f"autopipe plan {result.schedule_options}".rstrip()
        terminal.say(f"next: {command}, with the --gpus and the memory of this plan")
    else:
        terminal.next(f"autopipe train {result.schedule_options}".rstrip(), work_dir=work_dir)
