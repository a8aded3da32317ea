"""The cost of stale gradients: two models under 1f1b, 2bw and pipedream, for the same number of samples.

Ranks are threads. No result depends on speed, so the numbers are the same on any machine with the same rounding.
Results are stored in benchmarks/results/convergence.json, so that ``--only gpt.py`` can repeat a part;
docs/convergence.md and docs/convergence.svg are written from all of them. ``--recipe own`` uses the constant learning
rates of the model files.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from convergence_plot import Panel, plot

from autopipe.generate import generate
from autopipe.ir.cluster import Cluster, ClusterDevice, Level
from autopipe.ir.profile import Device, Measurement, NodeCost, Profile
from autopipe.planning import PlanOptions, make_plan
from autopipe.runtime.context import RunContext
from autopipe.runtime.events import Silent
from autopipe.runtime.job import Job, RunDirectory
from autopipe.runtime.session import RankSession
from autopipe.runtime.transport.threads import run_in_threads
from autopipe.trace import Capture, capture
from autopipe.workload import LoadOptions, Workload, load_workload

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "convergence.json"
DOCS = ROOT / "docs" / "convergence.md"
PICTURE = ROOT / "docs" / "convergence.svg"
STAGES = 4


@dataclass(frozen=True)
class Study:
    """One model and its recipe."""

    name: str
    arguments: dict[str, str]
    batch_size: int
    steps: int
    margin: float  # by which the evaluation loss may exceed that of 1f1b, in nats
    learning_rate: float  # the peak
    own: bool = False  # use the constant learning rate of the model file instead


@dataclass(frozen=True)
class Contender:
    """One way to train a model."""

    label: str
    schedule: str
    num_microbatches: int = 4
    options: dict[str, int] = field(default_factory=dict)  # of the schedule
    seed: int = 0  # of the initial weights, the order of the data and the dropout masks


STUDIES = (
    Study("gpt.py", {"blocks": "3", "width": "48"}, 8, 800, 0.05, 5e-4),
    Study("resnet.py", {}, 32, 376, 0.05, 0.015),
)
OWN = {"gpt.py": (16, 300), "resnet.py": (32, 376)}  # minibatch and steps with the file's own learning rate
WARMUP = 0.1
# linear warm-up from 0 in a tenth of the steps, then cosine decay to 0
RECIPE = """
import math

from torch.optim.lr_scheduler import LambdaLR

STEPS, WARMUP = {steps}, {warmup}


def scheduler(optimizer):
    def factor(step):
        if step < WARMUP:
            return (step + 1) / WARMUP
        return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))

    return LambdaLR(optimizer, factor)
"""
PLAIN = Contender("1f1b", "1f1b")
ANOTHER_SEED = replace(PLAIN, label="1f1b, another seed", seed=1)
STALE = (
    Contender("2bw", "2bw"),
    Contender("pipedream", "pipedream"),
    Contender("pipedream, m = 2", "pipedream", 2),
    # for this number of stages and microbatches the arithmetic of 2bw: a staleness of one step in every stage
    Contender("pipedream, vertical sync", "pipedream", 4, {"vertical_sync": 1}),
    Contender("pipedream, m = 2, vertical sync", "pipedream", 2, {"vertical_sync": 1}),
)


@dataclass
class Outcome:
    """The result of one training."""

    label: str
    num_microbatches: int
    staleness: tuple[int, ...]  # by stage
    losses: list[float]  # by minibatch
    last_tenth: float  # mean loss of the last tenth of the minibatches
    evaluation: float  # evaluation loss at the end


class LossRecorder(Silent):
    """Records the losses that rank 0 reports."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.evaluation = float("nan")

    def event(self, kind: str, **fields: Any) -> None:
        """Record the loss of a step or of an evaluation."""
        if kind == "step":
            self.losses.append(fields["loss"])
        elif kind == "evaluation":
            self.evaluation = fields["loss"]


