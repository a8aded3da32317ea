"""What cannot run in stages with the same numbers: each is tried, and prints ``refused`` with its line, or ``ran``."""

import copy
import functools
import sys

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
other = nn.Linear(4, 4)
data, labels = torch.randn(12, 8), torch.randint(4, (12,))


def loss_of():
    return F.cross_entropy(model(data), labels)


def parameter_in_loss():
    loss = loss_of() + 1e-3 * sum(p.pow(2).sum() for p in model.parameters())
    loss.backward()


def loss_of_parameters_alone():
    model[0].weight.pow(2).sum().backward()


def gradient_penalty():
    x = data.clone().requires_grad_()
    torch.autograd.grad(model(x).sum(), x, create_graph=True)


def grad_of_parameters():
    torch.autograd.grad(loss_of(), list(model.parameters()))


def create_graph():
    loss_of().backward(create_graph=True)


def backward_inputs():
    loss_of().backward(inputs=[model[0].weight])


def backward_twice():
    loss = loss_of()
    loss.backward()
    loss.backward()


def hook_on_parameter():
    model[0].weight.register_hook(lambda g: g * 2)


def hook_after_accumulation():
    model[0].weight.register_post_accumulate_grad_hook(lambda p: None)


def hook_on_output():
    model(data).register_hook(lambda g: g * 2)


def backward_hook_on_module():
    handle = model[2].register_full_backward_hook(lambda m, i, o: None)
    try:
        loss_of()
    finally:
        handle.remove()


def submodule_with_gradient():
    F.cross_entropy(model[4](torch.tanh(model[2](torch.ones(12, 16)))), labels).backward()


def head_on_output():
    F.cross_entropy(other(model(data)), labels).backward()


def custom_function():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    Double.apply(model(data)).sum().backward()


def address():
    model[0].weight.data_ptr()


def version():
    print(model[0].weight._version)


def shared_memory():
    model.share_memory()


def lbfgs():
    torch.optim.LBFGS(model.parameters()).step(lambda: loss_of())


def own_optimizer():
    class Mine(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)

    mine = Mine(model.parameters(), lr=0.1)
    loss_of().backward()
    mine.step()


def replaced_step():
    original = torch.optim.Adagrad.step

    @functools.wraps(original)
    def twice(self, closure=None):
        original(self, closure)
        return original(self)

    torch.optim.Adagrad.step = twice
    try:
        mine = torch.optim.Adagrad(model.parameters(), lr=0.1)
        loss_of().backward()
        mine.step()
    finally:
        torch.optim.Adagrad.step = original


def optimizer_of_two():
    both = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    loss_of().backward()
    both.step()


def new_parameter():
    kept = model[2]
    model[2] = nn.Linear(16, 16)
    try:
        loss_of()
    finally:
        model[2] = kept


def other_shape():
    kept = model[4].bias.data
    model[4].bias.data = torch.zeros(1)
    try:
        loss_of()
    finally:
        model[4].bias.data = kept


def tied_later():
    kept = model[2].weight
    model[2].weight = nn.Parameter(kept.detach().clone())
    try:
        loss_of()
    finally:
        model[2].weight = kept


def memory_of_another_parameter():
    kept = model[0].bias.data
    model[0].bias.data = model[2].bias.data
    try:
        loss_of()
    finally:
        model[0].bias.data = kept


def replaced_parameters():
    torch.func.functional_call(
        model, {k: v.detach().clone() for k, v in model.named_parameters()}, (data,)
    ).sum().backward()


def compiled():
    torch.compile(model, backend="aot_eager")


def hook_on_compiled():
    wrapper = torch.compile(model, backend="eager")
    wrapper.register_forward_hook(lambda *_: None)
    wrapper(data)


def gradient_of_output():
    model(data).retain_grad()


def written_into_a_tensor():
    total = torch.zeros(())
    total += loss_of()
    total.backward()


def noise_with_gradient():
    torch.bernoulli(model(data).sigmoid()).sum().backward()


def slopes_with_gradient():
    F.rrelu(model(data), training=True).sum().backward()


def changed_before_backward():
    loss = loss_of()
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    try:
        loss.backward()
    finally:
        with torch.no_grad():
            model[0].weight.mul_(2)


def grad_of_another_type():
    model[4].bias.grad = torch.zeros(4, dtype=torch.float64)


def scaled_by_a_trained_number():
    (loss_of() * other.bias[0]).backward()


def out_argument():
    torch.add(model(data), 1, out=torch.empty(12, 4))


NOT_WAYS = {"loss_of"}
WAYS = [
    v
    for k, v in list(globals().items())
    if type(v) is type(loss_of) and v.__module__ == "__main__" and k not in NOT_WAYS
]


def plain_step():
    opt.zero_grad()
    loss = loss_of()
    loss.backward()
    opt.step()
    return loss


if __name__ == "__main__":
    before = copy.deepcopy(model.state_dict())
    for _ in range(3):
        print(f"{plain_step().item():.17g}")
    for way in WAYS:
        if sys.argv[1:] == ["--plain"]:
            continue
        try:
            way()
        except Exception as error:
            line = way.__code__.co_firstlineno
            last = line + len(list(way.__code__.co_lines()))
            where = getattr(error, "where", "")
            kind = (
                "refused"
                if str(error).startswith("autopipe run:") and f"{__file__}:" in where
                else type(error).__name__
            )
            print(f"{way.__name__}: {kind}", file=sys.stderr)
        else:
            print(f"{way.__name__}: ran", file=sys.stderr)
    # what was refused has changed nothing
    for _ in range(3):
        print(f"{plain_step().item():.17g}")
    print(f"{sum(v.double().abs().sum().item() for v in model.state_dict().values()):.17g}")
