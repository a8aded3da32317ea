"""Optimizers and schedulers, of torch and in the style of third parties, with which a run must resume.

Each case is the text of a model file's hooks. ``REFUSED``: those that no checkpoint can hold, with the message.
``SAME_STAGES``: those that resume with the same stages, and are refused by name with other cuts.
"""

from __future__ import annotations

FILE = """
import collections, copy, functools, itertools, math, random
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as S

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 5)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))

def build_model():
    return Net()

def loss(output, target):
    return F.cross_entropy(output, target)

def data(batch_size=8):
    g = torch.Generator().manual_seed(3)
    for _ in range(40):
        yield torch.randn(batch_size, 6, generator=g), torch.randint(0, 5, (batch_size,), generator=g)

def parameters(named):
    return [p for _, p in named]

def two_groups(named):
    decayed, others = [p for n, p in named if p.dim() > 1], [p for n, p in named if p.dim() < 2]
    both = [{"params": decayed, "weight_decay": 0.3, "lr": 0.02}, {"params": others, "weight_decay": 0.0}]
    return [group for group in both if group["params"]]

def two_of_one_rate(named):
    return [{key: value for key, value in group.items() if key != "lr"} for group in two_groups(named)]

class Own(torch.optim.Optimizer):
    def __init__(self, ps, lr=0.01, **more):
        super().__init__(ps, dict(lr=lr, betas=(0.9, 0.99), **more))

    @torch.no_grad()
    def step(self, closure=None):
        self.begin()
        for group in self.param_groups:
            self.group(group)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.direction(p, group, self.state[p]))

    def begin(self): pass
    def group(self, group): pass

def optimizer(named_parameters):
    return torch.optim.AdamW(parameters(named_parameters), lr=0.01)
"""


def torch_optimizer(text: str) -> str:
    return f"def optimizer(named):\n    return torch.optim.{text}\n"


def scheduler(text: str, of: str = "SGD(parameters(named), lr=0.1, momentum=0.9)") -> str:
    return f"{torch_optimizer(of)}\ndef scheduler(o):\n    return {text}\n"


def own(
    direction: str,
    *,
    begin: str = "pass",
    group: str = "pass",
    init: str = "pass",
    more: str = "",
    stored: str = "",
    load: str = "",
) -> str:
    """``stored``: what its state_dict has beside that of torch. ``load``: a statement that restores it from ``s``."""
    methods = (
        f"""
    def state_dict(self):
        return {{**super().state_dict(), {stored}}}
    def load_state_dict(self, s):
        {load}
        super().load_state_dict(s)
"""
        if stored
        else ""
    )
    return f"""
{more}
class A(Own):
    def __init__(self, ps, lr=0.01):
        super().__init__(ps, lr)
        {init}
{methods}
    def begin(self):
        {begin}
    def group(self, group):
        {group}
    def direction(self, p, group, state):
        {direction}

def optimizer(named):
    return A(parameters(named))
"""


ADAM_BY = """if not state:
            state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
        b1, b2 = group["betas"]
        state["m"].mul_(b1).add_(p.grad, alpha=1 - b1); state["v"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
        step = {step}
        return state["m"] / (1 - b1 ** step) / ((state["v"] / (1 - b2 ** step)).sqrt() + 1e-8)"""

WARM_UP = "S.SequentialLR(o, [S.LinearLR(o, 0.1, total_iters=3), S.CosineAnnealingLR(o, 20)], [3])"

