"""Packages that keep state in other values than a plain integer, or beside constants; see ``cases``."""

# the source does not show that ``scale`` reads what ``pick`` returns
HIDDEN = """
class Holder:
    def __init__(self, value): self.value = value
_ALL = [Holder(START)]
def pick(i): return _ALL[i]
"""


def hidden(start: str, body: str, before: str = "") -> str:
    """Return a module whose ``scale`` changes ``h.value``. ``before``: imports and classes."""
    return before + HIDDEN.replace("START", start) + "def scale():\n    h = pick(0)\n" + body


CHANGING_VALUES = {
    "epochs counted by another counter": (hidden("[0, 0]", """
    h.value[0] += 1
    if h.value[0] >= 10: h.value[0], h.value[1] = 0, h.value[1] + 1
    return 1 if h.value[1] >= 5 else 0
""", ""), "util.scale()", "_ALL[0].value[1]"),
    "a phase that begins later": (hidden("0", """
    h.value += 1
    if h.value == 20: h.phase = 0
    h.phase = getattr(h, 'phase', -1000) + (h.value >= 20)
    return 1 if h.phase > 80 else 0
""", ""), "util.scale()", "_ALL[0].phase"),
    "window of a fraction": (hidden("0", """
    h.value += 1
    return 1 if 0.3 < h.value / 1000 < 0.4 else 0
""", ""), "util.scale()", "_ALL[0].value"),
    "window of a rounded fraction": (hidden("0", """
    h.value += 1
    return 1 if int(h.value / 50) == 9 else 0
""", ""), "util.scale()", "_ALL[0].value"),
    "a float that a function of C compares": (hidden("0.0", """
    h.value += 1.0
    return 1 if math.isclose(h.value, 500.0) else 0
""", "import math"), "util.scale()", "_ALL[0].value"),
    "an integer that a function of C divides": (hidden("0", """
    h.value += 1
    return 1 if math.gcd(h.value, 499) > 1 else 0
""", "import math"), "util.scale()", "_ALL[0].value"),
    "a float that is rounded": (hidden("0.0", """
    h.value += 0.25
    return 1 if round(h.value) == 499 else 0
""", ""), "util.scale()", "_ALL[0].value"),
    "window of a float": (hidden("0.0", """
    h.value += 0.001
    return 1 if 0.3 < h.value < 0.4 else 0
""", ""), "util.scale()", "_ALL[0].value"),
    "window of a numpy integer": (hidden("np.int64(0)", """
    h.value = h.value + np.int64(1)
    return 1 if 300 < h.value < 400 else 0
""", "import numpy as np"), "util.scale()", "_ALL[0].value"),
    "window of a length": (hidden("[]", """
    h.value.append(0)
    return 1 if 300 < len(h.value) < 400 else 0
""", ""), "util.scale()", "_ALL[0].value"),
    "number in a text": (hidden("'0'", """
    h.value = str(int(h.value) + 1)
    return 1 if int(h.value) > 100 else 0
""", ""), "util.scale()", "_ALL[0].value"),
    "count read at once": ("""
import itertools
COUNT = itertools.count()
def scale(): return float(next(COUNT))
""", "util.scale()", "COUNT"),
    "count beside a buffer": ("""
import itertools
COUNT = itertools.count()
def scale(m):
    if not hasattr(m, "mean"): m.register_buffer("mean", m.l[0].bias.detach() * 0)
    m.mean.add_(1)
    return next(COUNT) // 2 + m.mean.sum() * 0
""", "util.scale(self)", "COUNT"),
    "method of a count": ("""
import itertools
draw = itertools.count().__next__
def scale(): return draw() // 200
""", "util.scale()", "draw"),
    "partial of a count": ("""
import functools, itertools
draw = functools.partial(next, itertools.count())
def scale(): return draw() // 200
""", "util.scale()", "draw[0]"),
    "count as a default argument": ("""
import itertools
def scale(count=itertools.count()): return next(count) // 200
""", "util.scale()", "a default argument of scale"),
    "count in a tuple": ("""
import itertools
COUNTS = (itertools.count(), 1)
def scale(): return next(COUNTS[0]) // 200
""", "util.scale()", "COUNTS[0]"),
    "count behind map": ("""
import itertools
NUMBERS = map(lambda n: n // 200, itertools.count())
def scale(): return next(NUMBERS)
""", "util.scale()", "NUMBERS[0]"),
    "count compared with a number": ("""
import itertools
COUNT = itertools.count()
def scale(): return 1 if next(COUNT) == 217 else 0
""", "util.scale()", "COUNT"),
    "cycle": ("""
import itertools
CYCLE = itertools.cycle([0.0, 1.0])
def scale(): return next(CYCLE)
""", "util.scale()", "CYCLE"),
    "numpy.int8": (hidden("np.int8(0)", """
    h.value = h.value + np.int8(1)
    return float(h.value) // 100
""", "import numpy as np"), "util.scale()", "_ALL[0].value"),
    "huge integer": (hidden("10**400", """
    h.value += 1
    return (h.value - 10**400) // 200
"""), "util.scale()", "_ALL[0].value"),
    "array of int8": (hidden("np.zeros(2, np.int8)", """
    h.value[0] += 1
    return float(h.value[0]) // 100
""", "import numpy as np"), "util.scale()", "_ALL[0].value"),
    "replaced array": (hidden("np.zeros(2)", """
    h.value = h.value + [1, 0]
    return float(h.value[0]) // 200
""", "import numpy as np"), "util.scale()", "_ALL[0].value"),
    "tuple with a constant": (hidden("(0, 0.5)", """
    h.value = h.value[0] + 1, h.value[1]
    return h.value[0] // 200
"""), "util.scale()", "_ALL[0].value"),
    "replaced list": (hidden("[0]", """
    h.value = [h.value[0] + 1]
    return h.value[0] // 200
"""), "util.scale()", "_ALL[0].value"),
    "frozen dataclass": (hidden("Steps(0, 0.5)", """
    h.value = dataclasses.replace(h.value, n=h.value.n + 1)
    return h.value.n // 200
""", "import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass Steps:\n    n: int\n    rate: float\n"),
        "util.scale()", "_ALL[0].value"),
    "text": (hidden("'a'", """
    h.value = "b" if h.value == "a" else "a"
    return 1.0 if h.value == "b" else 0.0
"""), "util.scale()", "_ALL[0].value"),
    "bytearray": ("""
BYTES = bytearray(2)
def scale():
    BYTES[0] += 1
    return BYTES[0] // 100
""", "util.scale()", "BYTES"),
    "array of the standard library": ("""
import array
NUMBERS = array.array("l", [0])
def scale():
    NUMBERS[0] += 1
    return NUMBERS[0] // 200
""", "util.scale()", "NUMBERS"),
    "ctypes": ("""
import ctypes
NUMBER = ctypes.c_long(0)
def scale():
    NUMBER.value += 1
    return NUMBER.value // 200
""", "util.scale()", "NUMBER"),
    "ChainMap": ("""
from collections import ChainMap
CHAIN = ChainMap({"n": 0}, {"m": 1})
def scale():
    CHAIN["n"] += 1
    return CHAIN["n"] // 200
""", "util.scale()", "CHAIN.maps[0]['n']"),
    "view of a dict": ("""
import types
def parts():
    content = {"n": 0}
    return types.MappingProxyType(content), content.__setitem__
VIEW, put = parts()
def scale():
    put("n", VIEW["n"] + 1)
    return VIEW["n"] // 200
""", "util.scale()", "VIEW['n']"),
    "queue": ("""
import queue
QUEUE = queue.Queue()
QUEUE.put(0)
def scale():
    n = QUEUE.get_nowait()
    QUEUE.put(n + 1)
    return n // 200
""", "util.scale()", "QUEUE.queue[0]"),
    "weak reference": ("""
import weakref
class Holder:
    def __init__(self): self.n = 0
_KEPT = [Holder()]
REFERENCE = weakref.ref(_KEPT[0])
def scale():
    h = REFERENCE()
    h.n += 1
    return h.n // 200
""", "util.scale()", "REFERENCE.n"),
    "remainder beyond a threshold": (hidden("0", """
    h.value += 1
    return 1 if h.value % 7 == 3 and h.value > 150 else 0
"""), "util.scale()", "_ALL[0].value"),
    "quotient compared with a number": (hidden("0", """
    h.value += 1
    return 1 if h.value // 100 == 3 else 0
"""), "util.scale()", "_ALL[0].value"),
    "schedule in a dict": (hidden("0", """
    h.value += 1
    return SCHEDULE.get(h.value, 0)
""", "SCHEDULE = {217: 1.0}"), "util.scale()", "_ALL[0].value"),
    "schedule in a set": (hidden("0", """
    h.value += 1
    return 1 if h.value in {217, 333} else 0
"""), "util.scale()", "_ALL[0].value"),
    "table of a few hundred steps": (hidden("0", """
    h.value += 1
    return TABLE[h.value]
""", "TABLE = [0.0] * 690 + [1.0] * 10"), "util.scale()", "_ALL[0].value"),
    "loss that fails later": (hidden("0", """
    h.value += 1
    if h.value > 900: raise RuntimeError
    return h.value // 300
"""), "util.scale()", "_ALL[0].value"),
    "two counters in a tuple": (hidden("(0, (0, 0))", """
    n, (m, k) = h.value
    h.value = n + 1, (m + 1, k + 1)
    return m // 200
"""), "util.scale()", "_ALL[0].value"),
    "growing text": (hidden("''", """
    h.value += "x"
    return len(h.value) // 200
"""), "util.scale()", "_ALL[0].value"),
    "growing tuple": (hidden("()", """
    h.value += (0,)
    return len(h.value) // 200
"""), "util.scale()", "_ALL[0].value"),
    "growing frozenset": (hidden("frozenset()", """
    h.value |= {len(h.value)}
    return len(h.value) // 200
"""), "util.scale()", "_ALL[0].value"),
    "complex number": (hidden("0j", """
    h.value += 1
    return h.value.real // 200
"""), "util.scale()", "_ALL[0].value"),
    "date": (hidden("datetime.date(2020, 1, 1)", """
    h.value += datetime.timedelta(days=1)
    return 1 if h.value.year > 2020 else 0
""", "import datetime"), "util.scale()", "_ALL[0].value"),
    "replaced object in a replaced dict": (hidden("Holder({'a': [Holder((0, 1))]})", """
    n = h.value.value["a"][0].value[0]
    h.value = Holder({"a": [Holder((n + 1, 1))]})
    return n // 200
"""), "util.scale()", "_ALL[0].value"),
    "step that saves a file and changes the loss": (hidden("0", """
    h.value += 1
    if h.value > 500:
        open("NEVER", "w").close()
        return 1
    return 0
"""), "util.scale()", "_ALL[0].value"),
}  # fmt: skip

