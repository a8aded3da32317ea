"""With --json, standard output holds one document, wherever and whatever the user's code prints."""

from __future__ import annotations

import json

import pytest

PRINTING = """
import ctypes
import os
import sys

import torch
from torch import nn

print("printed at import")
sys.__stdout__.write("printed to the stream that Python started with\\n")
os.write(1, b"written to descriptor 1\\n")
ctypes.CDLL(None).puts(b"printed by C")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x):
        print("printed in the forward")
        return self.layers(x)


def build_model():
    print("printed when the model is built")
    return Net()


def loss(output, target):
    print("printed in the loss")
    return (output - target).pow(2).mean()


def data(batch_size=8):
    print("printed by data")
    for _ in range(2):
        os.system("echo printed by a process of data")
        yield torch.ones(batch_size, 8), torch.zeros(batch_size, 8)


evaluate_data = data
"""
SIZES = ["--gpus", "2", "--device", "cpu", "--batch-size", "8", "--microbatch-sizes", "2", "--num-microbatches", "4"]
FILES = {"model.py": PRINTING}


@pytest.mark.timeout(600)
def test_every_command_prints_exactly_one_document(commands):
    for words in (
        ["profile", "model.py", "--device", "cpu", "--microbatch-sizes", "2"],
        ["plan", "model.py", *SIZES, "--replicas", "never"],
        ["train", "model.py", *SIZES, "--replicas", "never", "--steps", "2", "--run-dir", "run"],
        ["eval", "run"],
        ["export", "run", "-o", "weights.safetensors"],
    ):
        out, err = commands.run(*words, "--json", seconds=300)
        assert json.loads(out)["command"] == words[0]
        assert "printed" not in out
        if words[0] == "profile":
            for place in ("at import", "to the stream that Python started with", "when the model is built", "by C"):
                assert f"printed {place}" in err
            assert "written to descriptor 1" in err


@pytest.mark.timeout(300)
def test_an_error_is_the_only_document(commands):
    (commands.folder / "model.py").write_text('print("printed before it fails")\n1 / 0\n')
    out, err = commands.run("train", "model.py", *SIZES, "--json", code=1)
    assert json.loads(out)["error"]["type"] == "ModelFileError"
    assert "printed before it fails" in err
