"""Test one model of the zoo, and print one line of JSON.

``NAME``: test it in this process. ``--serve``: read requests (``seconds name``, one per line) and test each model in a
forked process, so that common imports run once.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopipe.errors import AutopipeError, PlanError
from autopipe.ir.cluster import Cluster, ClusterDevice, Level
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Device, Measurement, NodeCost, Profile
from autopipe.planning import PlanOptions, make_plan
from autopipe.trace import Capture, capture
from benchmarks.zoo import more_transformers, own_models, transformers_models, vision_models

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))  # the oracle, and difficult models

from support import chain  # noqa: E402
from support.models import trace as tracer_models  # noqa: E402

NUM_STAGES = 3
RUNS = ((4, (0, 0, 0)), (6, (1, 1, 0)))  # batch size, (seed, minibatch, microbatch)
TOLERANCE = 1e-6
ENOUGH_SECONDS = 3.0  # for the measurement of one model
LIBRARIES = "transformers.modeling_utils", "transformers.generation", "timm", "torchvision"
IMPORTED = ("torch._dynamo", "torch.export", *LIBRARIES)


def names(which: str) -> list[str]:
    """Return the models of a set, as family/model: ``first``, or ``more``, to which nothing was adapted."""
    families: dict[str, Iterable[str]] = {
        "transformers": transformers_models.MODELS,
        "timm": vision_models.TIMM,
        "torchvision": vision_models.TORCHVISION,
        "own": tracer_models.CASES,
    }
    if which == "more":
        families = {
            "transformers": more_transformers.MODELS,
            "timm": vision_models.MORE_TIMM,
            "torchvision": vision_models.MORE_TORCHVISION,
            "own": own_models.MODELS,
        }
    return [f"{family}/{name}" for family, models in families.items() for name in models]


def workload_of(name: str) -> Any:
    """Return the workload of a model."""
    family, _, model = name.partition("/")
    makers = {
        "transformers": more_transformers if model in more_transformers.MODELS else transformers_models,
        "own": own_models if model in own_models.MODELS else tracer_models,
    }
    if family in makers:
        return makers[family].workload(model)
    return getattr(vision_models, f"{family}_workload")(model)


def make_test_plan(captured: Capture, spec: Any) -> Plan:
    """Plan three stages, or fewer without enough cuts. Every node costs the same."""
    costs = {node.name: NodeCost(1e-3, 2e-3, 1000, 1000) for node in captured.graph.nodes}
    profile = Profile(spec, captured.graph, Device("cpu", "test", 0), (Measurement(1, costs),))
    for count in range(NUM_STAGES, 0, -1):
        cluster = Cluster((Level("host", count, 1e10, 1e-6),), (ClusterDevice("cpu"),), "test")
        try:
            return make_plan(profile, cluster, PlanOptions(num_ranks=count, batch_size=8, num_microbatches=4))
        except PlanError:
            if count == 1:
                raise
    raise AssertionError("unreachable")


class Step(nn.Module):
    """Model and loss in one module, for ``torch.export``."""

    def __init__(self, workload: Any) -> None:
        super().__init__()
        self.workload, self.model = workload, workload.build_model()

    def forward(self, item: Any) -> Any:
        """Return the loss of a batch."""
        return self.workload.loss(self.model, item)[0]


def export(workload: Any) -> Callable[[], object]:
    """Build the model, and return a function that exports it."""
    step, item = Step(workload), workload.example_item(5)
    return lambda: torch.export.export(step, (item,), strict=False)


def medians(actions: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median CPU seconds of each action, in at most five alternating rounds.

    CPU time of the process, because other processes may share the machine.
    """
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(5):
        for name, action in actions.items():
            torch._dynamo.reset()
            gc.collect()
            started = time.process_time()
            action()
            times[name].append(time.process_time() - started)
        if sum(map(sum, times.values())) > ENOUGH_SECONDS:
            break
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def compare(workload: Any, captured: Capture, plan: Plan, folder: Path) -> tuple[str, str]:
    """Compare the stages with the model; return exact, equal or wrong, and the first difference."""
    worst = 0.0
    first = ""
    for batch_size, where in RUNS:
        for difference in chain.differences(workload, captured, plan, folder, batch_size, where, detailed=True):
            first = first or f"{difference[0]} (batch {batch_size}): {difference[1]:.1e}"
            worst = max(worst, difference[1])
    if not first:
        return "exact", ""
    return ("equal" if worst <= TOLERANCE else "wrong"), first


