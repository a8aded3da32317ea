"""Options and hooks with ``--resume``: applied, or refused with the old and new value; never ignored."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.resume import CASES, FILE, scheduler, torch_optimizer
from support.oracle import chunks, loss_of
from support.oracle import load as load_file
from support.pipelines import Captured, build, captured_file, minibatches, plan_for
from support.resumed import assert_equal, train, with_hooks

from autopipe.commands.prepared import Prepared
from autopipe.commands.settings import ModelSettings, PlanSettings, ProfileSettings, TrainSettings
from autopipe.commands.store import PlanRecord, Store
from autopipe.commands.training.resume_options import as_recorded, refuse_other_training
from autopipe.errors import ArtifactError, RunError
from autopipe.ir import artifact
from autopipe.ir.cluster import Cluster, ClusterDevice, Level
from autopipe.planning.requests import PlanRequest
from autopipe.runtime.checkpoint.checkpoint import Checkpoint
from autopipe.runtime.checkpoint.directory import directory_of
from autopipe.runtime.training_state.stage import Training, restore_training

STEP = 4
ADAMW = torch_optimizer("AdamW(parameters(named), lr=0.01, weight_decay=0.1)")
WARM = scheduler("S.SequentialLR(o, [S.LinearLR(o, 0.1, total_iters=3), S.StepLR(o, 2)], [3])")
OBJECT = CASES["LambdaLR with an object"].replace("self.calls, self.seen = 0, []", "self.calls, self.seen = 1, []")


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    path = tmp_path_factory.mktemp("net") / "net.py"
    path.write_text(FILE)
    return captured_file(path, (), 8)


@pytest.fixture(scope="module")
def saved(network: Captured, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Return the checkpoint of a run of three stages with given hooks."""
    checkpoints: dict[str, Checkpoint] = {}

    def checkpoint(text: str) -> Checkpoint:
        if text not in checkpoints:
            folder = tmp_path_factory.mktemp("run")
            captured = with_hooks(network, text, folder)
            pipeline = build(captured, plan_for(captured, 3, "1f1b", 2, 8), folder / "run", save=True, clip_grad_norm=1)
            train(pipeline, minibatches(captured.workload, STEP, 8), STEP)
            checkpoints[text] = Checkpoint(directory_of(pipeline.run.checkpoints, STEP))
        return checkpoints[text]

    return checkpoint


def settings_of(**model: Any) -> TrainSettings:
    return TrainSettings(PlanSettings(ProfileSettings(ModelSettings("net.py", **model))), resume=True)


def prepared(network: Captured, text: str, folder: Path, stages: int = 3, microbatches: int = 2) -> Prepared:
    captured = with_hooks(network, text, folder)
    plan = plan_for(captured, stages, "1f1b", microbatches, 8)
    record: Any = None
    return Prepared(captured.workload, captured.capture.graph, captured.profile, record, plan, folder)


def test_omitted_options_keep_the_values_of_the_run(saved: Callable[[str], Checkpoint]) -> None:
    settings = as_recorded(settings_of(), saved(ADAMW))
    model, plan = settings.plan.profile.model, settings.plan
    assert (model.seed, model.learning_rate, model.precision) == (0, None, "fp32")
    assert (plan.batch_size, plan.num_microbatches, plan.schedule) == (8, 2, None)
    assert (settings.clip_grad_norm, settings.deferred_batch_norm, settings.new_rate) == (1.0, False, None)


