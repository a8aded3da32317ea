"""Measure the model of a command. The stored profile is reused while it is up to date.

A GPU is measured in a process of its own (``apart``), which captures the model and writes profile.json. The command
then loads the model as it does with any stored profile: both never hold it in memory at a time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autopipe.capture_inputs import store
from autopipe.commands.checking.batch_sizes import PlainModel, taken
from autopipe.commands.models import Model, counted_if_too_large, load_model
from autopipe.commands.planning.request import (
    BETWEEN_SECONDS,
    COUNTED_SIZES,
    ENOUGH_SECONDS,
    MICROBATCH_SIZES,
    NO_SIZES,
    QUICK_SECONDS,
    SLOW_SECONDS,
    Sizes,
    larger_sizes,
)
from autopipe.commands.settings import ModelSettings, ProfileSettings
from autopipe.commands.store import Input, Work, stale, team_inputs
from autopipe.errors import ProfileError, RunError, counted
from autopipe.ir import artifact, decoding
from autopipe.ir.graph import Graph
from autopipe.ir.profile import COUNTED, Profile, WorkloadSpec
from autopipe.measure import estimate, measure
from autopipe.measure.device import find_device, release
from autopipe.trace.axes import find_axes
from autopipe.trace.loss.coupling import statistics_notes
from autopipe.trace.numbers import WithNumbers
from autopipe.trace.placed import Place, used
from autopipe.trace.teams import alone
from autopipe.workers.task import Link
from autopipe.workers.worker import Worker, needs_worker, result_of
from autopipe.workload.cutting.dimensions import Minibatch
from autopipe.workload.model.placeholders import has_placeholders

Accept = Callable[[Graph], None]
"""Takes the captured graph before it is measured; raises to refuse it."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A new profile, which has been written, and what its capture said."""

    profile: Profile
    method: str  # of the capture
    warnings: tuple[str, ...]  # about the model


@dataclass(frozen=True, slots=True)
class _Task:
    """What the process that measures a model needs to know: the arguments of ``measure_anew``."""

    model: ModelSettings
    work_dir: str
    device: str | None
    microbatch_sizes: tuple[int, ...] | None
    threads: int | None
    allow_data_dependent: bool
    verify: bool
    sizes: Sizes
    minibatch: Minibatch | None
    # see ``load_model``
    proven_on: str


def measured_apart(settings: ProfileSettings) -> bool:
    """Return whether the model is measured in a process of its own.

    Raises: ProfileError if this machine does not have the device of the settings.
    """
    return not settings.estimate and needs_worker(find_device(settings.device or "auto").type)


def measure_anew(
    settings: ProfileSettings,
    work: Work,
    sizes: Sizes = NO_SIZES,
    accept: Accept | None = None,
    minibatch: Minibatch | None = None,
) -> Measured:
    """Capture, verify and measure the model, and write profile.json. ``minibatch``: see ``load_model``.

    Raises: ProfileError if the process that measures ends early; the errors of ``load_model``, ``accept`` and
    ``measure_model``.
    """
    if measured_apart(settings):
        return _measured_in_another_process(settings, work, sizes, accept, minibatch)
    return _measured_here(settings, work, sizes, accept, minibatch)


def _with_numbers(model: Model) -> Any:
    graph = model.graph
    return WithNumbers(model.workload, graph.numbers) if graph.varies else model.workload


def _measured_here(
    settings: ProfileSettings,
    work: Work,
    sizes: Sizes,
    accept: Accept | None,
    minibatch: Minibatch | None,
    proven_on: str = "cpu",
) -> Measured:
    if not settings.estimate:  # described for the device that is measured, whatever the stored profile was made for
        settings = dataclasses.replace(settings, device=settings.device or "auto")
    model = load_model(settings, work, verify=settings.verify, minibatch=minibatch, proven_on=proven_on)
    release(torch.device(proven_on))
    if accept is not None:
        accept(model.graph)
    profile = measure_model(model, settings, work, sizes)
    return Measured(profile, model.capture.method, model.notes)