def main(name: str, *, time_export: bool = True) -> dict[str, Any]:
    """Return the row of a model. ``time_export``: with the seconds of ``torch.export``."""
    torch.set_num_threads(1)
    vision_models.importable()
    row: dict[str, Any] = {"name": name}
    workload = workload_of(name)
    workload.loss(workload.build_model(), workload.example_item(2))  # imports and caches are not part of the time
    try:
        row.update(attempt(workload, data_dependent=False))
        data_dependent = row["result"] == "refused"
        if data_dependent:
            second = attempt(workload, data_dependent=True)
            row.update(second if second["result"] != "refused" else {})
        if time_export and row["result"] != "refused":
            row.update(seconds(workload, data_dependent=data_dependent))
    except Exception as error:
        traceback.print_exc()
        row["result"], row["reason"] = "failed", f"{type(error).__name__}: {str(error)[:200]}"
    return row


def seconds(workload: Any, *, data_dependent: bool) -> dict[str, Any]:
    """Return the seconds of a capture, without build and verification, and those of ``torch.export``."""
    fields: dict[str, Any] = {}
    model = workload.build_model()
    run_capture = functools.partial(capture, workload, model=model, verify=False, allow_data_dependent=data_dependent)
    actions: dict[str, Callable[[], object]] = {"capture_seconds": run_capture}
    try:
        actions["export_seconds"] = export(workload)
        actions["export_seconds"]()
    except Exception as error:
        del actions["export_seconds"]
        fields["export_error"] = type(error).__name__
    return {**fields, **medians(actions), "clock": "processor"}


def attempt(workload: Any, *, data_dependent: bool) -> dict[str, Any]:
    """Test a model from capture to comparison. ``data_dependent``: as with ``--allow-data-dependent``."""
    row: dict[str, Any] = {}
    try:
        captured = capture(workload, allow_data_dependent=data_dependent)
        row.update(method=captured.method, nodes=len(captured.graph.nodes))
        plan = make_test_plan(captured, workload.spec)
        row["stages"] = len(plan.stages)
        with tempfile.TemporaryDirectory() as folder:
            row["result"], row["reason"] = compare(workload, captured, plan, Path(folder))
    except AutopipeError as error:
        row["result"] = "refused"
        reason = f"{error.what} ({error.where})" if error.where else error.what
        row["reason"] = re.sub(r"/\S*/site-packages/", "", reason)
    return row


def serve(*, time_export: bool) -> None:
    """Test the models that stdin requests, each in a process of its own with a time limit."""
    vision_models.importable()
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # imported objects are never garbage
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of models must not mix with the answers
    for line in sys.stdin:
        limit_seconds, _, name = line.strip().partition(" ")
        child = os.fork()
        if not child:
            signal.alarm(int(limit_seconds))  # ends the process
            try:
                print(json.dumps(main(name, time_export=time_export)), file=answers, flush=True)
                os._exit(0)
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == -signal.SIGALRM:
            row = {"name": name, "result": "time limit", "reason": f"longer than {limit_seconds} s"}
            print(json.dumps(row), file=answers, flush=True)
        elif code:
            row = {"name": name, "result": "failed", "reason": f"its process ended with {code}"}
            print(json.dumps(row), file=answers, flush=True)


if __name__ == "__main__":
    timed = "--no-export" not in sys.argv
    if sys.argv[1] == "--list":
        print("\n".join(names(sys.argv[2])))
    elif sys.argv[1] == "--serve":
        serve(time_export=timed)
    else:
        print(json.dumps(main(sys.argv[1], time_export=timed)))
