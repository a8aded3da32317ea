"""Through the command line: graphs cut by the ``split`` hook train, resume and evaluate as the written loop does."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import Commands
from support.models.graphs import NET, SPLIT

MODEL = (
    NET
    + """
def data():
    g = torch.Generator().manual_seed(0)
    for _ in range(3):
        edges = torch.cat([torch.randint(0, 4, (2, 5), generator=g) + 4 * i for i in range(6)], 1)
        yield (torch.randn(24, 6, generator=g), edges), torch.randint(0, 3, (24,), generator=g)

evaluate_data = data
loss = nn.CrossEntropyLoss
"""
)


@pytest.mark.parametrize("way", ["split", "whole"])
def test_graphs_train_resume_and_evaluate_as_the_written_loop(commands: Commands, tmp_path: Path, way: str) -> None:
    (tmp_path / "model.py").write_text(MODEL + (SPLIT if way == "split" else ""))
    words = ["--gpus", "2", "--replicas", "never", "--device", "cpu", "--schedule", "1f1b"]
    words += ["--num-microbatches", "3" if way == "split" else "1"]
    if way == "whole":
        _, err = commands.run("plan", "model.py", *words[:4], "--num-microbatches", "2", code=1)
        assert "index" in err and "--num-microbatches 1" in err and "split(batch, parts)" in err
    run = ["train", "model.py", *words, "--run-dir", "run", "--no-check"]
    commands.run(*run, "--steps", "3")
    commands.run(*run, "--steps", "5", "--resume", "--data-reader", "each")
    commands.run("export", "run", "-o", "model.safetensors")
    document = commands.document("eval", "run")
    assert document["loss"] > 0
    commands.plain_loop("model.safetensors", steps=5)
