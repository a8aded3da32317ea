"""Python state that changes a call is seen with its line; counters, logs and caches change nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.state import ACCEPTED, BASE, net
from support.models.state import REFUSED as COMMON
from support.models.state_objects import BETWEEN, DISCARDED, OBJECTS, QUIET, SEEDED
from support.models.state_places import PLACES, SET, UNCHANGED
from support.models.state_places import SETTINGS as OF_THE_PROCESS
from support.models.surveyed import surveyed
from support.oracle import train as plain
from support.pipelines import build, captured_file, minibatches, plan_for

from autopipe.errors import TraceError
from autopipe.trace import capture
from autopipe.trace.state.snapshots.settings import SETTINGS
from autopipe.trace.tape.survey import NOTHING
from autopipe.workload import LoadOptions, load_workload

CHANGING = {**COMMON, **PLACES, **OBJECTS, **BETWEEN}
HARMLESS = {
    **ACCEPTED,
    **DISCARDED,
    **QUIET,
    **UNCHANGED,
    **{name: text for name, (text, *_) in OF_THE_PROCESS.items()},
}
REFUSED = {
    "a layer replaced at a step": "parameter h.1.a.weight is bound to a new tensor in the forward",
    "the version of a parameter": "how often a tensor was written (_version) is read",
    "the content behind a descriptor": "model.py.log, and reads what an earlier call left there",
    "a number in a file": "model.py.state, and reads what an earlier call left there",
    "a number that torch saves": "model.py.state, and reads what an earlier call left there",
    "the size of a file": "model.py.state, and reads what an earlier call left there",
    "the entries of a folder": "model.py.state, and reads what an earlier call left there",
    "a backward of the user's own that counts": "model.Scale computes in another way than in an earlier call",
}
"""What the error says of cases that cannot be trained."""
LATER = {
    *("the hits of a cache", "the position of a descriptor", "a digest that goes on", "a product of iterators"),
    *("bits of a generator", "a generator that is drawn from under another name"),
    *("an order that a generator shuffles", "the number of the step", "the epoch of a scheduler"),
    "a switch that the optimizer hook turns",
}
"""Cases that do the same in the first microbatches: a run compares each microbatch."""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def settings_as_they_were() -> Iterator[None]:
    before = dict(SETTINGS.all())
    yield
    SETTINGS.restore(before)


def written(text: str, folder: Path) -> Path:
    path = folder / "model.py"
    path.write_text(BASE + text)
    return path


@pytest.mark.parametrize("name", [name for name in CHANGING if name not in LATER])
def test_state_that_changes_a_call_is_seen_with_its_line(name: str, tmp_path: Path) -> None:
    survey = surveyed(written(CHANGING[name][0], tmp_path))
    assert survey.first is not None
    assert (survey.numbers is None) is (name in REFUSED), survey
    assert REFUSED.get(name, "") in survey.first.text + survey.why
    assert re.search(r"\.py:\d+", survey.first.where + survey.first.text), survey.first


@pytest.mark.parametrize("name", list(HARMLESS))
def test_state_that_changes_no_call_is_nothing(name: str, tmp_path: Path) -> None:
    assert surveyed(written(HARMLESS[name], tmp_path)) == NOTHING


@pytest.mark.parametrize("name", [name for name in HARMLESS if name not in OF_THE_PROCESS])
def test_state_that_is_unread_or_constant_trains_as_in_a_plain_loop(name: str, tmp_path: Path) -> None:
    path = written(HARMLESS[name], tmp_path)
    subject = captured_file(path)
    pipeline = build(subject, plan_for(subject, 2, "1f1b", 3, 6), tmp_path / "run")
    items = minibatches(subject.workload, 3, 6)
    ours = pipeline.weights(pipeline.train(items))
    _, model, _ = plain(path, items, 3)
    for key, value in model.named_parameters():
        assert torch.equal(ours[key], value), key


@pytest.mark.parametrize("name", list(SET))
def test_a_setting_of_results_is_refused_in_the_forward_and_accepted_in_the_file(name: str, tmp_path: Path) -> None:
    survey = surveyed(written(net("pass", SET[name]), tmp_path))
    assert survey.numbers is None and survey.first is not None
    assert "the forward or the loss changes the setting torch." in survey.first.text
    assert surveyed(written(f"{SET[name]}\n" + net("pass", SET[name]), tmp_path)) == NOTHING


@pytest.mark.parametrize("name", list(SEEDED))
def test_a_seed_in_forward_or_loss_is_refused_with_its_line(name: str, tmp_path: Path) -> None:
    survey = surveyed(written(SEEDED[name], tmp_path))
    assert survey.numbers is None and survey.first is not None
    assert "seeds torch's random numbers" in survey.first.text
    assert "torch." in survey.first.where.partition(": ")[2]


def test_a_capture_restores_the_content_of_arrays(tmp_path: Path) -> None:
    workload = load_workload(LoadOptions(str(written(ACCEPTED["a histogram for the log"], tmp_path))))
    model: Any = workload.build_model()
    capture(workload, model=model)
    assert model.hits.tolist() == [0, 0, 0]


def test_a_backward_hook_that_changes_gradients_is_named_with_its_function_and_line(tmp_path: Path) -> None:
    text = """