CASES: dict[str, str] = {
    # optimizers of torch
    "AdamW": torch_optimizer("AdamW(parameters(named), lr=0.01)"),
    "AdamW fused": torch_optimizer("AdamW(parameters(named), lr=0.01, fused=True)"),
    "AdamW foreach": torch_optimizer("AdamW(parameters(named), lr=0.01, foreach=True)"),
    "AdamW amsgrad, two groups": torch_optimizer("AdamW(two_groups(named), lr=0.01, amsgrad=True)"),
    "Adam with names": torch_optimizer("Adam(list(named), lr=0.01)"),
    "SGD momentum": torch_optimizer("SGD(parameters(named), lr=0.05, momentum=0.9)"),
    "SGD nesterov, two groups": torch_optimizer("SGD(two_groups(named), lr=0.05, momentum=0.9, nesterov=True)"),
    "NAdam": torch_optimizer("NAdam(parameters(named), lr=0.01)"),
    "RAdam": torch_optimizer("RAdam(parameters(named), lr=0.01)"),
    "ASGD": torch_optimizer("ASGD(parameters(named), lr=0.01, t0=2)"),
    "Adafactor": torch_optimizer("Adafactor(parameters(named), lr=0.01)"),
    "Rprop": torch_optimizer("Rprop(parameters(named), lr=0.01)"),
    "RMSprop centered": torch_optimizer("RMSprop(parameters(named), lr=0.01, centered=True, momentum=0.9)"),
    "Adagrad": torch_optimizer("Adagrad(parameters(named), lr=0.01, lr_decay=0.1, initial_accumulator_value=0.1)"),
    "Adamax": torch_optimizer("Adamax(parameters(named), lr=0.01)"),
    "Adadelta": torch_optimizer("Adadelta(parameters(named), lr=1.0)"),
    "tensor rate": scheduler("S.ExponentialLR(o, 0.8)", "AdamW(parameters(named), lr=torch.tensor(0.01))"),
    "tensor rate, two groups": scheduler("S.ExponentialLR(o, 0.8)", "AdamW(two_groups(named), lr=torch.tensor(0.01))"),
    # schedulers of torch
    "OneCycleLR on AdamW": scheduler("S.OneCycleLR(o, 0.05, total_steps=40)", "AdamW(parameters(named))"),
    "OneCycleLR on two groups": scheduler("S.OneCycleLR(o, 0.05, total_steps=40)", "AdamW(two_groups(named))"),
    "OneCycleLR on SGD": scheduler("S.OneCycleLR(o, 0.05, total_steps=40)"),
    "CyclicLR on Adam": scheduler("S.CyclicLR(o, 0.01, 0.1, step_size_up=3)", "Adam(parameters(named))"),
    "CyclicLR with a function": scheduler("S.CyclicLR(o, 0.01, 0.1, step_size_up=3, scale_fn=lambda x: 0.9 ** x)"),
    "SequentialLR": scheduler(WARM_UP),
    "SequentialLR on two groups": scheduler(WARM_UP, "SGD(two_groups(named), lr=0.1)"),
    "ChainedScheduler": scheduler("S.ChainedScheduler([S.ConstantLR(o, 0.3, 4), S.ExponentialLR(o, 0.9)])"),
    "nested": scheduler("S.SequentialLR(o, [S.ChainedScheduler([S.ConstantLR(o, 0.3, 4), S.ExponentialLR(o, 0.9)]), "
                        "S.CosineAnnealingLR(o, 9)], [4])"),
    "CosineAnnealingWarmRestarts": scheduler("S.CosineAnnealingWarmRestarts(o, 3, 2)"),
    "CosineAnnealingLR": scheduler("S.CosineAnnealingLR(o, 9)", "SGD(two_groups(named), lr=0.1)"),
    "MultiStepLR": scheduler("S.MultiStepLR(o, [2, 5])"),
    "MultiplicativeLR": scheduler("S.MultiplicativeLR(o, lambda s: 0.9)"),
    "PolynomialLR": scheduler("S.PolynomialLR(o, 12, 2.0)"),
    "LambdaLR": scheduler("S.LambdaLR(o, lambda s: 0.9 ** s)", "SGD(two_groups(named), lr=0.1)"),
    "LambdaLR with an object": """
class Decay:
    def __init__(self): self.calls, self.seen = 0, []
    def __call__(self, step):
        self.calls += 1; self.seen.append(step)
        return 0.9 ** self.calls

def scheduler(o):
    return S.LambdaLR(o, Decay())
""",
    "a tensor rate that two groups share, with an object": f"""
class Decay:
    def __init__(self): self.calls = 0
    def __call__(self, step):
        self.calls += 1
        return 0.99 ** self.calls
{scheduler("S.LambdaLR(o, Decay())", "AdamW(two_of_one_rate(named), lr=torch.tensor(0.01))")}""",
    "a scheduler of its own": """
class Plateaus(S.LRScheduler):
    def __init__(self, o):
        self.history, self.best, self.kind = collections.deque(maxlen=3), float("inf"), ("a", (1, None))
        super().__init__(o)
    def get_lr(self):
        self.history.append(self.last_epoch)
        self.best = min(self.best, 5.0 - self.last_epoch)
        return [b / (1 + sum(self.history)) for b in self.base_lrs]

def scheduler(o):
    return Plateaus(o)
""",
    # in the style of third parties
    "integer step": own(ADAM_BY.format(step='state["step"] = state.get("step", 0) + 1')),
    "step in the group": own(ADAM_BY.format(step='group["step"]'), group='group["step"] = group.get("step", 0) + 1'),
    "step in its state_dict": own(
        ADAM_BY.format(step="self.count"), begin="self.count += 1", init="self.count = 0",
        stored='"count": self.count', load='self.count = s.pop("count")',
    ),
    "slow weights in its state_dict": own(
        """slow = self.slow[p]
        slow.lerp_(p, 0.1)
        return p.grad + 0.1 * (p - slow)""",
        init='self.slow = {p: p.detach().clone() for g in self.param_groups for p in g["params"]}',
        stored='"slow": self.slow', load='self.slow = s.pop("slow")',
    ),
    "float state": own("""state["sum"] = state.get("sum", 0.1) * 1.1 + 1 / 3
        return p.grad * state["sum"]"""),
    "list of tensors": own("""if not state:
            state["pre"] = [torch.zeros(size) for size in p.shape]
        for dim, pre in enumerate(state["pre"]):
            pre.add_(p.grad.pow(2).sum([d for d in range(p.dim()) if d != dim]))
        scale = 1.0
        for dim, pre in enumerate(state["pre"]):
            scale = scale * pre.sqrt().add(1e-4).reshape([-1 if d == dim else 1 for d in range(p.dim())])
        return p.grad / scale ** (1 / p.dim())"""),
    "nested dicts and tuples": own("""if not state:
            state["all"] = {"m": (torch.zeros_like(p), 0), "flags": {"first": True, "why": None}, 3: "three"}
        m, count = state["all"]["m"]
        state["all"]["m"] = (m * 0.9 + p.grad, count + 1)
        state["all"]["flags"]["first"] = count > 2
        return state["all"]["m"][0] / (count + 2) * (0.5 if state["all"]["flags"]["first"] else 1.0)"""),
    "half precision and transposed state": own("""if not state:
            state["m"] = torch.zeros_like(p, dtype=torch.bfloat16).t() if p.dim() > 1 else torch.zeros_like(p).double()
        m = state["m"].t() if p.dim() > 1 else state["m"]
        m.mul_(0.9).add_(p.grad)
        return m.to(p.dtype)"""),
    "numpy state": own("""if not state:
            state["m"], state["n"] = np.zeros(tuple(p.shape), np.float32), np.float64(0.1)
        state["m"] = state["m"] * np.float32(0.9) + p.grad.numpy(); state["n"] = state["n"] * 1.01
        return torch.from_numpy(state["m"]) * float(state["n"])"""),
    "SWALR": scheduler("torch.optim.swa_utils.SWALR(o, 0.01, anneal_epochs=4)"),
    "the head alone": torch_optimizer('AdamW([p for n, p in named if n.startswith("head")], lr=0.01)'),
    "Muon on the matrices": torch_optimizer("Muon([p for n, p in named if p.dim() == 2], lr=0.01)"),
}  # fmt: skip

