"""Load and capture the model of a command."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from autopipe.commands.changing import changing, with_homes
from autopipe.commands.settings import ModelSettings, ProfileSettings
from autopipe.commands.store import Work
from autopipe.commands.trusted_code import refuse_untrusted
from autopipe.errors import ModelFileError, RunError, TraceError
from autopipe.ir.profile import Profile, WorkloadSpec
from autopipe.ir.teams.axis_sets import choose
from autopipe.launch.rank.cpu_tuning import return_freed_memory
from autopipe.measure.device import find_device
from autopipe.measure.on_device import described_as, described_on
from autopipe.trace import Capture, capture
from autopipe.trace.axes import choose_verified, find_axes
from autopipe.trace.explain import depends_on_data
from autopipe.trace.teams import difference, member_of
from autopipe.workload import LoadOptions, Workload
from autopipe.workload.batches.items import kept, shapes
from autopipe.workload.cutting.dimensions import REMEDY, Minibatch
from autopipe.workload.model.placeholders import has_placeholders
from autopipe.workload.model.size_limits import TooLargeError, build_within_memory, loading_within_memory
from autopipe.workload.target.targets import user_line

T = TypeVar("T")
_ENOUGH = 5  # samples, so that each half has at least two
_TOO_LARGE = (
    "to plan for other devices, count it without memory: autopipe profile TARGET --estimate, then "
    "autopipe plan --gpus N --device-name NAME; to train it here, use a machine with more memory, or a smaller model"
)

_PLACEHOLDERS = (
    "a large model: this command does not hold its weights, but random ones that share memory; each rank builds the "
    "weights that it trains"
)


@dataclass(frozen=True, slots=True)
class Model:
    """The user's model: its workload, its capture, and the module itself."""

    workload: Workload
    capture: Capture
    built: nn.Module


def load_model(
    settings: ProfileSettings,
    work: Work,
    *,
    verify: bool,
    stored: Profile | None = None,
    state: bool = True,
    minibatch: Minibatch | None = None,
    proven_on: str = "cpu",
) -> Model:
    """Load and capture the model.

    ``stored``: an earlier profile, whose tested ranges of sizes are reused if the graph is equal. ``state``: as in
    ``capture``. ``minibatch``: the batch size and the number of microbatches, if known. ``proven_on``: the device of
    ``capture``. A large model gets placeholders for its parameters, and a note says so.

    Raises: RunError if no model was named; the errors of ``capture``.
    """
    work.progress(f"importing the model: {settings.model.target}".removesuffix(": "), 0.0)
    with loading_within_memory(settings.model.target, _TOO_LARGE):
        workload = _workload(settings.model, work)
    if minibatch is not None:
        workload.batches.minibatch = minibatch
    work.progress(f"capturing the model: {workload.name}", 0.0)
    kind = device_kind(settings, work)
    built = _built(workload, settings, work, stored, whole=kind == "cpu" and not work.elsewhere)

    def captured_now() -> Capture:
        captured = capture(
            workload,
            model=built,
            allow_data_dependent=settings.allow_data_dependent,
            verify=verify and not settings.estimate,
            lengths=stored is None or len(stored.graph.symbols) > 1,
            state=state,
            changing=lambda: changing(workload),
            numbers=stored.graph.numbers if stored is not None and stored.graph.varies and not state else None,
            device=torch.device(proven_on),
        )
        if has_placeholders(built):
            return_freed_memory()
        return with_homes(captured, workload, None if stored is None else stored.graph)

    try:
        captured = captured_now()
    except TraceError as error:
        if proven_on != "cpu":  # the CPU decides
            raise
        if settings.estimate:
            if depends_on_data(error.__cause__):
                error.remedy = (
                    "profile the model without --estimate, in a size that fits this machine: costs that depend on the "
                    "values in the batch can only be measured, not counted"
                )
            raise
        _refuse_misfit(workload)
        uncut = _not_cut(workload)
        if uncut is None or type(uncut.__cause__).__name__ not in error.what:
            raise  # not caused by the split
        if minibatch is None or minibatch.parts > 1:
            raise uncut from None
        workload.batches.train_whole()
        captured = captured_now()
        work.notes.append("each batch is one microbatch, because the model fails on a part of a batch")
    work.notes.extend(note for note in workload.build_notes if note not in work.notes)
    if stored is not None and stored.graph.model_digest == captured.graph.digest:
        team, sequence = _team_of(settings.model, stored.workload)
        workload.run_in_teams(team, sequence=sequence)
    if settings.model.sequence and workload.spec.team == 1:
        raise RunError(
            "--sequence-parallel divides the positions of values among the members of a team, and there is no team",
            remedy="give --tensor-parallel N, too",
        )
    if workload.spec.team > 1:
        captured = _member(workload, described_on(kind, captured, workload), stored, work)
    if stored is not None and stored.graph.digest == captured.graph.digest:
        # the stored ranges of sizes and exactness were tested on real batches
        known = dataclasses.replace(
            captured.graph,
            symbols=stored.graph.symbols,
            exact=stored.graph.exact,
            homes=stored.graph.homes,
            axes=stored.graph.axes,
            whole=stored.graph.whole,
        )
        captured = dataclasses.replace(captured, graph=known)
        if stored.device.kind == kind:
            return Model(workload, described_as(stored.graph, captured), built)
    if workload.spec.team == 1:
        captured = described_on(kind, captured, workload)
    return Model(workload, captured, built)


