"""The scripts of ``autopipe plain``, compared with the weights of the stages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from autopipe.commands.plain.plain import Subject, written
from support.pipelines import Captured, build
from support.warm.programs import run_warm


def run(loop: Path, *arguments: str) -> str:
    """Run a script in a process that cannot import autopipe."""
    done = run_warm(str(loop), *arguments, cwd=loop.parent, without="autopipe")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def compared(captured_model: Captured, plan: Any, steps: int, folder: Path, **job: Any) -> str:
    """Train in stages, write the script, run it, and return its last line."""
    pipeline = build(captured_model, plan, folder / "run", **job)
    items = []
    epoch, size = 0, plan.batch_size if captured_model.workload.takes_batch_size else None
    while len(items) < steps:
        items += list(captured_model.workload.items(size, epoch=epoch))[: steps - len(items)]
        epoch += 1
    weights = pipeline.weights(pipeline.train(items))
    aliases = captured_model.capture.graph.aliases
    weights |= {other: weights[first] for other, first in aliases.items()}
    save_file({name: tensor.clone().contiguous() for name, tensor in weights.items()}, folder / "out.safetensors")
    subject = Subject(captured_model.workload, plan, pipeline.context, pipeline.job, pipeline.run.stages, steps)
    text, _ = written(subject)
    assert not re.search(r"^\s*(import|from) autopipe", text, re.MULTILINE)
    (folder / "loop.py").write_text(text)
    return run(folder / "loop.py", "out.safetensors").splitlines()[-1]


def is_equal(line: str) -> bool:
    equal, _, total, *_ = line.split()
    return equal == total and int(total) > 4
