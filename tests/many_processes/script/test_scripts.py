"""Unmodified scripts in stages: standard output and saved tensors are those of python, bit for bit."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import pytest
import torch
from support.script_runs import SCRIPTS, by_python, in_stages
from support.slow import mostly_slow
from torch.utils import _pytree as pytree

CASES = {
    "accumulation": ("language.py", (), "language.pt"),
    "autocast": ("language.py", ("--bf16", "--steps", "3"), "language.pt"),
    "workers": ("images.py", (), "images.pt"),
    "no optimizer": ("recurrent.py", (), ""),
    "trainer": ("trainer.py", (), "trainer.pt"),
    "mask": ("masked.py", (), "masked.pt"),
    "tied over stages": ("tied_over_stages.py", (), ""),
    "tied over stages, several calls": ("tied_over_stages.py", ("--several",), ""),
    "tied and frozen, several calls": ("tied_over_stages.py", ("--several", "--frozen"), ""),
    "several calls": ("several_calls.py", (), "several.pt"),
    "several calls, added in place": ("several_calls.py", ("--add",), "several.pt"),
    "packed sequences": ("packed.py", (), "packed.pt"),
    "attributes": ("attributes.py", (), "attributes.pt"),
    "changing numbers": ("calls/changing_numbers.py", (), "changing_numbers.pt"),
    "decisions": ("calls/decisions.py", (), "decisions.pt"),
    "evaluations": ("calls/evaluations.py", (), "evaluations.pt"),
    "autograd function": ("calls/custom_function.py", (), "custom_function.pt"),
    "autograd function of the script": ("calls/own_function.py", (), "own_function.pt"),
    "tied": ("tied.py", (), "tied.pt"),
    "distributed": ("wrapped.py", ("distributed", "cpu"), ""),
    "unfreezing": ("unfreezing.py", (), "unfreezing.pt"),
    "vision": ("vision.py", (), "vision_2.pt"),
    "scaler": ("vision.py", ("--amp", "--scaler", "--clip-grad-norm", "1.0"), "vision_2.pt"),
    "lightning": ("lightning_boring.py", (), "boring.pt"),
    "transformers BERT": ("hf_trainer.py", (), "trainer.pt"),
    "transformers GPT-2": ("hf_trainer.py", ("--language", "--bf16"), "trainer.pt"),
    "accelerate": ("accelerated.py", (), "accelerated.pt"),
}
# with every change; in three stages, a few
IN_THREE = ("accumulation", "trainer", "tied over stages", "several calls")
SOONER = {*((name, 2) for name in CASES), *((name, 3) for name in IN_THREE)}
PACKAGES = {
    "lightning_boring.py": ("lightning",),
    "hf_trainer.py": ("transformers", "accelerate"),
    "accelerated.py": ("accelerate",),
}


def skip_without_packages(script: str) -> None:
    for package in PACKAGES.get(script, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install {package}")


def differences(left: Path, right: Path) -> list[int]:
    loaded = [torch.load(path, weights_only=True) for path in (left, right)]
    a, b = (pytree.tree_leaves(value) for value in loaded)
    assert len(a) == len(b) > 3
    assert {type(value) for value in b} <= {torch.Tensor, int, float, bool, str, type(None)}
    return [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if not bool(torch.as_tensor(x == y).all())]


@pytest.mark.parametrize(("name", "stages"), mostly_slow(itertools.product(CASES, (2, 3)), SOONER))
def test_a_script_prints_and_saves_what_it_does_in_python(name: str, stages: int, tmp_path: Path) -> None:
    script, words, saved = CASES[name]
    skip_without_packages(script)
    plain = by_python(SCRIPTS / script, *words, folder=tmp_path / "plain")
    staged = in_stages(SCRIPTS / script, *words, folder=tmp_path / "staged", stages=stages)
    assert plain.code == 0, plain.errors
    assert staged.code == 0, staged.errors
    assert staged.output == plain.output
    assert f"{stages} stages: " in staged.errors
    if saved:
        assert differences(tmp_path / "plain" / saved, tmp_path / "staged" / saved) == []


def test_a_script_resumes_as_it_does_in_python(tmp_path: Path) -> None:
    script = SCRIPTS / "language.py"
    for folder in ("plain", "staged"):
        assert by_python(script, "--steps", "2", folder=tmp_path / folder).code == 0
    words = ("--steps", "3", "--resume")
    plain = by_python(script, *words, folder=tmp_path / "plain")
    staged = in_stages(script, *words, folder=tmp_path / "staged")
    assert plain.code == staged.code == 0, staged.errors
    assert "step 4" in plain.output
    assert staged.output == plain.output
    assert differences(tmp_path / "plain" / "language.pt", tmp_path / "staged" / "language.pt") == []


def test_a_script_that_is_killed_goes_on_as_it_does_in_python(tmp_path: Path) -> None:
    script = SCRIPTS / "resuming.py"
    plain = [by_python(script, last, folder=tmp_path / "plain") for last in ("4", "8")]
    staged = [in_stages(script, last, folder=tmp_path / "staged") for last in ("4", "8")]
    assert [ended.code for ended in plain] == [ended.code for ended in staged] == [-9, 0], staged[1].errors
    assert "resumed at 4" in plain[1].output
    assert [ended.output for ended in staged] == [ended.output for ended in plain]
    assert differences(tmp_path / "plain" / "weights.pt", tmp_path / "staged" / "weights.pt") == []


def test_two_models_that_are_trained_through_each_other_are_refused(tmp_path: Path) -> None:
    staged = in_stages(SCRIPTS / "gan.py", folder=tmp_path)
    assert staged.code == 1
    for model in ("generator", "discriminator"):
        assert model in staged.errors
    assert f"{SCRIPTS / 'gan.py'}:32" in staged.errors
    assert staged.output == ""
    assert not (tmp_path / "gan.pt").exists()


def test_accumulation_is_reported_as_overlap(tmp_path: Path) -> None:
    staged = in_stages(SCRIPTS / "language.py", "--steps", "1", folder=tmp_path)
    assert "overlap from the script's accumulation of 4 microbatches" in staged.errors


def test_numbers_that_are_read_between_microbatches_are_named(tmp_path: Path) -> None:
    script = tmp_path / "reads.py"
    script.write_text(
        "import torch\nfrom torch import nn\n"
        "model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))\n"
        "opt = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(4):\n"
        "    loss = model(torch.randn(3, 4)).sum()\n"
        "    loss.backward()\n"
        "    print(loss.item())\n"
        "opt.step()\n"
    )
    staged = in_stages(script, folder=tmp_path)
    assert "no overlap" in staged.errors
    assert f"{script}:8 (3 times a step)" in staged.errors


WRAPPER = """
import sys
import torch
from torch import nn


