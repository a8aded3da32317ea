"""Ways to read and write parameters, gradients and optimizer state between the steps of one model.

Each way starts from the same weights and prints what it computes, its losses, and sums of all that it may have changed.
"""

import copy
import io
import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 16, bias=False)
        self.drop = nn.Dropout(0.1)
        self.third = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        x = torch.tanh(self.second(x)) + x
        x = self.drop(torch.relu(self.third(x * self.scale)))
        return self.head(x)


model = Net()
initial = copy.deepcopy(model.state_dict())
data = torch.randn(512, 8)
labels = data[:, :4].argmax(1)


def adam():
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


opt = adam()


def batch():
    rows = torch.randint(len(data), (12,))
    return data[rows], labels[rows]


def loss_of():
    x, y = batch()
    return F.cross_entropy(model(x), y)


def step(between=None, after=None, zero=True):
    loss = loss_of()
    if zero:
        opt.zero_grad()
    loss.backward()
    if between is not None:
        between()
    opt.step()
    if after is not None:
        after()
    return loss


def show(*values):
    for value in values:
        if isinstance(value, torch.Tensor):
            print(f"  {value.detach().double().abs().sum().item():.17g}")
        else:
            print(f"  {value!r}")


# --- parameters: reads ------------------------------------------------------------------------------------------------


def read_norm():
    step(after=lambda: show(model.second.weight.norm()))


def read_item():
    step()
    show(model.head.bias[0].item(), float(model.head.bias[1]), model.head.bias.tolist())


def read_print():
    step()
    print(model.head.bias, model.norm.running_mean)
    print(f"{model.head.bias.mean():.9f}")


def read_numpy():
    step()
    show(float(model.third.weight.detach().numpy().astype("float64").sum()))


def kept_numpy():
    view = model.third.weight.detach().numpy()
    step()
    show(float(view.sum()))
    step()
    show(float(np.abs(view).sum()))


def kept_detach():
    view = model.first.weight.detach()
    step()
    step()
    show(view)


def kept_view():
    with torch.no_grad():
        row = model.first.weight[3]
        flat = model.first.weight.view(-1)[5:9]
    step()
    show(row, flat)


def kept_data():
    held = [p.data for p in model.parameters()]
    step()
    show(*held)


def kept_state_dict():
    held = model.state_dict()
    step()
    show(*held.values())
    model.load_state_dict(held)
    step()


def vector():
    step()
    show(nn.utils.parameters_to_vector(model.parameters()))


def torch_tensor():
    step()
    show(
        torch.tensor(model.head.bias.tolist()),
        torch.tensor(model.head.bias.detach()),
        torch.stack(list(model.head.bias.detach())),
    )


def dlpack():
    step()
    show(torch.from_dlpack(model.head.weight.detach()))


def storage():
    step()
    show(
        model.head.weight.untyped_storage().nbytes(), torch.tensor(model.head.bias.detach().untyped_storage().tolist())
    )


def deepcopy_model():
    step()
    other = copy.deepcopy(model).eval()
    step()
    with torch.no_grad():
        show(other(data[:5]))
    show(type(other.head.weight).__name__, type(other.norm.running_mean).__name__)


def save_model():
    step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    show(*loaded["model"].values(), len(loaded["optimizer"]["state"]), loaded["optimizer"]["state"][0]["exp_avg"])
    step()


def save_whole_model():
    step()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    show(*loaded.state_dict().values(), type(loaded.head.weight).__name__)


def foreach_norm():
    step()
    with torch.no_grad():
        show(*torch._foreach_norm(list(model.parameters())))


def buffers():
    step()
    show(
        model.norm.running_var, model.norm.num_batches_tracked.item(), dict(model.named_buffers())["norm.running_mean"]
    )


def kept_buffer():
    mean = model.norm.running_mean.detach()
    step()
    show(mean)
    loss_of()
    show(mean)


def submodule_alone():
    step()
    with torch.no_grad():
        show(model.head(torch.ones(2, 16)), model.first(data[:3]))
        show(model.head(model(data[:4])[:, :1].expand(4, 16)))


def evaluate():
    step()
    model.eval()
    with torch.no_grad():
        out = model(data[:40])
        show(out, F.cross_entropy(out, labels[:40]), (out.argmax(1) == labels[:40]).float().mean().item())
    model.train()
    step()


def functional_call():
    step()
    model.eval()
    with torch.no_grad():
        show(torch.func.functional_call(model, dict(model.named_parameters()), (data[:4],)))
    model.train()


# --- parameters: writes -----------------------------------------------------------------------------------------------


def manual_sgd():
    loss = loss_of()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.1)
    loss_of()


