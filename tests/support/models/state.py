# ruff: noqa: E501
"""Model files whose Python state changes. ``REFUSED``: the change affects training; ``ACCEPTED``: it does not."""

BASE = """
import collections
import functools
import itertools
import logging
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

logger = logging.getLogger(__name__)


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(3))
        self.o = nn.Linear(8, 5)
        self.prepare()

    def prepare(self):
        pass

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return self.o(x)


def loss(output, target):
    return F.cross_entropy(output, target)


def data(batch_size=6):
    g = torch.Generator().manual_seed(5)
    for _ in range(30):
        yield torch.randn(batch_size, 8, generator=g), torch.randint(0, 5, (batch_size,), generator=g)


def optimizer(named_parameters):
    return torch.optim.SGD([parameter for _, parameter in named_parameters], lr=0.1)


def build_model():
    return Net()

"""


def net(prepare: str, forward: str, after: str = "") -> str:
    """Return a subclass of Net. ``forward``: statements before the blocks; ``after``: statements after the head."""
    return f"""
class Net(Net):
    def prepare(self):
        {prepare}

    def forward(self, x):
        {forward}
        y = super().forward(x)
        {after or "pass"}
        return y
"""


DATA = """
def data(batch_size=6):
    g = torch.Generator().manual_seed(5)
    for i in range(30):
        {change}
        yield torch.randn(batch_size, 8, generator=g), torch.randint(0, 5, (batch_size,), generator=g)
"""
LOSS = """
{before}


def loss(output, target{argument}):
    {change}
    return F.cross_entropy(output, target, label_smoothing={smoothing})
"""


def loss(before: str, change: str, smoothing: str, argument: str = "") -> str:
    return LOSS.format(before=before, change=change, smoothing=smoothing, argument=argument)


