"""Do stale gradients cost anything? Two models under 1f1b, 2bw and pipedream, for the same number of samples.

Ranks are threads, one thread each; nothing here depends on how fast anything is, so the numbers are the same on any
machine with the same rounding. Writes benchmarks/results/convergence.md, docs/convergence.md and docs/convergence.svg.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from convergence_plot import Panel, plot

from autopipe.generate import generate
from autopipe.ir.cluster import Cluster, ClusterDevice, Level
from autopipe.ir.profile import Device, Measurement, NodeCost, Profile
from autopipe.planning import PlanOptions, make_plan
from autopipe.runtime.events import Silent
from autopipe.runtime.job import Job, RunDirectory
from autopipe.runtime.layout import Layout
from autopipe.runtime.session import RankSession
from autopipe.runtime.threads import run_in_threads
from autopipe.trace import Capture, capture
from autopipe.workload import LoadOptions, Workload, load_workload

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "convergence.md"
DOCS = ROOT / "docs" / "convergence.md"
PICTURE = ROOT / "docs" / "convergence.svg"
STAGES = 4


@dataclass(frozen=True)
class Study:
    """One model. ``margin``: by how much its evaluation loss may be above that of 1f1b, in nats."""

    name: str
    arguments: dict[str, str]
    batch_size: int
    steps: int
    margin: float


@dataclass(frozen=True)
class Contender:
    """One way to train it. ``seed``: of the initial weights, the order of the data and the dropout masks."""

    label: str
    schedule: str
    num_microbatches: int = 4
    options: dict[str, int] = field(default_factory=dict)
    seed: int = 0


STUDIES = (
    Study("gpt.py", {"blocks": "3", "width": "48"}, 16, 300, 0.05),
    Study("resnet.py", {}, 32, 376, 0.05),
)
PLAIN = Contender("1f1b", "1f1b")
ANOTHER_SEED = replace(PLAIN, label="1f1b, another seed", seed=1)
STALE = (
    Contender("2bw", "2bw"),
    Contender("pipedream", "pipedream"),
    Contender("pipedream, m = 2", "pipedream", 2),
    # at m = 4 vertical sync is 2bw: every stage one step stale
    Contender("pipedream, m = 2, vertical sync", "pipedream", 2, {"vertical_sync": 1}),
)


@dataclass
class Outcome:
    """``losses``: of every minibatch. ``evaluation``: at the end. ``staleness``: of each stage."""

    contender: Contender
    losses: list[float]
    evaluation: float
    staleness: tuple[int, ...]


class Ear(Silent):
    """Keeps the losses that rank 0 reports."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.evaluation = float("nan")

    def event(self, kind: str, **fields: Any) -> None:
        """Keep a step's loss, and an evaluation's."""
        if kind == "step":
            self.losses.append(fields["loss"])
        elif kind == "evaluation":
            self.evaluation = fields["loss"]


def captured(study: Study, seed: int) -> tuple[Workload, Capture, Profile]:
    """Capture a model; every node is taken to cost the same, so that the cuts are those of any machine."""
    target = ROOT / "sample_models" / study.name
    workload = load_workload(LoadOptions(str(target), arguments=study.arguments, seed=seed))
    found = capture(workload)
    costs = {node.name: NodeCost(1e-3, 2e-3, 1000, 1000) for node in found.graph.nodes}
    profile = Profile(workload.spec, found.graph, Device("cpu", "uniform", 0), (Measurement(1, costs),))
    return workload, found, profile


