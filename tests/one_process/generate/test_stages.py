"""Stage files, run one after another, are the model: results, gradients and buffers, bit for bit."""

import functools

import pytest
import torch
from support.chain import differences, even_cuts, forward, load, plan_of
from support.pipelines import ARGUMENTS, captured
from support.trace_cases import CASES, workload

from autopipe.draws import Draws
from autopipe.trace import capture

pytestmark = pytest.mark.usefixtures("one_thread")
SAMPLES = ("gpt", "hf_llama", "resnet", "seq2seq_lstm", "unet")


@functools.cache
def of_case(name):
    work = workload(name)
    return work, capture(work, verify=False)


@pytest.mark.parametrize("num_stages", (1, 3))
@pytest.mark.parametrize("name", CASES)
def test_stages_of_every_kind_of_model_are_the_model(name, num_stages, tmp_path):
    work, traced = of_case(name)
    plan = plan_of(traced.graph, even_cuts(traced.graph, num_stages))
    for batch_size, where in ((4, (0, 0, 0)), (7, (1, 2, 3))):
        assert differences(work, traced, plan, tmp_path, batch_size, where) == []


@pytest.mark.parametrize("num_stages", (1, 2, 3, 4))
@pytest.mark.parametrize("sample", SAMPLES)
def test_stages_of_the_samples_are_the_model(sample, num_stages, tmp_path):
    subject = captured(sample)
    plan = plan_of(subject.capture.graph, even_cuts(subject.capture.graph, num_stages))
    assert len(plan.stages) == num_stages
    for batch_size, where in ((3, (0, 0, 0)), (4, (7, 1, 2))):
        assert differences(subject.workload, subject.capture, plan, tmp_path, batch_size, where) == []


@pytest.mark.parametrize("name", CASES)
def test_the_stages_state_together_is_the_models_state(name, tmp_path):
    work, traced = of_case(name)
    model = work.build_model()
    stages = load(traced, plan_of(traced.graph, even_cuts(traced.graph, 3)), tmp_path, model)
    state = {}
    for stage in stages:
        state.update(stage.state_dict(keep_vars=True))
    expected = model.state_dict(keep_vars=True)
    assert sorted(state) == sorted(expected)
    assert all(state[name] is tensor for name, tensor in expected.items())


@pytest.mark.parametrize("name", ("tied", "shared layer"))
def test_a_stage_names_a_shared_parameter_as_the_model_does(name, tmp_path):
    work, traced = of_case(name)
    model = work.build_model()
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    for stage in load(traced, plan_of(traced.graph, even_cuts(traced.graph, 3)), tmp_path, model):
        assert [name for name, _ in stage.named_parameters()] == [first[id(p)] for p in stage.parameters()]


def test_in_evaluation_mode_the_stages_are_the_model_in_evaluation_mode(tmp_path):
    subject = captured("gpt")
    assert ARGUMENTS["gpt"]["dropout"] == "0.1"
    model = subject.workload.build_model()
    plan = plan_of(subject.capture.graph, even_cuts(subject.capture.graph, 3))
    stages = load(subject.capture, plan, tmp_path, model)
    item = subject.workload.example_item(4)
    for stage in stages:
        stage.eval()
    with torch.no_grad():
        ours, _ = forward(stages, plan, subject.workload.leaves(item), (0, 0, 0))
        theirs, _ = subject.workload.loss(model.eval(), item)
    assert torch.equal(ours[0], theirs)
    for stage in stages:
        stage.train()
    model.train()
    with torch.no_grad(), Draws(0, 0, 0):
        theirs, _ = subject.workload.loss(model, item)
    with torch.no_grad():
        ours, _ = forward(stages, plan, subject.workload.leaves(item), (0, 0, 0))
    assert torch.equal(ours[0], theirs)


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_stage_that_is_moved_makes_everything_on_its_own_device(sample, tmp_path):
    subject = captured(sample)
    plan = plan_of(subject.capture.graph, even_cuts(subject.capture.graph, 3))
    stages = [
        stage.place(torch.device("meta"))
        for stage in load(subject.capture, plan, tmp_path, subject.workload.build_model())
    ]
    leaves = {name: leaf.to("meta") for name, leaf in subject.workload.leaves(subject.workload.example_item(2)).items()}
    results, flights = forward(stages, plan, leaves, (0, 0, 0))
    assert all(value.is_meta for _, named, _ in flights for value in named.values())
    assert results[0].shape == ()
