"""Classes of installed packages that keep state which changes the loss later; see ``cases``."""

CLASSES = {
    "base class of a temporary object": ("""
class Base: STATE = {"n": 0}
class C(Base):
    def f(self):
        self.STATE["n"] += 1
        return self.STATE["n"] // 200
def scale(): return C().f()
""", "util.scale()", "Base.STATE['n']"),
    "type(self).X": ("""
class C:
    n = 0
    def f(self):
        type(self).n += 1
        return type(self).n // 200
def scale(): return C().f()
""", "util.scale()", "C.n"),
    "cls.X": ("""
class C:
    n = 0
    @classmethod
    def f(cls):
        cls.n += 1
        return cls.n // 200
def scale(): return C.f()
""", "util.scale()", "C.n"),
    "super()": ("""
class Base:
    STATE = {"n": 0}
    def f(self):
        self.STATE["n"] += 1
        return self.STATE["n"] // 200
class C(Base):
    def f(self): return super().f()
def scale(): return C().f()
""", "util.scale()", "Base.STATE['n']"),
    "Base.X": ("""
class Base: n = 0
class C(Base):
    def f(self):
        Base.n += 1
        return Base.n // 200
def scale(): return C().f()
""", "util.scale()", "Base.n"),
    "instance in a module global": ("""
class C:
    def __init__(self): self.n = 0
    def f(self):
        self.n += 1
        return self.n // 200
ONE = C()
def scale(): return ONE.f()
""", "util.scale()", "ONE.n"),
    "bound method": ("""
class C:
    def __init__(self): self.n = 0
    def f(self):
        self.n += 1
        return self.n // 200
scale = C().f
""", "util.scale()", "scale.n"),
    "callable instance": ("""
class C:
    def __init__(self): self.n = 0
    def __call__(self):
        self.n += 1
        return self.n // 200
scale = C()
""", "util.scale()", "scale.n"),
    "cache singleton object": ("""
import functools
class S:
    n = 0
@functools.cache
def state(): return S()
def scale():
    s = state()
    s.n += 1
    return s.n // 200
""", "util.scale()", "state().n"),
    "default argument of a method": ("""
class C:
    def f(self, state={"n": 0}):
        state["n"] += 1
        return state["n"] // 200
def scale(): return C().f()
""", "util.scale()", "a default argument of f['n']"),
    "self.__class__.n": ("""
class C:
    n = 0
    def f(self):
        self.__class__.n += 1
        return self.n // 200
def scale(): return C().f()
""", "util.scale()", "C.n"),
    "three classes": ("""
class A: STATE = {"n": 0}
class B(A): pass
class C(B):
    def f(self):
        self.STATE["n"] += 1
        return self.STATE["n"] // 200
def scale(): return C().f()
""", "util.scale()", "A.STATE['n']"),
    "two packages": ("""
from counting_base import Base
class C(Base):
    def f(self):
        self.STATE["n"] += 1
        return self.STATE["n"] // 200
def scale(): return C().f()
""", "util.scale()", "Base.STATE['n']"),
    "property": ("""
class Base: STATE = {"n": 0}
class C(Base):
    @property
    def f(self):
        self.STATE["n"] += 1
        return self.STATE["n"] // 200
def scale(): return C().f
""", "util.scale()", "Base.STATE['n']"),
    "__call__ of a temporary": ("""
class C:
    N = [0]
    def __call__(self):
        self.N[0] += 1
        return self.N[0] // 200
def scale(): return C()()
""", "util.scale()", "C.N[0]"),
    "__getattr__": ("""
class C:
    N = [0]
    def __getattr__(self, name):
        self.N[0] += 1
        return self.N[0] // 200
def scale(): return C().anything
""", "util.scale()", "C.N[0]"),
    "metaclass": ("""
class Meta(type):
    n = 0
    def __call__(cls, *a):
        Meta.n += 1
        return super().__call__(*a)
class C(metaclass=Meta):
    def f(self): return type(type(self)).n // 200
def scale(): return C().f()
""", "util.scale()", "Meta.n"),
    "slots": ("""
class C:
    __slots__ = ("n",)
    def __init__(self): self.n = 0
    def f(self):
        self.n += 1
        return self.n // 200
ONE = C()
def scale(): return ONE.f()
""", "util.scale()", "ONE.n"),
    "picked through a function": ("""
class Holder:
    def __init__(self): self.reg = {"n": 0}
_H = [Holder()]
def pick(i): return _H[i]
def scale():
    h = pick(0)
    h.reg["n"] += 1
    return h.reg["n"] // 200
""", "util.scale()", "_H[0].reg['n']"),
    "static method": ("""
class Reg:
    table = {"n": 0}
    @staticmethod
    def f():
        Reg.table["n"] += 1
        return Reg.table["n"] // 200
""", "util.Reg.f()", "Reg.table['n']"),
    "length of a list": ("""
class C:
    SEEN = []
    def f(self):
        self.SEEN.append(0)
        return len(self.SEEN) // 200
def scale(): return C().f()
""", "util.scale()", "C.SEEN"),
    "exact step": ("""
class C:
    N = {"n": 0}
    LIMIT = 217
    def f(self):
        self.N["n"] += 1
        return 1 if self.N["n"] == self.LIMIT else 0
def scale(): return C().f()
""", "util.scale()", "C.N['n']"),
    "every 77th": ("""
class C:
    N = {"n": 0}
    def f(self):
        self.N["n"] += 1
        return 1 if self.N["n"] % 77 == 0 else 0
def scale(): return C().f()
""", "util.scale()", "C.N['n']"),
    "descriptor": ("""
class Count:
    def __init__(self): self.n = 0
    def __get__(self, obj, kind=None):
        self.n += 1
        return self.n // 200
class C:
    f = Count()
def scale(): return C().f
""", "util.scale()", "C.f.n"),
    "vars(self)": ("""
class C:
    def __init__(self): self.n = 0
    def f(self):
        vars(self)["n"] += 1
        return self.__dict__["n"] // 200
ONE = C()
def scale(): return ONE.f()
""", "util.scale()", "ONE.n"),
    "replaced object": ("""
class H:
    def __init__(self, n): self.n = n
class C:
    now = H(0)
    def f(self):
        C.now = H(C.now.n + 1)
        return C.now.n // 200
def scale(): return C().f()
""", "util.scale()", "C.now"),
    "replaced tuple": ("""
class C:
    now = (0, 1)
    def f(self):
        n, s = type(self).now
        type(self).now = (n + s, s)
        return n // 200
def scale(): return C().f()
""", "util.scale()", "C.now"),
    "base module of the user's model in a package": ("""
from torch import nn
class Counting(nn.Module):
    STATE = {"n": 0}
    def factor(self):
        self.STATE["n"] += 1
        return self.STATE["n"] // 200
""", "self.factor()", "Counting.STATE['n']"),
    "array": ("""
import numpy as np
class C:
    N = np.zeros(1)
    def f(self):
        self.N[0] += 1
        return float(self.N[0] // 200)
def scale(): return C().f()
""", "util.scale()", "C.N"),
    "a deque": ("""
from collections import deque
class C:
    N = deque([0], maxlen=1)
    def f(self):
        self.N.append(self.N[-1] + 1)
        return self.N[0] // 200
def scale(): return C().f()
""", "util.scale()", "C.N[0]"),
    "Counter": ("""
from collections import Counter
class C:
    N = Counter()
    def f(self):
        self.N.update(["x"])
        return self.N["x"] // 200
def scale(): return C().f()
""", "util.scale()", "C.N['x']"),
}  # fmt: skip
