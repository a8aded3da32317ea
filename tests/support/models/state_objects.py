# ruff: noqa: E501
"""Model files that keep state in objects of libraries, on library modules, or change it in C; see ``state``.

``DISCARDED``: what the forward draws or writes is thrown away, so that training is as in a plain loop.
"""

from __future__ import annotations

from .state import DATA, loss, net

LATER = "x = x * 2 if {} else x"


def late(prepare: str, change: str, test: str, before: str = "") -> str:
    """Return a model that doubles its input when a condition turns true at a later step."""
    return before + net(prepare, f"{change}\n        {LATER.format(test)}")


OBJECTS = {
    "a number in a stream of bytes": (
        late("self.f = io.BytesIO(); pickle.dump(0, self.f)",
             "self.f.seek(0); k = pickle.load(self.f) + 1; self.f.seek(0); pickle.dump(k, self.f)", "k > 200",
             "import io, pickle\n"),
        "model.f", "pickle.load(self.f)"),
    "the length of a stream of text": (
        late("pass", "STORE.write('.')", "STORE.tell() > 200", "import io\nSTORE = io.StringIO()\n"),
        "STORE", "STORE.tell() > 200"),
    "the position in an open file": (
        late("self.f = open(__file__ + '.log', 'w+')", "self.f.write('x')", "self.f.tell() > 200"),
        "model.f", "self.f.tell() > 200"),
    "the changes of a database": (
        late("pass", "DB.execute('insert into t values (1)'); k = DB.execute('select count(*) from t').fetchone()[0]",
             "k > 200", "import sqlite3\nDB = sqlite3.connect(':memory:', check_same_thread=False)\nDB.execute('create table t (k)')\n"),
        "DB", "select count(*)"),
    "a digest that goes on": (
        late("self.m = hashlib.md5()", "self.m.update(b'a')", "self.m.digest()[:2] == b'00'", "import hashlib\n"),
        "model.m", "self.m.digest()"),
    "rows of a reader": (
        late("self.rows = csv.reader(['1.0'] * 200 + ['2.0'] * 9)", "w = next(self.rows)[0]", "w == '2.0'", "import csv\n"),
        "model.rows", "next(self.rows)"),
    "matches of an expression": (
        late("self.found = re.finditer('.', 'a' * 200 + 'b' * 9)", "w = next(self.found).group()", "w == 'b'", "import re\n"),
        "model.found", "next(self.found)"),
    "one of two copies of an iterator": (
        late("self.it = itertools.tee(itertools.count())[0]", "pass", "next(self.it) > 200"), "model.it", "next(self.it)"),
    "a product of iterators": (
        late("self.it = itertools.product(range(9), range(99))", "pass", "next(self.it)[0] == 7"), "model.it", "next(self.it)"),
    "entries of an array in their order": (
        late("self.it = np.arange(999).flat", "pass", "next(self.it) > 200"), "model.it", "next(self.it)"),
    "bits of a generator": (
        late("self.bits = np.random.PCG64(0)", "pass", "self.bits.random_raw() % 97 == 0"), "model.bits", "self.bits.random_raw()"),
    "arguments of an exception": (
        late("self.e = ValueError()", "self.e.args = (*self.e.args, 1)", "len(self.e.args) > 200"), "model.e", "self.e.args"),
    "bytes seen through a view": (
        late("self.m = memoryview(bytearray(8))", "self.m[0] += 1", "self.m[0] > 200"), "model.m", "self.m[0] += 1"),
    "an attribute of a logger": (late("logger.k = 0", "logger.k += 1", "logger.k > 200"), "logger.k", "logger.k += 1"),
    "the level of a logger": (
        late("logger.setLevel(10)", "logger.setLevel(logger.level + 1)", "logger.level > 200"), "logger.level", "logger.level"),
    "an attribute of torch": (late("torch.own_k = 0", "torch.own_k += 1", "torch.own_k > 200"), "own_k", "torch.own_k += 1"),
    "an attribute of the functions of torch": (
        late("F.own_k = 0", "F.own_k += 1", "F.own_k > 200"), "own_k", "F.own_k += 1"),
    "an attribute of a class of torch": (
        late("nn.Linear.own_k = 0", "nn.Linear.own_k += 1", "nn.Linear.own_k > 200"), "own_k", "nn.Linear.own_k += 1"),
    "an attribute of a module in C, by its name": (
        late("math.own_k = 0", "setattr(math, 'own_k', math.own_k + 1)", "math.own_k > 200", "import math\n"),
        "own_k", "setattr(math, 'own_k'"),
    "a built-in name": (
        late("import builtins; builtins.own_k = 0", "import builtins; builtins.own_k += 1", "own_k > 200"),
        "own_k", "builtins.own_k += 1"),
    "a heap": (
        late("self.q = [5]", "heapq.heappush(self.q, len(self.q))", "self.q[-1] > 200", "import heapq\n"),
        "model.q", "heapq.heappush(self.q"),
    "the order of a dict": (
        late("self.d = collections.OrderedDict.fromkeys(range(99))", "self.d.move_to_end(next(iter(self.d)))",
             "next(iter(self.d)) == 98"),
        "model.d", "self.d.move_to_end"),
    "a generator that is drawn from under another name": (
        net("self.coin = random.Random(0)", "coin = self.coin\n        flip = coin.random()\n        x = x * 0.5 if flip < 0.001 else x"),
        "model.coin", "coin = self.coin"),
    "an order that a generator shuffles": (
        net("self.coin, self.order = random.Random(0), [1.0, 1.0]", "self.coin.shuffle(self.order)\n        x = x * self.order[0]"),
        "model.coin", "self.coin.shuffle"),
}  # fmt: skip

