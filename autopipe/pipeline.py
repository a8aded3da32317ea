"""``Pipeline``, the Python interface: a model with its options, and a method for each command.

The methods and the command line share the work directory: a plan made by one is used by the other. Three things are
available on the command line only, because they concern processes or machines and not one model: launchers that start
the command once for each rank (``slurm``, ``env``), ``doctor``, and plans that are not trained
(``plan --sweep-gpus``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, Unpack

from autopipe.commands import option_values
from autopipe.commands import options as settings_of
from autopipe.commands.settings import WORK_DIRECTORY, ignore_event
from autopipe.errors import RunError
from autopipe.options import commands as table

if TYPE_CHECKING:
    from autopipe.commands.loop import Steps
    from autopipe.commands.settings import Events, Progress, StopEvent
    from autopipe.report.results import (
        CheckReport,
        EvaluateResult,
        ExportResult,
        GenerateResult,
        PlainResult,
        PlanResult,
        ProfileResult,
        ReportResult,
        SimulateResult,
        TrainResult,
    )

P = ParamSpec("P")
R = TypeVar("R")

_IN_PROCESS = ("local", "ssh")


def _guarded(method: Callable[Concatenate[Pipeline, P], R]) -> Callable[Concatenate[Pipeline, P], R]:
    """Refuse to run a method while the calling script is being imported."""

    @functools.wraps(method)
    def run(self: Pipeline, /, *args: P.args, **kwargs: P.kwargs) -> R:
        from autopipe.workers.unguarded import refuse_unguarded

        refuse_unguarded()
        return method(self, *args, **kwargs)

    return run


def _command(method: Callable[Concatenate[Pipeline, P], R]) -> Callable[Concatenate[Pipeline, P], R]:
    """Run a method that imports the user's files as a command of its own: see ``UserModules``."""

    @_guarded
    @functools.wraps(method)
    def run(self: Pipeline, /, *args: P.args, **kwargs: P.kwargs) -> R:
        from autopipe.user_modules import USER_MODULES

        options = self.options | {name: value for name, value in kwargs.items() if value is not None}
        files = tuple(str(options.get(name)) for name in option_values.TARGETS)
        with USER_MODULES.command((self.target, Path.cwd(), files)):
            return method(self, *args, **kwargs)

    return run