# name -> (text after BASE, part of the message, the named line)
REGISTRY = """
class Registry:
    def __init__(self, old=None):
        self.names, self.scales = (list(old.names), dict(old.scales)) if old else ([(int, "x")], {"half": [0.5]})
        self.by_type = dict(old.by_type) if old else {(int, torch.Tensor): "half"}

""" + net(
    "self.registry = Registry()",
    "self.registry = Registry(self.registry)CHANGE\n        x = x * self.registry.scales['half'][0]",
)
REFUSED = {
    "a registry that grows with each copy": (
        REGISTRY.replace("CHANGE", "; self.registry.scales['half'][0] *= 0.9"), "model.registry", "self.registry",
    ),
    "a counter and a branch not taken": (
        net("self.k = 0", "self.k += 1\n        if self.k > 24: x = x * 0.5"), "model.k", "self.k += 1",
    ),
    "a counter written out": (
        net("self.k = 0", "self.k = self.k + 1\n        x = x * 0.5 if self.k > 24 else x"), "model.k", "self.k = self.k",
    ),
    "a counter through a local name": (
        net("self.k = 0", "k = self.k\n        self.k = k + 1\n        if k > 24: x = x * 0.5"), "model.k", "self.k = k + 1",
    ),
    "a counter of a class": (
        net("type(self).k = 0", "type(self).k += 1\n        if self.k > 24: x = x * 0.5"), "Net.k", "type(self).k += 1",
    ),
    "a counter of a block": (
        net("self.h[1].k = 0", "self.h[1].k += 1\n        if self.h[1].k > 24: x = x * 0.5"), "model.h.1.k", "].k += 1",
    ),
    "a counter in a helper object": (
        net("self.meter = Meter()", "x = x * self.meter.factor()").replace("class Net", """
class Meter:
    def __init__(self):
        self.calls = 0
    def factor(self):
        self.calls += 1
        return 0.5 if self.calls > 24 else 1.0

class Net""", 1), "model.meter.calls", "self.calls += 1",
    ),
    "an entry of a dict": (
        net("self.state = dict(k=0, w=2)", "self.state['k'] += 1\n        if self.state['k'] > 24: x = x * 0.5"),
        "model.state['k']", "self.state['k'] += 1",
    ),
    "the length of a list": (
        net("self.log = []", "self.log.append(0)\n        if len(self.log) > 24: x = x * 0.5"), "model.log", "self.log.append",
    ),
    "an average of numbers": (
        net("self.mean = 1.0", "self.mean = 0.9 * self.mean + 0.1 * x.shape[0]", "y = y * (self.mean > 2)"),
        "model.mean", "self.mean = 0.9",
    ),
    "layers frozen at a step": (
        net("self.n = 0", "self.n += 1\n        if self.n == 24: self.h[0].requires_grad_(False)"), "model.n", "self.n += 1",
    ),
    "a layer replaced at a step": (
        net("self.n = 0", "self.n += 1\n        if self.n == 24: self.h[1] = Block()"), "model.n", "self.n += 1",
    ),
    "a generator of its own": (
        net("self.coin = random.Random(0)", "x = x * 0.5 if self.coin.random() < 0.03 else x"), "model.coin", "self.coin.random()",
    ),
    "numpy's generator of its own": (
        net("self.rng = np.random.default_rng(0)", "x = x * 0.5 if self.rng.random() < 0.03 else x"), "model.rng", "self.rng",
    ),
    "a generator in a global dict": (
        "TOOLS = dict(coin=random.Random(0))\n" + net("pass", "x = x * 0.5 if TOOLS['coin'].random() < 0.03 else x"),
        "TOOLS['coin']", "TOOLS",
    ),
    "a count of itertools": (
        net("self.count = itertools.count()", "x = x * 0.5 if next(self.count) > 24 else x"), "model.count", "next(self.count)",
    ),
    "a forward hook with a counter": (
        """
def hook(module, inputs, output):
    module.calls += 1
    return output * 0.5 if module.calls > 24 else output
""" + net("self.h[0].calls = 0; self.h[0].register_forward_hook(hook)", "pass"), "model.h.0.calls", "module.calls += 1",
    ),
    "a loss that counts its calls": (
        loss("CALLS = [0]", "CALLS[0] += 1", "0.0 if CALLS[0] < 24 else 0.1"), "CALLS[0]", "CALLS[0] += 1",
    ),
    "a loss with a global number": (
        loss("CALLS = 0", "global CALLS\n    CALLS += 1", "0.0 if CALLS < 24 else 0.1"), "CALLS", "CALLS += 1",
    ),
    "a loss with an attribute of its own": (
        loss("", "loss.calls = getattr(loss, 'calls', 0) + 1", "0.0 if loss.calls < 24 else 0.1"), "loss.calls", "loss.calls =",
    ),
    "a loss with a default argument": (
        loss("", "state[0] += 1", "0.0 if state[0] < 24 else 0.1", ", state=[0]"), "a default argument of loss", "state[0] += 1",
    ),
    "a loss in a closure": (
        """
def annealed():
    calls = 0
    def loss(output, target):
        nonlocal calls
        calls += 1
        return F.cross_entropy(output, target) * (1.0 if calls < 24 else 0.5)
    return loss

loss = annealed()
""", "calls of loss", "calls += 1",
    ),
    "a helper with a closure": (
        """
def made():
    calls = 0
    def factor():
        nonlocal calls
        calls += 1
        return 1.0 if calls < 24 else 0.5
    return factor

factor = made()

def loss(output, target):
    return F.cross_entropy(output, target) * factor()
""", "calls of factor", "calls += 1",
    ),
    "a helper with an attribute": (
        """
def factor():
    factor.calls += 1
    return 1.0 if factor.calls < 24 else 0.5

factor.calls = 0

def loss(output, target):
    return F.cross_entropy(output, target) * factor()
""", "factor.calls", "factor.calls += 1",
    ),
    "a loss that is an object": (
        """
class Loss:
    def __init__(self):
        self.calls = 0
    def weight(self):
        return min(1.0, max(0.1, self.calls / 24))
    def __call__(self, output, target):
        self.calls += 1
        return F.cross_entropy(output, target) * self.weight()

loss = Loss()
""", "loss.calls", "self.calls += 1",
    ),
    "a switch at every call": (
        net("self.odd = False", "self.odd = not self.odd\n        x = x * 0.5 if self.odd else x"), "model.odd", "self.odd = not",
    ),
    "a counter by its name": (
        net("self.k = 0", "setattr(self, 'k', getattr(self, 'k') + 1)\n        if self.k > 24: x = x * 0.5"),
        "model.k", "setattr(self, 'k'",
    ),
    "data freezes through a method": (
        "MODEL = []\n" + net("MODEL[:] = [self]", "pass") + """
def freeze(model, on):
    for parameter in model.h[0].parameters():
        parameter.requires_grad = not on

""" + DATA.format(change="freeze(MODEL[0], i > 20)"), "the model (.requires_grad =)", "parameter.requires_grad = not on",
    ),
    "data counts on an object that the loss reads": (
        """
class Schedule:
    def __init__(self):
        self.step = 0
    def advance(self):
        self.step += 1

SCHEDULE = Schedule()
""" + loss("", "pass", "0.0 if SCHEDULE.step < 24 else 0.1") + DATA.format(change="SCHEDULE.advance()"),
        "SCHEDULE.step", "self.step += 1",
    ),
    "numbers counted in an array": (
        net("self.hits = np.zeros(3)", "self.hits[0] += 1\n        x = x * 0.5 if self.hits.sum() > 24 else x"),
        "model.hits", "self.hits[0] += 1",
    ),
    "a number that follows another": (
        net("self.k = 0; self.w = 1.0", "self.k += 1\n        self.w = 1.0 if self.k < 24 else 0.5", "y = y * self.w"),
        "model.k", "self.k += 1",
    ),
    "data sets what the loss reads": (
        loss("STEP = [0]", "pass", "0.0 if STEP[0] < 24 else 0.1") + DATA.format(change="STEP[0] = i"),
        "STEP[0]", "STEP[0] = i",
    ),
    "data sets a global that the forward reads": (
        "FACTOR = 1.0\n" + net("pass", "x = x * FACTOR") + DATA.format(change="""global FACTOR
        if i > 20:
            FACTOR = 0.5"""), "FACTOR", "FACTOR = 0.5",
    ),
    "data freezes the model": (
        "MODEL = []\n" + net("MODEL[:] = [self]", "pass") + DATA.format(change="MODEL[0].h[0].requires_grad_(i < 20)"),
        "the model (.requires_grad_())", "requires_grad_(i < 20)",
    ),
    "a dropout that rises with the steps": (
        net("self.k, self.drop = 0, nn.Dropout(0.0)", "self.k += 1\n        self.drop.p = 0.01 * (self.k // 20)\n        x = self.drop(x)"),
        "model.k", "self.k += 1",
    ),
    "a dropout that rises by itself": (
        net("self.drop = nn.Dropout(0.0)", "self.drop.p = min(0.3, self.drop.p + 0.01)\n        x = self.drop(x)"),
        "model.drop.p", "self.drop.p = min",
    ),
    "data changes a dropout": (
        "MODEL = []\n" + net("MODEL[:] = [self]; self.drop = nn.Dropout(0.1)", "x = self.drop(x)")
        + DATA.format(change="MODEL[0].drop.p = 0.1 if i < 20 else 0.5"), "the model (.p =)", "drop.p =",
    ),
}  # fmt: skip

