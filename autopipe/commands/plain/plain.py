"""``plain``: the plain training loop that a run or a plan is equal to, written as a script without autopipe."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopipe.commands.artifact_steps import batch_size_of, prepare
from autopipe.commands.locks import only_one
from autopipe.commands.plain.script import DivisorText, PlainLoop, script
from autopipe.commands.settings import ModelSettings, PlainScriptSettings, Progress
from autopipe.commands.store import Store
from autopipe.commands.stored_runs import model_of
from autopipe.commands.trusted_code import untrusted_stages
from autopipe.errors import RunError, counted
from autopipe.generate import load_constants
from autopipe.generate.loader import DIVISOR_CONSTANTS, DIVISOR_FILE
from autopipe.ir.artifact import write_text
from autopipe.ir.plan import Plan
from autopipe.report.results import PlainResult
from autopipe.runtime.checkpoint import directory as checkpoints
from autopipe.runtime.context import RunContext
from autopipe.runtime.job import Job, RunDirectory
from autopipe.verify.check import staleness
from autopipe.verify.order import why_another_order, why_not_bitwise
from autopipe.workload import Workload
from autopipe.workload.batches.data import DEFAULT_BATCH_SIZE
from autopipe.workload.batches.forms import form_of
from autopipe.workload.hooks.calling import form_of_call
from autopipe.workload.hooks.hook import Hook
from autopipe.workload.target.targets import Target, absolute

_MOST_NUMBERS = 1000  # elements of a tensor that is written into the script
_SIMILAR = "equal within rounding, not bit for bit: "


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """The training that the script repeats: that of a run, or of the run that a plan would give."""

    workload: Workload
    plan: Plan
    context: RunContext
    job: Job
    stages: Path  # the folder of the stage files
    steps: int  # to train


def plain(settings: PlainScriptSettings, progress: Progress | None = None) -> PlainResult:
    """Write the plain loop of a run, or of a model with the options of ``train``.

    Raises: RunError for training that a script cannot express, with the reason.
    """
    if settings.run is not None:
        text, loop = written(_of_run(settings, settings.run))
    else:
        with only_one(settings.plan.work_dir, "writes a plain loop"):
            text, loop = written(_of_plan(settings, progress))
    write_text(settings.output, text)
    return PlainResult(str(settings.output), loop.steps, len(text.splitlines()), loop.notes)


def _of_run(settings: PlainScriptSettings, directory: Path) -> Subject:
    run = RunDirectory(directory)
    job, plan = run.job(), run.plan()
    saved = checkpoints.steps(run.checkpoints)
    steps = settings.steps or (saved[-1] if saved else job.steps)
    if not steps:
        raise RunError(f"{directory} has no checkpoint, so its number of steps is not known", remedy="give --steps")
    workload = model_of(run, ModelSettings(), "plain")
    if reason := untrusted_stages(run.stages):  # divisor.py becomes part of the script
        raise RunError(
            f"the stage files of this run are not used: {reason}",
            where=str(run.stages),
            remedy="name the model file instead of the run, with the options of the run",
        )
    return Subject(workload, plan, RunContext.of(plan, run.graph()), job, run.stages, steps)


def _of_plan(settings: PlainScriptSettings, progress: Progress | None) -> Subject:
    plan = settings.plan
    if plan.gpus is None and not Store(plan.work_dir).plan.is_file():
        plan = dataclasses.replace(plan, gpus=1)  # the script runs in one process
    prepared = prepare(plan, progress)
    device = prepared.profile.device
    job = Job(
        steps=settings.steps or _STEPS,
        epochs=0,
        batch_size=prepared.plan.batch_size,
        device=device.kind,
        threads=device.threads,
        clip_grad_norm=settings.clip_grad_norm,
        ema=settings.plan.ema or 0.0,
    )
    context = RunContext.of(prepared.plan, prepared.graph)
    return Subject(prepared.workload, prepared.plan, context, job, prepared.stages, job.steps)


_STEPS = 10  # if neither a run nor an option gives the number


def written(subject: Subject) -> tuple[str, PlainLoop]:
    """Return the text of the script, and its parts.

    Raises: RunError for training that a script cannot express, with the reason.
    """
    _refuse(subject)
    modules: dict[str, str] = {"users": _location(subject.workload.spec.target)}
    workload, plan, job = subject.workload, subject.plan, subject.job
    hooks, spec = workload.hooks, workload.spec
    size = batch_size_of(workload, plan)
    data = hooks["data"]
    source = _name(spec.hooks.get("data"), "data", modules)
    made_once = data.from_class and not callable(data.function)
    hook = None if spec.optimizer else hooks.get("optimizer")
    stale = staleness(subject.context)
    item = workload.example_item(2)
    loop = PlainLoop(
        title=f"Plain training of {workload.name}, which the same training in stages is equal to.",
        modules=modules,
        build=_build(workload),
        setup=(f"source = {source}()",) if made_once else (),
        data="source" if made_once else _data(data, source, size),
        loss=_called(hooks.get("loss"), _name(spec.hooks.get("loss"), "loss", modules)),
        optimizer=_optimizer(workload, hook, _name(spec.hooks.get("optimizer"), "optimizer", modules)),
        learning_rate=spec.lr if hook is not None and not isinstance(hook.function, type) else None,
        scheduler=_scheduler(hooks.get("scheduler"), _name(spec.hooks.get("scheduler"), "scheduler", modules)),
        batch=form_of_call(workload.build_model(), item, has_loss="loss" in workload.hooks),
        seed=spec.seed,
        steps=subject.steps,
        batch_size=size,
        microbatches=plan.num_microbatches,
        threads=job.threads,
        device=job.device,
        opaque=spec.opaque_modules,
        draws=subject.context.graph.draws,
        weighted=subject.context.weighted,
        clip=job.clip_grad_norm,
        staleness=_staleness(subject, stale) if stale else None,
        autocast={"bf16": "torch.bfloat16", "fp16": "torch.float16"}.get(spec.precision, ""),
        divisor=_divisor(subject, item),
        **_cut(workload, item),
        own_loss=_own_loss(workload),
        ema=job.ema,
        after_step=_name(spec.hooks.get("after_step"), "after_step", modules) if "after_step" in hooks else "",
        notes=_notes(subject),
    )
    return script(loop), loop


def _cut(workload: Workload, item: Any) -> dict[str, Any]:
    """Return the fields of ``PlainLoop`` that determine how batches are split.

    ``item``: a batch; a microbatch if the data cannot be resized.
    """
    cutting = workload.cutting
    dimensions = cutting.of(item) if cutting.known else {}
    counted = "target" if cutting.is_whole else "along" if dimensions else "first"
    cut = "hook" if "split" in workload.hooks else "whole" if cutting.is_whole else counted
    return {"dimensions": dimensions, "counted": counted, "cut": cut}


def _refuse(subject: Subject) -> None:
    job, spec = subject.job, subject.workload.spec
    hooks = subject.workload.hooks
    batch = subject.workload.example_item(None)
    parts = subject.workload.split(batch, subject.plan.num_microbatches)
    structures = {form_of(part).structure for part in parts}
    reasons = {
        "its batches are synthetic, from example_inputs or --input": spec.inputs or "data" not in hooks,
        "it starts from weights that the model does not have when built (--init-from)": job.init_from,
        "it updates batch statistics once per minibatch (--deferred-batch-norm)": job.deferred_batch_norm,
        "it skips steps that are not finite (--on-nonfinite skip)": job.on_nonfinite == "skip",
        "its microbatches have different structures, such as lists of images": len(structures) > 1
        or ("split" not in hooks and not subject.workload.cutting.is_whole and subject.workload.is_fixed(batch)),
        "its learning rate was changed when it was resumed (--lr)": job.learning_rate is not None,
    }
    for reason, applies in reasons.items():
        if applies:
            raise RunError(
                f"a script of a plain loop cannot express this training: {reason}",
                where=subject.workload.name,
                remedy="use autopipe check, which compares with a plain loop inside autopipe",
            )


def _notes(subject: Subject) -> tuple[str, ...]:
    reasons = (*why_another_order(subject.context), *why_not_bitwise(subject.context, subject.job))
    return (f"{_SIMILAR}{'; '.join(reasons)}.",) if reasons else ()


def _location(text: str) -> str:
    """Return the absolute path of a TARGET's file, or its module's name."""
    return Target.parse(absolute(text)).location


def _name(option: str | None, hook: str, modules: dict[str, str]) -> str:
    """Return the expression for a hook; add its file or module to ``modules`` if only the option names it."""
    if option is None:
        return f"users.{hook}"
    if option.startswith(":"):
        return f"users.{option[1:]}"
    location, attribute = _location(option), Target.parse(option).attribute or hook
    for name, known in modules.items():
        if known == location:
            return f"{name}.{attribute}"
    modules[f"{hook}_module"] = location
    return f"{hook}_module.{attribute}"


def _build(workload: Workload) -> str:
    attribute = workload.name.rpartition(":")[2]
    arguments = {name: _literal(text) for name, text in workload.spec.arguments.items()}
    if isinstance(workload.builder.value, nn.Module):
        return f"users.{attribute}"
    return f"users.{attribute}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _data(hook: Hook, name: str, size: int | None) -> str:
    if not callable(hook.function):
        return name
    if size is None:
        return f"{name}({DEFAULT_BATCH_SIZE if hook.needs_batch_size else ''})"
    return f"{name}({'batch_size=' if hook.names_batch_size else ''}BATCH_SIZE)"


def _called(hook: Hook | None, name: str) -> str:
    """Return the expression of the loss function, which calls the hook if it is a class."""
    if hook is None:
        return ""
    return f"{name}()" if hook.from_class else name


def _own_loss(workload: Workload) -> str:
    workload.stepping.stepped_parameters()  # builds the model, and so the loss
    return workload.own_loss.prefix


def _optimizer(workload: Workload, hook: Hook | None, name: str) -> str:
    spec = workload.spec
    rate = "" if spec.lr is None else f", lr={spec.lr!r}"
    if hook is not None:
        return f"{name}(trained{rate if isinstance(hook.function, type) else ''})"
    return f"torch.optim.{workload.stepping.optimizer_class.__name__}(trained{rate})"


def _scheduler(hook: Hook | None, name: str) -> str:
    return "" if hook is None else f"{name}(optimizer)"


def _staleness(subject: Subject, stale: Mapping[str, int]) -> int | dict[str, int]:
    trained = [name for name, spec in subject.context.graph.parameters.items() if spec.requires_grad]
    deltas = {stale.get(name, 0) for name in trained}
    return deltas.pop() if len(deltas) == 1 else {name: delta for name, delta in stale.items() if name in trained}


def _divisor(subject: Subject, item: Any) -> DivisorText | None:
    """Return the arithmetic of ``divisor.py``. Raises: RunError if a tensor that it reads is too large."""
    if not subject.context.graph.divisor:
        return None
    text = (subject.stages / DIVISOR_FILE).read_text(encoding="utf-8")
    lines, tree = text.splitlines(), ast.parse(text)
    owner = next(node for node in tree.body if isinstance(node, ast.ClassDef))
    method = next(node for node in owner.body if isinstance(node, ast.FunctionDef))
    inputs = [argument.arg for argument in method.args.args[1:]]
    fields = {
        target.id: ast.literal_eval(node.value)
        for node in owner.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    last = method.body[-1]
    assert isinstance(last, ast.Return) and isinstance(last.value, ast.Tuple)
    body = [line[8:] for line in lines[method.body[0].lineno - 1 : last.lineno - 1]]
    constants = load_constants(subject.stages, DIVISOR_CONSTANTS)
    body = [*(f"{name} = {_tensor(name, tensor)}" for name, tensor in constants.items()), *map(_as_function_line, body)]
    leaves = dict(zip(subject.workload.leaves(item), _tensor_positions(item), strict=True))
    names = {leaves[name]: argument for name, argument in zip(fields.get("INPUTS", ()), inputs, strict=True)}
    imports = tuple(line for line in lines if line.startswith(("import ", "from ")) and "autopipe" not in line)
    results = _as_function_line(ast.unparse(last.value))
    future = tuple(line for line in imports if "__future__" not in line)
    return DivisorText(future, names, tuple(body), results, bool(fields["PENALTY"]))


def _tensor_positions(item: Any) -> list[int]:
    return [position for position, leaf in enumerate(pytree.tree_leaves(item)) if isinstance(leaf, Tensor)]


def _as_function_line(line: str) -> str:
    """Return a line of a generated method as a line of a function: batches are on the CPU, constants are variables."""
    line = line.replace("device_of(self).type", '"cpu"').replace("device_of(self)", '"cpu"')
    return re.sub(r"\bself\.(constant_\d+)", r"\1", line)


def _tensor(name: str, tensor: Tensor) -> str:
    if tensor.numel() > _MOST_NUMBERS:
        raise RunError(
            f"a script of a plain loop cannot express this training: the loss divides by a tensor of the model with "
            f"{counted(tensor.numel(), 'element')} ({name}), and at most {_MOST_NUMBERS} are written into a script",
            remedy="use autopipe check, which compares with a plain loop inside autopipe",
        )
    return f"torch.tensor({tensor.tolist()!r}, dtype={tensor.dtype})"
