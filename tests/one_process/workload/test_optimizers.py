"""The optimizer and the scheduler of a model file, or of an option."""

import pytest
import torch
from support.models.workload import MODEL, fails
from torch import nn


def named(*sizes, grad=True):
    return [(f"p{i}", nn.Parameter(torch.zeros(size), requires_grad=grad)) for i, size in enumerate(sizes)]


def test_the_default_optimizer_is_adamw_over_trained_parameters(load):
    workload = load(MODEL)
    optimizer = workload.optimizer(named(2) + named(3, grad=False))
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [tuple(p.shape) for g in optimizer.param_groups for p in g["params"]] == [(2,)]
    assert workload.optimizer(named(3, grad=False)) is None
    assert workload.optimizer([]) is None


def test_the_users_optimizer_gets_names_and_a_subset(load):
    workload = load(
        MODEL + "def optimizer(named):\n    return torch.optim.SGD([p for n, p in named if n != 'p1'], lr=0.5)\n"
    )
    optimizer = workload.optimizer(named(2, 3))
    assert isinstance(optimizer, torch.optim.SGD) and len(optimizer.param_groups[0]["params"]) == 1
    assert load(MODEL + "optimizer = torch.optim.SGD\n").optimizer(named(2)).param_groups[0]["lr"] == 0.001


def test_a_learning_rate_option_replaces_that_of_the_hook_but_not_several(load):
    hook = "def optimizer(named):\n    return torch.optim.SGD([dict(params=[p], lr={}) for n, p in named])\n"
    assert load(MODEL + hook.format("0.5"), lr=0.25).optimizer(named(2, 3)).param_groups[1]["lr"] == 0.25
    workload = load(MODEL + hook.format("float(n[1]) + 1"), lr=0.25)
    assert "uses 2 learning rates (1, 2)" in fails(lambda: workload.optimizer(named(2, 3))).what


def test_an_optimizer_option_comes_before_the_hook(load):
    text = MODEL + "def optimizer(named): return torch.optim.SGD([p for _, p in named], lr=0.5)\n"
    assert isinstance(load(text, optimizer="Adagrad").optimizer(named(2)), torch.optim.Adagrad)
    assert isinstance(load(text, optimizer="torch.optim:RAdam", lr=0.1).optimizer(named(2)), torch.optim.RAdam)


def test_an_optimizer_hook_that_fails_is_an_error_of_the_model_file(load):
    broken = load(MODEL + "def optimizer(named): return named[7]\n")
    error = fails(lambda: broken.optimizer(named(2)))
    assert "optimizer of net_of_batches.py failed: IndexError" in error.what and "named[7]" in error.where
    other = load(MODEL + "def optimizer(named): return 3\n")
    assert "returned an int, not a torch Optimizer" in fails(lambda: other.optimizer(named(2))).what


def test_a_scheduler_is_built_from_the_optimizer_and_checked(load):
    workload = load(MODEL + "def scheduler(optimizer): return torch.optim.lr_scheduler.StepLR(optimizer, 1)\n")
    optimizer = workload.optimizer(named(2))
    assert isinstance(workload.scheduler(optimizer), torch.optim.lr_scheduler.StepLR)
    assert load(MODEL).scheduler(optimizer) is None
    broken = load(MODEL + "def scheduler(optimizer): return 3\n")
    assert "returned an int, not a torch LRScheduler" in fails(lambda: broken.scheduler(optimizer)).what


NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 2)
    def forward(self, x):
        return self.head(self.body(x)).sum()

