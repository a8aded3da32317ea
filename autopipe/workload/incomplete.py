"""The error for a model file that lacks a model, data or loss. It names all that is missing, and how to give it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from autopipe.errors import ModelFileError
from autopipe.ir.profile import WorkloadSpec
from autopipe.workload.hooks import candidates
from autopipe.workload.model.building import NoModelError
from autopipe.workload.target.guard import run_command
from autopipe.workload.target.targets import Target

SECOND_FILE = "define build_model(), data and loss, here or in a second file (README, Your own model)"


def without_model(error: NoModelError, module: ModuleType, spec: WorkloadSpec) -> ModelFileError:
    """Return the error for a file whose model cannot be chosen or built; it also names missing data and loss."""
    lacks, location = _lacking(module, spec), Target.parse(spec.target).location
    name = candidates.model_name(module) if error.arguments is None else ""
    given = f"name {location}:{name}" if name else error.arguments
    if given and not lacks:
        objects = f"where a value is an object, such as a config, {SECOND_FILE}"
        remedy = f"{given}; {objects if error.arguments else 'or define build_model()'}"
    else:
        named = [" ".join((given, *_options(module, lacks)))] if given else []
        remedy = "; or ".join((*named, *_ways(module)))
    return ModelFileError("; ".join((error.what, *map(_absent, lacks))), where=error.where, remedy=remedy)


def without_data(module: ModuleType, spec: WorkloadSpec, name: str) -> ModelFileError:
    """Return the error for a file without data; the loss is named if it is missing, too. ``name``: of the model."""
    lacks = [lacking for lacking in _lacking(module, spec) if lacking != "data"]
    return ModelFileError(
        "; ".join((f"{name} has no data: looked for data and example_inputs", *map(_absent, lacks))),
        where=getattr(module, "__file__", None) or "",
        remedy="; or ".join((f"give {' '.join(_options(module, ['data', *lacks]))}", *_ways(module))),
    )


def _lacking(module: ModuleType, spec: WorkloadSpec) -> list[str]:
    has = set(spec.hooks) | {name for name, value in vars(module).items() if callable(value) or _is_data(value)}
    lacks = [] if spec.inputs or has & {"data", "example_inputs"} else ["data"]
    return lacks if "loss" in has else [*lacks, "loss"]


def _is_data(value: object) -> bool:
    return hasattr(value, "__iter__") and not hasattr(value, "backward")


def _absent(name: str) -> str:
    return f"no {name}, unless the model returns it" if name == "loss" else f"no {name}"


def _options(module: ModuleType, lacks: list[str]) -> list[str]:
    """Return the options that give what is missing, with names of the file where it has any."""
    options = []
    if "data" in lacks:
        name = candidates.data_name(module)
        options.append(f"--data :{name}" if name else '--data :NAME (or --input "x:f32[8,16]")')
    if "loss" in lacks:
        options.append(f"--loss :{candidates.loss_name(module) or 'NAME'}")
    return options


def _ways(module: ModuleType) -> tuple[str, str]:
    """Return what works for every script: run it as it is, and a second file."""
    path = getattr(module, "__file__", None) or ""
    try:
        is_script = "__main__" in Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError):
        is_script = False
    command = run_command(path) if is_script else "autopipe run SCRIPT.py --gpus 2"
    return f"{command} (the training script as it is)", SECOND_FILE


__all__ = ["without_data", "without_model"]
