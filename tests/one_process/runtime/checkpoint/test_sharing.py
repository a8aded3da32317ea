"""The replicas of a stage write a checkpoint together: it equals the one that a single writer writes."""

from __future__ import annotations

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
from autopipe.runtime.checkpoint import saver
from autopipe.runtime.checkpoint.checkpoint import Checkpoint
from autopipe.runtime.checkpoint.directory import Part, finish, steps, unfinished, write_part
from autopipe.runtime.checkpoint.manifest import Manifest
from autopipe.runtime.checkpoint.saver import Saver
from autopipe.runtime.checkpoint.sharing import bits, checksums, share
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


def written_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the first replica of each stage write everything."""
    monkeypatch.setattr(saver, "share", lambda tensors, writer, *rest: {} if writer else tensors)


# -- shares and checksums ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_are_disjoint_complete_and_of_about_the_same_size(count: int) -> None:
    tensors = {f"t{i}": torch.zeros(1 + i * i % 37, 5) for i in range(40)} | {"counter": torch.tensor(3)}
    shares = [share(tensors, writer, count, {"counter"}) for writer in range(count)]
    assert sorted(name for part in shares for name in part) == sorted(tensors)
    assert "counter" in shares[0]
    sizes = [sum(tensor.numel() * tensor.element_size() for tensor in part.values()) for part in shares]
    assert max(sizes) - min(sizes) <= 20 * 37
    reordered = dict(reversed(tensors.items()))
    assert [part.keys() for part in shares] == [share(reordered, w, count, {"counter"}).keys() for w in range(count)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.bool])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9])
def test_a_checksum_changes_with_any_element_and_not_with_the_place_in_memory(dtype: torch.dtype, count: int) -> None:
    values = (torch.arange(count + 1) % 2).to(dtype)
    tensor = values[1:].clone()
    assert bits(values[1:]) == bits(tensor) == checksums({"t": values[1:]})["t"]
    for place in range(count):
        other = tensor.clone()
        other[place] = ~other[place] if dtype == torch.bool else other[place] + 1
        assert bits(other) != bits(tensor), place


def test_each_part_of_a_sparse_tensor_has_a_checksum() -> None:
    tensor = torch.eye(4).to_sparse()
    assert set(checksums({"t": tensor, "d": torch.ones(2)})) == {
        *(f"t@sparse_coo.{part}" for part in ("indices", "values", "size")),
        "d",
    }


# -- checkpoints of replicated stages ----------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "pipedream"])
@pytest.mark.parametrize("layout", ["first", "last", "data parallel"])
def test_replicas_write_what_one_writer_would(
    layout: str, schedule: str, network: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(pipeline(network, layout, tmp_path / "shared", schedule), 3)
    shared = Checkpoint.latest(tmp_path / "shared" / "checkpoints")
    written_alone(monkeypatch)
    trained(pipeline(network, layout, tmp_path / "alone", schedule), 3)
    alone = Checkpoint.latest(tmp_path / "alone" / "checkpoints")
    assert shared is not None and alone is not None
    assert unequal(everything(shared), everything(alone)) == []
    assert [state for state in shared.stages if state.state] == [state for state in alone.stages if state.state]
    for stage, ranks in enumerate(LAYOUTS[layout]):
        files = [file for file in shared.manifest.files if file.file.startswith(f"stage-{stage}-")]
        assert len(files) == len(ranks)
        names = [name for file in files for name in file.tensors]
        assert len(names) == len(set(names)) and all(file.tensors for file in files)
        data = [sum(t.numel() * t.element_size() for t in shared.read(list(f.tensors)).values()) for f in files]
        assert max(data) < 1.2 * sum(data) / len(data)


@pytest.mark.parametrize(("before", "after"), [("first", "first"), ("data parallel", "last"), ("last", "alone")])
def test_a_run_resumes_at_any_layout_from_what_replicas_wrote(
    before: str, after: str, network: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(pipeline(network, before, tmp_path / "shared"), 2)
    resumed = trained(pipeline(network, after, tmp_path / "shared", start_step=2), STEPS)
    with monkeypatch.context() as patch:
        written_alone(patch)
        trained(pipeline(network, before, tmp_path / "alone"), 2)
    expected = trained(pipeline(network, after, tmp_path / "alone", start_step=2), STEPS)
    assert unequal(resumed, expected) == []
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
def test_a_damaged_part_is_refused_and_the_checkpoint_before_is_used(
    damage: str, network: Captured, tmp_path: Path
) -> None:
    built = pipeline(network, "data parallel", tmp_path / "run", checkpoint_every=1, keep_checkpoints=0)
    trained(built, 3)
    path = checkpoints.directory_of(built.run.checkpoints, 3) / "stage-0-of-1.part-1-of-3.safetensors"
    if damage == "lost":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        ArtifactError, match=r"the checkpoint of step 3 is damaged: stage-0-of-1\.part-1-of-3"
    ) as caught:
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


def part(writer: int, **tensors: torch.Tensor) -> Part:
    """Return the part of one of two writers of a stage that has the tensors a and b."""
    return Part(0, Snapshot.of(tensors), writer=writer, checksums={"a": 1, "b": 2})


def test_a_checkpoint_without_the_part_of_a_lost_replica_is_never_finished(tmp_path: Path) -> None:
    leading = Saver(tmp_path, (2,), keep=0, leads=True, timeout_seconds=0.05)
    leading.write(Manifest(3, 0, 3, 0, "g", "p", ()), [part(0, a=torch.ones(2))])
    with pytest.raises(ArtifactError, match=r"stage 0 has not .*: stage-0-of-1\.part-1-of-2\.safetensors is missing"):
        leading.wait()
    assert steps(tmp_path) == [] and Checkpoint.latest(tmp_path) is None
    # the same checkpoint is written again after a restart, by all
    checkpoints.clear_unfinished(tmp_path)
    first, second = Saver(tmp_path, (2,), keep=0, leads=True), Saver(tmp_path, (2,), keep=0, leads=False)
    first.write(Manifest(3, 0, 3, 0, "g", "p", ()), [part(0, a=torch.ones(2))])
    second.write(Manifest(3, 0, 3, 0, "g", "p", ()), [part(1, b=torch.zeros(3))])
    first.wait()
    assert first.finished() == [(3, tmp_path / "step-00000003")]
    assert Checkpoint(tmp_path / "step-00000003").shapes() == {"a": (2,), "b": (3,)}
    assert sorted(path.name for path in (tmp_path / "step-00000003").iterdir()) == [
        "manifest.json",
        "stage-0-of-1.part-0-of-2.safetensors",
        "stage-0-of-1.part-1-of-2.safetensors",
    ]


@pytest.mark.parametrize("written", [{"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)}])
def test_a_tensor_that_no_or_every_replica_wrote_is_refused(written: dict[str, torch.Tensor], tmp_path: Path) -> None:
    temporary = unfinished(tmp_path, 3, "p")
    for writer in range(2):
        write_part(temporary, part(writer, **written), (2,))
    with pytest.raises(RunError, match="number 1 of them differs from the first in the sizes of its tensors"):
        finish(tmp_path, temporary, (2,), Manifest(3, 0, 3, 0, "g", "p", ()), 0)
    assert steps(tmp_path) == []


def test_the_checksum_depends_on_the_place_of_every_number():
    rows = torch.arange(48.0).reshape(6, 8)
    assert bits(rows) != bits(rows.flip(0))
    assert bits(rows) == bits(rows.clone())
    first, second = torch.zeros(600_000), torch.zeros(600_000)
    first[0], second[-2] = 1.0, 1.0  # in another chunk
    assert bits(first) != bits(second)
    few = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)  # less than a word
    assert bits(few) != bits(few.flip(0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex64, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 4, 8, 1000])
def test_a_checksum_changes_with_signs(dtype: torch.dtype, count: int) -> None:
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)
    others = [-tensor, tensor.abs(), torch.cat([-tensor[:2], tensor[2:]])]
    if dtype.is_complex:
        tensor = tensor * (1 + 2j)
        others = [-tensor, tensor.conj().resolve_conj(), tensor.real.to(dtype)]
    assert all(torch.equal(other, tensor) or bits(other) != bits(tensor) for other in others)