class Pipeline:
    """A model to train in pipeline stages, and the options that all its methods share.

    ``target`` is a path such as ``"gpt.py"``, a TARGET text such as ``"gpt.py:build_model"``, or a module-level
    function or class; None is the model of the work directory. Options have the names and meanings of the command line
    (docs/cli.md): ``--batch-size 64`` is ``batch_size=64``, and None means that an option is not given. Options of a
    method override those of the pipeline, for that call only.

    Ranks are processes that import the calling script, so a script must call methods under
    ``if __name__ == "__main__":``.

    Raises: TypeError for an unknown option, with the most similar name; ValueError for an invalid value, such as a
    lambda, which ranks cannot import. Methods raise subclasses of ``AutopipeError``.
    """

    def __init__(self, target: table.Target | None = None, /, **options: Unpack[table.PipelineOptions]) -> None:
        self.target = None if target is None else option_values.target_text(target, "target")
        self.options = option_values.parsed(options, table.PipelineOptions)
        self._last_run: Path | None = None

    def __repr__(self) -> str:
        """Return the expression that creates an equal pipeline."""
        target = () if self.target is None else (repr(self.target),)
        return f"Pipeline({', '.join((*target, *(f'{name}={value!r}' for name, value in self.options.items())))})"

    @_command
    def profile(
        self,
        *,
        estimate: bool = False,
        on_progress: Progress | None = None,
        **options: Unpack[table.ProfileOptions],
    ) -> ProfileResult:
        """Capture the model, measure it, and write profile.json.

        ``estimate``: count operations and bytes only, without timing and without memory for the weights.
        """
        from autopipe.commands import artifact_steps

        given = self._merged(options, table.ProfileOptions) | {"estimate": estimate}
        settings = settings_of.profile_settings(self.target, given)
        return artifact_steps.profile(settings, on_progress, given.get("batch_size"))

    @_command
    def plan(
        self,
        *,
        explain: bool = False,
        on_progress: Progress | None = None,
        **options: Unpack[table.PlanOptions],
    ) -> PlanResult:
        """Cut the model into stages and write plan.json. ``explain``: also return the reasons for each cut."""
        from autopipe.commands import artifact_steps

        settings = settings_of.plan_settings(self.target, self._merged(options, table.PlanOptions))
        return artifact_steps.plan(settings, on_progress, explained=explain)

    @_command
    def generate(self, *, on_progress: Progress | None = None) -> GenerateResult:
        """Write the stages of the stored plan as Python files."""
        from autopipe.commands import artifact_steps

        return artifact_steps.generate(self._work_dir(), on_progress)

    @_guarded
    def simulate(
        self, *, on_progress: Progress | None = None, **options: Unpack[table.SimulateOptions]
    ) -> SimulateResult:
        """Simulate the stored plan without running it, and write timeline.json."""
        from autopipe.commands.planning import simulating

        given = option_values.parsed(options, table.SimulateOptions)
        schedule = given.get("schedule")
        return simulating.simulate(
            given.get("work_dir") or self._work_dir(),
            None if schedule == "auto" else schedule,
            on_progress,
            settings_of.order_settings(given),
            given.get("trace"),
        )

    @_command
    def check(self, *, on_progress: Progress | None = None, **options: Unpack[table.CheckOptions]) -> CheckReport:
        """Train a few steps plainly and in stages, and compare every parameter; see ``CheckReport.equal``."""
        from autopipe.commands.training import runs

        settings = settings_of.check_settings(self.target, self._merged(options, table.CheckOptions))
        return runs.check(settings, on_progress)

    @_command
    def train(
        self,
        *,
        on_event: Events | None = None,
        stop: StopEvent | None = None,
        devices: Sequence[int] = (),
        **options: Unpack[table.TrainOptions],
    ) -> TrainResult:
        """Train, after running every step that is missing or stale.

        ``on_event`` is called with the kind and the fields of each event. ``stop``: once its ``is_set()`` returns true,
        the run stops after the current minibatch, with a checkpoint; signals are then left to the caller. Without
        ``stop``, the first Ctrl-C stops the run in this way. ``devices``: indices of the GPUs that ranks on this
        machine may use; () for all.

        Raises: WorkerError for the first rank that failed.
        """
        return self._trained(self._merged(options, table.TrainOptions), on_event, stop, devices)

    @_guarded
    def steps(
        self,
        batches: Iterable[Any],
        *,
        on_event: Events | None = None,
        devices: Sequence[int] = (),
        **options: Unpack[table.TrainOptions],
    ) -> Steps:
        """Train in a loop of the caller: ``for loss in pipe.steps(batches)``, one optimizer step for each minibatch.

        ``batches`` yields minibatches as ``data`` of a model file does: (inputs, target) or a dict. It is read in the
        calling thread, and the next minibatch only after the loop's body of the one before. Each loss is a float with
        the attributes ``step`` and ``learning_rate``. The training ends, with a checkpoint, when the iterable ends, at
        ``break``, and at an exception in the loop. ``result`` of the returned object is then the ``TrainResult``.
        ``on_event`` is called in another thread. Options are those of ``train``, except for those of the data.

        Raises: RunError for an option that such a training cannot have. The loop raises what ``train`` raises.
        """
        from autopipe.commands.loop import Steps, refuse_options

        refuse_options(options)
        self._merged(options, table.TrainOptions)  # an invalid value is an error here, not in the loop

        def train(first: Any, address: str, on_event: Events, stop: StopEvent) -> TrainResult:
            return self._train_loop(first, address, on_event, stop, devices, **options)

        return Steps(batches, train, on_event)

    @_command
    def _train_loop(
        self,
        first: Any,
        address: str,
        on_event: Events,
        stop: StopEvent,
        devices: Sequence[int],
        **options: Unpack[table.TrainOptions],
    ) -> TrainResult:
        from autopipe.commands.loop import options_of

        given = options_of(self._merged(options, table.TrainOptions), first)
        return self._trained(given, on_event, stop, devices, address)

    def _trained(
        self,
        given: Mapping[str, Any],
        on_event: Events | None,
        stop: StopEvent | None,
        devices: Sequence[int],
        loop: str = "",
    ) -> TrainResult:
        """Train with options that are merged. ``loop``: as in ``TrainSettings``."""
        from autopipe.commands.training import runs
        from autopipe.commands.training.external_ranks import placed

        launch = settings_of.launch_settings(given)
        if launch.name not in _IN_PROCESS:
            raise RunError(
                f"launcher {launch.name!r} works on the command line only: it starts the command once for each rank",
                remedy=f"run autopipe train --launcher {launch.name}, or use launcher 'local' or 'ssh' in Python",
            )
        settings = placed(settings_of.train_settings(self.target, given, launch=launch, devices=devices))
        settings = dataclasses.replace(settings, loop=loop)
        run = functools.partial(runs.train, settings, on_event or ignore_event)
        result = run() if stop is None else run(stop=stop.is_set)
        self._last_run = Path(result.run_dir)
        return result

    @_command
    def evaluate(
        self,
        run: table.StrPath | None = None,
        *,
        on_event: Events | None = None,
        **options: Unpack[table.EvaluateOptions],
    ) -> EvaluateResult:
        """Evaluate a run on held-out data, from its newest checkpoint.

        ``run``: its directory; None for the run of the last ``train``, else the newest run of the work directory.
        """
        from autopipe.commands.training import runs

        given = {"work_dir": self._work_dir()} | option_values.parsed(options, table.EvaluateOptions)
        return runs.evaluate(settings_of.evaluate_settings(self._run(run), given), on_event)

    @_command
    def export(
        self, output: table.StrPath, run: table.StrPath | None = None, **options: Unpack[table.ExportOptions]
    ) -> ExportResult:
        """Write a run's weights as one file, or as a folder, for the unmodified model.

        ``output``: a file name with the suffix .safetensors or .pt, or a folder. ``run``: as in ``evaluate``.
        """
        from autopipe.commands.training import runs

        given = {"work_dir": self._work_dir()} | option_values.parsed(options, table.ExportOptions)
        return runs.export(settings_of.export_settings(Path(output), self._run(run), given))

    @_guarded
    def report(
        self,
        output: table.StrPath = "report.html",
        run: table.StrPath | None = None,
        *,
        on_progress: Progress | None = None,
        **options: Unpack[table.WorkOptions],
    ) -> ReportResult:
        """Write a page about a run or the plan: one HTML file, which needs no network.

        ``run``: a run directory, its name, or ``"plan"``; None for the run of the last ``train``, else the newest run
        of the work directory, else the plan.
        """
        from autopipe.commands.reporting import report
        from autopipe.commands.settings import ReportSettings

        given = {"work_dir": self._work_dir()} | option_values.parsed(options, table.WorkOptions)
        subject = self._last_run if run is None else run
        name = None if subject is None else str(subject)
        return report(ReportSettings(Path(output), run=name, work_dir=Path(given["work_dir"])), on_progress)

    @_command
    def plain(
        self,
        output: table.StrPath = "loop.py",
        run: table.StrPath | None = None,
        *,
        on_progress: Progress | None = None,
        **options: Unpack[table.PlainOptions],
    ) -> PlainResult:
        """Write the plain loop as a script that does not import autopipe.

        ``run``: a run whose model, settings and steps are used; None for the model of the pipeline.
        """
        from autopipe.commands.plain.plain import plain

        given = self._merged(options, table.PlainOptions)
        target = self.target if run is None else None
        settings = settings_of.plain_settings(target, Path(output), None if run is None else Path(run), given)
        return plain(settings, on_progress)

    def _merged(self, options: Mapping[str, Any], kind: type) -> dict[str, Any]:
        """Return the options of a call: its own, and those of the pipeline that the method accepts."""
        known = table.options_of(kind)
        shared = {name: value for name, value in self.options.items() if name in known}
        merged = shared | option_values.parsed(options, kind)
        while (pair := table.exclusive_pair(known, merged)) is not None:  # keep the option of the call, drop the other
            merged.pop(next(name for name in pair if options.get(name) is None))
        return merged

    def _work_dir(self) -> Path:
        return Path(self.options.get("work_dir") or WORK_DIRECTORY)

    def _run(self, run: table.StrPath | None) -> Path | None:
        return self._last_run if run is None else Path(run)