def trained(study: Study, contender: Contender) -> Outcome | None:
    """Train and evaluate; None where the schedule refuses the model, whose tied weights would be of two versions."""
    _, found, profile = captured(study, contender.seed)
    cluster = Cluster((Level("host", STAGES, 1e10, 1e-6),), (ClusterDevice("cpu"),), "one host")
    m = contender.num_microbatches
    options = PlanOptions(STAGES, study.batch_size, num_microbatches=m, schedule="gpipe")
    plan = make_plan(profile, cluster, options)
    plan = replace(plan, schedule=contender.schedule, schedule_options=contender.options)
    if contender.schedule == "pipedream" and plan.ties and not contender.options:
        return None
    layout = Layout.of(plan, found.graph)
    job = Job(steps=study.steps, epochs=0, batch_size=study.batch_size, save=False)
    ear = Ear()

    def body(session: RankSession) -> None:
        session.train()
        session.evaluate(64, study.steps)

    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory(Path(folder))
        run.write(job, plan, found.graph)
        generate(found, plan, run.stages)
        reporters = [ear, *(Silent() for _ in range(STAGES - 1))]
        sessions = run_in_threads(run, job, layout, body, reporters=reporters)
    staleness = tuple(r.versions.staleness for s in sessions for r in s.executor.runners.values())
    return Outcome(contender, ear.losses, ear.evaluation, staleness)


def last_tenth(losses: Sequence[float]) -> float:
    """Return the mean of the last tenth of the training losses."""
    return statistics.fmean(losses[-max(len(losses) // 10, 1) :])


def table(study: Study, outcomes: Sequence[Outcome]) -> list[str]:
    """Return the lines of a study's table."""
    base = outcomes[0]
    lines = [
        f"## {study.name}",
        "",
        f"{STAGES} stages, minibatch {study.batch_size}, {study.steps} steps ({study.steps * study.batch_size} samples)"
        + (f", {', '.join(f'{k} {v}' for k, v in study.arguments.items())}" if study.arguments else "")
        + f". Margin: {study.margin} in evaluation loss.",
        "",
        "| schedule | m | staleness by stage | training loss, last tenth | evaluation loss | above 1f1b | in margin |",
        "|---|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        above = outcome.evaluation - base.evaluation
        stale = ", ".join(map(str, outcome.staleness))
        verdict = "" if not any(outcome.staleness) else "yes" if above <= study.margin else "NO"
        lines.append(
            f"| {outcome.contender.label} | {outcome.contender.num_microbatches} | {stale} "
            f"| {last_tenth(outcome.losses):.4f} | {outcome.evaluation:.4f} | {above:+.4f} | {verdict} |"
        )
    return [*lines, ""]


INTRODUCTION = f"""# Convergence of the schedules that do not flush

`2bw` and `pipedream` train on weights that are some optimizer steps old. Here two models are trained with them for the
same number of samples as with `1f1b`, which is plain training to the last bit. The recipe is the model file's own:
nothing was tuned for staleness, and there is no warm-up. `1f1b` with another seed shows how much is luck.
`make bench-convergence` writes this page. Ranks are threads, {STAGES} stages.

The margin is on the loss of the evaluation data, at the end. `NO` means what it says: at this number of samples, with
this recipe, the schedule is still further behind. The recipes have constant learning rates and no warm-up, and stale
gradients cost most where the weights move fastest. Batch normalisation sees each microbatch by itself, so
`m` is part of the recipe of `resnet.py`. `gpt.py` ties its embeddings: under `pipedream` its stages would read
two versions of one tensor, which is refused; with vertical sync they read one.

![Training loss against samples](convergence.svg)

"""


def main() -> None:
    """Train, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start, panels, lines = time.perf_counter(), [], []
    for study in (replace(s, steps=max(int(s.steps * options.scale), 10)) for s in STUDIES):
        outcomes: list[Outcome] = []
        for contender in (PLAIN, ANOTHER_SEED, *STALE):
            outcome = trained(study, contender)
            if outcome is not None:
                outcomes.append(outcome)
                print(f"{study.name} {contender.label}: {outcome.evaluation:.4f}", flush=True)
        lines += table(study, outcomes)
        curves = {o.contender.label: o.losses for o in outcomes if o.contender.seed == 0}
        panels.append(Panel(study.name, study.batch_size, curves))
    machine = f"{platform.machine()}, torch {torch.__version__}, CPU, one thread a rank"
    lines.append(f"{machine}; {time.perf_counter() - start:.0f} s in all.")
    text = "\n".join(lines) + "\n"
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("# Convergence\n\n" + text)
    DOCS.write_text(INTRODUCTION + text)
    PICTURE.write_text(plot(panels))
    print(text)


if __name__ == "__main__":
    main()
