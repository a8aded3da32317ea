"""``autopipe run --replicas``: the microbatches of a script on copies of its model, bit for bit as in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.script_runs import SCRIPTS, by_python, in_stages

SCRIPT = SCRIPTS / "calls" / "accumulating.py"


def equal(left: Path, right: Path) -> bool:
    a, b = (torch.load(folder / "accumulating.pt", weights_only=True) for folder in (left, right))
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("ranks", "replicas", "words"),
    [
        (2, 2, ()),
        (3, 3, ("--read", "--freeze")),
        (4, 2, ("--samples", "3")),
        pytest.param(4, 4, ("--norm",), marks=pytest.mark.slow),
        (2, 2, ("--norm", "--read")),
        pytest.param(2, 2, ("--cast",), marks=pytest.mark.slow),
    ],
)
def test_every_number_is_that_of_one_process(ranks: int, replicas: int, words: tuple[str, ...], tmp_path: Path) -> None:
    plain = by_python(SCRIPT, *words, folder=tmp_path / "plain")
    options = ("--replicas", str(replicas))
    staged = in_stages(SCRIPT, *words, folder=tmp_path / "staged", stages=ranks, options=options)
    assert plain.code == 0, plain.errors
    assert staged.code == 0, staged.errors
    assert f"{replicas} replicas of {'1 stage' if replicas == ranks else '2 stages'}: " in staged.errors
    assert staged.output == plain.output
    assert equal(tmp_path / "plain", tmp_path / "staged")
    overlap = "forwards do not overlap: numbers are read" if "--read" in words else "overlap from the script's accum"
    if "--norm" in words:
        overlap = "no overlap between replicas: the forward writes norm.num_batches_tracked"
    assert overlap in staged.errors


def test_two_calls_in_one_backward_are_equal_or_refused(tmp_path: Path) -> None:
    options = ("--replicas", "2")
    refused = in_stages(SCRIPT, "--together", folder=tmp_path / "often", options=options)
    assert refused.code == 1
    assert "one backward through two calls of the model, each of which uses" in refused.errors
    assert "try: --replicas never, or a backward for each call" in refused.errors
    plain = by_python(SCRIPT, "--together", "--once", folder=tmp_path / "plain")
    staged = in_stages(SCRIPT, "--together", "--once", folder=tmp_path / "staged", options=options)
    assert staged.code == 0, staged.errors
    assert staged.output == plain.output
    assert equal(tmp_path / "plain", tmp_path / "staged")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--replicas", "many"), "--replicas is 'many'"),
        (("--replicas", "0"), "--replicas is '0'"),
        (("--replicas", "3"), "--replicas 3 cannot have equal shares of 2 ranks"),
        (("--replicas", "2", "--num-microbatches", "1"), ""),
        (("--replicas", "4", "--num-microbatches", "2"), "compute parts of each batch, and --num-microbatches is 2"),
    ],
)
def test_a_number_that_cannot_be_is_an_error(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    staged = in_stages(SCRIPT, folder=tmp_path, options=options)
    assert staged.code == (1 if message else 0)
    assert message in staged.errors


def test_an_operator_of_a_module_of_the_script_is_imported_by_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "operators.py").write_text(
        "import torch\n"
        "@torch.library.custom_op('operators::twice', mutates_args=())\n"
        "def twice(x: torch.Tensor) -> torch.Tensor:\n    return 2 * x\n"
        "@twice.register_fake\ndef _(x):\n    return torch.empty_like(x)\n"
        "twice.register_autograd(lambda ctx, g: torch.ops.operators.twice(g))\n"
    )
    body = (
        "import torch, sys\nfrom torch import nn\ntorch.manual_seed(0)\n{operator}"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 2)\n"
        "    def forward(self, x):\n        return self.two(torch.ops.operators.twice(self.one(x)))\n"
        "net = Net()\nopt = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for _ in range(3):\n    loss = net(torch.randn(4, 4)).pow(2).mean()\n    opt.zero_grad()\n"
        "    loss.backward()\n    opt.step()\n    print(loss.item())\n"
    )
    script = tmp_path / "script.py"
    script.write_text(body.format(operator="import operators\n"))
    plain = by_python(script, folder=tmp_path)
    staged = in_stages(script, folder=tmp_path)
    assert (staged.code, staged.output) == (0, plain.output), staged.errors
    script.write_text(body.format(operator=(tmp_path / "operators.py").read_text()))
    staged = in_stages(script, folder=tmp_path)
    assert staged.code == 1
    assert "the forward calls the operator operators::twice, which the script itself defines" in staged.errors


MODEL = (
    "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\ntorch.manual_seed(0)\n"
    "class Net(nn.Module):\n"
    "    def __init__(self):\n        super().__init__()\n"
    "        self.a, self.n = nn.Linear(17, 33), nn.BatchNorm1d(33)\n"
    "        self.w, self.b = nn.Parameter(torch.randn(33)), nn.Linear(33, 50)\n"
    "    def forward(self, x):\n        h = torch.tanh(self.n(self.a(x)))\n        {body}\n"
    "net = Net()\nnet.n.{mode}()\nopt = torch.optim.SGD(net.parameters(), 0.1)\n"
    "for step in range(3):\n    opt.zero_grad()\n"
)
LATER = (
    "    losses = []\n    for training in (False, True, False, True, True):\n        net.n.train(training)\n"
    "        losses.append(net(torch.randn(6, 17)).pow(2).mean())\n    for loss in losses:\n        loss.backward()\n"
)
TRANSPOSED = "    for _ in range(2):\n        (net(torch.randn(64, 17)).t() * torch.randn(50, 64)).sum().backward()\n"
TOGETHER = "    sum(net(torch.randn(16, 17)).pow(2).mean() for _ in range(3)).backward()\n"
STEP = "    opt.step()\n    print([p.grad.double().sum().item() for p in net.parameters() if p.grad is not None])\n"
TWICE = "return self.b(F.layer_norm(h, (33,), self.w, self.w))"


@pytest.mark.parametrize(
    ("body", "mode", "loop", "options"),
    [
        ("return self.b(h)", "train", LATER, ("--replicas", "2")),
        ("return self.b(h)", "eval", TRANSPOSED, ("--replicas", "2")),
        ("return self.b(h)", "eval", TRANSPOSED, ("--replicas", "never")),
        (TWICE, "eval", TOGETHER, ("--replicas", "never")),
    ],
)
def test_backwards_that_read_what_came_later_or_lies_otherwise(
    body: str, mode: str, loop: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(MODEL.format(body=body, mode=mode) + loop + STEP)
    plain = by_python(script, folder=tmp_path)
    staged = in_stages(script, folder=tmp_path, options=options)
    assert staged.code == 0, staged.errors
    assert staged.output == plain.output


def test_a_parameter_that_a_call_gets_twice_is_used_twice(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(MODEL.format(body=TWICE, mode="eval") + TOGETHER + STEP)
    staged = in_stages(script, folder=tmp_path, options=("--replicas", "2"))
    assert staged.code == 1
    assert "each of which uses w several times" in staged.errors


def test_the_faster_of_stages_and_replicas_is_chosen(tmp_path: Path) -> None:
    script = tmp_path / "chosen.py"
    text = (
        "import torch, sys\nfrom torch import nn\ntorch.manual_seed(0)\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.table, self.one = nn.Embedding(int(sys.argv[1]), 64), nn.Linear(64, 64)\n"
        "        self.two = nn.Linear(64, 8)\n"
        "        self.times = int(sys.argv[2])\n"
        "    def forward(self, x):\n        h = self.table(x)\n"
        "        for _ in range(self.times):\n            h = torch.tanh(self.one(h))\n        return self.two(h)\n"
        "net = Net()\nopt = torch.optim.SGD(net.parameters(), 0.1)\n"
        "net(torch.randint(100, (64, 32))).pow(2).mean().backward()\nopt.step()\n"
    )
    script.write_text(text)
    options = ("--num-microbatches", "4", "--replicas", "auto")
    computes = in_stages(script, "100", "40", folder=tmp_path, options=options)
    assert computes.code == 0, computes.errors
    assert "2 replicas of 1 stage: " in computes.errors
    exchanges = in_stages(script, "400000", "2", folder=tmp_path, options=options)
    assert exchanges.code == 0, exchanges.errors
    assert "run: 2 stages: " in exchanges.errors
