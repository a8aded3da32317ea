"""Turns options into the settings of the commands. The options are declared in ``autopipe.options``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from autopipe.commands.option_values import NEWEST
from autopipe.commands.settings import (
    AUTO_TEAM,
    CheckSettings,
    ClusterSettings,
    EvaluateSettings,
    ExportSettings,
    ModelSettings,
    OrderSettings,
    PlainScriptSettings,
    PlanSettings,
    ProfileSettings,
    TrainSettings,
)
from autopipe.launch.request import LaunchSettings

S = TypeVar("S")

# field of the settings -> option, where their names differ
_OPTION_OF = {
    "learning_rate": "lr",
    "sequence": "sequence_parallel",
    "threads": "threads_per_rank",
    "gpu_memory_bytes": "gpu_memory",
    "evaluate_every": "eval_every",
    "check_first": "check",
    "record_timeline": "timeline",
    "watchdog_seconds": "watchdog",
}


def _settings(kind: type[S], options: Mapping[str, Any], **fields: Any) -> S:
    """Return settings with these fields; the others have the value of the option of the same name, if it is given."""
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]  # all settings are dataclasses
        value = options.get(_OPTION_OF.get(field.name, field.name))
        if value is not None:
            fields.setdefault(field.name, value)
    return kind(**fields)


def model_settings(target: str | None, options: Mapping[str, Any]) -> ModelSettings:
    """Return the settings of ``ModelOptions``, and of how the model is captured."""
    hooks = {
        "loss": options.get("loss"),
        "data": options.get("data"),
        "optimizer": options.get("optimizer"),
        "evaluate_data": options.get("eval_data"),
        "after_step": options.get("after_step"),
    }
    return _settings(
        ModelSettings,
        options,
        target=target or "",
        arguments=dict(options.get("arg") or {}),
        hooks={name: text for name, text in hooks.items() if text},
        inputs=tuple(options.get("input") or ()),
        team=_team(options),
    )


def _team(options: Mapping[str, Any]) -> int | None:
    team = options.get("tensor_parallel")
    return AUTO_TEAM if team == "auto" else team


def profile_settings(target: str | None, options: Mapping[str, Any]) -> ProfileSettings:
    """Return the settings of ``ProfileOptions``."""
    model, verify = model_settings(target, options), not options.get("no_verify")
    return _settings(ProfileSettings, options, model=model, verify=verify)


def order_settings(options: Mapping[str, Any]) -> OrderSettings:
    """Return the settings of ``OrderOptions``."""
    return _settings(OrderSettings, options, file=options.get("schedule_file"))


def plan_settings(target: str | None, options: Mapping[str, Any]) -> PlanSettings:
    """Return the settings of ``PipelineOptions``."""
    return _settings(
        PlanSettings,
        options,
        profile=profile_settings(target, options),
        cluster=_settings(ClusterSettings, options, file=options.get("cluster")),
        order=order_settings(options),
        tensor_parallel=_team(options),
    )


def check_settings(target: str | None, options: Mapping[str, Any]) -> CheckSettings:
    """Return the settings of ``CheckOptions``."""
    return _settings(CheckSettings, options, plan=plan_settings(target, options))


def plain_settings(
    target: str | None, output: Path, run: Path | None, options: Mapping[str, Any]
) -> PlainScriptSettings:
    """Return the settings of ``PlainOptions``."""
    return _settings(PlainScriptSettings, options, plan=plan_settings(target, options), output=output, run=run)


def launch_settings(options: Mapping[str, Any]) -> LaunchSettings:
    """Return the settings of ``LaunchOptions``."""
    return _settings(LaunchSettings, options, hosts=options.get("hosts") or options.get("hostfile") or ())


def train_settings(
    target: str | None, options: Mapping[str, Any], *, launch: LaunchSettings, devices: Sequence[int] = ()
) -> TrainSettings:
    """Return the settings of ``TrainOptions``; ``launch`` is made from ``LaunchOptions`` by ``launch_settings``."""
    resume = options.get("resume")
    resumes = resume is not None and resume is not False
    return _settings(
        TrainSettings,
        options,
        plan=plan_settings(target, options),
        resume=resumes,
        resume_step=resume if resumes and resume is not True and resume != NEWEST else None,
        launch=launch,
        devices=tuple(devices),
        same_data=not options.get("allow_other_data"),
    )


def evaluate_settings(run: Path | None, options: Mapping[str, Any]) -> EvaluateSettings:
    """Return the settings of ``EvaluateOptions``."""
    return _settings(EvaluateSettings, options, run=run, model=_named_again(options), data=options.get("eval_data"))


def export_settings(output: Path, run: Path | None, options: Mapping[str, Any]) -> ExportSettings:
    """Return the settings of ``ExportOptions``."""
    return _settings(ExportSettings, options, output=output, run=run, model=_named_again(options))


def _named_again(options: Mapping[str, Any]) -> ModelSettings:
    return model_settings(options.get("target"), {name: options.get(name) for name in ("arg", "loss")})
