"""``--resume`` with other options: each is applied or refused. Options that are not given have the run's values.

==================================  ================================================================================
option                              with ``--resume``
==================================  ================================================================================
--lr                                applied from here on; refused if a scheduler sets the rate
--optimizer, an edited hook         refused if the optimizer or scheduler differs from the one at the run's start
--seed, --batch-size                another value is refused: random numbers and the position in the data depend on it
--num-microbatches, --precision,    applied from here on, with a note
--clip-grad-norm, --ema,
--deferred-batch-norm, --compile
==================================  ================================================================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace

from autopipe.commands.changing import refuse_varying
from autopipe.commands.prepared import Prepared
from autopipe.commands.settings import MAX_SHAPES, PlanSettings, TrainSettings
from autopipe.commands.store import PlanRecord, Store
from autopipe.errors import ArtifactError, AutopipeError, RunError, counted
from autopipe.ir import artifact
from autopipe.ir.plan import Plan
from autopipe.runtime.checkpoint.checkpoint import Checkpoint
from autopipe.runtime.checkpoint.manifest import TrainingOptions
from autopipe.runtime.job import RunDirectory
from autopipe.runtime.training_state.stage import Training, edits, refuse_partial, tree_for
from autopipe.schedules import REGISTRY
from autopipe.workload import Workload

_SHOWN = 4
_FROM_WEIGHTS = "start a new run from its weights (autopipe export, then --init-from)"


def with_own_plan(settings: TrainSettings, run: RunDirectory) -> TrainSettings:
    """Return the settings with the length of the run, if none is given. Its plan becomes that of the work directory.

    Raises: ArtifactError if its files are damaged.
    """
    if settings.steps is None is settings.epochs and not settings.loop:
        job = run.job()
        settings = replace(settings, steps=job.steps or None, epochs=job.epochs or None)
    if not run.record.is_file():  # of an earlier version
        return settings
    plan, store = run.plan(), Store(settings.plan.work_dir)
    record = artifact.load(PlanRecord, run.record, renew=f"remove {run.record}, and the plan is made again")
    store.refuse_mismatch(plan, record)
    try:
        stored, _ = store.stored_plan()
    except ArtifactError:
        stored = None
    if stored is None or stored.digest != plan.digest:
        artifact.save(plan, store.plan)
        artifact.save(record, store.record)
    return replace(settings, plan=replace(settings.plan, resumed=True))


def as_recorded(settings: TrainSettings, source: Checkpoint) -> TrainSettings:
    """Return the settings, with the checkpoint's value for every option that is not given.

    Raises: RunError for an option that contradicts the checkpoint.
    """
    refuse_partial(source)
    recorded = source.manifest.options
    assert recorded is not None
    plan = settings.plan
    model = plan.profile.model
    if model.seed is not None and model.seed != source.manifest.seed:
        raise RunError(
            f"--seed is {model.seed}, but the run has seed {source.manifest.seed}, which determines the order of its "
            "data and its random numbers",
            where=str(source.directory),
            remedy=f"omit --seed; for another seed, {_FROM_WEIGHTS}",
        )
    if recorded.batch_size and plan.batch_size not in (None, recorded.batch_size):
        raise RunError(
            f"--batch-size is {plan.batch_size}, but the run has minibatches of {recorded.batch_size}, in which its "
            "position in the data is counted",
            where=str(source.directory),
            remedy=f"omit --batch-size; for another size, {_FROM_WEIGHTS}",
        )
    rate = recorded.lr if model.learning_rate is None else model.learning_rate
    hooks = dict(model.hooks)
    if recorded.optimizer:
        hooks.setdefault("optimizer", recorded.optimizer)
    model = replace(
        model,
        seed=source.manifest.seed,
        learning_rate=rate,
        hooks=hooks,
        precision=model.precision or recorded.precision,
    )
    ema = (recorded.ema or None) if plan.ema is None else plan.ema
    plan = replace(plan, profile=replace(plan.profile, model=model), ema=ema)
    return replace(
        settings,
        plan=plan if _stored_plan_fits(plan, recorded) else _as_planned(plan, recorded),
        clip_grad_norm=recorded.clip_grad_norm if settings.clip_grad_norm is None else settings.clip_grad_norm,
        deferred_batch_norm=settings.deferred_batch_norm or recorded.deferred_batch_norm,
        compile=recorded.compile if settings.compile is None else settings.compile,
        new_rate=None if rate == recorded.lr else rate,
    )


def _stored_plan_fits(settings: PlanSettings, recorded: TrainingOptions) -> bool:
    """Return whether the stored plan splits minibatches as the run did, and no option requires another plan.

    Then the values of the run are not added to the settings, because these are stored with a new plan and would apply
    to later runs as well.
    """
    given = replace(settings, max_shapes=MAX_SHAPES, ema=None, elsewhere=False, resumed=False)
    if given != PlanSettings(settings.profile):
        return False
    try:
        stored, _ = Store(settings.work_dir).stored_plan()
    except ArtifactError:
        return False
    same_schedule = stored.schedule == recorded.schedule or all(
        name in REGISTRY and REGISTRY[name].synchronous for name in (stored.schedule, recorded.schedule)
    )
    sizes = stored.num_microbatches, stored.batch_size if recorded.batch_size else 0
    return same_schedule and sizes == (recorded.num_microbatches, recorded.batch_size)


def _as_planned(settings: PlanSettings, recorded: TrainingOptions) -> PlanSettings:
    """Return the settings of a plan with the minibatches, microbatches and weight versions of the run."""
    pinned = replace(settings, batch_size=settings.batch_size or recorded.batch_size or None)
    if (pinned.num_microbatches, pinned.microbatch_size) == (None, None) and recorded.schedule != "custom":
        pinned = replace(pinned, num_microbatches=recorded.num_microbatches)
    kind = REGISTRY.get(recorded.schedule)
    if pinned.schedule is None and kind is not None and not kind.synchronous:
        pinned = replace(pinned, schedule=recorded.schedule)
    return pinned


def refuse_other_training(settings: TrainSettings, prepared: Prepared, source: Checkpoint) -> tuple[str, ...]:
    """Compare the options and hooks with those of the run; return notes on the options that change.

    Raises: RunError if the checkpoint would silently override them, or its state does not fit them.
    """
    recorded = source.manifest.options
    assert recorded is not None
    if settings.new_rate is not None and prepared.workload.stepping.has_scheduler:
        raise RunError(
            f"--lr is {settings.new_rate:g}, but a scheduler sets the learning rate of this run at every step, from "
            "rates in its state",
            where=str(source.directory),
            remedy=f"omit --lr; for other rates, {_FROM_WEIGHTS}",
        )
    if recorded.num_microbatches != prepared.plan.num_microbatches:
        refuse_varying(
            prepared.graph,
            f"the run has had {counted(recorded.num_microbatches, 'microbatch')} a step until now, and "
            f"{prepared.plan.num_microbatches} would change how often its Python has run",
        )
    hooks = _Hooks(prepared.workload, prepared.plan)
    first, second = (edits(source, hooks.build, rates=settings.new_rate is None) for _ in range(2))
    # a value that differs from build to build, such as a time, is not an edit
    differences = [f"{path} {text}" for path, text in first.items() if second.get(path) == text]
    if differences:
        more = f"; {counted(len(differences) - _SHOWN, 'more difference')}" if len(differences) > _SHOWN else ""
        raise RunError(
            f"optimizer and scheduler differ from those at the run's start: {'; '.join(differences[:_SHOWN])}{more}",
            where=str(source.directory),
            remedy=f"restore the former optimizer (only --lr may change); or {_FROM_WEIGHTS}",
        )
    for training in hooks.trainings:
        tree_for(source, training)
    now = _options(settings, prepared.plan)
    return tuple(
        f"continuing with {text} {getattr(now, field)} (before: {getattr(recorded, field)})"
        for field, text in {
            "num_microbatches": "num-microbatches",
            "precision": "precision",
            "clip_grad_norm": "clip-grad-norm",
            "deferred_batch_norm": "deferred-batch-norm",
            "ema": "ema",
            "compile": "compile",
            "lr": "a learning rate of",
        }.items()
        if getattr(now, field) != getattr(recorded, field)
    )


def _options(settings: TrainSettings, plan: Plan) -> TrainingOptions:
    spec = plan.workload
    recorded = TrainingOptions(spec.optimizer, spec.lr, spec.precision, 0, plan.num_microbatches)
    return dataclasses.replace(
        recorded,
        clip_grad_norm=settings.clip_grad_norm or 0.0,
        deferred_batch_norm=settings.deferred_batch_norm,
        ema=settings.plan.ema or 0.0,
        compile=bool(settings.compile),
    )


class _Hooks:
    """Builds optimizers and schedulers with the hooks, over empty parameters if possible.

    Raises: ModelFileError if the hooks fail.
    """

    def __init__(self, workload: Workload, plan: Plan) -> None:
        self.workload = workload
        try:
            self.named = dict(workload.build_model(empty=True).named_parameters())
            self.trainings = self._of_stages(plan)
        except AutopipeError:
            self.named = dict(workload.build_model().named_parameters())
            self.trainings = self._of_stages(plan)

    def build(self, owned: Sequence[str]) -> Training | None:
        """Build for the parameters that a stage steps."""
        parameters = {name: self.named[name] for name in owned if name in self.named}
        optimizer = self.workload.optimizer(list(parameters.items()))
        return None if optimizer is None else Training(parameters, optimizer, self.workload.scheduler(optimizer))

    def _of_stages(self, plan: Plan) -> list[Training]:
        trainings = []
        for stage in plan.stages:
            copies = {tie.parameter for tie in plan.ties if stage.index in tie.copies}
            trainings.append(self.build([n for n in self.named if n in stage.parameters and n not in copies]))
        return [training for training in trainings if training is not None]
