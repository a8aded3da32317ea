"""The memory of a stage, measured after each instruction, compared with counts by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.pipelines import build, captured, captured_file, measured_with, minibatches, plan_for
from support.samples import SAMPLES
from torch import nn

from autopipe.ir.cluster import Cluster, ClusterDevice, Level
from autopipe.ir.schedule import Instruction, Op
from autopipe.measure import measure
from autopipe.measure.live import HostMeter
from autopipe.planning import PlanOptions, make_plan
from autopipe.planning.cost.peaks import with_peaks
from autopipe.runtime.batches.on_device import LeavesOnGpu, Placement
from autopipe.runtime.footprint import Footprint
from autopipe.schedules import REGISTRY, StageBytes, make, peak_bytes
from autopipe.schedules.kind import line

MIB = 2**20


def measured(
    sample: str, schedule: str, folder: Path, stages: int = 2, m: int = 4, batch: int = 8, **changes: Any
) -> dict[int, Any]:
    subject = captured(sample)
    plan = plan_for(subject, stages, schedule, m, batch)
    if changes:
        plan = replace(plan, stages=tuple(replace(stage, **changes) for stage in plan.stages))
    return measured_with(subject, plan, folder)


def test_memory_is_counted_once_and_until_it_is_freed() -> None:
    meter = HostMeter()
    with meter:
        x = torch.zeros(MIB // 4)
        view = x[: MIB // 8].view(2, -1)
        assert meter.now() == MIB
        y = x * 2
        assert meter.now() == 2 * MIB
        del y
        meter.restart()
        assert (meter.now(), meter.most()) == (MIB, MIB)
        z = view + 1
        del z
        assert (meter.now(), meter.most()) == (MIB, MIB + MIB // 2)
    del x, view
    assert meter.now() == 0


def test_memory_that_autograd_saves_is_counted() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False))
    meter, size = HostMeter(), 64 * 64 * 4
    for parameter in model.parameters():
        meter.count(parameter)
    with meter:
        x = torch.randn(64, 64)
        loss = model(x).sum()
        assert meter.now() == 2 * size + size + size + 4  # weights, x, the result of ReLU (linear's is freed), loss
        loss.backward()
        assert meter.now() == 2 * size + size + 2 * size + 4  # nothing saved remains, but two gradients
    del x, loss


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "2bw", "zero-bubble"])
def test_stages_report_versions_microbatches_in_flight_and_bytes(schedule: str, tmp_path: Path) -> None:
    peaks = measured("gpt", schedule, tmp_path)
    assert sorted(peaks) == [0, 1]
    expected = {"gpipe": [4, 4], "1f1b": [2, 1], "2bw": [2, 1], "zero-bubble": [2, 2]}[schedule]
    assert [peaks[stage]["in_flight"] for stage in (0, 1)] == expected
    for books in peaks.values():
        versions = 2 if schedule == "2bw" else 1
        assert books["versions"] == versions
        # versions, and AdamW's two moments of the parameters that the stage owns, not of its copy of a tied weight
        assert books["held_bytes"] >= (versions + 1) * books["weight_bytes"]
        assert books["bytes"] > books["held_bytes"]


def test_recompute_and_fewer_microbatches_in_flight_need_less_memory(tmp_path: Path) -> None:
    plain = measured("gpt", "gpipe", tmp_path / "plain")
    again = measured("gpt", "gpipe", tmp_path / "again", recompute="stage")
    fewer = measured("gpt", "1f1b", tmp_path / "fewer")
    for stage in (0, 1):
        held_bytes = plain[stage]["held_bytes"]
        assert plain[stage]["bytes"] - held_bytes > 1.5 * (again[stage]["bytes"] - held_bytes)
    assert fewer[1]["bytes"] < plain[1]["bytes"]
    assert fewer[1]["held_bytes"] == plain[1]["held_bytes"]


def test_by_block_a_stage_needs_what_is_planned_and_a_fraction_of_its_activations(tmp_path: Path) -> None:
    subject = captured_file(SAMPLES / "gpt.py", (("blocks", "3"), ("width", "32")))
    profile = measure(subject.capture, subject.workload, device="cpu", microbatch_sizes=(2,))
    machine = Cluster((Level("host", 1, 1e10, 1e-6),), (ClusterDevice("cpu"),), "test")
    activations = {}
    for mode in ("never", "block"):
        options = PlanOptions(num_ranks=1, batch_size=8, num_microbatches=4, schedule="gpipe", recompute=mode)
        plan = with_peaks(make_plan(profile, machine, options), profile)
        assert plan.stages[0].recompute == mode
        peak = measured_with(subject, plan, tmp_path / mode)[0]
        assert plan.stages[0].peak_bytes == pytest.approx(peak["bytes"], rel=0.15)
        activations[mode] = peak["bytes"] - peak["held_bytes"]
    # four microbatches of three blocks and the head, or what is between these and the largest of them
    assert activations["never"] > 3 * activations["block"]


def test_a_batch_that_is_copied_to_the_device_counts_once() -> None:
    stage = nn.Linear(2, 2)
    versions = SimpleNamespace(masters={}, peak_versions=1)
    footprint = Footprint({0: SimpleNamespace(versions=versions, stage=stage)}, torch.device("cpu"))  # type: ignore[dict-item]
    on_device, elsewhere = torch.ones(100), torch.empty(100, device="meta")
    with footprint.owners, footprint.during(Instruction(Op.FORWARD, 0, 0, 0), [on_device, elsewhere]):
        copied = torch.ones(100)
    assert footprint.report()[0]["bytes"] == 4 * (len(on_device) + len(copied))


def test_the_memory_is_measured_without_a_copy_of_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []

    class Lazy(LeavesOnGpu):
        def __getitem__(self, name: str) -> torch.Tensor:
            reads.append(name)
            return self.host[name]

    monkeypatch.setattr(Placement, "of", lambda placement, leaves, numbers: Lazy(leaves, None, numbers))  # type: ignore[arg-type]
    measured("gpt", "gpipe", tmp_path)
    assert len(reads) == 3 * 4 * 3  # steps, microbatches, and the ids in both stages and the targets in one


def test_measuring_changes_no_bit(tmp_path: Path) -> None:
    subject = captured("resnet")
    plan = plan_for(subject, 2, "1f1b", 4, 8)
    items = minibatches(subject.workload, 2, 8)
    one, two = (build(subject, plan, tmp_path / str(on), measure_memory=on) for on in (False, True))
    first, second = (pipeline.weights(pipeline.train(items)) for pipeline in (one, two))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> list[StageBytes]:
    """Return the memory of three stages from two runs of gpipe: with two and with four microbatches in flight."""
    two, four = (measured("gpt", "gpipe", tmp_path_factory.mktemp(str(m)), stages=3, m=m, batch=2 * m) for m in (2, 4))
    sizes_in_bytes = []
    for stage in range(3):
        in_flight = (four[stage]["bytes"] - two[stage]["bytes"]) // 2
        version = four[stage]["weight_bytes"]
        sizes_in_bytes.append(StageBytes(four[stage]["bytes"] - version - 4 * in_flight, version, in_flight))
    return sizes_in_bytes


WHOLE = [
    name
    for name, kind in REGISTRY.items()
    if not (kind.splits_backward or kind.spills) and name not in ("custom", "gpipe")
]


@pytest.mark.parametrize("schedule", [name for name in WHOLE if name != "pipedream"])  # it refuses tied weights
def test_every_schedule_has_the_memory_of_its_instructions(
    schedule: str, sizes: list[StageBytes], tmp_path: Path
) -> None:
    footprints = measured("gpt", schedule, tmp_path, stages=3, m=4, batch=8)
    expected = peak_bytes(make(schedule, line(3, 4, 3)), sizes)
    for stage in range(3):
        assert footprints[stage]["bytes"] == pytest.approx(expected[stage], rel=0.1), (
            stage,
            footprints[stage],
            sizes[stage],
        )


def test_a_split_backward_keeps_gradients_for_its_second_half(sizes: list[StageBytes], tmp_path: Path) -> None:
    footprints = measured("gpt", "zero-bubble", tmp_path, stages=3, m=4, batch=8)
    schedule = make("zero-bubble", line(3, 4, 3))
    # the second half needs the gradient of a layer's result: less than half of what the layer saves
    least = peak_bytes(schedule, sizes)
    most = peak_bytes(schedule, [replace(size, between=size.in_flight // 2) for size in sizes])
    for stage in range(3):
        assert least[stage] * 0.9 < footprints[stage]["bytes"] < most[stage], (stage, least, most, footprints[stage])
