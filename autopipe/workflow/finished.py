"""What can be done with a run that has a checkpoint: find it, evaluate it in its stages, export its weights."""

from __future__ import annotations

import time
from pathlib import Path

from autopipe.errors import RunError
from autopipe.launch.registry import launch
from autopipe.launch.request import Launch
from autopipe.runtime import checkpoint as checkpoints
from autopipe.runtime.job import RunDirectory
from autopipe.workflow.listener import Listener
from autopipe.workflow.results import EvaluateResult, ExportResult
from autopipe.workflow.resuming import refuse_other_parameters
from autopipe.workflow.settings import EvaluateSettings, Events, ExportSettings
from autopipe.workload import Workload


def find_run(given: Path | None, work_dir: Path) -> Path:
    """Return the run that is meant: the one given, or the newest of the work directory that has a checkpoint.

    Raises: RunError where there is none.
    """
    if given is not None:
        if not (given / "job.json").is_file():
            raise RunError(f"{given} is no run: it has no job.json", remedy="name a directory that autopipe train made")
        return given
    runs = work_dir / "runs"
    candidates = sorted(path for path in runs.iterdir() if (path / "job.json").is_file()) if runs.is_dir() else []
    with_checkpoint = [path for path in candidates if checkpoints.steps(RunDirectory(path).checkpoints)]
    if not with_checkpoint:
        raise RunError(f"there is no finished run in {runs}", remedy="autopipe train TARGET --gpus N")
    return with_checkpoint[-1]


def evaluate(settings: EvaluateSettings, events: Events | None = None) -> EvaluateResult:
    """Run the evaluation data through the stages of a run, from its newest checkpoint.

    Raises: RunError where the stages cannot evaluate, with the reason.
    """
    run = RunDirectory(find_run(settings.run, settings.work_dir))
    job, plan = run.job(), run.plan()
    if job.evaluation_note:
        raise RunError(
            f"this model cannot be evaluated in stages: {job.evaluation_note}",
            remedy="autopipe export, and evaluate the model itself",
        )
    step = checkpoints.steps(run.checkpoints)[-1:]
    if not step:
        raise RunError(f"there is no checkpoint in {run.checkpoints}", remedy="autopipe train")
    checkpoints.Checkpoint(checkpoints.directory_of(run.checkpoints, step[0])).verify()
    refuse_other_parameters(run.graph(), Workload.from_spec(plan.workload).build_model(), run.path)
    listener = Listener(run, events or (lambda kind, fields: None), plan.num_ranks)
    start = time.time()
    launch(
        Launch(
            run,
            plan.num_ranks,
            listener,
            body="evaluate",
            batch_size=settings.batch_size or 0,
            evaluation_data=settings.data or "",
        )
    )
    found = listener.evaluation
    return EvaluateResult(
        loss=found["loss"],
        samples=found["samples"],
        batches=found["batches"],
        seconds=time.time() - start,
        run_dir=str(run.path),
        step=step[0],
    )


def export(settings: ExportSettings) -> ExportResult:
    """Write the weights of a checkpoint as one ``state_dict`` that the untouched model loads with ``strict=True``.

    Raises: RunError for another file ending; ArtifactError for a damaged checkpoint.
    """
    import torch
    from safetensors.torch import save_file

    kind = settings.output.suffix
    if kind not in (".safetensors", ".pt"):
        raise RunError(
            f"{settings.output} ends in {kind or 'nothing'}",
            remedy="end it in .safetensors or .pt, which says the format",
        )
    run = RunDirectory(find_run(settings.run, settings.work_dir))
    graph, plan = run.graph(), run.plan()
    steps = checkpoints.steps(run.checkpoints)
    if not steps or (settings.step is not None and settings.step not in steps):
        raise RunError(f"no checkpoint of step {settings.step}; there are {steps}", where=str(run.checkpoints))
    source = checkpoints.Checkpoint(checkpoints.directory_of(run.checkpoints, settings.step or steps[-1]))
    source.verify()
    model = Workload.from_spec(plan.workload).build_model()
    refuse_other_parameters(graph, model, run.path)
    state = model.state_dict()
    held = set(source.names)
    names = {key: f"model.{graph.aliases.get(key, key)}" for key in state}
    read = source.read(sorted({name for name in names.values() if name in held}))
    missing = [
        key for key, name in names.items() if name not in read and graph.aliases.get(key, key) in graph.parameters
    ]
    if missing:
        raise RunError(
            f"the checkpoint lacks parameter {missing[0]!r} ({len(missing)} missing)", where=str(source.directory)
        )
    # a buffer that no stage reads is as the model was built
    full = {key: read.get(name, state[key]).contiguous().clone() for key, name in names.items()}
    model.load_state_dict(full, strict=True)
    settings.output.parent.mkdir(parents=True, exist_ok=True)
    temporary = settings.output.with_name(f".{settings.output.name}.tmp")
    if kind == ".pt":
        torch.save(full, temporary)
    else:
        save_file(full, temporary, metadata={"format": "pt"})
    temporary.replace(settings.output)
    return ExportResult(
        path=str(settings.output),
        tensors=len(full),
        bytes=settings.output.stat().st_size,
        step=source.manifest.step,
        run_dir=str(run.path),
    )
