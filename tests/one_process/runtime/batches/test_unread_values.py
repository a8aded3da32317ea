"""Values that nothing reads, such as file names, may differ in every batch; values that are read may not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from support.oracle import load
from support.pipelines import build, captured_file, plan_for

from autopipe.ir.batch import BatchForm
from autopipe.trace import capture
from autopipe.workload import LoadOptions, load_workload
from autopipe.workload.batches.forms import form_of

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.o = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, {arguments}):
        {body}
        return {{"logits": self.o(torch.relu(self.b(torch.relu(self.a(x))))), "path": path}}


def build_model():
    return Net()


def loss(output, batch):
    return F.cross_entropy(output["logits"], batch["y"]){loss}


def optimizer(named_parameters):
    return torch.optim.SGD([parameter for _, parameter in named_parameters], lr=0.1)


def data():
    g = torch.Generator().manual_seed(5)
    for i in range(6):
        yield {{
            "x": torch.randn(6, 8, generator=g), "y": torch.randint(0, 5, (6,), generator=g),
            "path": [f"{{i}}_{{j}}.png" for j in range(6)], "index": 100 + 6 * i, "weight": 1.5 * i,
        }}
"""
ALL = {"path", "index", "weight"}
KEYWORDS = "x, y=None, path=None, index=None, weight=None"
CASES = {  # arguments, body, loss, the keys that are unread
    "nothing is read": (KEYWORDS, "pass", "", ALL),
    "keyword arguments": ("x, path=None, **more", "pass", "", ALL),
    "tensors are picked out": (
        "path, **batch", "x = [v.clone() if isinstance(v, torch.Tensor) else v for v in batch.values()][0]", "", ALL,
    ),
    "a number is read": (KEYWORDS, "x = x * weight", "", {"path", "index"}),
    "the loss reads a number": (KEYWORDS, "pass", " * batch['weight']", {"path", "index"}),
    "a name is compared": (KEYWORDS, "x = x * 2 if path[0] == '3_0.png' else x", "", {"index", "weight"}),
    "a name in an f-string": (KEYWORDS, "x = x + len(f'{path[1]}')", "", {"index", "weight"}),
    "a name is looked up": (KEYWORDS, "x = x * {'3_0.png': 2}.get(path[0], 1)", "", {"index", "weight"}),
    "an error that is caught": (
        KEYWORDS, "try: x = x + int(path[0][0])\n        except Exception: pass", "", {"index", "weight"},
    ),
    "only a str is looked at": (
        KEYWORDS, "x = x * 2 if type(path[0]) is str and path[0] > '2' else x", "", set(),
    ),
    "a number that chooses": (KEYWORDS, "x = x[:, :8] if index > 110 else x * 2", "", {"path", "weight"}),
    "joined by C": (KEYWORDS, "x = x + (''.join(path) > '2')", "", {"index", "weight"}),
}  # fmt: skip


def written(name: str, folder: Path) -> Path:
    arguments, body, loss, _ = CASES[name]
    path = folder / "model.py"
    path.write_text(MODEL.format(arguments=arguments, body=body, loss=loss))
    return path


@pytest.mark.parametrize("name", list(CASES))
def test_a_value_is_unread_only_if_neither_forward_nor_loss_reads_it(name: str, tmp_path: Path) -> None:
    captured = capture(load_workload(LoadOptions(str(written(name, tmp_path)))))
    assert {path.split("'")[1] for path in captured.graph.batch.unread} == CASES[name][3]


def test_a_capture_without_verification_finds_the_unread_values(tmp_path: Path) -> None:
    name = next(name for name, case in CASES.items() if case[3])
    workload = captured_file(written(name, tmp_path)).workload
    assert capture(workload, verify=False).graph.batch.unread == capture(workload).graph.batch.unread != ()


@pytest.mark.parametrize("name", ["nothing is read", "keyword arguments", "tensors are picked out"])
def test_a_change_of_an_unread_value_needs_no_new_stage_files(name: str, tmp_path: Path) -> None:
    path = written(name, tmp_path)
    subject = captured_file(path)
    pipeline = build(subject, plan_for(subject, 2, "1f1b", 3, 6), tmp_path / "run", max_shapes=1)
    items = list(subject.workload.items())
    ours = pipeline.weights(pipeline.train(items))
    assert not list((tmp_path / "run").rglob("shape_*"))
    torch.manual_seed(0)
    module = load(path)
    torch.manual_seed(0)
    model = module.build_model().train()
    optimizer = module.optimizer(list(model.named_parameters()))
    for item in module.data():
        for j in range(3):
            part = torch.utils._pytree.tree_map_only(torch.Tensor, lambda leaf, j=j: leaf.tensor_split(3)[j], item)
            (module.loss(model(**part), part) * (2 / 6)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    for key, value in model.named_parameters():
        assert torch.equal(ours[key], value), key


def test_a_change_of_the_type_of_an_unread_value_counts() -> None:
    def form(value: object) -> BatchForm:
        return form_of({"x": torch.ones(2, 3), "value": value})

    for value, same, other in (("a", "b" * 100, None), (1, -2, True), (1.0, float("nan"), 1), (b"a", b"b", "a")):
        known = form(value)
        assert not known.fits(form(same))
        unread = dataclasses.replace(known, unread=("['value']",))
        assert unread.fits(form(same))
        assert unread.difference(form(same)) == ""
        assert not unread.fits(form(other))
        assert "['value'] is" in unread.difference(form(other))
