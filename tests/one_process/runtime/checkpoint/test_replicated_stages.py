"""One replica of a stage writes its part of a checkpoint, and all of them must hold the same state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models.weights import MODEL, begun
from support.pipelines import Captured, Pipeline, build, captured_file, minibatches, plan_for
from support.schedule_cases import laid_out

from autopipe.commands.exporting import export
from autopipe.commands.settings import ExportSettings
from autopipe.commands.training.checkpoints import chosen, newest_intact
from autopipe.errors import ArtifactError, RunError
from autopipe.runtime.checkpoint import directory as checkpoints
from autopipe.runtime.checkpoint.checkpoint import Checkpoint
from autopipe.runtime.checkpoint.checksums import Sums
from autopipe.runtime.checkpoint.directory import steps, unfinished
from autopipe.runtime.checkpoint.manifest import Manifest
from autopipe.runtime.checkpoint.parts import Part, finish, write_part
from autopipe.runtime.checkpoint.saver import Saver
from autopipe.runtime.checkpoint.snapshot import Snapshot

STEPS = 4
LAYOUTS = {"alone": ((0,),), "first": ((0, 1), (2,)), "last": ((0,), (1, 2, 3)), "data parallel": ((0, 1, 2),)}


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    """A model with tied weights, BatchNorm with its counters, and integer buffers."""
    path = tmp_path_factory.mktemp("net") / "net.py"
    path.write_text(MODEL)
    return captured_file(path, (), 8)


def pipeline(network: Captured, layout: str, folder: Path, schedule: str = "1f1b", **job: object) -> Pipeline:
    ranks = LAYOUTS[layout]
    options = {"vertical_sync": 1} if schedule == "pipedream" else {}  # without it, it takes no tied weights
    plan = laid_out(plan_for(network, len(ranks), "1f1b", 3, 8), schedule, ranks, options=options)
    return build(network, plan, folder, **{"save": True, "ema": 0.9, **job})


def trained(built: Pipeline, steps: int) -> dict[str, torch.Tensor]:
    return built.weights(built.train(minibatches(built.captured.workload, STEPS, 8), steps))


def unequal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert actual.keys() == expected.keys()
    return [name for name in expected if not torch.equal(actual[name], expected[name])]


def everything(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return checkpoint.read(list(checkpoint.names))


# -- checkpoints of replicated stages ----------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "pipedream"])
@pytest.mark.parametrize("layout", ["first", "last", "data parallel"])
def test_one_replica_writes_the_whole_state_of_its_stage(
    layout: str, schedule: str, network: Captured, tmp_path: Path
) -> None:
    weights = trained(pipeline(network, layout, tmp_path, schedule), 3)
    checkpoint = Checkpoint.latest(tmp_path / "checkpoints")
    assert checkpoint is not None
    stages = len(LAYOUTS[layout])
    names = [f"stage-{stage}-of-{stages}.safetensors" for stage in range(stages)]
    assert [file.file for file in checkpoint.manifest.files] == names
    assert sorted(path.name for path in checkpoint.directory.iterdir()) == ["manifest.json", *names]
    assert all(stage.state is not None for stage in checkpoint.stages)
    stored = everything(checkpoint)
    keys = {name: f"average.{name[4:]}" if name.startswith("ema.") else f"model.{name}" for name in weights}
    assert [name for name, key in keys.items() if not torch.equal(weights[name], stored[key])] == []
    assert stored.keys() >= {f"optimizer.state[{name}]['exp_avg']" for name in network.capture.graph.parameters}


@pytest.mark.parametrize(("before", "after"), [("first", "first"), ("data parallel", "last"), ("last", "alone")])
def test_a_run_resumes_at_any_layout_from_what_a_replica_wrote(
    before: str, after: str, network: Captured, tmp_path: Path
) -> None:
    weights = trained(pipeline(network, before, tmp_path / "run"), 2)
    assert unequal(trained(pipeline(network, after, tmp_path / "run", start_step=2, save=False), 2), weights) == []
    resumed = trained(pipeline(network, after, tmp_path / "run", start_step=2), STEPS)
    if before == after:
        assert unequal(resumed, trained(pipeline(network, before, tmp_path / "whole"), STEPS)) == []


def test_what_replicas_wrote_is_exported_and_starts_another_run(network: Captured, tmp_path: Path) -> None:
    built = pipeline(network, "last", tmp_path / "run")
    weights = {name: tensor for name, tensor in trained(built, 2).items() if not name.startswith("ema.")}
    export(ExportSettings(tmp_path / "x.pt", run=built.run.path))
    exported = torch.load(tmp_path / "x.pt", weights_only=True)
    assert all(torch.equal(exported[name], weights[name]) for name in weights if name in exported)
    assert weights.keys() - exported.keys() == {"mask"}
    other = pipeline(network, "first", tmp_path / "other", ema=0.0)
    assert unequal(begun(other, checkpoints.directory_of(built.run.checkpoints, 2)), weights) == []


@pytest.mark.parametrize("damage", ["lost", "truncated"])
def test_a_damaged_file_is_refused_and_the_checkpoint_before_is_used(
    damage: str, network: Captured, tmp_path: Path
) -> None:
    built = pipeline(network, "data parallel", tmp_path / "run", checkpoint_every=1, keep_checkpoints=0)
    trained(built, 3)
    path = checkpoints.directory_of(built.run.checkpoints, 3) / "stage-0-of-1.safetensors"
    if damage == "lost":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match=r"the checkpoint of step 3 is damaged: stage-0-of-1") as caught:
        chosen(built.run, None)
    assert caught.value.remedy == "--resume 2 (intact: 1, 2)"
    assert newest_intact(built.run) == 2


def test_a_replica_that_has_diverged_is_named(network: Captured, tmp_path: Path) -> None:
    text = MODEL + "\nimport threading\ndef after_step(named_parameters, step):\n"
    text += "    other = threading.current_thread().name == 'rank 1' and step == 1\n"
    text += "    dict(named_parameters)['head.weight'].data[2, 3] += 0.002 if other else 0.001\n"
    path = tmp_path / "net.py"
    path.write_text(text.replace("self.head.weight = self.words.weight", ""))
    subject = captured_file(path, (), 8)
    built = pipeline(subject, "data parallel", tmp_path / "run", checkpoint_every=1, keep_checkpoints=0)
    words = r"members of stage 0 are no longer equal: number 1 of them differs from the first in average\.head\.weight"
    with pytest.raises(Exception, match=words):
        trained(built, STEPS)
    assert steps(built.run.checkpoints) == [1]


# -- parts that are missing --------------------------------------------------------------------------------------------


def part(place: int, **tensors: torch.Tensor) -> Part:
    """Return the part of one of two processes of a stage, of which the first writes the tensors."""
    return Part(0, None if place else Snapshot.of(tensors), place=place)


def test_a_checkpoint_without_the_part_of_a_lost_replica_is_never_finished(tmp_path: Path) -> None:
    leading = Saver(tmp_path, (2,), keep=0, leads=True, timeout_seconds=0.05)
    leading.write(Manifest(3, 0, 3, 0, "g", "p", ()), [part(0, a=torch.ones(2))])
    with pytest.raises(ArtifactError, match=r"stage 0 has not .*: stage-0-of-1\.process-1-of-2\.json is missing"):
        leading.wait()
    assert steps(tmp_path) == [] and Checkpoint.latest(tmp_path) is None
    # the same checkpoint is written again after a restart, by all
    checkpoints.clear_unfinished(tmp_path)
    first, second = Saver(tmp_path, (2,), keep=0, leads=True), Saver(tmp_path, (2,), keep=0, leads=False)
    first.write(Manifest(3, 0, 3, 0, "g", "p", ()), [part(0, a=torch.ones(2))])
    second.write(Manifest(3, 0, 3, 0, "g", "p", ()), [part(1)])
    first.wait()
    assert first.finished() == [(3, tmp_path / "step-00000003")]
    assert Checkpoint(tmp_path / "step-00000003").shapes() == {"a": (2,)}
    assert sorted(path.name for path in (tmp_path / "step-00000003").iterdir()) == [
        "manifest.json",
        "stage-0-of-1.safetensors",
    ]


@pytest.mark.parametrize("other", [{"a": 2.0}, {"a": 1.0, "b": 1.0}, {}])
def test_a_replica_that_holds_other_tensors_is_refused(other: dict[str, float], tmp_path: Path) -> None:
    temporary = unfinished(tmp_path, 3, "p")
    for place, values in enumerate(({"a": 1.0}, other)):
        sums = Sums({name: torch.tensor(value) for name, value in values.items()})
        write_part(temporary, replace(part(place), unwritten=sums, compared={"a": "a", "b": "b"}), (2,))
    with pytest.raises(RunError, match=r"number 1 of them differs from the first in [ab]"):
        finish(tmp_path, temporary, (2,), Manifest(3, 0, 3, 0, "g", "p", ()), 0)
    assert steps(tmp_path) == []
