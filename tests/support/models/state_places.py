"""Model files that keep state in unusual places; see ``state``."""

from __future__ import annotations

from .state import net

PLACES = {
    "a counter in modules that are nested deeply": (
        """
class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.k = 0
    def forward(self, x):
        self.k += 1
        return x if self.k < 200 else x * 2
class Net(Net):
    def prepare(self):
        self.deep = functools.reduce(lambda module, _: nn.ModuleList([module]), range(9), Counter())
    def forward(self, x):
        module = self.deep
        while isinstance(module, nn.ModuleList):
            module = module[0]
        return super().forward(module(x))
""", "model.deep.0.0.0.0.0.0.0.0.0.k", "self.k += 1"),
    "a counter in a dict of a linear layer": (
        net('self.o.stats = {"k": 0}', 'self.o.stats["k"] += 1', 'y = y * (1.0 if self.o.stats["k"] < 200 else 2.0)'),
        "model.o.stats['k']", 'self.o.stats["k"] += 1'),
    "a private counter of a linear layer": (
        net("self.o._k = 0", "self.o._k += 1", "y = y * (1.0 if self.o._k < 200 else 2.0)"),
        "model.o._k", "self.o._k += 1"),
}  # fmt: skip
