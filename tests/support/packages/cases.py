"""Installed packages that keep state: ``CHANGING`` changes the loss later, ``HARMLESS`` never does.

Each case is the text of ``counting/util.py``, the call in the forward, and what the message says. Other files are in
``FILES``.
"""

from __future__ import annotations

from pathlib import Path

from .classes import CLASSES
from .values import CHANGING_VALUES, CONSTANT_VALUES, ITERATORS

MODEL = """
import torch
from torch import nn

from counting import util


class Net(BASE):
    def __init__(self):
        super().__init__()
        self.l = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    def forward(self, x):
        return self.l(x) * (1 + 0.1 * CALL)
def model(): return Net()
def data(batch_size=4):
    g = torch.Generator().manual_seed(1)
    for _ in range(8):
        yield torch.randn(batch_size, 6, generator=g), torch.randint(0, 4, (batch_size,), generator=g)
loss = nn.CrossEntropyLoss()
"""

FUNCTIONS = {
    "global of another module": ("""
from . import state
def scale():
    state.N += 1
    return state.N // 200
""", "util.scale()", "N"),
    "global of a module imported in the function": ("""
def scale():
    from .state import COUNTS
    COUNTS["n"] += 1
    return COUNTS["n"] // 200
""", "util.scale()", "COUNTS['n']"),
    "global name by globals()": ("""
N = 0
def scale():
    globals()["N"] += 1
    return globals()["N"] // 200
""", "util.scale()", "N"),
    "global statement": ("""
N = 0
def scale():
    global N
    N += 1
    return N // 200
""", "util.scale()", "N"),
    "closure nonlocal": ("""
def make():
    n = 0
    def f():
        nonlocal n
        n += 1
        return n // 200
    return f
scale = make()
""", "util.scale()", "n of f"),
    "closure behind a plain decorator": ("""
def counting(fn):
    n = 0
    def wrapper():
        nonlocal n
        n += 1
        return fn() * (n // 200)
    return wrapper
@counting
def scale(): return 1
""", "util.scale()", "n of wrapper"),
    "closure of an inner function hidden in a list": ("""
def make():
    n = 0
    def f():
        nonlocal n
        n += 1
        return n // 200
    return f
F = [make()]
def pick(i): return F[i]
def scale(): return pick(0)()
""", "util.scale()", "n of f"),
    "lru_cache singleton": ("""
import functools
@functools.lru_cache
def state(): return {"n": 0}
def scale():
    s = state()
    s["n"] += 1
    return s["n"] // 200
""", "util.scale()", "state()['n']"),
    "itertools.count": ("""
import itertools
COUNT = itertools.count()
def scale(): return next(COUNT) // 200
""", "util.scale()", "COUNT"),
    "itertools.count in a closure": ("""
import itertools
def make():
    c = itertools.count()
    def f(): return next(c) // 200
    return f
scale = make()
""", "util.scale()", "c of f"),
    "threading.local": ("""
import threading
L = threading.local()
def scale():
    L.n = getattr(L, "n", 0) + 1
    return L.n // 200
""", "util.scale()", "L.n"),
    "default argument": ("""
def scale(state=[0]):
    state[0] += 1
    return state[0] // 200
""", "util.scale()", "a default argument of scale[0]"),
    "SimpleNamespace": ("""
import types
S = types.SimpleNamespace(n=0)
def scale():
    S.n += 1
    return S.n // 200
""", "util.scale()", "S.n"),
    "weak dictionary by model": ("""
import weakref
S = weakref.WeakKeyDictionary()
def scale(m):
    S[m] = S.get(m, 0) + 1
    return S[m] // 200
""", "util.scale(self)", "S.data[ReferenceType]"),
    "partial": ("""
import functools
def _inc(state):
    state["n"] += 1
    return state["n"] // 200
scale = functools.partial(_inc, {"n": 0})
""", "util.scale()", "scale[0]['n']"),
    "function attribute": ("""
def scale():
    scale.n = getattr(scale, "n", 0) + 1
    return scale.n // 200
""", "util.scale()", "scale.n"),
    "attribute of a wrapper": ("""
import functools
def wrapped(fn):
    @functools.wraps(fn)
    def inner():
        inner.calls += 1
        return fn() * (inner.calls // 200)
    inner.calls = 0
    return inner
@wrapped
def scale(): return 1
""", "util.scale()", "scale.calls"),
    "context variable": ("""
import contextvars
V = contextvars.ContextVar("V", default=0)
def scale():
    V.set(V.get() + 1)
    return V.get() // 200
""", "util.scale()", "V"),
}  # fmt: skip