DISCARDED = {
    "a generator that is only advanced": net("self.coin = random.Random(0)", "self.coin.random()"),
    "a draw of numpy that nothing reads": net("self.rng = np.random.default_rng(0)", "_ = self.rng.random()"),
    "a draw that is kept, and that nothing reads": net("self.coin = random.Random(0)", "coin = self.coin\n        self.last = coin.choice('abc')"),
    "a draw that decides what is printed": net("self.coin = random.Random(0)", "if self.coin.random() < 0.3: print(x.shape)"),
    "an iterator that counts steps": net("self.steps = iter(range(9999))", "next(self.steps, None)"),
    "a numbered iterator for the log": net(
        "self.steps = enumerate([0] * 9999)", "step, _ = next(self.steps)\n        if step % 10 == 0: print(step)"
    ),
    "a progress bar that is switched off": "from tqdm import tqdm\n" + net(
        "self.bar = iter(tqdm(range(9999), disable=True))", "next(self.bar)"
    ),
    "a progress bar": "import io\nfrom tqdm import tqdm\n" + net(
        "self.bar = iter(tqdm([0] * 9999, file=io.StringIO()))", "next(self.bar)"
    ),
    "names from a count": net("self.names = itertools.count()", "self.name = f'call {next(self.names)}'"),
    "a stream for the log": "import io\n" + net("self.f = io.StringIO()", "self.f.write('x'); print('x', file=self.f)"),
    "a digest for the log": "import hashlib\n" + loss("DIGEST = hashlib.md5()", "DIGEST.update(b'x')", "0.0"),
    "a round trip within the forward": "import io, pickle\n" + net(
        "self.scales = {'w': 0.5}", "self.scales = pickle.loads(pickle.dumps(self.scales))\n        x = x * self.scales['w']"
    ),
}  # fmt: skip

