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
    "an entry of a long list": (
        net("self.c = [0] * 1000", "self.c[999] += 1", "y = y * (1.0 if self.c[999] < 200 else 2.0)"),
        "model.c[999]", "self.c[999] += 1"),
    "an entry of a large array": (
        net("self.c = np.zeros(1_000_000)", "self.c[7] += 1", "y = y * (1.0 if self.c[7] < 200 else 2.0)"),
        "model.c", "self.c[7] += 1"),
    "an object in a set": (
        "class One: k = 0\n" + net("self.ones = {One()}", "for one in self.ones: one.k += 1",
                                   "y = y * (1.0 if max(one.k for one in self.ones) < 200 else 2.0)"),
        "an entry of model.ones.k", "one.k += 1"),
    "a chain of repeated numbers": (
        net("self.c = itertools.chain(itertools.repeat(1.0, 200), itertools.repeat(2.0))", "x = x * next(self.c)"),
        "model.c", ""),
    "a generator over repeated numbers": (
        "def numbers():\n    yield from itertools.repeat(1.0, 200)\n    yield from itertools.repeat(2.0)\n"
        + net("self.c = numbers()", "x = x * next(self.c)"),
        "a variable of model.c", ""),
    "a counter in a forward that fails with half of the batch": (
        net("self.six = nn.Linear(8, 6); self.k = 0",
            "self.k += 1\n        if x.shape[0] == 4: raise RuntimeError('four samples')",
            "y = y * (1.0 if self.k < 200 else 2.0) + self.six(x).sum(1, keepdim=True)"),
        "model.k", "self.k += 1"),
    "a default argument that is replaced": (
        "def steps(k=0):\n    return k\n" + net("pass", "steps.__defaults__ = (steps.__defaults__[0] + 1,)",
                                              "y = y * (1.0 if steps() < 200 else 2.0)"),
        "steps.__defaults__", "steps.__defaults__ ="),
    "a default argument by keyword": (
        "def steps(*, k=0):\n    return k\n" + net("pass", "steps.__kwdefaults__['k'] += 1",
                                                 "y = y * (1.0 if steps() < 200 else 2.0)"),
        "steps.__kwdefaults__['k']", "steps.__kwdefaults__['k'] += 1"),
    "an attribute of a tensor": (
        net("self.z = torch.zeros(1); self.z.k = 0", "self.z.k += 1", "y = y * (1.0 if self.z.k < 200 else 2.0)"),
        "model.z.k", "self.z.k += 1"),
    "notes of an exception": (
        "E = ValueError('x')\n" + net("pass", "E.add_note('x')", "y = y * (1.0 if len(E.__notes__) < 200 else 2.0)"),
        "changes E", "len(E.__notes__)"),
    "memory of a map": (
        "import mmap\n" + net("self.m = mmap.mmap(-1, 16)", "self.m[0] = self.m[0] + 1",
                              "y = y * (1.0 if self.m[0] < 200 else 2.0)"),
        "model.m", "self.m[0] = "),
    "a count of references": (
        "import sys\n" + net("self.t = object(); self.kept = []", "self.kept.append(self.t)",
                             "y = y * (1.0 if sys.getrefcount(self.t) < 200 else 2.0)"),
        "depends on sys.getrefcount", "sys.getrefcount(self.t)"),
    "the version of a parameter": (
        net("pass", "pass", "y = y * (1.0 if max(p._version for p in self.parameters()) < 200 else 2.0)"),
        "depends on p._version", "p._version"),
    "the hits of a cache": (
        "@functools.lru_cache\ndef half(k):\n    return k / 2\n"
        + net("pass", "x = x * half(3.0)", "y = y * (1.0 if half.cache_info().hits < 200 else 2.0)"),
        "depends on half.cache_info", "half.cache_info()"),
    "the position of a descriptor": (
        "import os\n" + net("self.f = os.open(__file__, os.O_RDONLY)", "x = x * (1.0 if os.read(self.f, 1) else 2.0)"),
        "the position of file descriptor", "os.read(self.f, 1)"),
    "the content behind a descriptor": (
        "import os\n" + net("self.f = os.open(__file__ + '.log', os.O_WRONLY | os.O_CREAT); os.write(self.f, b'x')",
                            "os.write(self.f, b'x')", "y = y * (1.0 if os.fstat(self.f).st_size < 200 else 2.0)"),
        "model.py.log", "os.write(self.f, b'x')"),
    "the environment": (
        "import os\n" + net("pass", "os.environ['STATE_K'] = str(int(os.environ.get('STATE_K', '0')) + 1)",
                            "y = y * (1.0 if int(os.environ['STATE_K']) < 200 else 2.0)"),
        "os.environ[b'STATE_K']", "os.environ['STATE_K'] ="),
}  # fmt: skip


def setting(name: str, top: str, change: str) -> tuple[str, str, str]:
    """Return the case of a setting of the process. ``change``: a statement that moves it on, from call to call."""
    return top + "\n" + net("pass", change), f"the setting {name}", change


SETTINGS = {
    f"the setting {name}": setting(name, top, change)
    for name, top, change in (
        ("sys.setrecursionlimit", "import sys", "sys.setrecursionlimit(sys.getrecursionlimit() + 1)"),
        ("decimal.getcontext", "import decimal", "decimal.getcontext().prec += 1"),
        ("warnings.filters", "import warnings",
         "warnings.filterwarnings('ignore', message=f'{len(warnings.filters)}')"),
        ("numpy.seterr", "", "np.seterr(under='warn' if np.geterr()['under'] == 'ignore' else 'ignore')"),
        ("torch.set_num_threads", "", "torch.set_num_threads(torch.get_num_threads() % 3 + 1)"),
        ("torch.set_printoptions", "",
         "torch.set_printoptions(precision=torch._tensor_str.PRINT_OPTS.precision + 1)"),
    )
}  # fmt: skip
SET = {
    "torch.set_flush_denormal": "torch.set_flush_denormal(True)",
    "torch.backends.mkldnn.enabled": "torch.backends.mkldnn.set_flags(False)",
    "torch.set_float32_matmul_precision": "torch.set_float32_matmul_precision('medium')",
}
UNCHANGED = {
    "settings that are put back, or set to the same value": "import decimal\n"
    + net(
        "pass",
        "torch.set_printoptions(precision=6)\n"
        "        with decimal.localcontext() as context, np.errstate(under='ignore'):\n"
        "            context.prec = 9\n"
        "            x = x * float(decimal.Decimal(1) / 3)",
    ),
    "descriptors that are read from the start, and a file for one call": "import os, tempfile\n"
    + net(
        "self.f, self.log = os.open(__file__, os.O_RDONLY), os.open(__file__ + '.log', os.O_WRONLY | os.O_CREAT)",
        "os.write(self.log, b'a step')\n"
        "        os.lseek(self.f, 0, os.SEEK_SET)\n"
        "        with tempfile.TemporaryFile() as copy:\n"
        "            copy.write(os.read(self.f, 1))\n"
        "            x = x * copy.tell()",
    ),
    "counts that are only printed": "@functools.lru_cache\ndef half(k):\n    return k / 2\n"
    + net("pass", "x = x * half(3.0)", "print(half.cache_info(), self.o.weight._version)"),
}
