"""Ways to use optimizers and their state, frozen parameters, outputs and random numbers.

Each prints what it computes; ``try_all`` prints its losses and sums of all that it may have changed.
"""

import copy

import torch
from torch.nn import functional as F
from ways_model import batch, data, labels, loss_of, model, run, show, step, try_all

# --- optimizers ---


def momentum_read():
    step()
    show(run.opt.state[model.head.weight]["exp_avg"], run.opt.state[model.head.weight]["step"], len(run.opt.state))
    step()


def momentum_kept():
    step()
    kept = run.opt.state[model.head.weight]["exp_avg_sq"]
    step()
    show(kept)


def momentum_write():
    step()
    run.opt.state[model.head.weight]["exp_avg"].mul_(0.5)
    run.opt.state[model.second.weight]["step"] += 3
    step()


def momentum_reset():
    step()
    run.opt.state.clear()
    step()
    del run.opt.state[model.head.bias]
    step()
    run.opt.state[model.first.bias] = {}
    step()


def optimizer_state():
    step()
    state = copy.deepcopy(run.opt.state_dict())
    step()
    run.opt.load_state_dict(state)
    step()
    show(len(run.opt.state_dict()["state"]))


def optimizer_copy():
    step()
    state = run.opt.state_dict()
    step()
    show(*[v["exp_avg"] for v in state["state"].values()])


def rates():
    for rate in (0.1, 0.02):
        for group in run.opt.param_groups:
            group["lr"] = rate
        run.opt.param_groups[0]["betas"] = (0.8, 0.9)
        step()


def scheduler():
    plan = torch.optim.lr_scheduler.OneCycleLR(run.opt, 0.05, total_steps=6)
    for _ in range(3):
        step()
        plan.step()
        show(plan.get_last_lr())


def closure():
    def evaluate_loss():
        run.opt.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    show(run.opt.step(evaluate_loss))


def another_optimizer():
    run.opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    step()
    step()
    show(run.opt.state[model.head.weight]["momentum_buffer"])


def group_added():
    run.opt = torch.optim.Adam(model.head.parameters(), lr=0.01)
    step()
    run.opt.add_param_group({"params": list(model.third.parameters()), "lr": 0.02})
    step()
    step()


def two_optimizers():
    one = torch.optim.SGD(model.head.parameters(), lr=0.1)
    two = torch.optim.RMSprop([*model.first.parameters(), *model.norm.parameters()], lr=0.01)
    for _ in range(2):
        one.zero_grad()
        two.zero_grad()
        loss_of().backward()
        one.step()
        two.step()
    run.opt = one


def step_hooks():
    handle = run.opt.register_step_post_hook(lambda *_: show("stepped", model.head.bias))
    step()
    handle.remove()


# --- freezing, outputs, randomness ---


def freeze():
    step()
    model.second.weight.requires_grad_(False)
    step()
    show(model.second.weight.grad is None)
    model.second.weight.requires_grad = True
    step()


def rate_of_dropout():
    step()
    model.drop.p = 0.5
    step()
    model.drop.p = 0.1


def batch_sizes():
    for size in (5, 9, 12):
        run.opt.zero_grad()
        F.cross_entropy(model(data[:size]), labels[:size]).backward()
        run.opt.step()


def metrics():
    x, y = batch()
    out = model(x)
    loss = F.cross_entropy(out, y)
    show(
        out.shape,
        out.requires_grad,
        loss.item(),
        (out.argmax(-1) == y).sum().item(),
        out.detach().cpu().numpy().sum().item(),
    )
    print(loss, out[:1])
    _, predicted = out.max(1)
    show(predicted.eq(y).sum(), out.softmax(1).max(), out.topk(2).indices)
    values = torch.zeros(2)
    with torch.no_grad():
        values[0] = loss
        values += out.mean()
    show(values, [float(v) for v in out[0]], bool(loss > 0), out.T.shape)
    kept = [loss.detach(), out[y == 1].sum().item(), len(out)]
    show(*kept, torch.tensor([loss.item(), 1.0]), torch.stack([loss, loss * 2]).mean(), f"{loss:.9f}")


def output_in_place():
    run.opt.zero_grad()
    x, y = batch()
    out = model(x)
    out *= 0.5
    out[:, 0] += 1
    F.cross_entropy(out, y).backward()
    run.opt.step()


def masked():
    run.opt.zero_grad()
    x, y = batch()
    out = model(x)
    keep = out.max(1).values > 0.05
    F.cross_entropy(out[keep], y[keep]).backward()
    run.opt.step()
    show(out[keep].shape)


def own_dropout():
    run.opt.zero_grad()
    x, y = batch()
    F.cross_entropy(F.dropout(model(x), 0.3), y).backward()
    run.opt.step()
    show(torch.rand(2))


def branch():
    run.opt.zero_grad()
    loss = loss_of()
    if loss > 1.2:
        loss = loss * 0.5
    loss.backward()
    run.opt.step()


def autocast():
    run.opt.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of()
    loss.backward()
    run.opt.step()
    show(loss)


def input_changed():
    run.opt.zero_grad()
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    x.zero_()
    y.zero_()
    run.opt.step()
    show(loss)


if __name__ == "__main__":
    try_all(dict(globals()))
