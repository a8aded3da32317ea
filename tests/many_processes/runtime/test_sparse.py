"""Through the command line: a model with sparse buffers is checked, trained with audits, resumed and exported."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from support import oracle
from support.commands import Commands
from support.models.sparse import MODEL

from autopipe import sparse

FILES = {"net.py": MODEL}
SIZES = ["--gpus", "3", "--device", "cpu", "--batch-size", "8", "--microbatch-sizes", "2", "--num-microbatches", "4"]


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_buffers_work_with_every_command(commands: Commands, tmp_path: Path) -> None:
    checked = commands.document("check", "net.py", *SIZES, "--replicas", "never")
    assert checked["bitwise"] and {"mixing", "shift"} <= {entry["name"] for entry in checked["parameters"]}
    words = ["train", "net.py", *SIZES, "--replicas", "never", "--run-dir", "run"]
    commands.document(*words, "--steps", "2")
    resumed = commands.document(*words, "--steps", "4", "--resume", "--audit-every", "1")
    assert resumed["audits"] and all(audit["bitwise"] for audit in resumed["audits"])
    assert commands.document("eval", "run")["loss"] > 0
    commands.document("export", "run", "-o", "x.pt")
    _, err = commands.run("export", "run", "-o", "x.safetensors", code=1)
    assert "mixing is a sparse tensor" in err

    items = list(itertools.islice(oracle.load(tmp_path / "net.py").data(8), 4))
    _, model, _ = oracle.train(tmp_path / "net.py", items, 4)
    exported = torch.load(tmp_path / "x.pt", weights_only=True)
    assert exported.keys() == model.state_dict().keys()
    assert [name for name, t in model.state_dict().items() if not sparse.equal(exported[name], t)] == []