def _measured_in_another_process(
    settings: ProfileSettings, work: Work, sizes: Sizes, accept: Accept | None, minibatch: Minibatch | None
) -> Measured:
    """Measure in a process, which proves the capture on the device that it measures.

    If the capture fails there, another process makes it on the CPU, which alone decides: a GPU may be too small for it,
    or useless after a batch that the model rejects, and it may add in another order from run to run.
    """
    received = set[str]()

    def handle(kind: str, fields: dict[str, Any]) -> None:
        received.add(kind)
        if kind == "progress":
            work.progress(fields["what"], fields["fraction"])
        elif kind == "captured" and accept is not None:
            accept(decoding.decode(Graph, fields["graph"], "graph"))

    def answer_of(proven_on: str) -> dict[str, Any]:
        task = _Task(
            settings.model,
            str(settings.work_dir),
            settings.device,
            settings.microbatch_sizes,
            settings.threads,
            settings.allow_data_dependent,
            settings.verify,
            sizes,
            minibatch,
            proven_on,
        )
        worker = Worker(
            measure_for_command,
            artifact.encode(task),
            doing="measuring the model",
            threads=torch.get_num_threads(),
            failure=ProfileError,
        )
        try:
            answer: dict[str, Any] = result_of(worker, handle)
        finally:
            if worker.died:
                received.add("on device")
        return answer

    device = str(find_device(settings.device or "auto"))
    try:
        answer = answer_of(device)
    except Exception as error:
        if "captured" in received or "on device" not in received:
            raise
        why = (str(getattr(error, "what", error)).strip().splitlines() or [type(error).__name__])[0]
        work.notes.append(f"captured on the CPU, because that failed on {device}: {why}")
        work.progress(f"capturing the model on the CPU, because that failed on {device}", 0.0)
        answer = answer_of("cpu")
    work.notes.extend(note for note in answer["notes"] if note not in work.notes)
    return Measured(work.store.stored_profile(), answer["method"], tuple(answer["warnings"]))


def measure_for_command(task: Any, link: Link) -> dict[str, Any]:
    """Do what ``measure_anew`` does, in the process that it starts. The profile itself is in profile.json."""
    wanted: _Task = decoding.decode(_Task, task, "task")
    settings = ProfileSettings(
        wanted.model,
        Path(wanted.work_dir),
        device=wanted.device,
        microbatch_sizes=wanted.microbatch_sizes,
        threads=wanted.threads,
        allow_data_dependent=wanted.allow_data_dependent,
        verify=wanted.verify,
    )
    work = Work.begin(settings.work_dir, link.progress)

    def accept(graph: Graph) -> None:
        link.ask("captured", graph=artifact.encode(graph))

    try:
        measured = _measured_here(settings, work, wanted.sizes, accept, wanted.minibatch, wanted.proven_on)
    except Exception:
        if used:
            link.send("on device")
        raise
    return {"notes": work.notes, "method": measured.method, "warnings": measured.warnings}


