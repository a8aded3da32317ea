"""Model files with an ``after_step`` hook, in the styles of users."""

from __future__ import annotations

HEAD = """
import copy
import torch
from torch import nn
from torch.nn import functional as F

def layers():
    return nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 6)
        {init}

    def forward(self, ids):
        h = self.words(ids).mean(1)
        {forward}

def build_model():
    return Net()

def loss(output, target):
    return output if output.dim() == 0 else F.cross_entropy(output, target)

def optimizer(named_parameters):
    return torch.optim.AdamW([p for _, p in named_parameters if p.requires_grad], lr=0.02)

def data(batch_size=8):
    g = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randint(0, 11, shape, generator=g)
    for _ in range(12):
        yield draw(batch_size, 4), draw(batch_size)

evaluate_data = data

{hook}
"""
PLAIN = (
    "self.body, self.head = layers(), nn.Linear(6, 11, bias=False)",
    """for layer in self.body:
            h = torch.tanh(layer(h))
        return self.head(h)""",
)
TEACHER = (
    """self.student = layers()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.predictor = nn.Linear(6, 6)""",
    """ours = theirs = h
        for layer in self.student:
            ours = torch.tanh(layer(ours))
        with torch.no_grad():
            for layer in self.teacher:
                theirs = torch.tanh(layer(theirs))
        return (F.normalize(self.predictor(ours), dim=1) - F.normalize(theirs, dim=1)).square().sum(1).mean()""",
)
TIED = (
    """self.body, self.head = layers(), nn.Linear(6, 11, bias=False)
        self.head.weight = self.words.weight
        self.words.weight.requires_grad_(TRAINED)""",
    PLAIN[1],
)
MODELS = {
    "a momentum teacher": (
        *TEACHER,
        """
@torch.no_grad()
def after_step(named_parameters, step):
    momentum = 1 - 0.1 / (step + 1)
    parameters = dict(named_parameters)
    for name, teacher in parameters.items():
        if name.startswith("teacher."):
            teacher.mul_(momentum).add_(parameters[name.replace("teacher", "student")], alpha=1 - momentum)
""",
    ),
    "a teacher by lists, of clamped students": (
        *TEACHER,
        """
def after_step(named_parameters, step):
    named = dict(named_parameters)
    with torch.no_grad():
        for name, parameter in named.items():
            if name.startswith("student."):
                parameter.clamp_(-0.3, 0.3)
        pairs = [(p, named[n.replace("teacher", "student")]) for n, p in named.items() if "teacher" in n]
        if pairs and step % 2 == 1:
            torch._foreach_lerp_([p for p, _ in pairs], [p for _, p in pairs], 0.25)
""",
    ),
    "clamped weights": (
        *PLAIN,
        """
def after_step(named_parameters, step):
    for _, parameter in named_parameters:
        parameter.data = parameter.data.clamp(-0.2, 0.2) if parameter.dim() == 2 else parameter.data
""",
    ),
    "normalised rows": (
        *PLAIN,
        """
@torch.no_grad()
def after_step(named_parameters, step):
    for name, parameter in named_parameters:
        if name.endswith("weight"):
            parameter.copy_(parameter / parameter.norm(dim=1, keepdim=True))
""",
    ),
    "a parameter by its name": (
        *PLAIN,
        """
@torch.no_grad()
def after_step(named_parameters, step):
    prototypes = dict(named_parameters)["head.weight"]
    prototypes.copy_(F.normalize(prototypes, dim=1))
""",
    ),
    "a trained tie": (
        TIED[0].replace("TRAINED", "True"),
        TIED[1],
        """
@torch.no_grad()
def after_step(named_parameters, step):
    for name, parameter in named_parameters:
        if name == "words.weight":
            parameter.mul_(0.9).add_(0.01 * step)
""",
    ),
    "a frozen tie": (
        TIED[0].replace("TRAINED", "False"),
        TIED[1],
        """
@torch.no_grad()
def after_step(named_parameters, step):
    for name, parameter in named_parameters:
        if name == "words.weight":
            parameter.copy_(parameter.roll(1, 0) * 0.99)
""",
    ),
}


def text(init: str, forward: str, hook: str) -> str:
    """Return a model file."""
    return HEAD.replace("{init}", init).replace("{forward}", forward).replace("{hook}", hook)