FILES = """
import os, pathlib
FILE = pathlib.Path(__file__ + ".state")

"""
PHRASE_OF_FILES = "reads what an earlier call left there"
HALVING = """
    def halve(self):
        for _ in range(1): self.s = 0.5
        return self.k
"""
LOGGING = """
    def log_step(self, k):
        if k % 10 != 0: return
        text = self.phrase(k)
        print(text)
    def phrase(self, k):
        words = []
        for word in ("step", str(k)): words.append(word)
        return " ".join(words)
"""
BETWEEN = {
    "data decides whether a printed function changes the model": (
        "EPOCH = [0]\n" + net("self.k, self.s = 0, 1.0", "if EPOCH[0] > 24: print(self.halve())\n        x = x * self.s")
        + HALVING + DATA.format(change="EPOCH[0] = i"), "EPOCH[0]", "EPOCH[0] = i"),
    "data sets a variable of the environment": (
        "import os\n" + net("pass", "x = x * (0.5 if os.getenv('STATE_J', '0') == '24' else 1.0)")
        + DATA.format(change="os.environ['STATE_J'] = str(i)"), "", "os.environ['STATE_J'] = str(i)"),
    "a list of a library that grows": (
        late("pass", "sys.path.append('/nowhere')", "len(sys.path) > 200", "import sys\n"),
        "path", "sys.path.append('/nowhere')"),
    "a counter that a function returns early with": (
        "S = [1.0]\ndef tick(k):\n    if k < 200: return\n    S[0] = 2.0\n"
        + net("self.k = 0", "self.k += 1\n        tick(self.k)", "y = y * S[0]"), "model.k", "self.k += 1"),
    "a number in a file": (
        late("FILE.write_text('0')", "k = int(FILE.read_text()) + 1; FILE.write_text(str(k))", "k > 200", FILES),
        PHRASE_OF_FILES, "FILE.write_text(str(k))"),
    "a number that torch saves": (
        late("torch.save({'k': 0}, FILE)", "k = torch.load(FILE)['k'] + 1; torch.save({'k': k}, FILE)", "k > 200", FILES),
        PHRASE_OF_FILES, "torch.save({'k': k}, FILE)"),
    "the size of a file": (
        late("FILE.write_text('')", "with FILE.open('a') as f: f.write('x')", "os.path.getsize(FILE) > 200", FILES),
        PHRASE_OF_FILES, "with FILE.open('a') as f: f.write('x')"),
    "the entries of a folder": (
        late("os.makedirs(FILE)", "n = len(os.listdir(FILE)); os.mkdir(f'{FILE}/{n}')", "n > 200", FILES),
        "the folder", "os.mkdir(f'{FILE}/{n}')"),
    "a hook of a gradient that counts": (
        net("self.k = 0; self.o.weight.register_hook(self.tick)", "x = x * 2 if self.k > 200 else x") + """
    def tick(self, gradient):
        self.k += 1
""", "a hook of the backward pass changes model.k", "self.k += 1"),
    "a hook in a lambda that counts": (
        net("s = self.s = {'k': 0}; self.o.weight.register_hook(lambda g: s.update(k=s['k'] + 1))",
            "x = x * 2 if self.s['k'] > 200 else x"),
        "a hook of the backward pass changes model.s", "s.update(k="),
    "a hook of a module's backward pass that counts": (
        "def tick(module, inputs, outputs):\n    module.k += 1\n"
        + net("self.k = 0; self.register_full_backward_hook(tick)", "x = x * 2 if self.k > 200 else x"),
        "a hook of the backward pass changes model.k", "module.k += 1"),
    "a backward of the user's own that counts": (
        """
class Scale(torch.autograd.Function):
    k = 0
    @staticmethod
    def forward(ctx, x):
        return x * (2.0 if Scale.k > 200 else 1.0)
    @staticmethod
    def backward(ctx, gradient):
        Scale.k += 1
        return gradient
""" + net("pass", "pass", "y = Scale.apply(y)"), "a hook of the backward pass changes Scale.k", "Scale.k += 1"),
    "the number of the step": (
        "STEP = [0]\ndef after_step(named_parameters, step):\n    STEP[0] = step\n"
        + net("pass", "x = x * 2 if STEP[0] > 200 else x"),
        "the after_step hook changes STEP[0]", "STEP[0] = step"),
    "the epoch of a scheduler": (
        """
EPOCH = [0]
def scheduler(optimizer):
    def factor(epoch):
        EPOCH[0] = epoch
        return 1.0
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
""" + net("pass", "x = x * 2 if EPOCH[0] > 200 else x"), "the scheduler hook changes EPOCH[0]", "EPOCH[0] = epoch"),
    "a switch that the optimizer hook turns": (
        "SCALE = [1.0]\n" + net("pass", "x = x * SCALE[0]") + """
def optimizer(named_parameters):
    SCALE[0] = 2.0
    return torch.optim.SGD([parameter for _, parameter in named_parameters], lr=0.1)
""", "the optimizer hook changes SCALE[0]", "SCALE[0] = 2.0"),
}  # fmt: skip
"""State in files, and state that is written between two forward passes."""

SEEDED = {
    "a seed in the forward": net("pass", "torch.manual_seed(0)\n        x = x + torch.randn_like(x)"),
    "the state of a generator in the loss": loss("", "torch.set_rng_state(torch.get_rng_state())", "0.0"),
}

QUIET = {
    "a counter that a method logs": net("self.k = 0", "self.k += 1\n        self.log_step(self.k)") + LOGGING,
    "an epoch of data that a method logs": "EPOCH = [0]\n" + net("pass", "self.log_step(EPOCH[0])") + LOGGING + DATA.format(change="EPOCH[0] = i"),
    "a line in a file": FILES + net("pass", "with FILE.open('a') as f: f.write('x')"),
    "a table with a heading in a file": FILES + net(
        "pass", "is_there = os.path.exists(FILE)\n        with open(FILE, 'a') as f: f.write('x' if is_there else 'heading')"
    ),
    "a file that is written before it is read": FILES + net(
        "pass", "FILE.write_text('0.5')\n        x = x * float(FILE.read_text())"
    ),
    "a number that is written to a file once": FILES + net(
        "pass", "if not os.path.exists(FILE): FILE.write_text('0.5')\n        x = x * float(FILE.read_text())"
    ),
    "gradients that are counted for the log": net("self.k = 0; self.o.weight.register_hook(self.tick)", "pass") + """
    def tick(self, gradient):
        self.k += 1
""",
    "a hook of the gradients that prints every tenth": "SEEN = []\n" + net(
        "self.o.weight.register_post_accumulate_grad_hook(lambda p: SEEN.append(0))",
        "if len(SEEN) % 10 == 9: print(len(SEEN))",
    ),
}  # fmt: skip
"""Files and hooks that change nothing that a forward or loss reads."""
