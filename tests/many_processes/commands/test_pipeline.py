"""``autopipe.Pipeline`` in a separate process: the weights equal the plain loop's, and a caller can stop a run."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = """
import json
import threading
from pathlib import Path

import torch
from torch import nn

import autopipe


def build_model(width=16):
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


def data(batch_size):
    generator = torch.Generator().manual_seed(7)
    for _ in range(40):
        yield torch.randn(batch_size, 8, generator=generator), torch.randn(batch_size, 3, generator=generator)


loss = nn.functional.mse_loss


def optimizer(named_parameters):
    return torch.optim.SGD([parameter for _, parameter in named_parameters], lr=0.1)


def plain_loop(steps):
    torch.manual_seed(0)
    model = build_model(24)
    stepped = optimizer(model.named_parameters())
    for _, (inputs, target) in zip(range(steps), data(8)):
        for x, y in zip(inputs.tensor_split(4), target.tensor_split(4)):
            (loss(model(x), y) / 4).backward()
        stepped.step()
        stepped.zero_grad()
    return model.state_dict()


def main():
    torch.set_num_threads(1)
    pipe = autopipe.Pipeline(
        build_model, arg={"width": 24}, data=data, loss="torch.nn.functional:mse_loss", optimizer=optimizer,
        gpus=2, batch_size=8, num_microbatches=4, replicas="never", device="cpu", microbatch_sizes=(2,),
    )
    plan = pipe.plan(schedule="1f1b")
    kinds = []
    run = pipe.train(steps=3, on_event=lambda kind, fields: kinds.append(kind))
    exported = torch.load(pipe.export("model.pt").path, weights_only=True)
    expected = plain_loop(3)
    stop = threading.Event()

    def stop_after_two(kind, fields):
        if kind == "step" and fields["step"] == 1:
            stop.set()

    stopped = []
    thread = threading.Thread(
        target=lambda: stopped.append(pipe.train(epochs=1, stop=stop, on_event=stop_after_two, run_dir="stopped"))
    )
    thread.start()
    thread.join()
    print(json.dumps({
        "stages": len(plan.plan.stages),
        "equal": pipe.check(steps=2).equal,
        "steps": kinds.count("step"),
        "losses": len(run.losses),
        "same": sorted(exported) == sorted(expected) and all(torch.equal(exported[k], expected[k]) for k in expected),
        "stopped": stopped[0].stopped,
        "left": 40 - stopped[0].step,
        "checkpoint": Path(stopped[0].checkpoint).is_dir(),
    }))


if __name__ == "__main__":
    main()
"""


def test_a_script_trains_its_model_as_the_plain_loop_does(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run([sys.executable, script.name], capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    left = answer.pop("left")
    assert answer == {
        "stages": 2,
        "equal": True,
        "steps": 3,
        "losses": 3,
        "same": True,
        "stopped": True,
        "checkpoint": True,
    }
    assert 0 < left <= 38


UNGUARDED = "autopipe.Pipeline(MODEL, gpus=2, batch_size=8, microbatch_sizes=(2,), device='cpu').train(steps=1)\n"


@pytest.mark.parametrize(
    ("model", "error"), [("'model.py:build_model', data='model.py:data'", "WorkerError"), ("build_model", "RunError")]
)
def test_a_script_that_trains_when_it_is_imported_is_refused(model: str, error: str, tmp_path: Path) -> None:
    begin, _, _ = SCRIPT.partition("def main():")
    (tmp_path / "model.py").write_text(begin)
    (tmp_path / "train.py").write_text(begin + UNGUARDED.replace("MODEL", model))
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert f"{error}: the calling script calls a method of Pipeline when it is imported" in done.stderr
    assert 'try: call it under `if __name__ == "__main__":`' in done.stderr
    assert done.stderr.count("Traceback") == 1  # none of a rank