ACCEPTED = {
    "a registry that copies itself": REGISTRY.replace("CHANGE", ""),
    "a counter that nothing reads": net("self.k = 0", "self.k += 1"),
    "a counter noted at a layer": net("self.k = 0", "self.k += 1\n        self.o.last_step = self.k"),
    "a counter that is printed": net(
        "self.k = 0", "self.k += 1\n        if self.k % 100 == 0: logger.info('step %d', self.k)"
    ),
    "a list of losses": loss("LOSSES = []", "LOSSES.append(output.shape[0])", "0.0"),
    "a list that stays short": net("self.log = []", "self.log.append(x.shape)\n        if len(self.log) > 9: self.log.pop(0)"),
    "the last output": net("self.last = None", "pass", "self.last = y.detach()"),
    "a value passed on in an attribute": net("self.x = None", "self.x = x * 2\n        x = self.x + 1"),
    "the loss of a part": net("self.aux = 0.0", "self.aux = x.mean()", "y = y + self.aux"),
    "a mask made once": net(
        "self.mask = None",
        "self.mask = torch.ones(8) if self.mask is None else self.mask\n        x = x * self.mask",
    ),
    "a mask for the last size": net(
        "self.mask = None",
        "if self.mask is None or self.mask.shape[0] != x.shape[0]: self.mask = torch.ones(x.shape[0], 1)\n"
        "        x = x * self.mask",
    ),
    "tables by size": net(
        "self.tables = dict()",
        "n = x.shape[0]\n        if n not in self.tables: self.tables[n] = torch.full((n, 1), 0.5)\n"
        "        x = x * self.tables[n]",
    ),
    "a memoized function": """
@functools.lru_cache(None)
def table(n):
    return torch.full((n,), 0.5)

""" + net("pass", "x = x * table(8)"),
    "an average for the log": """
class Meter:
    def __init__(self):
        self.total, self.count, self.average = 0.0, 0, 0.0
    def update(self, value):
        self.total += value
        self.count += 1
        self.average = self.total / self.count

METER = Meter()
""" + loss("", "METER.update(output.shape[0])", "0.0"),
    "numbers that only data reads": "EPOCH = [0]\n" + DATA.format(change="EPOCH[0] += 1\n        _ = EPOCH[0] * 2"),
    "a table that data fills once": "CLASSES = []\n" + loss("", "count = max(len(CLASSES), 1)", "0.0 * count") + """
def data(batch_size=6):
    if not CLASSES:
        CLASSES[:] = range(5)
    g = torch.Generator().manual_seed(5)
    for _ in range(30):
        yield torch.randn(batch_size, 8, generator=g), torch.randint(0, 5, (batch_size,), generator=g)
""",
    "a generator that only data draws from": "RNG = random.Random(0)\n" + DATA.format(change="RNG.random()"),
    "an attribute of the shape": net("self.n = 0", "self.n = x.shape[0]", "y = y[: self.n]"),
    "a sum that starts again in each forward": net(
        "self.aux = 0.0", "self.aux = 0.0\n        for block in self.h: self.aux = self.aux + block.a.weight.pow(2).mean()",
        "y = y + self.aux",
    ),
    "a list that starts again in each forward": net(
        "self.seen = []", "self.seen = []\n        for block in self.h: self.seen.append(x.mean() * 0.5)",
        "y = y + sum(self.seen)",
    ),
    "a list that is cleared in each forward": net(
        "self.seen = []", "self.seen.clear()\n        for block in self.h: self.seen.append(x.mean() * 0.5)",
        "y = y + sum(self.seen)",
    ),
    "a histogram for the log": net("self.hits = np.zeros(3)", "self.hits[x.shape[0] % 3] += 1"),
    "an attention map of many numbers": net(
        "self.map = None", "self.map = x[:, None].expand(-1, 40000, -1) * 1.0\n        x = x + self.map[:, 0]"
    ),
    "a model that only data uses": "ENCODER = Block()\n" + DATA.format(
        change="ENCODER.eval()\n        ENCODER.requires_grad_(i < 0)"
    ),
    "hooks that look": """
SEEN = collections.defaultdict(list)
def hook(module, inputs, output):
    SEEN[id(module)].append(output.shape)
""" + net("[block.register_forward_hook(hook) for block in self.h]", "pass"),
}  # fmt: skip
