"""``after_step``: in stages it has the effect that it has in a plain loop, bit for bit, or it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.models.after_step import MODELS, PLAIN, TEACHER, text
from support.pipelines import (
    Captured,
    assert_equals_oracle,
    build,
    captured_file,
    minibatches,
    plan_for,
    with_exact_ties,
)
from support.schedule_cases import compared, laid_out

from autopipe.commands.checking.causes import refusal_of_after_step
from autopipe.errors import ModelFileError, RunError, WorkerError
from autopipe.ir.messages import loans
from autopipe.trace import capture
from autopipe.workload import LoadOptions, load_workload

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 5


def subject_of(folder: Path, name: str) -> Captured:
    path = folder / "net.py"
    path.write_text(text(*MODELS[name]))
    return captured_file(path)


CASES = [
    *((name, 3, "1f1b", "never") for name in MODELS),
    *((name, 3, "2bw", "stage") for name in MODELS),
    ("a momentum teacher", 4, "pipedream", "never"),
    ("a frozen tie", 1, "pipedream", "never"),
    ("a teacher by lists, of clamped students", 2, "zero-bubble", "never"),
]


@pytest.mark.parametrize(("name", "stages", "schedule", "recompute"), CASES)
def test_weights_equal_a_plain_loop(name: str, stages: int, schedule: str, recompute: str, tmp_path: Path) -> None:
    subject = subject_of(tmp_path, name)
    plan = plan_for(subject, stages, schedule, 4, 8)
    plan = laid_out(plan, schedule, tuple((stage,) for stage in range(stages)), (recompute,))
    plan = with_exact_ties(plan)
    items = minibatches(subject.workload, STEPS, 8, last=5)
    pipeline = build(subject, plan, tmp_path / "run")
    assert refusal_of_after_step(subject.workload, plan, subject.capture.graph) is None
    assert_equals_oracle(plan, items, pipeline.weights(pipeline.train(items)))


def test_a_teacher_far_from_its_student_borrows_it(tmp_path: Path) -> None:
    subject = subject_of(tmp_path, "a momentum teacher")
    graph, plan = subject.capture.graph, plan_for(subject, 3, "1f1b", 4, 8)
    assert graph.after_step["teacher.0.weight"] == ("student.0.weight",)
    assert {name.partition(".")[0] for name in graph.after_step} == {"teacher"}
    borrowed = loans(plan, graph)
    assert borrowed and all(loan.parameter.startswith("student.") for loan in borrowed)
    assert all(loan.owner != loan.reader for loan in borrowed)


def test_stages_of_one_rank_lend_to_each_other(tmp_path: Path) -> None:
    subject = subject_of(tmp_path, "a momentum teacher")
    plan = plan_for(subject, 4, "1f1b", 4, 8)
    plan = laid_out(plan, "interleaved", ((0,), (1,), (0,), (1,)), options={"stages_per_rank": 2})
    items = minibatches(subject.workload, STEPS, 8)
    pipeline = build(subject, plan, tmp_path / "run")
    assert_equals_oracle(plan, items, pipeline.weights(pipeline.train(items)))


@pytest.mark.parametrize("name", ["a momentum teacher", "a trained tie"])
def test_replicas_equal_the_plain_loop_in_their_order_of_sums(name: str, tmp_path: Path) -> None:
    subject = subject_of(tmp_path, name)
    plan = laid_out(plan_for(subject, 2, "1f1b", 4, 8), "1f1b", ((0, 1), (2, 3)))
    comparison = compared(subject, plan, tmp_path / "run", steps=4)
    assert comparison.promised and comparison.bitwise, [d for d in comparison.differences if not d.bitwise]


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_resumed_run_continues_with_the_same_teacher(schedule: str, tmp_path: Path) -> None:
    subject = subject_of(tmp_path, "a momentum teacher")
    items = minibatches(subject.workload, STEPS, 8)
    first = build(subject, plan_for(subject, 3, schedule, 4, 8), tmp_path / "run", save=True)
    first.train(items[:3])
    second = build(subject, plan_for(subject, 2, schedule, 4, 8), first.run.path, start_step=3)
    sessions = second.train(items)
    assert_equals_oracle(second.plan, items, second.weights(sessions))


def test_a_change_that_the_capture_did_not_see_ends_the_run(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    hook = MODELS["a parameter by its name"][2].replace("prototypes.copy_", "step == 34 and prototypes.data.copy_")
    path.write_text(text(*PLAIN, hook))
    subject = captured_file(path)
    assert subject.capture.graph.after_step == {}
    # if the capture saw no change, every stage calls the hook with its own parameters
    path.write_text(path.read_text().replace('["head.weight"]', '.get("head.weight", torch.zeros(1, 1))'))
    subject = captured_file(tmp_path / "net.py", (), 6)
    pipeline = build(subject, plan_for(subject, 2, "1f1b", 4, 8), tmp_path / "run")
    items = minibatches(subject.workload, 5, 8) * 7
    with pytest.raises(WorkerError, match=r"changed head\.weight at step 34"):
        pipeline.train(items)


REFUSED = {
    "random numbers": (
        "def after_step(named, step):\n    for _, p in named:\n        p.data += 1e-3 * torch.randn_like(p)",
        "draws random numbers",
    ),
    "averages beside the model": (
        "shadow = {}\ndef after_step(named, step):\n    for n, p in named:\n"
        "        shadow[n] = shadow.get(n, p.detach().clone()) * 0.9 + 0.1 * p.detach()",
        "keeps tensors between steps: shadow",
    ),
    "averages in place": (
        "shadow = {}\ndef after_step(named, step):\n    for n, p in named:\n"
        "        shadow.setdefault(n, p.detach().clone()).lerp_(p.detach(), 0.1)",
        "changes a tensor of shape|keeps tensors between steps",
    ),
    "anchors made in the first call": (
        "anchors = {}\ndef after_step(named, step):\n    for n, p in named:\n        if n not in anchors:\n"
        "            anchors[n] = p.detach().clone()\n        p.data.lerp_(anchors[n], 0.1)",
        "keeps tensors between steps: anchors",
    ),
    "a model beside the one that is trained": (
        "beside = Net()\ndef after_step(named, step):\n    others = dict(beside.named_parameters())\n"
        "    for n, p in named:\n        p.data.lerp_(others[n].detach(), 0.1)",
        "uses words.weight of a model that it was not given",
    ),
    "another shape": (
        "def after_step(named, step):\n    for _, p in named:\n        p.data = p.data[:-1]",
        "changes the shape or dtype of",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_hook_that_stages_or_checkpoints_cannot_support_is_refused(name: str, tmp_path: Path) -> None:
    hook, message = REFUSED[name]
    path = tmp_path / "net.py"
    path.write_text(text(*PLAIN, hook))
    with pytest.raises(ModelFileError, match=message) as caught:
        capture(load_workload(LoadOptions(str(path))))
    assert "net.py:" in caught.value.where and "after_step" in caught.value.where
    assert caught.value.remedy


FOLLOWED = {
    "a frozen model beside it, masks and pairs made in the first call": """
