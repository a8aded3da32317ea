"""The table of four plans, the explanation, runners-up, and the choice by the simulator."""

import dataclasses
import itertools
import random

import pytest
from support.planning_cases import by_name, chain, cluster_of, machine, profile_of, random_graph

from autopipe.errors import PlanError
from autopipe.ir.cuts import Cuts
from autopipe.ir.graph import Graph
from autopipe.planning import PlanOptions, comparison, explain, make_plan
from autopipe.planning.api import make_problems, solve_problem
from autopipe.planning.compare import Contender, _advice, _best
from autopipe.planning.search.alternatives import (
    MOST_SCORED,
    RankedScore,
    best_by_score,
    data_parallel_plan,
    runners_up,
)
from autopipe.schedules import REGISTRY


def test_the_four_plans_are_as_named():
    result = comparison(
        chain(8, weight=2**20), machine(4, 100), PlanOptions(num_ranks=4, batch_size=32, num_microbatches=16)
    )
    rows = by_name(result)
    assert list(rows) == ["single device", "data parallel", "best straight pipeline", "best plan"]
    assert [len(c.plan.stages) for c in result.contenders][:3] == [1, 1, 4]
    assert [c.plan.num_ranks for c in result.contenders][:3] == [1, 4, 4]
    steps = {name: contender.plan.predicted.step_seconds for name, contender in rows.items()}
    # 8 layers of 0.06 s for two samples, 16 microbatches
    assert steps["single device"] == pytest.approx(16 * 0.48)
    assert steps["data parallel"] == pytest.approx(16 * 0.48 / 4, rel=0.01)
    assert steps["best plan"] <= min(steps.values()) * (1 + 1e-12)


def test_a_pipeline_that_is_not_faster_is_reported_as_such():
    profile, cluster, options = (
        chain(8, weight=2**10, output=2**26),
        machine(4, 100),
        PlanOptions(num_ranks=4, batch_size=32, num_microbatches=16),
    )
    result = comparison(profile, cluster, options)
    assert result.verdict.startswith("A pipeline does not pay here: data parallel is the fastest, 16.67 samples/s.")
    assert "--replicas" not in result.verdict
    straight = make_plan(profile, cluster, dataclasses.replace(options, may_replicate=False))
    report = comparison(profile, cluster, options, current=straight)
    assert "The plan of this command is not the best one: " in report.verdict
    assert report.verdict.endswith(" samples/s; --replicas auto chooses the best one.")
    assert [report.title(row) for row in report.contenders][2:] == ["best straight pipeline (this plan)", "best plan"]


def test_if_only_a_pipeline_fits_the_table_gives_the_reasons():
    result = comparison(
        chain(8), machine(4, 9), PlanOptions(num_ranks=4, batch_size=16, num_microbatches=16, recompute="never")
    )
    rows = by_name(result)
    assert rows["single device"].reason.startswith("stage 0 needs")
    assert rows["data parallel"].reason.startswith("the whole model needs")
    assert result.verdict.startswith("Only a pipeline fits: best")


def test_a_faster_pipeline_is_compared_with_the_best_single_stage():
    slow = dataclasses.replace(machine(4, 100), levels=(dataclasses.replace(machine(4).levels[0], bandwidth=1e8),))
    result = comparison(chain(8, output=2**10), slow, PlanOptions(num_ranks=4, batch_size=32, num_microbatches=16))
    assert "times as fast as" in result.verdict


def test_a_schedule_without_replicas_is_compared_without_them():
    kind = dataclasses.replace(REGISTRY["zero-bubble"], replicas=False)
    options = PlanOptions(num_ranks=4, batch_size=32, num_microbatches=16, schedule="zero-bubble", kind=kind)
    result = comparison(chain(8), machine(4, 100), options)
    rows = by_name(result)
    assert rows["data parallel"].reason == "schedule 'zero-bubble' does not support replicated stages"
    assert rows["best plan"].plan == rows["best straight pipeline"].plan


def test_if_nothing_fits_the_verdict_says_so():
    assert comparison(
        chain(4), machine(2, 0.1), PlanOptions(num_ranks=2, batch_size=4, num_microbatches=4)
    ).verdict.startswith("Nothing fits: stage")