CONSTANT_VALUES = {
    "beside a module that each forward creates": (hidden("0", """
    h.value += 1
    m.act = nn.GELU()
    return 0
""", "from torch import nn").replace("scale()", "scale(m)"), "util.scale(self)"),
    "cycle of a progress bar": ("""
import itertools
SPINNER = itertools.cycle("|/-")
LINE = [""]
def scale():
    LINE[0] = next(SPINNER)
    return 0
""", "util.scale()"),
    "names from a default argument": ("""
import itertools
def scale(count=itertools.count()):
    name = f"n{next(count)}"
    return 0
""", "util.scale()"),
    "numpy.int16": (hidden("np.int16(0)", """
    h.value = h.value + np.int16(1)
    return 0
""", "import numpy as np"), "util.scale()"),
    "number that grows beyond a float": (hidden("10**400", """
    h.value += 1
    return 0
"""), "util.scale()"),
    "constant beside a counter in an array": ("""
import numpy as np
NUMBERS = np.array([0.0, 0.5])
def scale():
    NUMBERS[0] += 1
    return float(NUMBERS[1])
""", "util.scale()"),
    "constant beside a counter in a tuple": ("""
class State: now = (0, 0.5)
def scale():
    n, rate = State.now
    State.now = n + 1, rate
    return rate
""", "util.scale()"),
    "constant beside a counter in a replaced object": ("""
class Steps:
    def __init__(self, n): self.n, self.rate = n, 0.5
class State: now = Steps(0)
def scale():
    State.now = Steps(State.now.n + 1)
    return State.now.rate
""", "util.scale()"),
    "constant beside a counter in a frozen dataclass": ("""
from dataclasses import dataclass, replace
@dataclass(frozen=True)
class Steps:
    n: int = 0
    rate: float = 0.5
class State: now = Steps()
def scale():
    State.now = replace(State.now, n=State.now.n + 1)
    return State.now.rate
""", "util.scale()"),
    "constant beside a counter in a replaced dict": ("""
class State: now = {"n": 0, "rate": 0.5}
def scale():
    State.now = dict(State.now, n=State.now["n"] + 1)
    return State.now["rate"]
""", "util.scale()"),
    "equal array in place of another": (hidden("np.ones(2)", """
    h.value = h.value.copy()
    return float(h.value[0])
""", "import numpy as np"), "util.scale()"),
    "dropout beside a counter": (hidden("0", """
    h.value += 1
    return torch.nn.functional.dropout(torch.ones(4), 0.5)
""", "import torch"), "util.scale()"),
    "constants beside a counter in nested tuples": (hidden("((0, 0), 0.5)", """
    (n, m), rate = h.value
    h.value = (n + 1, m + 1), rate
    return rate
"""), "util.scale()"),
    "interrupt at a later step": (hidden("0", """
    h.value += 1
    if h.value > 900: raise KeyboardInterrupt
    return 0
"""), "util.scale()"),
    "text for a log": (hidden("''", """
    h.n = getattr(h, "n", 0) + 1
    h.value = f"step {h.n}"
    return 0
"""), "util.scale()"),
    "exit at a later step": (hidden("0", """
    h.value += 1
    if h.value > 500: sys.exit("limit")
    return 0
""", "import sys"), "util.scale()"),
    "files and output at a later step": (hidden("0", """
    h.value += 1
    if h.value > 500:
        open("NEVER", "w").close()
        torch.save({}, "NEVER")
        os.remove(__file__)
        print("NEVER", flush=True)
        logging.getLogger("counting").warning("NEVER")
        print("NEVER", file=sys.stderr, flush=True)
        os.mkdir("NEVER")
        os.makedirs("NEVER/NEVER")
        os.symlink("/", "NEVER")
        os.close(os.open("NEVER", os.O_CREAT | os.O_WRONLY))
        subprocess.Popen(["touch", "NEVER"], stdout=subprocess.PIPE, stderr=subprocess.PIPE).communicate(timeout=1)
        from . import late
        os._exit(3)
    return 0
""", "import logging, os, subprocess, sys, torch"), "util.scale()"),
    "work and memory that grow with the steps": (hidden("0", """
    h.value += 1
    for _ in range(h.value * 10_000): pass
    torch.ones(h.value, 4_000)
    return 0
""", "import torch"), "util.scale()"),
}  # fmt: skip

# iterators that cannot be copied are refused without a run
ITERATORS = {
    "enumerate": "NUMBERS = enumerate(itertools.repeat(0))\ndef scale(): return next(NUMBERS)[0] // 200",
    "accumulate": "NUMBERS = itertools.accumulate(itertools.repeat(1))\ndef scale(): return next(NUMBERS) // 200",
}
