"""Capture a model that is loaded: in parts of a batch or as a whole, and for the members of a team."""

from __future__ import annotations

import contextlib
import dataclasses

import torch
from torch import nn

from autopipe.commands.changing import Looking, with_homes
from autopipe.commands.settings import ModelSettings, ProfileSettings
from autopipe.commands.store import Work
from autopipe.errors import ModelFileError, RunError, TraceError
from autopipe.ir.profile import Profile, WorkloadSpec
from autopipe.ir.teams.axis_sets import choose
from autopipe.launch.rank.cpu_tuning import return_freed_memory
from autopipe.measure.on_device import described_as, described_on
from autopipe.trace import Capture, capture
from autopipe.trace.axes import choose_verified, find_axes
from autopipe.trace.explain import depends_on_data
from autopipe.trace.teams import difference, member_of
from autopipe.workload import Workload
from autopipe.workload.batches.items import kept, shapes
from autopipe.workload.cutting.dimensions import REMEDY
from autopipe.workload.model.placeholders import has_placeholders
from autopipe.workload.target.targets import user_line

_ENOUGH = 5  # samples, so that each half has at least two


def captured_with(
    settings: ProfileSettings,
    work: Work,
    workload: Workload,
    built: nn.Module,
    stored: Profile | None,
    *,
    verify: bool,
    state: bool,
    kind: str,
    proven_on: str = "cpu",
) -> Capture:
    """Return the capture of a loaded model; for a team, that of a member.

    ``kind``: of the device that the graph is described for. The other arguments: see ``models.load_model``.
    """
    minibatch = workload.batches.minibatch

    def captured_now() -> Capture:
        with contextlib.ExitStack() as stack:
            looking = stack.enter_context(Looking(workload)) if state else None
            captured = capture(
                workload,
                model=built,
                allow_data_dependent=settings.allow_data_dependent,
                verify=verify and not settings.estimate,
                lengths=stored is None or len(stored.graph.symbols) > 1,
                changing=None if looking is None else looking.survey,
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
        team, sequence = team_of(settings.model, stored.workload)
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
            return described_as(stored.graph, captured)
    return described_on(kind, captured, workload) if workload.spec.team == 1 else captured


def team_of(model: ModelSettings, stored: WorkloadSpec | None = None) -> tuple[int, bool]:
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
