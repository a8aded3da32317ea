"""``autopipe.Pipeline``: its options, and the callables that it passes to the ranks by name."""

import functools
import importlib
import multiprocessing
import sys
import threading

import pytest
import torch
from torch import nn

import autopipe
from autopipe.commands import artifact_steps
from autopipe.commands.settings import ModelSettings, PlanSettings, ProfileSettings
from autopipe.commands.training import runs
from autopipe.launch.request import Host
from autopipe.report.results import TrainResult

RESULT = TrainResult((2.5,), 1, 3.0, 21.3, 2, "1f1b", 2, "runs/a", "")


def build_model():
    return nn.Linear(2, 2)


class Net(nn.Linear):
    @classmethod
    def small(cls):
        return cls(2, 2)


def local_function():
    def inner():
        return nn.Linear(2, 2)

    return inner


@pytest.fixture
def planned(monkeypatch):
    seen = []
    monkeypatch.setattr(artifact_steps, "plan", lambda settings, progress, explained: seen.append(settings))
    return seen


@pytest.fixture
def trained(monkeypatch):
    seen = []

    def train(settings, events, **more):
        seen.append((settings, more))
        return RESULT

    monkeypatch.setattr(runs, "train", train)
    return seen


def test_options_become_the_settings_of_the_command_line(planned, tmp_path):
    pipe = autopipe.Pipeline(
        "gpt.py", arg={"width": 64, "act": "gelu", "label": "7"}, gpus=4, batch_size=64, gpu_memory="24GiB"
    )
    pipe.plan(replicas="auto", work_dir=str(tmp_path))
    (settings,) = planned
    model = ModelSettings("gpt.py", arguments={"width": "64", "act": "gelu", "label": "'7'"})
    cluster = type(settings.cluster)(gpu_memory_bytes=24 * 2**30)
    profile = ProfileSettings(model, tmp_path)
    assert settings == PlanSettings(profile, gpus=4, batch_size=64, replicas="auto", cluster=cluster)


def test_options_of_a_call_override_those_of_the_pipeline_for_that_call(planned):
    pipe = autopipe.Pipeline("gpt.py", gpus=4, num_microbatches=8)
    pipe.plan(gpus=2, microbatch_size=4)
    pipe.plan()
    sizes = [(plan.gpus, plan.num_microbatches, plan.microbatch_size) for plan in planned]
    assert sizes == [(2, None, 4), (4, 8, None)]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"batchsize": 4}, TypeError, "unknown option 'batchsize'.*Did you mean 'batch_size'"),
        ({"gpus": 0}, ValueError, "gpus must be a whole number of at least 1, got 0"),
        ({"gpus": "two"}, ValueError, "gpus must be a whole number of at least 1, got 'two'"),
        ({"schedule": "1f1"}, ValueError, "unknown schedule '1f1'.*Did you mean '1f1b'"),
        ({"device": "gpu"}, ValueError, "unknown device 'gpu'"),
        ({"gpu_memory": "much"}, Exception, "much"),
        ({"allow_data_dependent": "no"}, ValueError, "allow_data_dependent must be True or False, got 'no'"),
        ({"lr": "fast"}, ValueError, "lr must be a finite number of at least 0, got 'fast'"),
        ({"ema": 1.5}, ValueError, "ema must be below 1, got 1.5"),
        ({"opaque": 3}, ValueError, "opaque must be a text, got 3"),
        ({"cluster": 3}, ValueError, "cluster must be a path, got 3"),
        ({"work_dir": b"here"}, ValueError, "work_dir must be a path, got b'here'"),
        ({"gpu_memory": -5}, ValueError, "gpu_memory must be a number above 0 or a text with a unit, got -5"),
        ({"link": [1]}, ValueError, r"link must be a number above 0 or a text with a unit, got \[1\]"),
        ({"arg": [1]}, ValueError, r"arg must be a dictionary of the model's keyword arguments, got \[1\]"),
        ({"input": 3}, ValueError, "input must be a text or a list of texts, got 3"),
        ({"ema": float("nan")}, ValueError, "ema must be a finite number of at least 0, got nan"),
        ({"seed": 1.5}, ValueError, "seed must be a whole number that fits in 64 bits, got 1.5"),
        ({"microbatch_sizes": "12"}, ValueError, "microbatch_sizes must be a list of whole numbers.*got '12'"),
        ({"num_microbatches": 4, "microbatch_size": 2}, ValueError, "exclude each other"),
        ({"arg": {"model": nn.Linear(1, 1)}}, ValueError, "arg: model is a Linear"),
    ],
)
def test_a_wrong_option_is_refused_at_once(options, kind, message):
    with pytest.raises(kind, match=message):
        autopipe.Pipeline("gpt.py", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trust": "no"}, "trust must be True or False, got 'no'"),
        ({"trust_network": "false"}, "trust_network must be True or False, got 'false'"),
        ({"elastic": 1}, "elastic must be True or False, got 1"),
        ({"watchdog": -1}, "watchdog must be a finite number of at least 0, got -1"),
        ({"watchdog": 0}, "watchdog must be above 0 seconds"),
        ({"resume": "newest"}, "resume must be True, False or the step of a checkpoint, got 'newest'"),
        ({"hosts": 3}, "hosts must be a text such as 'h1:2,h2:2' or a list of hosts, got 3"),
        ({"hosts": ["h1:2", 3]}, "3 is not a host such as 'h1:2'"),
        ({"hosts": ["h1:2", "h1"]}, "h1 is listed 2 times"),
        ({"hosts": [Host("-oProxyCommand=x")]}, "'-oProxyCommand=x' cannot be a host"),
        ({"hosts": [Host("h1", -2)]}, "h1: slots must be a whole number from 0 to 4096, got -2"),
        ({"hostfile": 3}, "hostfile must be a path, got 3"),
        ({"interface": 3}, "interface must be a text, got 3"),
        ({"resume": -7}, "resume must be True, False or the step of a checkpoint, got -7"),
    ],
)
def test_a_wrong_option_of_train_is_refused_before_the_model_is_read(trained, options, message):
    with pytest.raises(ValueError, match=message):
        autopipe.Pipeline("gpt.py").train(**options)
    assert not trained