def test_the_plan_of_the_work_directory_is_used_if_it_cuts_minibatches_equally(
    network: Captured, saved: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    def settings(microbatches: int) -> TrainSettings:
        work = tmp_path / str(microbatches)
        store, pipeline = Store(work), prepared(network, ADAMW, tmp_path, microbatches=microbatches)
        artifact.save(pipeline.plan, store.plan)
        cluster = Cluster((Level("host", 3, 1e10, 1e-6),), (ClusterDevice("cpu"),), "test")
        artifact.save(PlanRecord(pipeline.plan.digest, "", PlanRequest(gpus=3), cluster), store.record)
        return TrainSettings(PlanSettings(ProfileSettings(ModelSettings("net.py"), work)), resume=True)

    kept, pinned = as_recorded(settings(2), saved(ADAMW)).plan, as_recorded(settings(4), saved(ADAMW)).plan
    assert (kept.batch_size, kept.num_microbatches) == (None, None)
    assert (pinned.batch_size, pinned.num_microbatches) == (8, 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda s: replace(s, plan=replace(s.plan, batch_size=7)),
            "--batch-size is 7, but the run has minibatches of 8",
        ),
        (lambda s: settings_of(seed=7), "--seed is 7, but the run has seed 0"),
    ],
)
def test_options_that_decide_the_data_cannot_change(saved: Callable[[str], Checkpoint], change, words: str) -> None:
    with pytest.raises(RunError, match=words) as caught:
        as_recorded(change(settings_of()), saved(ADAMW))
    assert "omit --" in caught.value.remedy


def test_applied_options_are_reported(network: Captured, saved: Callable[[str], Checkpoint], tmp_path: Path) -> None:
    source = saved(ADAMW)
    settings = replace(as_recorded(settings_of(), source), clip_grad_norm=0.5)
    notes = refuse_other_training(settings, prepared(network, ADAMW, tmp_path, microbatches=4), source)
    assert notes == (
        "continuing with num-microbatches 4 (before: 2)",
        "continuing with clip-grad-norm 0.5 (before: 1.0)",
    )


EDITS = {
    "another number": (ADAMW, ADAMW.replace("0.1)", "0.3)"), r"\['weight_decay'\] was 0.1 and is 0.3"),
    "another rate": (ADAMW, ADAMW.replace("lr=0.01", "lr=0.5"), r"\['lr'\] was 0.01 and is 0.5"),
    "another optimizer": (ADAMW, torch_optimizer("SGD(parameters(named), lr=0.01)"), "optimizer was AdamW and is SGD"),
    "a scheduler": (ADAMW, ADAMW + "\ndef scheduler(o):\n    return S.StepLR(o, 2)\n", "the scheduler was not there"),
    "no scheduler": (WARM, WARM[: WARM.index("def scheduler")], "the scheduler was there and is not"),
    "another inner scheduler": (WARM, WARM.replace("StepLR(o, 2)", "StepLR(o, 3)"), r"step_size'\] was 2 and is 3"),
    "another milestone": (WARM, WARM.replace("[3])", "[5])"), r"_milestones\[0\] was 3 and is 5"),
    "another rate function": (CASES["LambdaLR with an object"], OBJECT, r"calls'\] was 1 and is 2"),
}