CHANGING = {**CLASSES, **FUNCTIONS, **CHANGING_VALUES}

LOGGING = {
    "progress bar": ("""
class Bar:
    def __init__(self): self.n, self.shown, self.line = 0, 0, ""
    def update(self):
        self.n += 1
        if self.n - self.shown >= 10:
            self.shown = self.n
            self.line = f"{self.n} steps"
        return self.n
BAR = Bar()
def scale():
    BAR.update()
    return 0
""", "util.scale()"),
    "logging counter with a rate limit": ("""
import logging, time
class Log:
    calls, last = {}, 0.0
    @classmethod
    def once(cls, key):
        cls.calls[key] = cls.calls.get(key, 0) + 1
        if cls.calls[key] > 100 and time.time() - cls.last > 10: logging.getLogger(__name__).info("%s", key)
        cls.last = time.time()
def scale():
    Log.once("x")
    return 0
""", "util.scale()"),
    "names": ("""
import itertools
_IDS = itertools.count()
class Thing:
    def __init__(self): self.id = f"thing{next(_IDS)}"
    def f(self): return 0
def scale(): return Thing().f()
""", "util.scale()"),
    "ring buffer": ("""
class Ring:
    def __init__(self): self.items, self.at = [0.0] * 4, 0
    def push(self, v):
        self.items[self.at] = v
        self.at = (self.at + 1) % 4
R = Ring()
def scale():
    R.push(1.0)
    return 0
""", "util.scale()"),
    "memo": ("""
import functools
@functools.lru_cache
def table(n): return (0.5,) * n
HITS = {"n": 0}
def scale():
    HITS["n"] += 1
    return table(3)[0]
""", "util.scale()"),
    "stack that a with block pushes and pops": ("""
class Mode:
    stack = []
    def __enter__(self): self.stack.append(self); return self
    def __exit__(self, *a): self.stack.pop()
def scale():
    with Mode() as m: return len(Mode.stack)
""", "util.scale()"),
    "a memoized table": ("""
import functools, torch
@functools.lru_cache
def table(n): return torch.full((n,), 0.5)
def scale(): return table(1)
""", "util.scale()"),
}  # fmt: skip

HARMLESS = {**LOGGING, **CONSTANT_VALUES}

# case -> file in site-packages -> text
FILES = {
    "global of another module": {"counting/state.py": "N = 0\n"},
    "global of a module imported in the function": {"counting/state.py": "COUNTS = {'n': 0}\n"},
    "files and output at a later step": {"counting/late.py": "from sys import stdout\nfrom torch import save\n"},
    "two packages": {"counting_base/__init__.py": "class Base:\n    STATE = {'n': 0}\n"},
}  # fmt: skip


def written(name: str, folder: Path) -> Path:
    """Write the packages of a case and a model file that uses them. Return the model file."""
    drawn = {iterator: (f"import itertools\n{text}\n", "util.scale()") for iterator, text in ITERATORS.items()}
    text, call, *_ = {**CHANGING, **HARMLESS, **drawn}[name]
    files = {"counting/__init__.py": "", "counting/util.py": text, **FILES.get(name, {})}
    for file, content in files.items():
        path = folder / "site-packages" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    base = "util.Counting" if "self.factor" in call else "nn.Module"
    model = folder / "model.py"
    model.write_text(MODEL.replace("BASE", base).replace("CALL", call))
    return model
