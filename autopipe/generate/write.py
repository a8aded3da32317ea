"""Write the stage files, the constants and the divisor of a captured model and a plan."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file

from autopipe import sparse
from autopipe.errors import ArtifactError
from autopipe.generate.divisor import write_divisor
from autopipe.generate.loader import CONSTANTS_FILE, stage_file
from autopipe.generate.parts import Captured, Part, divide
from autopipe.generate.source import stage_text
from autopipe.ir.agreement import refuse_disagreement
from autopipe.ir.artifact import write_text
from autopipe.ir.plan import Plan

_LOG = logging.getLogger(__name__)


def generate(capture: Captured, plan: Plan, directory: Path, *, of_a_call: bool = False) -> list[Path]:
    """Write ``stage_0.py``, ``stage_1.py``, ..., the constants and the divisor; remove the files of an earlier plan.

    ``of_a_call``: the outputs are those of a call of the model, not the loss and its weight.

    Raises: ArtifactError if plan and capture are of different models, or the plan is damaged; TraceError for a value
    that cannot be written as source text.
    """
    if plan.graph_digest != capture.graph.digest:
        raise ArtifactError(
            f"the plan was made for model {plan.graph_digest}, and the model is now {capture.graph.digest}",
            remedy=f"autopipe plan {plan.workload.target} --gpus {plan.num_ranks}",
        )
    refuse_disagreement(plan, capture.graph, of_a_call=of_a_call)
    parts = divide(capture.graph, plan)
    texts = [stage_text(capture, plan, part, of_a_call=of_a_call) for part in parts]
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / stage_file(index) for index in range(len(parts))]
    for path, text in zip(paths, texts, strict=True):
        write_text(path, text)
    for old in sorted(directory.glob("stage_*.py")):
        if old not in paths:
            old.unlink()
            _LOG.info("removed %s, which this plan does not use", old)
    _write_constants(capture, parts, directory)
    write_divisor(capture.divisor, plan, directory)
    return paths


def _write_constants(capture: Captured, parts: Iterable[Part], directory: Path) -> None:
    used = sorted({name for part in parts for name in part.constants})
    path = directory / CONSTANTS_FILE
    if not used:
        path.unlink(missing_ok=True)
        return
    temporary = path.with_suffix(".tmp")
    tensors = sparse.encoded({name: capture.constants[name].detach().cpu() for name in used})
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, temporary)
    temporary.replace(path)
