"""Python numbers that change from step to step travel with the microbatches; other calls are recorded as they run."""

from __future__ import annotations

import pytest
from support.models.lifted import row
from support.models.state import BASE, net

EQUAL = {
    "an annealed weight": net("self.k = 0", "self.k += 1\n        x = x * 0.99 ** self.k"),
    "a temperature": net("self.t = 2.0", "self.t = max(1.0, self.t * 0.97)", "y = y / self.t"),
    "a warm-up in the loss": """
STEP = [0]

def loss(output, target):
    STEP[0] += 1
    return F.cross_entropy(output, target) * min(1.0, STEP[0] / 30)
""",
    "a dropout that rises": net("self.k = 1", "self.k += 1\n        x = F.dropout(x, 0.001 * self.k, self.training)"),
    "an index": net("self.k = 0", "self.k += 1\n        x = x + x[:, self.k % 8].unsqueeze(1)"),
    "a switch as a number": net("self.k = 0", "self.k += 1\n        x = x * (self.k % 3 == 0)"),
    "a generator of its own": net("self.coin = random.Random(0)", "x = x * self.coin.random()"),
    "numpy's generator of its own": net("self.coin = np.random.default_rng(0)", "x = x * self.coin.random()"),
    "a number that becomes a tensor": net("self.k = 0", "self.k += 1\n        x = x * torch.tensor(0.1 * self.k)"),
    "a number of a tensor without dimensions": net(
        "self.k = 0", "self.k += 1\n        x = x * ((torch.tensor(float(self.k)) * 3 + 1) / 50).item()"
    ),
    "a number that the build draws": net(
        "self.k, self.phase = 0, torch.rand(1).item()", "self.k += 1\n        x = x * (1 + 0.01 * self.k * self.phase)"
    ),
    "a number, and a scheduler of torch": net("self.k = 0", "self.k += 1\n        x = x * 0.99 ** self.k") + """
def scheduler(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
""",
    "a number of every block": net(
        "self.k = 0", "self.k += 1\n        for block in self.h: x = block(x) * (0.9 + 0.001 * self.k)"
    ),
}  # fmt: skip
OTHER_CALLS = {
    "another branch": net("self.k = 0", "self.k += 1\n        if self.k % 2: x = x * 0.5"),
    "a branch by a tensor without dimensions": net(
        "self.k = 0", "self.k += 1\n        if float(torch.tensor(0.1 * self.k) * 2) > 3: x = torch.tanh(x)"
    ),
    "another type": net("self.k = 0", "self.k += 1\n        x = x * (2 if self.k % 2 else 0.5)"),
    "a slice": net("self.k = 0", "self.k += 1\n        x = x + x[:, : 1 + self.k % 2].sum(1, keepdim=True)"),
    "a layer's setting that ends": net(
        "self.d = nn.Dropout(0.1)", "self.d.p = max(0.0, self.d.p - 0.01)\n        x = self.d(x)"
    ),
    "a layer that is added": net(
        "self.k = 0; self.new = Block()", "self.k += 1\n        if self.k > 9: x = self.new(x)"
    ),
    "a layer that is frozen and thawed": net(
        "self.k = 0", "self.k += 1\n        self.h[0].requires_grad_(self.k % 5 > 1)"
    ),
    "the rate that a scheduler of torch sets": """
OPTIMIZER = [torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)]

def optimizer(named_parameters):
    OPTIMIZER[:] = [torch.optim.SGD([parameter for _, parameter in named_parameters], lr=0.1)]
    return OPTIMIZER[0]

def scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 4)

""" + net("self.k = 0", "self.k += 1\n        x = x * (1 + OPTIMIZER[0].param_groups[0]['lr'])"),
    "after_step that freezes, before the scheduler": """
STEP, SEEN = [0], [0]

def after_step(named_parameters, step):
    STEP[0] = step
    for name, parameter in named_parameters:
        parameter.requires_grad_(step < 3 or "h.0" not in name)

def lower(step):
    SEEN[0] = STEP[0]
    return 1.0

def scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lower)

""" + net("pass", "x = x * (1 + 0.01 * SEEN[0])"),
    "the number of the step": """
STEP = [0]

def after_step(named_parameters, step):
    STEP[0] = step

""" + net("pass", "x = x * 0.9 ** STEP[0] if STEP[0] > 3 else x"),
    "a number, and what a scheduler sets": "FACTOR = [1.0]\n" + net(
        "self.k = 0", "self.k += 1\n        x = x * 0.99 ** self.k * FACTOR[0]"
    ) + """
def lower(step):
    FACTOR[0] = 1.0 if step < 5 else 0.5
    return 1.0

def scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lower)
""",
}  # fmt: skip
REFUSED = {
    "a recurrent layer that leaves its training mode": net(
        "self.k, self.r = 0, nn.GRU(8, 8, num_layers=2, dropout=0.1)",
        "self.k += 1\n        self.r.train(self.k % 5 > 0)\n        x = x + self.r(x)[0]",
    ),
    "a recurrent layer that is frozen after it was read": net(
        "self.k, self.r = 0, nn.GRU(8, 8)",
        "self.k += 1\n        x = x + self.r(x)[0]\n        self.r.requires_grad_(self.k % 3 > 0)",
    ),
    "what after_step reads and the forward sets": "STEPS = [0]\n" + net(
        "self.k = 0", "self.k += 1; STEPS[0] += 1\n        x = x * 0.99 ** self.k"
    ) + """
def after_step(named_parameters, step):
    if STEPS[0] > 200:
        for _, parameter in named_parameters:
            parameter.data.clamp_(-1, 1)
""",
    "what a scheduler reads and the loss sets": """
CALLS = [0]

def loss(output, target):
    CALLS[0] += 1
    return F.cross_entropy(output, target) * 0.99 ** CALLS[0]

def lower(step):
    return 1.0 if CALLS[0] < 200 else 0.1

def scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lower)
""",
    "a number that after_step reads from a parameter": """
FACTOR = [1.0]

def after_step(named_parameters, step):
    FACTOR[0] = float(named_parameters[0][1].detach().sum())

""" + net("pass", "x = x * FACTOR[0]"),
    "a parameter that is frozen after it was read": net(
        "self.k = 0",
        "self.k += 1\n        y = self.h[0](x)\n        self.h[0].requires_grad_(self.k % 3 > 0)\n        x = x + y",
    ),
    "a number, and what the optimizer sets": "FACTOR = [1.0]\n" + net(
        "self.k = 0", "self.k += 1\n        x = x * 0.99 ** self.k * FACTOR[0]"
    ) + """
class Lowering(torch.optim.SGD):
    def step(self, closure=None):
        FACTOR[0] *= 0.9
        return super().step(closure)

def optimizer(named_parameters):
    return Lowering([parameter for _, parameter in named_parameters], lr=0.1)
""",
    "a number of a checkpoint": """
from torch.utils.checkpoint import checkpoint
""" + net("self.k = 0", "x = checkpoint(self.part, x, use_reentrant=False)") + """
def part(self, x):
    self.k += 1
    return torch.tanh(self.h[0](x)) * (1 + 0.01 * self.k)

Net.part = part
""",
    "a number of numpy's own type": net(
        "self.k = 0", "self.k += 1\n        x = x * torch.tensor(np.float64(0.97) ** self.k)"
    ),
    "a number in a file": net(
        "open('number', 'w').write('1')",
        "k = int(open('number').read()) + 1\n        open('number', 'w').write(str(k))\n        x = x * (1 + 0.01 * k)",
    ),
}  # fmt: skip
LATE_CALLS = {
    "a dropout that ends": net("self.k = 0", "self.k += 1\n        x = F.dropout(x, 0.1 - 0.0004 * min(self.k, 250))"),
    "a type that changes": net(
        "self.k = 0", "self.k += 1\n        x = x * (1.5 + self.k / 300 if self.k < 260 else 2)"
    ),
    "another number": net("self.k = 0", "self.k += 1\n        x = x * 0.99 ** self.k + (0.0 if self.k < 260 else 0.1)"),
}


@pytest.mark.parametrize("name", EQUAL)
def test_numbers_that_change_train_as_in_a_plain_loop(name: str) -> None:
    result = row(BASE + EQUAL[name], 20, 2)
    assert result["kind"] == "equal", result
    assert not result["why"].startswith("0 numbers")


@pytest.mark.parametrize("name", OTHER_CALLS)
def test_other_calls_train_as_in_a_plain_loop(name: str) -> None:
    result = row(BASE + OTHER_CALLS[name], 20, 2)
    assert result["kind"] == "equal", result


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_known_is_refused(name: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(str(tmp_path))
    result = row(BASE + REFUSED[name], 20, 2)
    assert result["kind"] == "refused", result


@pytest.mark.parametrize("name", LATE_CALLS)
def test_other_calls_after_the_first_minibatches_train_as_in_a_plain_loop(name: str) -> None:
    result = row(BASE + LATE_CALLS[name], 150, 2)
    assert result["kind"] == "equal", result
    assert "2 sequences" in result["why"]