def test_the_runner_up_is_the_best_plan_with_other_cuts():
    for seed in range(12):
        rng = random.Random(seed)
        graph = random_graph(rng, 10)
        profile, cluster = profile_of(graph, rng), cluster_of(rng, 2)
        if len(Cuts(graph).legal) < 3:
            continue
        # the units of recompute by block begin and end at cuts, so they would differ with fewer of them
        options = PlanOptions(num_ranks=2, batch_size=16, num_microbatches=4, recompute="never")
        plan = make_plan(profile, cluster, options)
        (problem,) = make_problems(profile, cluster, options)
        others = runners_up(problem, plan, solve_problem)
        bottlenecks = []
        for position in Cuts(graph).legal:
            if position != plan.stages[1].start:
                alone = dataclasses.replace(problem, cuts=Only(graph, position))
                bottlenecks.append(solve_problem(alone).predicted.bottleneck_seconds)
        assert others[0].predicted.bottleneck_seconds == pytest.approx(min(bottlenecks))


class Only(Cuts):
    """The cuts of a graph with a single legal position."""

    def __init__(self, graph: Graph, position: int) -> None:
        super().__init__(graph)
        self.only = position

    @property
    def legal(self):
        return (self.only,)


def test_the_explanation_names_cuts_limit_bound_and_runner_up():
    profile, cluster, options = (
        chain(8, output=2**20),
        machine(4, 100),
        PlanOptions(num_ranks=4, batch_size=32, num_microbatches=16),
    )
    plan = make_plan(profile, cluster, options)
    explanation = explain(plan, profile, cluster, options)
    assert [cut.node for cut in explanation.cuts] == [stage.first for stage in plan.stages[1:]]
    assert all(cut.earlier_seconds > cut.seconds < cut.later_seconds for cut in explanation.cuts)
    assert explanation.bound_seconds == pytest.approx(16 * 8 * 0.06 / 4)
    assert explanation.gap == pytest.approx(plan.predicted.step_seconds / explanation.bound_seconds - 1)
    assert explanation.limit.startswith("compute of stage")
    assert explanation.runner_up.digest != plan.digest
    lines = explanation.lines()
    assert (
        lines[0]
        == "before layer2: 2.00 MiB cross; the slower side takes 120 ms, 180 ms one cut earlier, 180 ms one cut later"
    )
    assert lines[-3].startswith("limited by compute of stage 0: 120 ms of a period of ")
    assert lines[-2].startswith(f"{explanation.gap:.1%} above the lower bound of 1.92 s a step")
    assert lines[-1].startswith("runner-up: cut before layer")
    assert "18x the ideal 1.92 s a step" in dataclasses.replace(explanation, gap=17.1).lines()


def test_memory_and_links_are_named_if_they_are_the_limit():
    tight = explain_of(chain(8), machine(4, 7), PlanOptions(num_ranks=4, batch_size=32, num_microbatches=16))
    assert tight.limit.startswith("memory: without its limit a step would be")
    narrow = dataclasses.replace(machine(4, 100), levels=(dataclasses.replace(machine(4).levels[0], bandwidth=1e8),))
    assert explain_of(chain(8), narrow, PlanOptions(num_ranks=4, batch_size=32, num_microbatches=16)).limit.startswith(
        "links: of the slowest stage's"
    )


def explain_of(profile, cluster, options):
    return explain(make_plan(profile, cluster, options), profile, cluster, options)


def test_the_simulator_may_choose_a_runner_up():
    profile, cluster = chain(8, output=2**20), machine(2, 100)
    seen = []

    def prefer_late_cuts(plan):
        seen.append(plan.digest)
        return dataclasses.replace(plan.predicted, step_seconds=1.0 / plan.stages[1].start)

    plan = make_plan(
        profile, cluster, PlanOptions(num_ranks=2, batch_size=32, num_microbatches=16), score=prefer_late_cuts
    )
    formula = make_plan(profile, cluster, PlanOptions(num_ranks=2, batch_size=32, num_microbatches=16))
    assert len(seen) == len(set(seen)) == 2
    assert {plan.digest, formula.digest} <= set(seen)
    assert plan.stages[1].start >= formula.stages[1].start
    assert len(list(itertools.islice(seen, 20))) <= 20


def dear_messages(plan):
    """A score that differs from the formula: every stage but the first costs another second."""
    step = plan.predicted.step_seconds + len(plan.stages) - 1
    return dataclasses.replace(plan.predicted, step_seconds=step, samples_per_second=plan.batch_size / step)


