"""Ways to use outputs of the model without their gradient: other modules that are trained, and random draws."""

import torch
from torch import nn
from torch.distributions import Bernoulli, Categorical, Normal
from torch.nn import functional as F
from ways_model import batch, model, run, show, try_all


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        return x * weight

    @staticmethod
    def backward(ctx, g):
        return g * 2, g.sum(0)


class Heads:
    def __init__(self):
        torch.manual_seed(1)
        self.probe = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4))
        self.rnn, self.scale = nn.LSTM(4, 6, 2, dropout=0.3), nn.Parameter(torch.ones(4))
        self.all = nn.ModuleList([self.probe, self.rnn])
        self.opt = torch.optim.Adam([*self.all.parameters(), self.scale], lr=0.01)

    def step(self, loss):
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        show(loss, sum(v.double().abs().sum() for v in self.all.state_dict().values()), self.scale)


def train(loss):
    run.opt.zero_grad()
    loss.backward()
    run.opt.step()


def probe_of_a_detached_output():
    heads = Heads()
    for _ in range(2):
        x, y = batch()
        out = model(x)
        train(F.cross_entropy(out, y))
        heads.step(F.cross_entropy(heads.probe(out.detach()), y))
        heads.step(heads.rnn(out.detach()[None])[0].square().mean())


def critic_before_the_backward():
    heads = Heads()
    x, y = batch()
    out = model(x)
    advantage = heads.probe(out.detach()).mean(1) - 0.5
    loss = (F.cross_entropy(out, y, reduction="none") * advantage.detach()).mean()
    heads.step(advantage.square().mean())
    train(loss)


def probe_of_a_model_in_evaluation():
    heads = Heads()
    model.eval()
    with torch.no_grad():
        features = model(batch()[0])
        show(heads.probe.eval()(features), heads.rnn(features[None])[0])
    heads.step(heads.probe.train()(features).square().mean())
    heads.step(heads.probe(features.relu()).square().mean())
    model.train()


def statistics_of_another_module():
    norm, other = nn.BatchNorm1d(4, affine=False), nn.BatchNorm1d(4)
    with torch.no_grad():
        show(other(model(batch()[0])), other.running_mean, other.running_var)
    show(norm(model(batch()[0]).detach()), norm.running_mean)


def custom_function_of_a_detached_output():
    heads = Heads()
    heads.step(Double.apply(model(batch()[0]).detach(), heads.scale).square().mean())


def one_matrix_of_both():
    heads = Heads()
    out = model(batch()[0]).detach()
    heads.step(torch.cat([out * 2, heads.scale.expand(3, 4)]).square().mean() + (out @ heads.scale).mean())


def sample_of_a_distribution():
    x, _ = batch()
    policy = Categorical(logits=model(x))
    action = policy.sample()
    show(action, policy.entropy())
    train((policy.log_prob(action) * Bernoulli(logits=model(x)).sample().mean(1)).mean())


def reparametrized_sample():
    x, _ = batch()
    normal = Normal(model(x), model(x).exp())
    value = normal.rsample()
    train((normal.log_prob(normal.sample()) + value).mean())


def draws_without_gradient():
    x, _ = batch()
    out = model(x)
    choice = torch.multinomial(out.softmax(1), 2)
    noise = torch.randn_like(out) + torch.rand_like(out) + torch.randint_like(out, 4)
    mask = torch.bernoulli(out.detach().sigmoid()) + torch.normal(out.detach(), 1.0) + torch.poisson(out.detach().exp())
    show(choice, noise, mask)
    train(out.gather(1, choice).sum() + (out * noise * mask).mean())


def forward_hooks():
    seen = []
    handles = [
        model.first.register_forward_hook(lambda module, inputs, output: output * (1 + len(seen))),
        model.third.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape)),
    ]
    for _ in range(2):
        x, y = batch()
        train(F.cross_entropy(model(x), y))
    for handle in handles:
        handle.remove()
    print(seen)


def noise_in_place():
    x, _ = batch()
    out = model(x)
    noise = -torch.empty_like(out).exponential_().log()
    drop = torch.zeros_like(out).bernoulli_(0.5)
    train((F.gumbel_softmax(out, tau=0.7) + out * noise + F.relu(out * drop, inplace=True)).square().mean())
    show(noise, drop)


if __name__ == "__main__":
    try_all({name: value for name, value in globals().items() if name != "train"})
