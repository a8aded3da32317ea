"""Load and capture the model of a command."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from autopipe.capture_inputs import CaptureInputs, begin, described, newly_read, surroundings
from autopipe.commands.capturing import captured_with, team_of
from autopipe.commands.settings import ModelSettings, ProfileSettings
from autopipe.commands.store import Work
from autopipe.commands.trusted_code import refuse_untrusted
from autopipe.errors import RunError
from autopipe.ir import artifact
from autopipe.ir.graph import Graph
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Profile, WorkloadSpec
from autopipe.launch.rank.cpu_tuning import return_freed_memory
from autopipe.measure.device import find_device
from autopipe.trace import Capture
from autopipe.workload import LoadOptions, Workload
from autopipe.workload.cutting.dimensions import WHOLE, Minibatch
from autopipe.workload.model.placeholders import has_placeholders
from autopipe.workload.model.size_limits import TooLargeError, build_within_memory, loading_within_memory

T = TypeVar("T")
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
    """The user's model: its workload, the module itself, and its graph."""

    workload: Workload
    built: nn.Module
    graph: Graph
    notes: tuple[str, ...]  # about the model
    evaluation_note: str  # see ``Capture``
    make_capture: Callable[[], Capture]
    inputs: CaptureInputs | None = None  # what the capture was made from, but files; None: it is not used again
    unchanged: bool = False  # the graph is the stored one: nothing was captured

    @staticmethod
    def of(workload: Workload, capture: Capture, built: nn.Module) -> Model:
        """Return the model of a capture."""
        return Model(workload, built, capture.graph, capture.notes, capture.evaluation_note, lambda: capture)

    @property
    def capture(self) -> Capture:
        """The capture. Raises: RunError if the stored graph is used, and the model has another one."""
        return self.make_capture()


def load_model(
    settings: ProfileSettings,
    work: Work,
    *,
    verify: bool,
    stored: Profile | None = None,
    state: bool = True,
    minibatch: Minibatch | None = None,
    proven_on: str = "cpu",
    reuse: bool = False,
) -> Model:
    """Load and capture the model.

    ``stored``: an earlier profile, whose tested ranges of sizes are reused if the graph is equal. ``state``: as in
    ``capture``. ``minibatch``: the batch size and the number of microbatches, if known. ``proven_on``: the device of
    ``capture``. ``reuse``: use the graph of ``stored`` if nothing that it was captured from has changed. A large model
    gets placeholders for its parameters, and a note says so.

    Raises: RunError if no model was named; the errors of ``capture``.
    """
    begin()
    given, kind = _given(settings.model, work), device_kind(settings, work)
    if reuse and stored is not None and stored.device.kind == kind:
        model = _unchanged(given, settings, work, stored, minibatch)
        if model is not None:
            return model
    workload = _loaded(given, settings, work, minibatch)
    work.progress(f"capturing the model: {workload.name}", 0.0)
    built = _built(workload, settings, work, stored, kind)
    model_digest = described(built)
    captured = captured_with(
        settings, work, workload, built, stored, verify=verify, state=state, kind=kind, proven_on=proven_on
    )
    model, spec = Model.of(workload, captured, built), workload.spec
    # a later capture of a model that varies would find its Python in another state
    if settings.estimate or model.graph.varies or WHOLE in (spec.batch_dims or {}).values():
        return model
    inputs = CaptureInputs(
        graph_digest=model.graph.digest,
        options=_options(settings, given),
        minibatch=_cut(minibatch),
        surroundings=surroundings(),
        model=model_digest,
        files={},
        batch_dims=spec.batch_dims,
        opaque_modules=spec.opaque_modules,
        team=spec.team,
        sequence=spec.sequence,
        evaluation_note=model.evaluation_note,
        notes=model.notes,
    )
    return dataclasses.replace(model, inputs=inputs)


