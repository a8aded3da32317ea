"""Ways to read and write parameters and buffers between steps.

Each prints what it computes; ``try_all`` prints its losses and sums of all that it may have changed.
"""

import copy
import io

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from ways_model import data, initial, labels, loss_of, model, run, show, step, try_all

# --- parameters: reads ---


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
    kept = [p.data for p in model.parameters()]
    step()
    show(*kept)


def kept_state_dict():
    kept = model.state_dict()
    step()
    show(*kept.values())
    model.load_state_dict(kept)
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
    torch.save({"model": model.state_dict(), "optimizer": run.opt.state_dict()}, file)
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


# --- parameters: writes ---


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


if __name__ == "__main__":
    try_all(dict(globals()))