def no_grad_in_place():
    step()
    with torch.no_grad():
        model.second.weight.mul_(0.5)
        model.head.bias[1] = 0.25
        model.third.weight[2:4, :3].zero_()
    step()


def set_data():
    step()
    model.second.weight.data = model.second.weight.data * 0.9
    model.head.bias.data = torch.ones(4)
    step()


def clamp_after_step():
    step(after=lambda: [p.data.clamp_(-0.2, 0.2) for p in model.parameters()])
    step()


def write_numpy():
    step()
    model.third.weight.detach().numpy()[0, :] = 0.125
    step()


def write_kept_view():
    view = model.first.weight.detach()[2]
    step()
    view.fill_(0.5)
    step()
    show(view)
    view.mul_(2)
    step()


def write_kept_numpy():
    view = model.first.bias.detach().numpy()
    step()
    view += 1
    step()
    view *= 0.5
    step()


def copy_between():
    step()
    with torch.no_grad():
        model.third.weight.copy_(model.second.weight)
    step()


def init_again():
    step()
    nn.init.normal_(model.head.weight, std=0.02)
    nn.init.zeros_(model.head.bias)
    step()


def reset_parameters():
    step()
    model.third.reset_parameters()
    model.norm.reset_running_stats()
    step()


def apply_init():
    step()
    model.apply(lambda m: nn.init.xavier_uniform_(m.weight) if isinstance(m, nn.Linear) else None)
    step()


def vector_to():
    step()
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()).detach() * 0.9, model.parameters())
    step()


def load_state():
    step()
    model.load_state_dict({k: v * 1 for k, v in initial.items()})
    step()


def load_head():
    step()
    model.head.load_state_dict({"weight": torch.ones(4, 16), "bias": torch.zeros(4)})
    step()


def swap_weights():
    step()
    saved = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(initial)
    model.eval()
    with torch.no_grad():
        show(model(data[:6]))
    model.train()
    model.load_state_dict(saved)
    step()


def foreach_write():
    step()
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.95)
    step()


def ema():
    average = copy.deepcopy(model)
    for _ in range(2):
        step()
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters(), strict=True):
                a.mul_(0.9).add_(p, alpha=0.1)
            for a, b in zip(average.buffers(), model.buffers(), strict=True):
                a.copy_(b)
    show(*average.state_dict().values())


def swa():
    average = torch.optim.swa_utils.AveragedModel(model)
    step()
    average.update_parameters(model)
    step()
    average.update_parameters(model)
    show(*average.state_dict().values())


def weight_decay_by_hand():
    step(between=lambda: [p.data.mul_(0.99) for p in model.parameters() if p.dim() > 1])
    step()


def buffer_write():
    step()
    model.norm.running_mean.zero_()
    model.scale.mul_(0.5)
    step()
    model.scale[3] = 2.0
    step()


def share_values():
    step()
    with torch.no_grad():
        model.second.weight.set_(model.second.weight.clone() * 0.8)
    step()


# --- gradients --------------------------------------------------------------------------------------------------------


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
    held = []
    step(between=lambda: held.extend(p.grad for p in model.parameters()))
    step()
    show(*held)


def grad_accumulated_kept():
    opt.zero_grad()
    loss_of().backward()
    held = [p.grad for p in model.parameters()]
    loss_of().backward()
    show(*held)
    held[0].mul_(0.5)
    opt.step()


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
    opt.zero_grad(set_to_none=False)
    loss_of().backward()
    opt.zero_grad(set_to_none=False)
    show(*[p.grad for p in model.parameters()])
    step(zero=False)


def zero_some():
    loss_of().backward()
    model.head.zero_grad()
    model.first.weight.grad = None
    step(zero=False)


def accumulate():
    opt.zero_grad()
    for _ in range(3):
        (loss_of() / 3).backward()
    show(model.head.bias.grad)
    opt.step()


def two_calls():
    opt.zero_grad()
    loss_of().backward()
    x, y = batch()
    loss = F.cross_entropy(model(x), y) + 0.1 * (model(x + 0.1) - model(x).detach()).pow(2).mean()
    loss.backward()
    opt.step()
    show(loss)


def retained():
    opt.zero_grad()
    loss = loss_of()
    loss.backward(retain_graph=True)
    loss.backward()
    opt.step()


def scaled_backward():
    opt.zero_grad()
    x, _ = batch()
    out = model(x)
    out.backward(torch.ones(12, 4))
    opt.step()


def autograd_backward():
    opt.zero_grad()
    torch.autograd.backward(loss_of())
    opt.step()