def _unchanged(
    given: WorkloadSpec, settings: ProfileSettings, work: Work, stored: Profile, minibatch: Minibatch | None
) -> Model | None:
    """Return the model with the stored graph; None if anything that it was captured from has changed."""
    inputs, kind = work.load(CaptureInputs, work.store.inputs), stored.device.kind
    if inputs is None or settings.estimate:
        return None
    plan = work.load(Plan, work.store.plan)
    cuts = [inputs.minibatch, *([] if plan is None else [(plan.num_microbatches, plan.batch_size)])]
    same = (_options(settings, given), stored.graph.digest) == (inputs.options, inputs.graph_digest)
    if not same or _cut(minibatch) not in cuts:
        return None
    if changed := inputs.changed():
        work.notes.append(f"captured again: {changed} has changed")
        return None
    workload = _loaded(inputs.loading(given), settings, work, minibatch)
    built = _built(workload, settings, work, stored, kind)
    new, changed = newly_read(inputs), inputs.changed()  # meanwhile
    if new or changed or described(built) != inputs.model:
        why = f"{new} is read, too" if new else f"{changed} has changed" if changed else "the model is built otherwise"
        work.notes.append(f"captured again: {why}")
        return None
    work.notes.extend(note for note in workload.build_notes if note not in work.notes)

    def again() -> Capture:
        work.progress(f"capturing the model: {workload.name}", 0.0)
        captured = captured_with(settings, work, workload, built, stored, verify=False, state=False, kind=kind)
        if captured.graph.digest != stored.graph.digest:
            work.store.inputs.unlink(missing_ok=True)
            raise RunError(
                f"the graph of {workload.name} has changed ({stored.graph.digest} -> {captured.graph.digest}), and "
                "nothing that is known to change it",
                where=workload.name,
                remedy="repeat the command: it captures the model again",
            )
        return captured

    model = Model(workload, built, stored.graph, inputs.notes, inputs.evaluation_note, functools.cache(again))
    return dataclasses.replace(model, unchanged=True)


def _options(settings: ProfileSettings, given: WorkloadSpec) -> str:
    """Return a digest of the options that a capture depends on."""
    options = dataclasses.replace(settings.model, learning_rate=None), dataclasses.replace(given, lr=None)
    return artifact.digest((*options, settings.allow_data_dependent))


def _cut(minibatch: Minibatch | None) -> tuple[int, int]:
    return (0, 0) if minibatch is None else (minibatch.parts, minibatch.batch_size or 0)


def _loaded(spec: WorkloadSpec, settings: ProfileSettings, work: Work, minibatch: Minibatch | None) -> Workload:
    work.progress(f"importing the model: {settings.model.target}".removesuffix(": "), 0.0)
    with loading_within_memory(settings.model.target, _TOO_LARGE):
        workload = Workload(spec)
    if minibatch is not None:
        workload.batches.minibatch = minibatch
    return workload


def _built(workload: Workload, settings: ProfileSettings, work: Work, stored: Profile | None, kind: str) -> nn.Module:
    whole = kind == "cpu" and not work.elsewhere
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


def keeps_decisions(work: Work) -> bool:
    """Return whether the model of the stored profile was captured with ``--allow-data-dependent``."""
    stored = work.load(Profile, work.store.profile)
    return stored is not None and "decisions kept" in stored.graph.captured_by


def _given(model: ModelSettings, work: Work) -> WorkloadSpec:
    """Return how to load the model that the settings name, else the one of the stored profile.

    Raises: RunError if there is neither, or another account can write what the profile names.
    """
    hooks = {name: text for name, text in model.hooks.items() if name != "optimizer"}
    if model.is_given:
        team, sequence = team_of(model)
        return LoadOptions(
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
    path = work.store.profile
    if not path.exists():
        raise RunError(
            f"no model was named, and there is no {path} that names one",
            remedy="name the model file in the command, path/to/file.py; or first: autopipe profile path/to/file.py",
        )
    stored = work.store.stored_profile().workload
    team, sequence = team_of(model, stored)
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
    return spec