def captured(study: Study, seed: int, folder: Path) -> tuple[Workload, Capture, Profile]:
    """Capture a model with equal costs for all nodes, so that the cuts do not depend on the machine."""
    target = ROOT / "sample_models" / study.name
    options = LoadOptions(str(target), arguments=study.arguments, seed=seed)
    if not study.own:
        recipe = folder / "recipe.py"
        recipe.write_text(RECIPE.format(steps=study.steps, warmup=max(int(study.steps * WARMUP), 1)))
        options = replace(options, hooks={"scheduler": f"{recipe}:scheduler"}, lr=study.learning_rate)
    workload = load_workload(options)
    model = capture(workload)
    costs = {node.name: NodeCost(1e-3, 2e-3, 1000, 1000) for node in model.graph.nodes}
    profile = Profile(workload.spec, model.graph, Device("cpu", "uniform", 0), (Measurement(1, costs),))
    return workload, model, profile


def trained(study: Study, contender: Contender) -> Outcome | None:
    """Train and evaluate; None if the schedule rejects the model because its tied weights would have two versions."""
    with tempfile.TemporaryDirectory() as folder:
        return _trained(study, contender, Path(folder))


def _trained(study: Study, contender: Contender, folder: Path) -> Outcome | None:
    _, model, profile = captured(study, contender.seed, folder)
    cluster = Cluster((Level("host", STAGES, 1e10, 1e-6),), (ClusterDevice("cpu"),), "one host")
    m = contender.num_microbatches
    options = PlanOptions(num_ranks=STAGES, batch_size=study.batch_size, num_microbatches=m, schedule="gpipe")
    plan = make_plan(profile, cluster, options)
    plan = replace(plan, schedule=contender.schedule, schedule_options=contender.options)
    if contender.schedule == "pipedream" and plan.ties and not contender.options:
        return None
    context = RunContext.of(plan, model.graph)
    job = Job(steps=study.steps, epochs=0, batch_size=study.batch_size, save=False)
    recorder = LossRecorder()

    def body(session: RankSession) -> None:
        session.train()
        session.evaluate(64, study.steps)

    run = RunDirectory(folder / "run")
    run.write(job, plan, model.graph)
    generate(model, plan, run.stages)
    reporters = [recorder, *(Silent() for _ in range(STAGES - 1))]
    sessions = run_in_threads(run, job, context, body, reporters=reporters)
    staleness = tuple(r.versions.staleness for s in sessions for r in s.executor.runners.values())
    last = statistics.fmean(recorder.losses[-max(len(recorder.losses) // 10, 1) :])
    losses = [round(loss, 4) for loss in recorder.losses]
    return Outcome(contender.label, m, staleness, losses, last, recorder.evaluation)


def table(study: Study, outcomes: Sequence[Outcome]) -> list[str]:
    """Return the table of a study, as lines."""
    base = outcomes[0]
    rate = "the file's own, constant" if study.own else f"{study.learning_rate:g} at its peak"
    model = "".join(f", {name} {value}" for name, value in study.arguments.items())
    lines = [
        f"### {'With the learning rate of the model file' if study.own else 'With warm-up and decay'}",
        "",
        f"{STAGES} stages, minibatch {study.batch_size}, {study.steps} steps "
        f"({study.steps * study.batch_size} samples){model}; learning rate {rate}.",
        f"Margin: {study.margin} in evaluation loss.",
        "",
        "| schedule | m | staleness by stage | training loss, last tenth | evaluation loss | above 1f1b | in margin |",
        "|---|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        above = outcome.evaluation - base.evaluation
        stale = ", ".join(map(str, outcome.staleness))
        verdict = "" if not any(outcome.staleness) else "yes" if above <= study.margin else "NO"
        lines.append(
            f"| {outcome.label} | {outcome.num_microbatches} | {stale} "
            f"| {outcome.last_tenth:.4f} | {outcome.evaluation:.4f} | {above:+.4f} | {verdict} |"
        )
    return [*lines, ""]


INTRODUCTION = f"""# Convergence of the schedules with stale weights

`2bw` and `pipedream` train on weights that are some optimizer steps old ([semantics.md](semantics.md)). This page
compares them with `1f1b`, which equals plain training, on two models, with the same number of samples and the same
recipe. `1f1b` with another seed shows the effect of chance. `make bench-convergence` writes this page. Ranks are
threads, {STAGES} stages.

The margin applies to the final loss on the evaluation data. `NO` means that the schedule is still outside the margin
after this number of samples, with this recipe.

## The cost of staleness

A gradient that is d steps old belongs to weights that have since moved by d optimizer steps. The distance grows with
the learning rate, and so does the cost. It does not depend on the schedule: a plain loop that reads weights d steps old
for every parameter has the same losses, bit for bit. That loop gives these evaluation losses:

| model, recipe | d = 0 | d = 1 | d = 2 |
|---|---|---|---|
| `resnet.py`, its own constant rate 0.05 | 0.104 | 0.177 | 0.250 |
| the same rate with warm-up and decay | 0.127 | 0.198 | 0.306 |
| 0.015 with warm-up and decay | 0.145 | 0.116 | 0.160 |
| 0.005 with warm-up and decay | 0.150 | 0.158 | 0.146 |
| `gpt.py`, its own constant rate 0.001, 300 steps of 16 | 2.599 | 2.760 | 2.992 |
| the same rate with warm-up and decay | 2.765 | 2.927 | |
| 0.0005 with warm-up and decay, 800 steps of 8 | 2.648 | 2.692 | 2.785 |

Warm-up and decay alone do not reduce the cost. A learning rate of a half or a third of the one that suits plain
training does. For `gpt.py`, which is far from convergence after a few thousand samples, more and smaller steps help
too: staleness costs a number of steps, and two steps still cost more than the margin. The tables below therefore give
every schedule the same smaller rate, and also show the results with the rate of the model file.

BatchNorm normalizes each microbatch by itself, so `m` is part of the recipe of `resnet.py`. `gpt.py` ties its
embeddings: under `pipedream` its stages would read two versions of one tensor, which is refused; with vertical sync
they read one.

![Training loss against samples](convergence.svg)

"""


def with_own_rate(study: Study) -> Study:
    """Return the study with the learning rate of the model file."""
    batch_size, steps = OWN[study.name]
    return replace(study, own=True, batch_size=batch_size, steps=steps)


def key(study: Study) -> str:
    """Return the key of a study in the results."""
    return f"{study.name} {'own' if study.own else 'warm'}"


def page(results: Mapping[str, Any]) -> tuple[str, str]:
    """Return the page and the figure of all results so far."""
    lines, panels = [], []
    for base in STUDIES:
        lines += [f"## {base.name}", ""]
        for study in (base, with_own_rate(base)):
            if key(study) not in results:
                continue
            outcomes = [Outcome(**entry) for entry in results[key(study)]["outcomes"]]
            lines += table(replace(study, steps=results[key(study)]["steps"]), outcomes)
            if not study.own:
                curves = {o.label: o.losses for o in outcomes if o.label != ANOTHER_SEED.label}
                panels.append(Panel(study.name, study.batch_size, curves))
    lines.append(f"{platform.machine()}, torch {torch.__version__}, CPU, one thread per rank.")
    return INTRODUCTION + "\n".join(lines) + "\n", plot(panels)


def main() -> None:
    """Train, print the results and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[study.name for study in STUDIES])
    parser.add_argument("--recipe", choices=("warm", "own"), default="warm", help="of the learning rate")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for base in STUDIES:
        if options.only not in (None, base.name):
            continue
        study = with_own_rate(base) if options.recipe == "own" else base
        outcomes: list[Outcome] = []
        for contender in (PLAIN, ANOTHER_SEED, *STALE):
            outcome = trained(study, contender)
            if outcome is not None:
                outcomes.append(outcome)
                print(f"{study.name} {contender.label}: {outcome.evaluation:.4f}", flush=True)
        results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
        results[key(study)] = {"steps": study.steps, "outcomes": [dataclasses.asdict(o) for o in outcomes]}
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results) + "\n")
    text, picture = page(json.loads(RESULTS.read_text()))
    DOCS.write_text(text)
    PICTURE.write_text(picture)
    print(text)


if __name__ == "__main__":
    main()