def _team_of(model: ModelSettings, stored: WorkloadSpec | None = None) -> tuple[int, bool]:
    """Return the members of each rank, and whether they have their own positions of values.

    What the options leave open is as in ``stored``.
    """
    size = model.team or (1 if stored is None else stored.team)
    sequence = stored is not None and stored.sequence if model.sequence is None else model.sequence
    return size, sequence and size > 1


def _member(workload: Workload, complete: Capture, stored: Profile | None, work: Work) -> Capture:
    """Return the capture of a member of a team. Axes are verified, unless the graph of a stored profile results.

    Raises: TraceError if the model has nothing that a team of this size can shard.
    """
    size, sequence = workload.spec.team, workload.spec.sequence
    work.progress(f"sharding {workload.name} over a team of {size}", 0.0)
    axes = find_axes(complete).axes
    chosen = choose(complete.graph, axes, size)
    if chosen and stored is not None and stored.workload.team == size:
        with contextlib.suppress(TraceError):
            member = member_of(complete, chosen, size, sequence=sequence)
            if member.graph.digest == stored.graph.digest:
                return member
    sizes = complete.graph.symbols
    leaves = workload.leaves(workload.example_item(sizes[0].hint + 1 if sizes else None))
    verified = choose_verified(complete, axes, leaves, size)
    work.notes.extend(note for note in verified.notes if note not in work.notes)
    if not verified.axes:
        raise TraceError(
            f"{workload.name} has nothing that a team of {size} can shard: every member would compute the same",
            where=workload.files[0] if workload.files else "",
            remedy="omit --tensor-parallel; `autopipe profile` shows which sizes can be divided",
        )
    member = member_of(complete, verified.axes, size, sequence=sequence)
    why = difference(complete, member, verified.axes, leaves) if sequence else ""
    if why:
        raise TraceError(
            f"--sequence-parallel is not used for {workload.name}: with a member's own positions, {why}",
            where=workload.files[0] if workload.files else "",
            remedy="train without --sequence-parallel, and report the model",
        )
    return member


def _built(
    workload: Workload, settings: ProfileSettings, work: Work, stored: Profile | None, *, whole: bool
) -> nn.Module:
    """Return the model. ``whole``: see ``build_within_memory``."""
    with _threads_of_ranks(settings, stored):
        if settings.estimate:
            return workload.build_model(empty=True)
        size = 0 if stored is None else stored.graph.parameter_bytes
        built = build_within_memory(workload, whole=whole, remedy=_TOO_LARGE, known_bytes=size)
    if has_placeholders(built):
        return_freed_memory()
        work.notes.append(_PLACEHOLDERS)
    return built