NOISE = own(
    "return p.grad + 0.1 * torch.randn(p.shape, generator=self.rng)",
    init="self.rng = torch.Generator().manual_seed(4)",
    stored='"rng": self.rng.get_state()',
    load='self.rng.set_state(s.pop("rng"))',
)
SAME_STAGES: dict[str, str] = {
    "its own generator": NOISE,
    "random.Random and numpy": own(
        "return p.grad * self.a.random() * self.b.random() * self.c.rand()",
        init="self.a, self.b, self.c = random.Random(1), np.random.default_rng(2), np.random.RandomState(3)",
        stored='"rngs": [self.a, self.b, self.c]',
        load='self.a, self.b, self.c = s.pop("rngs")',
    ),
    "a list in the order of the parameters": own(
        """index = next(i for i, q in enumerate(group["params"]) if q is p)
        self.sums[index].add_(p.grad.abs())
        return p.grad / (1 + self.sums[index])""",
        init='self.sums = [torch.zeros_like(p) for g in self.param_groups for p in g["params"]]',
        stored='"sums": self.sums',
        load='self.sums = s.pop("sums")',
    ),
}
REFUSED: dict[str, tuple[str, str]] = {
    "a count that a decorated step reads": (
        """
class Counting(torch.optim.SGD):
    count = 0
    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.count
        return super().step(closure)

def optimizer(named):
    return Counting(parameters(named), lr=0.1)
""",
        "optimizer.count",
    ),
    "LambdaLR with a closure": ("""
def scheduler(o):
    calls = [0]
    factor = 1.0
    def rate(step):
        nonlocal factor
        calls[0] += 1; factor *= 0.9
        return factor / (1 + 0.1 * calls[0])
    return S.LambdaLR(o, rate)
""", "calls of rate|factor of rate"),
    "LambdaLR with a partial": ("""
def cosine(step, *, period, seen):
    seen.append(step)
    return 0.5 + 0.5 * math.cos(len(seen) / period)

def scheduler(o):
    return S.LambdaLR(o, functools.partial(cosine, period=5, seen=[]))
""", r"lr_lambdas\[0\]\['seen'\]"),
    "Lookahead": ("""
class Lookahead(torch.optim.Optimizer):
    def __init__(self, base, k=3, alpha=0.5):
        self.base, self.k, self.alpha, self.count = base, k, alpha, 0
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, base.defaults
        self.slow = {p: p.detach().clone() for g in self.param_groups for p in g["params"]}
    @torch.no_grad()
    def step(self, closure=None):
        self.base.step(); self.count += 1
        if self.count % self.k == 0:
            for p, slow in self.slow.items():
                slow.add_(p - slow, alpha=self.alpha); p.copy_(slow)

def optimizer(named):
    return Lookahead(torch.optim.Adam(parameters(named), lr=0.05))
""", "optimizer has no state_dict"),
    "averages in a step hook": ("""
def optimizer(named):
    o = torch.optim.SGD(parameters(named), lr=0.1)
    average, count = {}, [0]
    def hook(o, args, kwargs):
        count[0] += 1
        with torch.no_grad():
            for p in parameters(named):
                a = average.setdefault(p, p.clone())
                a.lerp_(p, 1 / count[0])
                if count[0] % 3 == 0:
                    p.copy_(0.5 * (a + p))
    o.register_step_post_hook(hook)
    return o
""", "average of hook|count of hook"),
    "two optimizers in one": ("""
class Merged(torch.optim.Optimizer):
    def __init__(self, *inner):
        super().__init__([p for o in inner for g in o.param_groups for p in g["params"]], {"lr": 0.1})
        self.inner = inner
    def step(self, closure=None):
        for o in self.inner:
            o.step()

def optimizer(named):
    flat, rest = [p for _, p in named if p.dim() < 2], [p for _, p in named if p.dim() > 1]
    inner = [torch.optim.SGD(flat, lr=0.1, momentum=0.9)] if flat else []
    return Merged(*inner, *([torch.optim.AdamW(rest, lr=0.01)] if rest else []))
""", "optimizer.inner"),
    "copies of its own": (own(
        """ema = self.copies[p]
        ema.lerp_(p, 0.1)
        return p.grad + 0.1 * (p - ema)""",
        init='self.copies = {p: copy.deepcopy(p) for g in self.param_groups for p in g["params"]}',
    ), "optimizer.copies|computes another value"),
    "a scheduler in a step hook": ("""
def optimizer(named):
    o = torch.optim.SGD(parameters(named), lr=0.1)
    rate = S.CosineAnnealingLR(o, 9)
    o.register_step_post_hook(lambda *_: rate.step())
    return o
""", "rate of"),
    "a step that is replaced": ("""
def optimizer(named):
    o = torch.optim.SGD(parameters(named), lr=0.1)
    plain, done = o.step, 0
    def step(*args):
        nonlocal done
        done += 1
        for group in o.param_groups:
            group["lr"] = 0.1 / done
        plain()
    o.step = step
    return o
""", "computes another value"),
    "step in the optimizer": (own(
        ADAM_BY.format(step="self.count"), begin="self.count += 1", init="self.count = 0"
    ), "optimizer.count"),
    "an array that is kept in C": (
        own("self.n[0] += 1; return p.grad / self.n[0]", init="self.n = __import__('array').array('d', [0.0])"),
        "optimizer.n",
    ),
    "an iterator": (own("return p.grad * next(self.n)", init="self.n = itertools.count(1)"), "optimizer.n"),
    "keyed by id": (
        own("""self.seen[id(p)] = self.seen.get(id(p), 0) + 1
        return p.grad / self.seen[id(p)]""", init="self.seen = {}"),
        "optimizer.seen",
    ),
    "an object made in step": (
        own("""state.setdefault("ema", Ema()).n += 1
        return p.grad / state["ema"].n""", more="class Ema:\n    n = 0\n"),
        "Ema",
    ),
    "a global": (
        own("""COUNT[0] += 1
        return p.grad / COUNT[0]""", more="COUNT = [0]"),
        "COUNT",
    ),
    "an attribute of the class": (
        own("""A.count += 1
        return p.grad / A.count""").replace("class A(Own):", "class A(Own):\n    count = 0"),
        "A.count",
    ),
    "the global generator": (own("return p.grad + 0.1 * torch.randn(p.shape)"), "torch's global generator"),
}  # fmt: skip
