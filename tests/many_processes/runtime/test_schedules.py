"""A dozen layouts in processes: the exported weights equal the plain loop's, with or without stale weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.oracle import by_owner
from support.oracle import train as plain
from support.oracle_order import Order
from support.pipelines import ARGUMENTS, BATCH, build, captured, minibatches
from support.samples import SAMPLES
from support.schedule_cases import Case

from autopipe.commands.settings import ExportSettings, ModelSettings, PlanSettings, ProfileSettings, TrainSettings
from autopipe.commands.training import runs
from autopipe.launch.registry import run_ranks
from autopipe.launch.request import LaunchRequest

STEPS = 6
QUICK = (
    Case("1f1b", "gpt", (1, 1, 1), "p + 1", recompute=("stage",)),
    Case("2bw", "resnet", (1, 1), "p + 1"),
    Case("pipedream", "unet", (1, 1, 1), "2"),
    Case("zero-bubble", "resnet", (1, 1), "2p"),
    Case("interleaved", "gpt", (1, 1), "2p", loops=2),
    Case("1f1b", "unet", (2, 1), "2p"),
    Case("1f1b", "resnet", (3, 1), "2p"),
    Case("interleaved", "gpt", (2, 2), "8", loops=2),
)
LONGER = (
    Case("gpipe", "seq2seq_lstm", (1, 1, 1, 1), "p"),
    Case("eager-1f1b", "hf_llama", (1, 1, 1), "2p"),
    Case("zero-bubble", "gpt", (1, 1, 1), "p + 1", recompute=("never", "stage")),
    Case("pipedream", "gpt", (1, 1, 1), "1", vertical_sync=True),
    Case("pipedream", "resnet", (3, 1), "2p"),
    Case("2bw", "unet", (1, 2), "8"),
    Case("zero-bubble", "unet", (2, 2), "2p", recompute=("stage", "never")),
)


def name(case: Case) -> str:
    return f"{case.schedule}-{case.model}-{'-'.join(map(str, case.replicas))}-m{case.m}"


@dataclass
class Ear:
    """Collects the losses that rank 0 reports."""

    losses: list[float]

    def __call__(self, event: dict[str, Any]) -> None:
        if event["kind"] == "step":
            self.losses.append(event["loss"])


def numbers(model: str) -> dict[str, float]:
    return {key: float(text) if "." in text else int(text) for key, text in ARGUMENTS[model].items()}


def assert_exported(case: Case, folder: Path) -> None:
    capture = captured(case.model)
    plan = case.plan(capture)
    pipeline = build(capture, plan, folder / "run", steps=STEPS, batch_size=7, save=True)
    ear = Ear([])
    run_ranks(LaunchRequest(run=pipeline.run, world_size=plan.num_ranks, on_event=ear, watchdog_seconds=60))
    torch.set_num_threads(1)
    assert all(tie.exact for tie in plan.ties)
    order = Order([(*stage.parameters, *stage.buffers) for stage in plan.stages], case.stage_replicas, case.m)
    losses, model, _ = plain(
        Path(capture.workload.spec.target),
        minibatches(capture.workload, STEPS, 7),  # seven samples cannot be cut into equal microbatches
        case.m,
        staleness=by_owner([stage.parameters for stage in plan.stages], case.staleness()),
        arguments=numbers(case.model),
        order=order if max(case.replicas) > 1 else None,
    )
    exported = torch.load(runs.export(ExportSettings(folder / "model.pt", run=folder / "run")).path)
    assert ear.losses == losses
    assert exported.keys() == model.state_dict().keys()
    # if steps overlap, running statistics are averaged while later microbatches are in flight
    own = dict(model.named_buffers()) if max(case.replicas) > 1 and max(case.staleness()) else {}
    assert all(torch.equal(exported[key], value) for key, value in model.state_dict().items() if key not in own)


@pytest.mark.parametrize("case", QUICK, ids=name)
def test_weights_of_processes_equal_the_oracle(case: Case, tmp_path: Path) -> None:
    assert_exported(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", LONGER, ids=name)
def test_weights_of_more_processes_equal_the_oracle(case: Case, tmp_path: Path) -> None:
    assert_exported(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["2bw", "zero-bubble"])
def test_weights_of_a_run_by_command_equal_the_oracle(schedule: str, tmp_path: Path) -> None:
    profile = ProfileSettings(
        ModelSettings(str(SAMPLES / "resnet.py")), work_dir=tmp_path / "work", device="cpu", microbatch_sizes=(2,)
    )
    plan = PlanSettings(
        profile, gpus=2, replicas="never", batch_size=BATCH["resnet"], schedule=schedule, num_microbatches=4
    )
    settings = TrainSettings(plan, steps=STEPS, run_dir=tmp_path / "run")
    result = runs.train(settings, lambda kind, fields: None)
    torch.set_num_threads(1)
    delta = 1 if schedule == "2bw" else 0
    items = minibatches(captured("resnet").workload, STEPS, BATCH["resnet"])
    losses, model, _ = plain(SAMPLES / "resnet.py", items, 4, staleness=lambda name: delta)
    exported = torch.load(runs.export(ExportSettings(tmp_path / "model.pt", run=tmp_path / "run")).path)
    assert list(result.losses) == losses
    assert all(torch.equal(exported[key], value) for key, value in model.state_dict().items())