@contextlib.contextmanager
def _threads_of_ranks(settings: ProfileSettings, stored: Profile | None) -> Iterator[None]:
    """Use as many threads as a rank: an initialization such as ``orthogonal_`` rounds differently with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads or (1 if stored is None else stored.device.threads))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def counted_if_too_large(
    load: Callable[[ProfileSettings], T], settings: ProfileSettings, work: Work
) -> tuple[T, ProfileSettings]:
    """Load a model, without memory for its weights if they do not fit this machine. A note says so.

    Returns what ``load`` returns, and the settings with which the model was loaded.

    Raises: TooLargeError if the settings request a measurement on a device; the errors of ``load``.
    """
    try:
        return load(settings), settings
    except TooLargeError as error:
        if settings.device not in (None, "auto"):
            raise
        work.notes.append(f"{error.what}; its operations and bytes were counted instead, and nothing was timed")
        settings = dataclasses.replace(settings, estimate=True)
        return load(settings), settings


def device_kind(settings: ProfileSettings, work: Work) -> str:
    """Return the kind of the device that the model is measured for, as ``measure`` chooses it."""
    if settings.estimate:
        return "cpu"
    wanted = settings.device
    stored = work.load(Profile, work.store.profile) if wanted is None else None
    if stored is not None:
        return stored.device.kind
    return find_device(wanted or "auto").type


def _refuse_misfit(workload: Workload) -> None:
    """Run the unmodified model on one batch of its data. If that fails too, its error is the better message.

    Raises: ModelFileError with the shapes of the batch and the user's line.
    """
    item = workload.example_item(None)
    model = workload.build_model()
    with workload.explained(item):
        workload.loss(model, item)


def _not_cut(workload: Workload) -> ModelFileError | None:
    """Return the error for a model that accepts a whole batch of its data but fails on a part of it; else None."""
    item = workload.example_item(None)
    if workload.is_fixed(item):
        return None
    halves = workload.split(item, 2) if workload.num_samples(item) >= _ENOUGH else []
    model = workload.build_model()
    for part in (workload.example_item(_ENOUGH), *halves):
        try:
            with torch.no_grad():
                workload.loss(model, kept(part))
        except Exception as error:
            text = (str(error).strip().splitlines() or [""])[0]
            uncut = ModelFileError(
                f"the model accepts a batch of its data ({shapes(item)}), but fails on {workload.num_samples(part)} "
                f"samples of it ({shapes(part)}): {type(error).__name__}: {text}",
                where=user_line(error, workload.files[0] if workload.files else ""),
                remedy=f"its samples depend on one another, or another dimension counts them: {REMEDY}",
            )
            uncut.__cause__ = error
            return uncut
    return None


def keeps_decisions(work: Work) -> bool:
    """Return whether the model of the stored profile was captured with ``--allow-data-dependent``."""
    stored = work.load(Profile, work.store.profile)
    return stored is not None and "decisions kept" in stored.graph.captured_by


def _workload(model: ModelSettings, work: Work) -> Workload:
    """Load the model that the settings name, else the one of the stored profile.

    Raises: RunError if there is neither, or another account can write what the profile names.
    """
    hooks = {name: text for name, text in model.hooks.items() if name != "optimizer"}
    if model.is_given:
        team, sequence = _team_of(model)
        spec = LoadOptions(
            model.target,
            arguments=model.arguments,
            hooks=hooks,
            inputs=model.inputs,
            optimizer=model.hooks.get("optimizer", ""),
            lr=model.learning_rate,
            seed=model.seed or 0,
            precision=model.precision or "fp32",
            opaque=model.opaque or "auto",
            team=team,
            sequence=sequence,
        ).spec()
        return Workload(spec)
    path = work.store.profile
    if not path.exists():
        raise RunError(
            f"no model was named, and there is no {path} that names one",
            remedy="name the model file in the command, path/to/file.py; or first: autopipe profile path/to/file.py",
        )
    stored = work.store.stored_profile().workload
    team, sequence = _team_of(model, stored)
    spec = LoadOptions(
        stored.target,
        arguments=stored.arguments | model.arguments,
        hooks=stored.hooks | hooks,
        inputs=model.inputs or stored.inputs,
        optimizer=model.hooks.get("optimizer", stored.optimizer),
        lr=stored.lr if model.learning_rate is None else model.learning_rate,
        seed=stored.seed if model.seed is None else model.seed,
        precision=model.precision or stored.precision,
        opaque=model.opaque or stored.opaque,
        team=team,
        sequence=sequence,
    ).spec()
    named = {f"argument {name}" for name in model.arguments} | set(model.hooks)
    refuse_untrusted(spec, path, "autopipe plan", named=named)
    return Workload(spec)