def measure_model(model: Model, settings: ProfileSettings, work: Work, sizes: Sizes = NO_SIZES) -> Profile:
    """Measure a captured model in this process, and write profile.json."""
    own_size = model.workload.num_samples(model.workload.example_item(None))
    if model.capture.coupling.wants_whole and not sizes.exact:
        sizes = dataclasses.replace(sizes, exact=(sizes.batch_size or own_size,))
    minibatch_size = sizes.batch_size or own_size
    larger = larger_sizes(minibatch_size)
    if not model.graph.symbols:  # no size may vary: there is one microbatch size to measure
        wanted = sizes.exact or (model.workload.num_samples(model.workload.example_item(1)),)
        larger = ()
    elif settings.microbatch_sizes:
        wanted, larger = settings.microbatch_sizes, ()
    else:
        device = torch.device("cpu") if settings.estimate else find_device(settings.device or "auto")
        usable = _usable(model, sizes, work, device)
        wanted = usable
        if not settings.estimate:  # larger sizes are for another minibatch, which a later command may name
            wanted = tuple(size for size in usable if size <= minibatch_size or size in sizes.exact) or usable[:1]
        larger = () if sizes.exact else (*(size for size in usable if size > wanted[-1]), *larger)
    named = bool(settings.microbatch_sizes or sizes.exact)
    if settings.estimate:
        profile = estimate(
            alone(model.capture),
            _with_numbers(model),
            microbatch_sizes=wanted,
            larger_sizes=larger,
            progress=work.progress,
        )
    else:
        profile = measure(
            alone(model.capture),
            _with_numbers(model),
            device=settings.device or "auto",
            microbatch_sizes=wanted,
            larger_sizes=larger,
            quick_seconds=QUICK_SECONDS,
            slow_seconds=math.inf if named else SLOW_SECONDS,
            between_seconds=BETWEEN_SECONDS if sizes.quick and not named else math.inf,
            enough_seconds=ENOUGH_SECONDS[sizes.quick],
            threads=settings.threads or 1,
            complete=not has_placeholders(model.built),
            progress=work.progress,
        )
    if model.capture.team == 1:
        model_axes = find_axes(model.capture)
        graph = dataclasses.replace(profile.graph, axes=model_axes.axes, whole=tuple(model_axes.whole.items()))
        profile = dataclasses.replace(profile, graph=graph)
    # so that a plan can be made later without the model file
    verified = model.capture.exact is not None
    profile = dataclasses.replace(profile, batch_size=own_size, coupling=model.capture.coupling, verified=verified)
    artifact.save(profile, work.store.profile)
    work.store.inputs.unlink(missing_ok=True)
    return profile


def _usable(model: Model, sizes: Sizes, work: Work, device: torch.device) -> tuple[int, ...]:
    """Return the sizes to measure: those that the model accepts in training, which may exclude one sample."""
    least = min(sizes.exact, default=1)
    usual = COUNTED_SIZES if sizes.few else (size for size in MICROBATCH_SIZES if size >= least)
    wanted = sorted({*usual, *sizes.exact})
    if any(parameter.is_meta for parameter in model.built.parameters()):
        return tuple(wanted)
    if device in used and _takes_on(device, model, wanted[0]):
        return tuple(wanted)
    usable, why = taken(model.workload, model.built, wanted)
    if why:
        work.notes.append(f"only microbatches of at least {counted(usable[0], 'sample')} are measured: {why}")
    return usable


def _takes_on(device: torch.device, model: Model, size: int) -> bool:
    """Return whether the model trains on a batch of this size on a device. If not, the CPU decides."""
    try:
        with Place(device).having(model.workload, model.built, model.capture):
            plain = PlainModel(model.workload, str(device), model.built)
            return plain.refuses(model.workload.example_item(size), 1) is None
    except Exception:
        return False