def test_data_parallelism_is_scored_whatever_its_formula():
    profile, cluster = chain(8, weight=2**30), machine(4, 100)
    free = PlanOptions(num_ranks=4, batch_size=32, num_microbatches=16, may_replicate=True)
    assert len(make_plan(profile, cluster, free).stages) > 1
    plan = make_plan(profile, cluster, free, score=RankedScore(dear_messages, 1))
    assert (len(plan.stages), plan.num_ranks) == (1, 4)


@pytest.mark.parametrize("weight", [2**20, 2**28, 2**30])
@pytest.mark.parametrize("score", [None, dear_messages, RankedScore(dear_messages, 1)])
def test_no_row_of_the_table_is_faster_than_the_best_plan(weight, score):
    result = comparison(
        chain(8, weight=weight),
        machine(4, 100),
        PlanOptions(num_ranks=4, batch_size=32, num_microbatches=16),
        score=score,
    )
    rates = [contender.plan.predicted.samples_per_second for contender in result.contenders]
    assert rates[-1] == max(rates)
    assert result.alone is result.contenders[0].plan


def test_data_parallelism_has_no_more_ranks_than_microbatches():
    (problem,) = make_problems(
        chain(8), machine(16, 100), PlanOptions(num_ranks=16, batch_size=8, num_microbatches=4, may_replicate=True)
    )
    plan = data_parallel_plan(problem)
    assert plan.num_ranks == 4
    assert plan.notes[0].startswith("12 of 16 ranks stay unused")


def test_the_advice_names_the_options_that_choose_the_best_plan():
    cluster = machine(4, 100)
    plans = [
        make_plan(chain(8), cluster, PlanOptions(num_ranks=4, batch_size=32, num_microbatches=count, schedule=schedule))
        for count, schedule in ((1, "gpipe"), (8, "1f1b"))
    ]
    best = Contender("best", plans[1], "")
    assert _advice((best,), plans[0]).endswith("; --schedule 1f1b chooses the best one.")
    assert _advice((best,), plans[1]) == ""
    same = dataclasses.replace(plans[0], schedule="1f1b")
    assert _advice((best,), same).endswith("samples/s.")


def test_a_search_that_fails_leaves_the_known_plans():
    plan = make_plan(chain(8), machine(4, 100), PlanOptions(num_ranks=4, batch_size=32))

    def failing():
        raise PlanError("nothing fits")

    assert _best(failing, [plan]) is plan
    with pytest.raises(PlanError, match="nothing fits"):
        _best(failing, [])


def test_a_score_chooses_only_among_plans_that_fit():
    profile, cluster = chain(4, saved=2**20, weight=2**30), machine(2, 12)
    scored = []

    def score(plan):
        scored.append(plan)
        return plan.predicted

    options = PlanOptions(num_ranks=2, batch_size=8, num_microbatches=4, may_replicate=True)
    plan = make_plan(profile, cluster, options, score=score)
    assert len(plan.stages) == 2
    assert {len(other.stages) for other in scored} == {2}  # the whole model does not fit a device


def test_no_more_plans_are_scored_than_the_limit():
    scored = []

    def score(plan):
        scored.append(plan)
        return plan.predicted

    def solve(problem):
        solved.append(problem)
        return solve_problem(problem)

    solved = []
    problems = make_problems(chain(30), machine(12), PlanOptions(num_ranks=12, batch_size=32))
    pairs = [(problem, solve_problem(problem)) for problem in problems]
    best_by_score(pairs, score, solve)
    assert len(scored) == MOST_SCORED
    # two plans have enough runners-up, one for each of their 11 cuts; those of a third are not searched
    assert len(pairs) > 2
    assert len(solved) == 2 * 11


def test_an_explanation_without_neighbouring_cuts_or_other_plans_omits_them():
    options = PlanOptions(num_ranks=2, batch_size=8, num_microbatches=4)
    plan = make_plan(chain(2), machine(2), options)
    lines = explain(plan, chain(2), machine(2), options).lines()
    assert lines[0].endswith("the slower side takes 60.0 ms")
    assert not [line for line in lines if "one cut" in line or "runner-up" in line]
    assert len(lines) == 3