build_model = Net
MODEL = Net()
"""


def of_model(workload, prefix=""):
    return [(name, p) for name, p in workload.build_model().named_parameters() if name.startswith(prefix)]


def test_a_stage_without_parameters_of_the_hook_has_no_optimizer(load):
    workload = load(
        NET + "def optimizer(named): return torch.optim.SGD([p for n, p in named if n.startswith('head')], lr=0.1)\n"
    )
    assert workload.optimizer(of_model(workload, "body")) is None
    for prefix in ("", "head"):
        assert len(workload.optimizer(of_model(workload, prefix)).param_groups[0]["params"]) == 2
    by_key = load(NET + "def optimizer(named): return torch.optim.SGD([dict(named)['head.bias']], lr=0.1)\n")
    assert by_key.optimizer(of_model(by_key, "body")) is None
    empty = load(
        NET + "def optimizer(named):\n    head = [p for n, p in named if n.startswith('head')]\n"
        "    return torch.optim.SGD([{'params': head}, {'params': []}], lr=0.1)\n"
    )
    assert empty.optimizer(of_model(empty, "body")) is None


def test_a_hook_that_fails_only_on_a_stage_is_reported_as_such(load):
    workload = load(
        NET + "def optimizer(named):\n    flat = torch.optim.SGD([p for _, p in named if p.dim() == 1], lr=0.1)\n"
        "    return torch.optim.SGD([p for _, p in named], lr=flat.param_groups[0]['lr'])\n"
    )
    whole = of_model(workload)
    assert len(workload.optimizer(whole).param_groups[0]["params"]) == 4
    error = fails(lambda: workload.optimizer([pair for pair in whole if pair[1].dim() > 1]))
    assert "does not fail with those of the whole model" in error.what and "empty parameter list" in error.what
    broken = load(NET + "def optimizer(named): return torch.optim.SGD([], lr=0.1)\n")
    error = fails(lambda: broken.optimizer(of_model(broken, "body")))
    assert "empty parameter list" in error.what and "whole model" not in error.what


def test_a_hook_must_choose_by_name_from_the_given_parameters(load):
    first = load(NET + "def optimizer(named): return torch.optim.SGD([p for _, p in named][:1], lr=0.1)\n")
    error = fails(lambda: first.optimizer(of_model(first, "head")))
    assert (
        "does not choose parameters by name: it selects head.weight when called with the parameters of one"
        in error.what
    )
    stranger = load(NET + "def optimizer(named): return torch.optim.SGD(MODEL.parameters(), lr=0.1)\n")
    error = fails(lambda: stranger.optimizer(of_model(stranger)))
    assert "4 parameters that were not passed to it" in error.what and "global model" in error.what


def test_a_scheduler_that_needs_a_metric_or_steps_another_optimizer_is_refused_by_name(load):
    metric = "torch.optim.lr_scheduler.ReduceLROnPlateau(o)"
    own = """
class Metric(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self): return self.base_lrs
    def _initial_step(self): pass
    def step(self, metric): pass
"""
    for text, name in ((metric, "ReduceLROnPlateau"), ("Metric(o)", "Metric")):
        workload = load(f"{NET}{own}\ndef scheduler(o): return {text}\n")
        error = fails(lambda workload=workload: workload.scheduler(workload.optimizer(of_model(workload))))
        assert f"returned a {name}, whose step needs an argument" in error.what
        assert error.remedy
    other = load(
        NET + "def scheduler(o): return torch.optim.lr_scheduler.StepLR(torch.optim.SGD(MODEL.parameters()), 1)\n"
    )
    error = fails(lambda: other.scheduler(other.optimizer(of_model(other))))
    assert "a StepLR of another optimizer than it was given" in error.what


SGD = "def {}(named): return torch.optim.SGD([p for _, p in named], lr=0.5)\n"
STEP = "def {}(optimizer): return torch.optim.lr_scheduler.StepLR(optimizer, 1)\n"
FILE = "net_of_batches.py"


@pytest.mark.parametrize(
    ("text", "options", "note"),
    [
        ("", {}, f"AdamW, lr 0.001 ({FILE} has no `optimizer`)"),
        ("from torch.optim import Optimizer\n", {"lr": 0.1}, f"AdamW, lr 0.1 ({FILE} has no `optimizer`)"),
        (SGD.format("optimizer"), {}, f"{FILE}:optimizer"),
        (SGD.format("optimizer") + STEP.format("scheduler"), {}, f"{FILE}:optimizer; scheduler: {FILE}:scheduler"),
        (SGD.format("get_optimizer"), {"optimizer": ":get_optimizer", "lr": 0.25}, f"{FILE}:get_optimizer, lr 0.25"),
        (SGD.format("get_optimizer"), {"optimizer": "sgd"}, "SGD, lr 0.001"),
        ("", {"optimizer": "torch.optim:RAdam"}, "torch.optim:RAdam"),
        *(
            (
                SGD.format(name),
                {},
                f"AdamW, lr 0.001 ({FILE} has no `optimizer`; did you mean {name}? give --optimizer :{name})",
            )
            for name in ("get_optimizer", "configure_optimizers", "optimiser")
        ),
        *(
            (
                SGD.format("optimizer") + STEP.format(name),
                {},
                f"{FILE}:optimizer; no scheduler (did you mean {name}? name it `scheduler`)",
            )
            for name in ("lr_scheduler", "get_scheduler")
        ),
        (  # a function that a hook calls
            "def schedule(step): return 0.1\ndef after_step(named, step): schedule(step)\n" + SGD.format("optimizer"),
            {},
            f"{FILE}:optimizer",
        ),
    ],
)
def test_a_note_names_the_optimizer_and_a_function_with_a_similar_name(load, text, options, note):
    assert load(MODEL + text, **options).choice.note == f"optimizer: {note}"