beside = Net().requires_grad_(False)
masks, pairs = {}, []
@torch.no_grad()
def after_step(named, step):
    if not pairs:
        pairs.extend(named)
    for n, p in named:
        if n not in masks:
            masks[n] = torch.ones(p.shape)
        p.mul_(masks[n]).lerp_(dict(beside.named_parameters())[n], 0.1)
""",
    "NumPy over the memory of a parameter": """
def after_step(named, step):
    for n, p in named:
        w = p.detach().numpy()
        w *= 0.9
""",
    "a norm beyond a limit that the first weights do not have": """
def after_step(named, step):
    for n, p in named:
        norm = p.data.norm()
        if n.startswith("body") and norm > 1.9:
            p.data = p.data * (1.9 / norm)
""",
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_hook_that_stages_support_is_accepted(name: str, tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(text(*PLAIN, FOLLOWED[name]).replace("lr=0.02", "lr=0.2"))
    subject = captured_file(path)
    assert "body.1.weight" in subject.capture.graph.after_step
    plan = plan_for(subject, 3, "1f1b", 4, 8)
    items = minibatches(subject.workload, STEPS, 8)
    pipeline = build(subject, plan, tmp_path / "run")
    assert refusal_of_after_step(subject.workload, plan, subject.capture.graph) is None
    assert_equals_oracle(plan, items, pipeline.weights(pipeline.train(items)))


BEYOND = {
    "a norm over everything": (
        "def after_step(named, step):\n    norm = sum(p.detach().square().sum() for _, p in named).sqrt()\n"
        "    for _, p in named:\n        p.data.div_(norm)",
        "depends on .* parameters of other stages",
    ),
    "a norm as a number": (
        "def after_step(named, step):\n    norm = sum(p.detach().square().sum().item() for _, p in named) ** 0.5\n"
        "    for _, p in named:\n        p.data.mul_(min(1.0, 3 / norm))",
        "depends on parameters of other stages: called with",
    ),
    "a norm by NumPy": (
        "def after_step(named, step):\n    arrays = [p.detach().numpy() for _, p in named]\n"
        "    norm = sum(float((a**2).sum()) for a in arrays)\n    for a in arrays:\n        a /= norm",
        "depends on parameters of other stages: called with",
    ),
    "how many there are": (
        "def after_step(named, step):\n    for _, p in named:\n        p.data.mul_(1 - 0.1 / len(named))",
        "depends on parameters of other stages: called with",
    ),
    "names of several stages": (
        "def after_step(named, step):\n    named = dict(named)\n    for n in ('words.weight', 'head.weight'):\n"
        "        named[n].data.mul_(0.9)",
        "fails when called with the .* of stage .*KeyError",
    ),
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_hook_that_looks_beyond_its_stage_is_refused_before_training(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook, message = BEYOND[name]
    path = tmp_path / "net.py"
    path.write_text(text(*PLAIN, hook))
    subject = captured_file(path)
    monkeypatch.setattr("autopipe.commands.checking.causes._MOST_BORROWED", 4)
    refusal = refusal_of_after_step(subject.workload, plan_for(subject, 3, "1f1b", 4, 8), subject.capture.graph)
    with pytest.raises(RunError, match=message):
        raise refusal or AssertionError("not refused")
    # the remedy that every refusal names
    plan = plan_for(subject, 1, "1f1b", 4, 8)
    items = minibatches(subject.workload, 3, 8)
    pipeline = build(subject, plan, tmp_path / "run")
    assert_equals_oracle(plan, items, pipeline.weights(pipeline.train(items)))


def test_a_norm_over_a_few_parameters_is_exact(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(text(*PLAIN, BEYOND["a norm over everything"][0]))
    subject = captured_file(path)
    plan = plan_for(subject, 2, "1f1b", 4, 8)
    assert refusal_of_after_step(subject.workload, plan, subject.capture.graph) is None
    items = minibatches(subject.workload, 3, 8)
    pipeline = build(subject, plan, tmp_path / "run")
    assert_equals_oracle(plan, items, pipeline.weights(pipeline.train(items)))


def test_a_counter_is_noted_and_accepted(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(text(*TEACHER, "calls = []\ndef after_step(named, step):\n    calls.append(step)\n"))
    captured = capture(load_workload(LoadOptions(str(path))))
    assert captured.graph.after_step == {}
    assert any("after_step changes calls" in note for note in captured.notes)


def test_the_hook_of_a_large_model_is_tried_on_parts_of_the_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subject_of(tmp_path, "a momentum teacher")
    monkeypatch.setattr("autopipe.trace.after_step.WHOLE_BYTES", 0)
    monkeypatch.setattr("autopipe.trace.after_step.CUT", 3)
    again = capture(load_workload(LoadOptions(subject.workload.spec.target)), verify=False)
    assert again.graph.after_step == subject.capture.graph.after_step