def test_an_option_of_another_command_is_unknown():
    with pytest.raises(TypeError, match="unknown option 'epochs'"):
        autopipe.Pipeline("gpt.py").check(epochs=3)


def test_callables_of_packages_are_passed_by_module_and_name():
    pipe = autopipe.Pipeline(build_model, loss=nn.CrossEntropyLoss, data=Net.small.__func__)
    assert pipe.target == f"{__name__}:build_model"
    assert pipe.options["loss"] == "torch.nn.modules.loss:CrossEntropyLoss"
    assert pipe.options["data"] == f"{__name__}:Net.small"
    assert autopipe.Pipeline(Net).target == f"{__name__}:Net"


def test_callables_of_a_single_file_are_passed_by_its_path(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "net_of_a_script.py"
    path.write_text("def build_model():\n    raise NotImplementedError\n")
    module = importlib.import_module(path.stem)
    assert autopipe.Pipeline(module.build_model).target == f"{path}:build_model"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (lambda: nn.Linear(2, 2), "a lambda or local function"),
        (local_function(), "a lambda or local function"),
        (functools.partial(nn.Linear, 2, 2), "a partial, not a function or class"),
        (nn.Linear(2, 2), "a Linear, not a function or class"),
        (nn.Linear(2, 2).forward, "which torch.nn.modules.linear does not define under that name"),
        (torch.zeros(3), "not a function or class"),
    ],
)
def test_what_ranks_cannot_import_is_refused(value, problem):
    with pytest.raises(ValueError, match=f"target is .*{problem}.*top level of a module"):
        autopipe.Pipeline(value)


def test_train_names_the_missing_guard_where_a_rank_imports_the_script(trained, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(autopipe.RunError, match="if __name__ =="):
        autopipe.Pipeline("gpt.py").train(steps=1)
    assert not trained


def test_train_takes_a_stop_and_devices(trained):
    stop = threading.Event()
    pipe = autopipe.Pipeline("gpt.py", gpus=2)
    assert pipe.train(stop=stop, devices=[1], steps=3, resume=True, audit_every="auto") is RESULT
    ((settings, more),) = trained
    assert (settings.devices, settings.steps, settings.resume, settings.resume_step) == ((1,), 3, True, None)
    assert settings.audit_every is None
    assert more["stop"]() is False
    stop.set()
    assert more["stop"]() is True


def test_a_device_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(autopipe.RunError, match="there is no GPU 99"):
        autopipe.Pipeline("gpt.py", gpus=2, work_dir=tmp_path).train(devices=[99])


def test_launchers_that_start_a_command_are_refused():
    with pytest.raises(autopipe.RunError, match="'slurm' works on the command line only"):
        autopipe.Pipeline("gpt.py", gpus=2).train(launcher="slurm")


def test_the_representation_is_the_call():
    assert repr(autopipe.Pipeline("gpt.py", gpus=2)) == "Pipeline('gpt.py', gpus=2)"
