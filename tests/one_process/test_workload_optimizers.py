"""The optimizer and the scheduler of a model file, or of an option."""

import torch
from torch import nn
from workload_cases import MODEL, fails


def named(*sizes, grad=True):
    return [(f"p{i}", nn.Parameter(torch.zeros(size), requires_grad=grad)) for i, size in enumerate(sizes)]


def test_the_default_optimizer_is_adamw_of_what_is_trained(load):
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


def test_an_optimizer_hook_that_fails_or_gives_something_else_is_the_users(load):
    broken = load(MODEL + "def optimizer(named): return named[7]\n")
    error = fails(lambda: broken.optimizer(named(2)))
    assert "optimizer of net_of_batches.py failed: IndexError" in error.what and "named[7]" in error.where
    other = load(MODEL + "def optimizer(named): return 3\n")
    assert "gave an int, not a torch Optimizer" in fails(lambda: other.optimizer(named(2))).what


def test_a_scheduler_is_made_of_the_optimizer_and_checked(load):
    workload = load(MODEL + "def scheduler(optimizer): return torch.optim.lr_scheduler.StepLR(optimizer, 1)\n")
    optimizer = workload.optimizer(named(2))
    assert isinstance(workload.scheduler(optimizer), torch.optim.lr_scheduler.StepLR)
    assert load(MODEL).scheduler(optimizer) is None
    broken = load(MODEL + "def scheduler(optimizer): return 3\n")
    assert "gave an int, not a torch LRScheduler" in fails(lambda: broken.scheduler(optimizer)).what