def doubled(module, inputs, outputs):
    return tuple(None if g is None else g * 2 for g in inputs)


def build_model():
    model = Net()
    model.h[1].register_full_backward_hook(doubled)
    return model
"""
    path = written(text, tmp_path)
    with pytest.raises(TraceError, match=r"backward hook doubled of .* may change gradients") as caught:
        capture(load_workload(LoadOptions(str(path))))
    assert "torch.autograd.Function" in caught.value.remedy
    assert re.search(r"model\.py:\d+", caught.value.where)


@pytest.mark.parametrize(
    ("hook", "refused"),
    [
        ("lambda m, inputs, outputs: SEEN.append(outputs[0].norm())", False),
        ("lambda m, inputs, outputs: print(outputs[0].shape)", False),
        ("observed", False),
        ("averaged", False),
        ("lambda m, inputs, outputs: tuple(g.clamp(-1e6, 1e6) for g in inputs)", True),
        ("late", True),
        ("in_place", True),
        ("late); model.o.register_full_backward_pre_hook(lambda m, g: (g[0] * 2,)", True),
        ("observed); model.o.register_full_backward_pre_hook(lambda m, g: (g[0] * 2,)", False),
    ],
)
def test_a_backward_hook_that_may_change_gradients_is_refused_and_one_that_observes_is_not(
    hook: str, refused: bool, tmp_path: Path
) -> None:
    text = f"""
SEEN = []
AVERAGE = torch.zeros(())


def observed(module, inputs, outputs):
    print(float(outputs[0].abs().max()))


@torch.no_grad()
def averaged(module, inputs, outputs):
    AVERAGE.mul_(0.9).add_(outputs[0].norm())


def late(module, inputs, outputs):
    return None if outputs[0].abs().max() < 1e6 else inputs


def in_place(module, inputs, outputs):
    if outputs[0].abs().max() > 1e6:
        inputs[0].mul_(0.5)


def build_model():
    model = Net()
    model.h[1].register_full_backward_hook({hook})
    return model
"""
    workload = load_workload(LoadOptions(str(written(text, tmp_path))))
    if not refused:
        notes = capture(workload).notes
        assert any("only observes" in note for note in notes)
        return
    with pytest.raises(TraceError, match="may change gradients, and stages do not run"):
        capture(workload)


@pytest.mark.parametrize("name", ["a layer replaced at a step", "a number in a file"])
def test_the_command_refuses_before_training(name: str, run: Any, tmp_path: Path) -> None:
    path = written(CHANGING[name][0], tmp_path)
    done = run("train", path.name, "--gpus", "2", "--device", "cpu", "--steps", "1")
    assert done.exit_code == 1
    error = " ".join(done.stderr.split())
    assert REFUSED[name] in error and ": the model is not one fixed graph" in error
    assert "running its Python for each microbatch is not possible: " in error
    assert not (tmp_path / ".autopipe" / "runs").exists()