def grad_scaler():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    opt.zero_grad()
    scaler.scale(loss_of()).backward()
    scaler.unscale_(opt)
    show(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    scaler.step(opt)
    scaler.update()
    show(scaler.get_scale())


def noise_in_gradients():
    step(between=lambda: [p.grad.add_(torch.randn_like(p) * 1e-3) for p in model.parameters()])


# --- optimizers -------------------------------------------------------------------------------------------------------


def momentum_read():
    step()
    show(opt.state[model.head.weight]["exp_avg"], opt.state[model.head.weight]["step"], len(opt.state))
    step()


def momentum_kept():
    step()
    held = opt.state[model.head.weight]["exp_avg_sq"]
    step()
    show(held)


def momentum_write():
    step()
    opt.state[model.head.weight]["exp_avg"].mul_(0.5)
    opt.state[model.second.weight]["step"] += 3
    step()


def momentum_reset():
    step()
    opt.state.clear()
    step()
    del opt.state[model.head.bias]
    step()
    opt.state[model.first.bias] = {}
    step()


def optimizer_state():
    step()
    state = copy.deepcopy(opt.state_dict())
    step()
    opt.load_state_dict(state)
    step()
    show(len(opt.state_dict()["state"]))


def optimizer_copy():
    step()
    state = opt.state_dict()
    step()
    show(*[v["exp_avg"] for v in state["state"].values()])


def rates():
    for rate in (0.1, 0.02):
        for group in opt.param_groups:
            group["lr"] = rate
        opt.param_groups[0]["betas"] = (0.8, 0.9)
        step()


def scheduler():
    plan = torch.optim.lr_scheduler.OneCycleLR(opt, 0.05, total_steps=6)
    for _ in range(3):
        step()
        plan.step()
        show(plan.get_last_lr())


def closure():
    def evaluate_loss():
        opt.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    show(opt.step(evaluate_loss))


def another_optimizer():
    global opt
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    step()
    step()
    show(opt.state[model.head.weight]["momentum_buffer"])


def group_added():
    global opt
    opt = torch.optim.Adam(model.head.parameters(), lr=0.01)
    step()
    opt.add_param_group({"params": list(model.third.parameters()), "lr": 0.02})
    step()
    step()


def two_optimizers():
    global opt
    one = torch.optim.SGD(model.head.parameters(), lr=0.1)
    two = torch.optim.RMSprop([*model.first.parameters(), *model.norm.parameters()], lr=0.01)
    for _ in range(2):
        one.zero_grad()
        two.zero_grad()
        loss_of().backward()
        one.step()
        two.step()
    opt = one


def step_hooks():
    handle = opt.register_step_post_hook(lambda *_: show("stepped", model.head.bias))
    step()
    handle.remove()


# --- freezing, outputs, randomness ------------------------------------------------------------------------------------


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
        opt.zero_grad()
        F.cross_entropy(model(data[:size]), labels[:size]).backward()
        opt.step()


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
    opt.zero_grad()
    x, y = batch()
    out = model(x)
    out *= 0.5
    out[:, 0] += 1
    F.cross_entropy(out, y).backward()
    opt.step()


def masked():
    opt.zero_grad()
    x, y = batch()
    out = model(x)
    keep = out.max(1).values > 0.05
    F.cross_entropy(out[keep], y[keep]).backward()
    opt.step()
    show(out[keep].shape)


def own_dropout():
    opt.zero_grad()
    x, y = batch()
    F.cross_entropy(F.dropout(model(x), 0.3), y).backward()
    opt.step()
    show(torch.rand(2))


def branch():
    opt.zero_grad()
    loss = loss_of()
    if loss > 1.2:
        loss = loss * 0.5
    loss.backward()
    opt.step()


def autocast():
    opt.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of()
    loss.backward()
    opt.step()
    show(loss)


def input_changed():
    opt.zero_grad()
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    x.zero_()
    y.zero_()
    opt.step()
    show(loss)


NOT_WAYS = {"adam", "batch", "loss_of", "step", "show"}
WAYS = [
    v for k, v in list(globals().items()) if type(v) is type(step) and v.__module__ == "__main__" and k not in NOT_WAYS
]

if __name__ == "__main__":
    chosen = sys.argv[1:]
    step()
    for way in WAYS:
        if chosen and way.__name__ not in chosen:
            continue
        model.load_state_dict(initial)
        opt = adam()
        step()
        print(way.__name__)
        way()
        show(step())
        show(sum(v.double().abs().sum() for v in model.state_dict().values()))
        show(sum(v.double().abs().sum() for s in opt.state.values() for v in s.values() if isinstance(v, torch.Tensor)))
        show(torch.rand(1).item())