def ensure_profile(
    settings: ProfileSettings,
    work: Work,
    sizes: Sizes = NO_SIZES,
    accept: Accept | None = None,
    minibatch: Minibatch | None = None,
    *,
    may_count: bool = False,
) -> tuple[Model, Profile]:
    """Return the model and its profile: the stored one if model, device and sizes are unchanged.

    ``minibatch``: see ``load_model``. ``may_count``: a model that does not fit this machine is counted and not
    measured.
    """
    stored, reason = work.load(Profile, work.store.profile), "no profile found"
    loaded: Model | None = None
    if stored is not None:

        def load(how: ProfileSettings) -> Model:
            # a graph that equals the stored one was verified when that was captured
            return load_model(how, work, verify=False, stored=stored, minibatch=minibatch, reuse=True)

        model, settings = counted_if_too_large(load, settings, work) if may_count else (load(settings), settings)
        reason = stale(profile_inputs(stored, model, settings))
        if not reason:
            if accept is not None:
                accept(model.graph)
            unverified = (
                "" if stored.verified or settings.estimate else ", whose capture was not compared with the model"
            )
            work.notes.append(f"profile of {stored.graph.name} reused{unverified}")
            if stored.graph.symbols:  # the capture was not verified again, which gives this warning
                notes = dict.fromkeys((*model.notes, *statistics_notes(stored.graph)))
                model = dataclasses.replace(model, notes=tuple(notes))
            store(model.inputs, stored.graph.digest, work.store.inputs)
            # a seed or a learning rate given to this command only is not stored
            return model, dataclasses.replace(stored, workload=model.workload.spec)
        if not settings.verify and not measured_apart(settings):
            loaded = model
        del model  # it is built again

    def measure_now(how: ProfileSettings) -> tuple[Model, Profile]:
        if measured_apart(how):
            return _loaded_after(measure_anew(how, work, sizes, accept, minibatch), how, work, minibatch)
        model = loaded or load_model(how, work, verify=how.verify, minibatch=minibatch)
        if accept is not None:
            accept(model.graph)
        return model, measure_model(model, how, work, sizes)

    model, profile = counted_if_too_large(measure_now, settings, work)[0] if may_count else measure_now(settings)
    captured_by = profile.graph.captured_by
    work.notes.append(f"profiled {counted(len(profile.graph.nodes), 'op')}, captured by {captured_by} ({reason})")
    store(model.inputs, profile.graph.digest, work.store.inputs)
    return model, profile


def _loaded_after(
    measured: Measured, settings: ProfileSettings, work: Work, minibatch: Minibatch | None
) -> tuple[Model, Profile]:
    """Load the model that another process has measured.

    Raises: RunError if it is another model in this process.
    """
    profile = measured.profile
    model = load_model(settings, work, verify=False, stored=profile, state=False, minibatch=minibatch)
    if model.graph.digest != profile.graph.digest:
        raise RunError(
            f"the model differs from process to process: {profile.graph.digest} where it was measured, and "
            f"{model.graph.digest} here",
            where=model.workload.name,
            remedy="build the same model in every process, as ranks do, too: without sets in the order of their "
            "hashes, the time, or a process id",
        )
    model = dataclasses.replace(model, notes=measured.warnings)
    return model, dataclasses.replace(profile, workload=model.workload.spec)


def profile_inputs(stored: Profile, model: Model, settings: ProfileSettings) -> Iterator[Input]:
    """Yield the inputs of a stored profile, compared with a model and the settings of a command."""
    spec, device = model.workload.spec, stored.device
    counted = device.kind == COUNTED and not settings.estimate
    yield Input(counted, False, "the stored profile was counted and not timed")
    yield from team_inputs(stored.workload, spec)
    yield Input(stored.graph.digest, model.graph.digest, "the model changed ({written} -> {now})")
    yield Input(_costs_of(stored.workload), _costs_of(spec), "the options of the model changed")
    wanted = find_device("auto").type if settings.device == "auto" else (settings.device or device.kind)
    yield Input(device.kind, wanted.partition(":")[0], "the device changed ({written} -> {now})")
    threads = device.threads if settings.threads is None else settings.threads
    yield Input(device.threads, threads, "the threads of a rank changed ({written} -> {now})")
    measured = {measurement.microbatch_size for measurement in stored.measurements}
    for size in settings.microbatch_sizes or ():
        yield Input(size in measured, True, f"microbatch size {size} was not measured")


def _costs_of(spec: WorkloadSpec) -> WorkloadSpec:
    """Return the part of a spec that determines the cost of the model.

    Without seed and learning rate, which do not affect it, and ``batch_dims``, which changes the graph.
    """
    return dataclasses.replace(spec, seed=0, lr=None, batch_dims=None)
