"""A comparison runs where it fits, and one that does not is left out with the bytes; it never fails the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from click.testing import CliRunner
from support.pipelines import captured, plan_for

from autopipe.cli.main import autopipe
from autopipe.commands.checking import checking, fitting
from autopipe.commands.checking.first_steps import FirstSteps
from autopipe.commands.checking.fitting import Need, Place, need_of, out_of_memory, place_of
from autopipe.commands.checking.task import Wanted
from autopipe.commands.settings import ignore_event
from autopipe.errors import WorkerError
from autopipe.ir.profile import Device, Measurement, NodeCost, Profile, WorkloadSpec

GIB = 2**30
MODEL = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

def data(batch_size=8):
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        yield torch.randn(batch_size, 6, generator=g), torch.randn(batch_size, 1, generator=g)

loss = nn.MSELoss()
"""
WORDS = ["net.py", "--gpus", "2", "--device", "cpu", "--batch-size", "8", "--num-microbatches", "2", "--steps", "1"]


def on(kind: str) -> SimpleNamespace:
    return SimpleNamespace(profile=SimpleNamespace(device=Device(kind, kind, 0)))


@pytest.mark.parametrize(
    ("need", "device", "words"),
    [
        (Need(40 * GIB, 10 * GIB), "cuda", ""),
        (Need(90 * GIB, 20 * GIB), "cpu", "on the CPU of this host: the comparison needs about 90.0 GiB on one GPU"),
        (Need(90 * GIB, 20 * GIB, flops=1e20), "", "it would take about"),
        (Need(90 * GIB, 20 * GIB, autocast=True), "", "on the CPU of this host, autocast computes in other dtypes"),
        (Need(90 * GIB, 200 * GIB), "", "or about 290 GiB of memory on this host (200 GiB available)"),
        (Need(10 * GIB, 300 * GIB), "", "of memory on this host"),
    ],
)
def test_a_comparison_runs_on_the_gpu_else_on_the_host(
    need: Need, device: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "_free_on_gpu", lambda: 80 * GIB)
    monkeypatch.setattr(fitting, "available_bytes", lambda: round(200 * GIB / fitting._SHARE))
    place = place_of(on("cuda"), need)
    assert place.device == device
    assert words in place.why and bool(words) == bool(place.why)


def test_on_a_cpu_everything_shares_the_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "available_bytes", lambda: 100 * GIB)
    assert place_of(on("cpu"), Need(60 * GIB, 30 * GIB)) == Place("cpu", 1)
    assert place_of(on("cpu"), Need(60 * GIB, 40 * GIB)).device == ""


def test_the_need_counts_the_stages_or_the_plain_loop_and_the_results() -> None:
    subject = captured("gpt")
    plan, graph = plan_for(subject, 2, "1f1b", 4, 8), subject.capture.graph
    costs = {node.name: NodeCost(0.0, 0.0, 10, 1000) for node in graph.nodes}
    profile = Profile(subject.workload.spec, graph, Device("cpu", "cpu", 0), (Measurement(2, costs),))
    weights = sum(spec.num_bytes({}) for spec in graph.parameters.values())
    prepared = SimpleNamespace(plan=plan, graph=graph, profile=profile)
    need = need_of(prepared, steps=3)
    saved = 1000 * len(graph.nodes)
    peaks = sum(stage.peak_bytes * stage.replicas for stage in plan.stages)
    state = 2 * weights  # of Adam
    assert need.device_bytes == max(peaks, 2 * weights + state + saved)
    assert need.host_bytes == 4 * (3 * weights + 2 * weights + state) + 2 * weights
    assert not need.autocast
    nodes = replace(graph.nodes[0], context="no_grad; autocast(cpu, bfloat16)"), *graph.nodes[1:]
    prepared.graph = replace(graph, nodes=nodes)
    prepared.plan = replace(plan, graph_digest=prepared.graph.digest)
    assert need_of(prepared, steps=3).autocast


def test_a_rank_that_was_out_of_memory_is_recognized_by_its_cause() -> None:
    error = WorkerError("OutOfMemoryError: CUDA out of memory", rank=1)
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    used = out_of_memory(error, "cpu")
    assert used.startswith("out of memory after ") and psutil.Process().memory_info().rss > 0
    assert out_of_memory(ValueError("another error"), "cpu") == ""


def test_a_plan_that_was_checked_on_a_cpu_is_checked_again_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL)
    spec = WorkloadSpec("net.py", arguments={}, hooks={}, inputs=(), seed=0)
    plan = SimpleNamespace(workload=spec, digest="d", num_microbatches=2)

    def mark(kind: str) -> str:
        prepared: Any = SimpleNamespace(profile=on(kind).profile, plan=plan, stages=tmp_path)
        return FirstSteps(None, prepared, ignore_event, Wanted(steps=3), {}, beside=False)._mark  # type: ignore[arg-type]

    marks = [mark(kind) for kind in ("cpu", "cuda", "cpu")]
    assert marks[0] == marks[2] != marks[1]


def test_train_goes_on_without_a_check_that_is_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL)

    def exhausted(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(checking, "compare", exhausted)
    done = CliRunner().invoke(autopipe, ["train", *WORDS, "--json"])
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)["losses"]) == 1
    assert "not checked: out of memory after " in done.stderr
    monkeypatch.setattr(fitting, "available_bytes", lambda: 1000)
    done = CliRunner().invoke(autopipe, ["check", *WORDS])
    assert done.exit_code == 1
    assert "not checked: comparing with plain training needs about" in done.stderr
    assert "compare a smaller configuration of the model" in done.stderr