@pytest.mark.parametrize("stages", [3, 2])
@pytest.mark.parametrize("name", EDITS)
def test_an_edited_hook_is_refused_with_both_values(
    name: str, stages: int, network: Captured, saved: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    before, after, words = EDITS[name]
    source = saved(before)
    settings = as_recorded(settings_of(), source)
    with pytest.raises(RunError, match=words):
        refuse_other_training(settings, prepared(network, after, tmp_path, stages), source)
    same = tmp_path / "same"
    same.mkdir()
    assert refuse_other_training(settings, prepared(network, before, same, stages), source) == ()


def test_a_value_that_differs_between_builds_is_not_an_edit(
    network: Captured, saved: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    text = "\nimport time\ndef optimizer(named):\n    o = torch.optim.AdamW(parameters(named))\n"
    text += "    o.made = time.perf_counter()\n    return o\n"
    source = saved(text)
    settings = as_recorded(settings_of(), source)
    assert refuse_other_training(settings, prepared(network, text, tmp_path), source) == ()


def test_a_new_learning_rate_is_refused_with_a_scheduler(
    network: Captured, saved: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    source = saved(WARM)
    settings = as_recorded(settings_of(learning_rate=0.5), source)
    with pytest.raises(RunError, match=r"--lr is 0\.5, but a scheduler sets the learning rate"):
        refuse_other_training(settings, prepared(network, WARM, tmp_path), source)


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("stages", [3, 2])
def test_a_new_learning_rate_is_applied_from_the_checkpoint_on(stages: int, network: Captured, tmp_path: Path) -> None:
    captured = with_hooks(network, ADAMW, tmp_path)
    items = minibatches(captured.workload, 8, 8)
    train(build(captured, plan_for(captured, 3, "1f1b", 2, 8), tmp_path / "run", save=True), items, STEP)
    plan = plan_for(captured, stages, "1f1b", 2, 8)
    options = {"save": True, "start_step": STEP, "learning_rate": 0.2}
    weights = train(build(captured, plan, tmp_path / "run", **options), items, 8)
    torch.manual_seed(0)
    module = load_file(tmp_path / "net.py")
    torch.manual_seed(0)
    model = module.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for step, item in enumerate(items):
        for part in chunks(item, 2):
            (loss_of(module.loss, model, part) / 2).backward()
        optimizer.param_groups[0]["lr"] = 0.01 if step < STEP else 0.2
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(weights, {name: parameter.detach() for name, parameter in model.named_parameters()})


def rewritten(source: Checkpoint, folder: Path, change: Callable[[dict[str, Any]], None]) -> Checkpoint:
    """Return a copy of a checkpoint with a manifest that was changed on purpose."""
    shutil.copytree(source.directory, folder / "step-00000004")
    path = folder / "step-00000004" / "manifest.json"
    document = json.loads(path.read_text())
    del document["digest"]
    change(document)
    path.write_text(json.dumps(document))
    return Checkpoint(folder / "step-00000004")


def test_a_checkpoint_of_an_earlier_format_is_loaded_but_not_resumed(
    saved: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    def earlier(document: dict[str, Any]) -> None:
        del document["options"]
        for file in document["files"]:
            del file["training"]
            file |= {"groups": {"layers.0.weight": {"lr": 0.01}}, "scheduler": {"last_epoch": 4.0}}

    source = rewritten(saved(ADAMW), tmp_path, earlier)
    assert source.read(["model.layers.0.weight"])["model.layers.0.weight"].shape == (6, 6)
    with pytest.raises(RunError, match="did not store the complete state of optimizers") as caught:
        as_recorded(settings_of(), source)
    assert "--init-from" in caught.value.remedy


def first_group(document: dict[str, Any]) -> dict[str, Any]:
    attributes = dict(document["files"][0]["training"]["state"]["optimizer"]["attributes"])
    group: dict[str, Any] = attributes["param_groups"]["groups"][0]
    return group


DAMAGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "an unknown kind": lambda d: first_group(d)["values"].update(lr={"is": "class"}),
    "a method's name": lambda d: first_group(d)["values"].update(lr={"is": "items", "items": []}),
    "no items": lambda d: first_group(d)["values"].update(betas={"is": "tuple"}),
    "a bare list": lambda d: first_group(d)["values"].update(betas=[0.9, 0.99]),
    "no pairs": lambda d: d["files"][0]["training"]["state"]["optimizer"].update(attributes=[1]),
    "no optimizer": lambda d: d["files"][0]["training"].update(state={}),
    "a number of another kind": lambda d: first_group(d)["values"].update(lr={"is": "float", "value": "x"}),
    "a tensor that is not there": lambda d: first_group(d)["values"].update(
        lr={"is": "tensor", "dtype": "float32", "shape": [], "name": "model.x"}
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_state_of_another_form_is_refused_with_the_file(
    name: str, network: Captured, saved: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    source = rewritten(saved(ADAMW), tmp_path, DAMAGES[name])
    captured = with_hooks(network, ADAMW, tmp_path)
    names = source.stages[0].owned
    owned = {n: p for n, p in captured.workload.build_model().named_parameters() if n in names}
    optimizer = captured.workload.optimizer(list(owned.items()))
    assert optimizer is not None
    with pytest.raises(ArtifactError):
        restore_training(source, Training(owned, optimizer, None))