class Checked(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = self.original = module

    def forward(self, x):
        result = self.module(x)
        result.register_hook(lambda gradient: None)
        return result


torch.manual_seed(0)
model = Checked(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    x = torch.randn(3, 4)
    loss = (model.module(x) if sys.argv[1:] else model(x)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(loss.item())
"""


def test_the_remedy_for_a_wrapper_that_cannot_be_recorded_is_the_module_in_it(tmp_path: Path) -> None:
    script = tmp_path / "wrapper.py"
    script.write_text(WRAPPER)
    staged = in_stages(script, folder=tmp_path)
    assert staged.code == 1
    assert f"{script}:14: result.register_hook(lambda gradient: None), called at {script}:23" in staged.errors
    assert "call the Sequential in it in training: MODEL.module(...)" in staged.errors
    staged = in_stages(script, "inner", folder=tmp_path)
    assert staged.code == 0, staged.errors
    assert (
        staged.output == by_python(script, "inner", folder=tmp_path).output == by_python(script, folder=tmp_path).output
    )


def test_parts_of_a_batch_are_refused_for_a_loss_inside_of_the_model(tmp_path: Path) -> None:
    staged = in_stages(SCRIPTS / "language.py", folder=tmp_path, options=("--num-microbatches", "4"))
    assert staged.code == 1
    assert "[1] of the model is one number, such as a loss inside of its forward" in staged.errors
    assert "step 0" not in staged.output
