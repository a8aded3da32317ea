"""``autopipe run --num-microbatches``: bit-equal to a script that joins the same parts in plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.script_runs import SCRIPTS, Ended, by_python, in_stages

SCRIPT = SCRIPTS / "batches.py"
HEAD = """
import torch
from torch import nn
torch.manual_seed(0)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout({rate})
    def forward(self, x, more=None):
        h = self.two(self.drop(torch.tanh(self.one(x))))
        {body}
model = Model()
opt = torch.optim.SGD(model.parameters(), 0.1)
"""
LOOP = """
for _ in range({steps}):
    opt.zero_grad()
    out = model({arguments})
    (out if isinstance(out, torch.Tensor) else out[0]).pow(2).mean().backward()
    opt.step()
print("end")
"""


def equal(left: Path, right: Path) -> bool:
    a, b = (torch.load(folder / "batches.pt", weights_only=True) for folder in (left, right))
    assert a.keys() == b.keys()
    assert len(a) > 10
    return all(torch.equal(a[name], b[name]) for name in a)


def one_model(body: str, folder: Path, *, arguments: str = "torch.randn(8, 4)", rate: float = 0.0) -> Ended:
    folder.mkdir(exist_ok=True)
    script = folder / "one.py"
    script.write_text(HEAD.format(body=body, rate=rate) + LOOP.format(steps=2, arguments=arguments))
    return in_stages(script, folder=folder, options=("--num-microbatches", "2"))


@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (4, ()),
        (3, ("--loss", "ignored")),
        (2, ("--loss", "contrastive", "--samples", "7")),
        (2, ("--accumulate", "2", "--loss", "ignored", "--samples", "9")),
    ],
)
def test_parts_are_those_of_plain_torch(stages: int, parts: int, words: tuple[str, ...], tmp_path: Path) -> None:
    plain = by_python(SCRIPT, *words, "--cut", str(parts), folder=tmp_path / "plain")
    cut = ("--num-microbatches", str(parts), "--replicas", "never")
    staged = in_stages(SCRIPT, *words, folder=tmp_path / "staged", stages=stages, options=cut)
    assert plain.code == 0, plain.errors
    assert staged.code == 0, staged.errors
    assert staged.output == plain.output
    assert equal(tmp_path / "plain", tmp_path / "staged")
    uncut = by_python(SCRIPT, *words, folder=tmp_path / "uncut")
    assert uncut.output != plain.output  # dropout and batch norm differ: the comparison sees the cut


@pytest.mark.parametrize(
    ("ranks", "parts", "replicas", "words"),
    [
        (2, 4, 2, ()),
        (2, 3, 2, ("--loss", "contrastive", "--samples", "7")),
        (4, 2, 2, ("--accumulate", "2", "--loss", "ignored", "--samples", "9")),
        pytest.param(4, 4, 4, ("--samples", "6"), marks=pytest.mark.slow),
    ],
)
def test_replicas_are_copies_of_plain_torch(
    ranks: int, parts: int, replicas: int, words: tuple[str, ...], tmp_path: Path
) -> None:
    cut = ("--cut", str(parts), "--replicas", str(replicas))
    plain = by_python(SCRIPT, *words, *cut, folder=tmp_path / "plain")
    options = ("--num-microbatches", str(parts), "--replicas", str(replicas))
    staged = in_stages(SCRIPT, *words, folder=tmp_path / "staged", stages=ranks, options=options)
    assert plain.code == 0, plain.errors
    assert staged.code == 0, staged.errors
    assert f"{replicas} replicas of {'1 stage' if replicas == ranks else '2 stages'}: " in staged.errors
    assert staged.output == plain.output
    assert equal(tmp_path / "plain", tmp_path / "staged")


def test_the_first_lines_say_what_is_cut_and_what_differs(tmp_path: Path) -> None:
    staged = in_stages(SCRIPT, "--samples", "10", folder=tmp_path, options=("--num-microbatches", "4", "--check", "2"))
    assert staged.code == 0, staged.errors
    assert "cut into 4 parts of 2 to 3: " in staged.errors
    assert "times the speed of one process is predicted" in staged.errors
    assert "not bit-equal to python: gradients are sums over parts" in staged.errors
    assert "each part draws its random numbers" in staged.errors
    assert "batch norm (norm) uses the statistics of each part" in staged.errors
    assert "equal those of one process that joins the same parts, after 2 optimizer steps" in staged.errors
    assert "no overlap" not in staged.errors


def test_without_draws_and_batch_norm_only_rounding_differs(tmp_path: Path) -> None:
    staged = one_model("return h", tmp_path)
    assert staged.code == 0, staged.errors
    assert "not bit-equal" in staged.errors
    assert "not equal to python" not in staged.errors


REFUSED = {
    "a loss inside": ("return h, h.pow(2).mean()", "torch.randn(8, 4)", "[1] of the model is one number"),
    "the mean of the batch": ("return h - h.mean(0)", "torch.randn(8, 4)", "other values for the batch"),
    "other samples in training": (
        "return h + 1e-4 * h.flip(0) * self.training",
        "torch.randn(8, 4)",
        "the output of the model depends on other samples",
    ),
    "the number of samples": ("return h / len(x)", "torch.randn(8, 4)", "other values for the batch"),
    "samples in dimension 1": ("return h.T.contiguous()", "torch.randn(8, 4)", "the samples in dimension 0"),
    "time first": ("return h.cumsum(0)", "torch.randn(8, 3, 4)", "other values for the batch"),
    "samples that are not outermost": (
        "return h.transpose(0, 1).flatten(0, 1)",
        "torch.randn(8, 3, 4)",
        "other values for the batch",
    ),
    "a number of samples": ("return h, len(x)", "torch.randn(8, 4)", "it depends on the number of samples"),
    "a fixed size": ("return h.view(8, 8)", "torch.randn(8, 4)", "does not run on parts of 4, 4 samples"),
    "one sample": ("return h", "torch.randn(1, 4)", "it has one sample"),
    "no samples": ("return h", "more=None, x=torch.ones(()).numpy()", "cannot be divided: no argument"),
    "draws in evaluation": ("return h + torch.randn_like(h)", "torch.randn(8, 4)", "in evaluation mode, too"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_parts_would_change_is_refused_with_its_line(name: str, tmp_path: Path) -> None:
    body, arguments, text = REFUSED[name]
    staged = one_model(body, tmp_path, arguments=arguments, rate=0.5 if "training" in name else 0.0)
    assert staged.code == 1
    assert text in staged.errors
    assert "one.py:18" in staged.errors
    assert "end" not in staged.output


def test_samples_that_are_mixed_only_by_a_later_batch_are_refused(tmp_path: Path) -> None:
    # equal samples show nothing, so that the next batch is tested as well
    body = "return h - h.mean(0) * (x != x[0]).any()"
    script = tmp_path / "later.py"
    batches = "torch.ones(8, 4) if _ == 0 else torch.randn(8, 4)"
    script.write_text(HEAD.format(body=body, rate=0.0) + LOOP.format(steps=2, arguments=batches))
    staged = in_stages(script, folder=tmp_path, options=("--num-microbatches", "2"))
    assert staged.code == 1
    assert "other values for the batch" in staged.errors


def test_arguments_without_samples_stay_whole(tmp_path: Path) -> None:
    staged = one_model("return h * more", tmp_path, arguments="torch.randn(8, 4), torch.arange(1.0, 9.0)[:1]")
    assert staged.code == 0, staged.errors


FOUND = {
    "an output without gradient": ("return h, h > 0", "torch.randn(8, 4)"),
    "memory that begins anywhere": ("return self.two(torch.tanh(h))", "torch.randn(12, 6)[:, :4]"),
    "a weight in a list": ("return torch.tanh(h @ [self.two.weight][0]) + h", "torch.randn(8, 4)"),
    "another type": ("return h.double()", "torch.randn(11, 4)"),
    "a checkpoint": (
        "return torch.utils.checkpoint.checkpoint(torch.tanh, h, use_reentrant=True)",
        "torch.randn(8, 4)",
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_parts_on_replicas_equal_those_of_one_process(name: str, tmp_path: Path) -> None:
    body, arguments = FOUND[name]
    script = tmp_path / "one.py"
    script.write_text(
        "import torch.utils.checkpoint" + HEAD.format(body=body, rate=0.1) + LOOP.format(steps=2, arguments=arguments)
    )
    options = ("--num-microbatches", "4", "--replicas", "2", "--check", "2")
    staged = in_stages(script, folder=tmp_path, options=options)
    assert staged.code == 0, staged.errors
    assert "equal those of one process that joins the same parts, after 2 optimizer steps" in staged.errors


def test_two_cut_calls_in_one_backward_are_added_one_after_the_other(tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(
        HEAD.format(body="return self.two(torch.tanh(h))", rate=0.1) + "for _ in range(2):\n    opt.zero_grad()\n"
        "    (model(torch.randn(8, 4)) - model(torch.randn(6, 4))[:1]).pow(2).mean().backward()\n    opt.step()\n"
    )
    options = ("--num-microbatches", "4", "--replicas", "2", "--check", "2")
    staged = in_stages(script, folder=tmp_path, options=options)
    assert staged.code == 0, staged.errors
    assert "equal those of one process that joins the same parts, after 2 optimizer steps" in staged.errors


TIED = """
import torch
from torch import nn
torch.manual_seed(0)
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.one, self.two = nn.Embedding(20, 8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.token.weight
    def forward(self, x):
        return self.head(self.two(torch.tanh(self.one(self.token(x)))))
model = Tied()
opt = torch.optim.AdamW(model.parameters(), 0.01)
for _ in range(4):
    tokens = torch.randint(20, (9, 6))
    opt.zero_grad()
    logits = model(tokens)
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    opt.step()
"""


def test_the_uses_of_a_tied_parameter_are_added_part_by_part(tmp_path: Path) -> None:
    script = tmp_path / "tied.py"
    script.write_text(TIED)
    staged = in_stages(script, folder=tmp_path, options=("--num-microbatches", "3", "--check", "3"))
    assert staged.code == 0, staged.errors
    assert "equal those of one process that joins the same parts, after 3 optimizer steps" in staged.errors


def test_the_uses_in_three_stages_are_added_part_by_part(tmp_path: Path) -> None:
    options = ("--num-microbatches", "4", "--check", "4")
    staged = in_stages(SCRIPTS / "tied.py", folder=tmp_path, stages=3, options=options)
    assert staged.code == 0, staged.errors
    assert "equal those of one process that joins the same parts, after 4 optimizer steps" in staged.errors
