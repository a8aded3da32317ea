"""Ways to read and write gradients between steps.

Each prints what it computes; ``try_all`` prints its losses and sums of all that it may have changed.
"""

import torch
from torch import nn
from torch.nn import functional as F
from ways_model import batch, loss_of, model, run, show, step, try_all


def grad_norms():
    step(between=lambda: show(*[p.grad.norm() for p in model.parameters()]))


def grad_clamp():
    step(between=lambda: [p.grad.clamp_(-0.01, 0.01) for p in model.parameters()])


def grad_data():
    step(between=lambda: [p.grad.data.mul_(0.5) for p in model.parameters()])


def grad_index():
    def write():
        model.head.weight.grad[1:3] = 0
        model.head.weight.grad += 0.01

    step(between=write)


def grad_set():
    def write():
        model.head.weight.grad = torch.ones(4, 16)
        model.second.weight.grad = model.second.weight.grad * 2

    step(between=write)


def grad_none():
    def write():
        model.third.weight.grad = None

    step(between=write)
    show(model.third.weight.grad is None, model.head.weight.grad is None)


def grad_del():
    def write():
        del model.third.weight.grad

    step(between=write)


def grad_numpy():
    def write():
        model.first.bias.grad.numpy()[:] = 0.5

    step(between=write)


def grad_kept():
    kept = []
    step(between=lambda: kept.extend(p.grad for p in model.parameters()))
    step()
    show(*kept)


def grad_accumulated_kept():
    run.opt.zero_grad()
    loss_of().backward()
    kept = [p.grad for p in model.parameters()]
    loss_of().backward()
    show(*kept)
    kept[0].mul_(0.5)
    run.opt.step()


def denormals_flushed():
    torch.set_flush_denormal(True)
    for _ in range(3):
        step(between=lambda: torch._foreach_mul_([p.grad for p in model.parameters()], 1e-36))
    torch.set_flush_denormal(False)


def grad_foreach():
    step(between=lambda: torch._foreach_mul_([p.grad for p in model.parameters()], 0.5))


def clip_norm():
    step(between=lambda: show(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))


def clip_norm_inf():
    step(between=lambda: show(nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=float("inf"))))


def clip_norm_one():
    step(between=lambda: show(nn.utils.clip_grad_norm_(model.second.weight, 0.01)))


def clip_value():
    step(between=lambda: nn.utils.clip_grad_value_(model.parameters(), 0.01))


def total_norm():
    step(between=lambda: show(nn.utils.get_total_norm([p.grad for p in model.parameters()])))


def zero_in_place():
    run.opt.zero_grad(set_to_none=False)
    loss_of().backward()
    run.opt.zero_grad(set_to_none=False)
    show(*[p.grad for p in model.parameters()])
    step(zero=False)


def zero_some():
    loss_of().backward()
    model.head.zero_grad()
    model.first.weight.grad = None
    step(zero=False)


def accumulate():
    run.opt.zero_grad()
    for _ in range(3):
        (loss_of() / 3).backward()
    show(model.head.bias.grad)
    run.opt.step()


def two_calls():
    run.opt.zero_grad()
    loss_of().backward()
    x, y = batch()
    loss = F.cross_entropy(model(x), y) + 0.1 * (model(x + 0.1) - model(x).detach()).pow(2).mean()
    loss.backward()
    run.opt.step()
    show(loss)


def retained():
    run.opt.zero_grad()
    loss = loss_of()
    loss.backward(retain_graph=True)
    loss.backward()
    run.opt.step()


def scaled_backward():
    run.opt.zero_grad()
    x, _ = batch()
    out = model(x)
    out.backward(torch.ones(12, 4))
    run.opt.step()


def autograd_backward():
    run.opt.zero_grad()
    torch.autograd.backward(loss_of())
    run.opt.step()


def grad_scaler():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    run.opt.zero_grad()
    scaler.scale(loss_of()).backward()
    scaler.unscale_(run.opt)
    show(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    scaler.step(run.opt)
    scaler.update()
    show(scaler.get_scale())


def noise_in_gradients():
    step(between=lambda: [p.grad.add_(torch.randn_like(p) * 1e-3) for p in model.parameters()])


if __name__ == "__main__":
    try_all(dict(globals()))
