"""The search space of a request, the progress of its search, and plans that no schedule can run."""

import dataclasses
import math

import pytest
from support.planning_cases import chain, machine

from autopipe.commands.planning import choose, scaling
from autopipe.commands.planning.choose import choose_plan, later, search
from autopipe.commands.settings import AUTO_TEAM, ModelSettings, PlanSettings, ProfileSettings
from autopipe.commands.store import Work
from autopipe.errors import PlanError, ScheduleError
from autopipe.ir import artifact
from autopipe.ir.cluster import Level
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Measurement
from autopipe.planning import PlanOptions, SearchProgress, make_best_plan, make_plan, simulated_scores
from autopipe.planning.api import MOST_MICROBATCH_SIZES, candidate_counts
from autopipe.planning.baselines import compare_plan, explain_plan
from autopipe.planning.cost import predict
from autopipe.planning.requests import PlanRequest
from autopipe.planning.search_space import MANY_RANKS, Space, schedules, takes_replicas
from autopipe.schedules import REGISTRY

GRID = "F0,F1,B0,B1\nF0,B0,F1,B1\n"
FOUND, FAST = chain(8, saved=2**20, weight=2**20, output=2**20), machine(4, 100)


def silent(what, fraction):
    pass


def test_auto_trains_exactly_and_prefers_1f1b():
    names = schedules("auto")
    assert names[0] == "1f1b"
    assert all(REGISTRY[name].synchronous and not REGISTRY[name].splits_backward for name in names)
    assert {"custom", "interleaved"}.isdisjoint(names)
    assert "interleaved" in schedules("auto", links_known=True)


def test_auto_lists_the_schedules_that_it_leaves_out():
    assumed, known = (Space.of(PlanRequest(), 2, 32, links_known=known).left_out for known in (False, True))
    assert [line.split()[0] for line in assumed] == ["zero-bubble", "interleaved"]
    assert [line.split()[0] for line in known] == ["zero-bubble"]
    assert Space.of(PlanRequest(schedule="gpipe"), 2, 32).left_out == ()


@pytest.mark.parametrize("name", [name for name in REGISTRY if name != "custom"])
def test_every_schedule_of_the_planner_can_run_its_plan(name):
    space = Space.of(PlanRequest(schedule=name), 1 if REGISTRY[name].spills else 2, 32)
    planned, _ = search(FOUND, machine(2, 100), space.unreplicated, silent)
    assert math.isfinite(planned.predicted.step_seconds)
    assert planned.schedule == name
    assert predict.predict(planned, FOUND, machine(2, 100)) == planned.predicted


@pytest.mark.parametrize("name", list(REGISTRY))
def test_replicas_are_in_the_space_if_schedule_and_planner_support_them(name):
    if name == "custom":
        assert Space.of(PlanRequest(schedule=name, grid=GRID), 2, 32).replicated == ()
        return
    space = Space.of(PlanRequest(schedule=name), 4, 32)
    assert bool(space.replicated) == REGISTRY[name].replicas
    if REGISTRY[name].equal_replicas:
        assert all(options.replicas > 1 and not options.may_replicate for options in space.rivals())
    else:
        assert all(options.may_replicate and takes_replicas(options) for options in space.rivals())


def test_replicas_never_excludes_replicas_and_auto_has_both():
    space = Space.of(PlanRequest(), 4, 32)
    assert all(not options.may_replicate for options in space.choices("never"))
    assert {not options.may_replicate for options in space.choices("auto")} == {True, False}


def test_replicas_for_a_schedule_without_them_are_refused():
    with pytest.raises(PlanError, match="schedule 'custom' does not support replicated stages"):
        Space.of(PlanRequest(schedule="custom", grid=GRID), 2, 32).choices("auto")


def test_interleaving_is_tried_with_several_depths():
    space = Space.of(PlanRequest(schedule="interleaved"), 2, 32)
    assert [options.stages_per_rank for options in space.unreplicated] == [2, 3, 4]


def test_options_of_a_schedule_are_in_the_plan_and_its_memory():
    request_ = PlanRequest(schedule="pipedream", vertical_sync=True, warmup_depth=2, num_microbatches=2)
    (options,) = Space.of(request_, 4, 32).unreplicated
    planned, _ = search(FOUND, FAST, (options,), silent)
    assert planned.schedule_options == {"vertical_sync": 1, "depth": 2}
    assert predict.schedule_of(planned).staleness == (3, 3, 3, 3)
    (own,) = Space.of(PlanRequest(schedule="pipedream", num_microbatches=2), 4, 32).unreplicated
    plain, _ = search(FOUND, FAST, (own,), silent)
    assert planned.stages[-1].peak_bytes > plain.stages[-1].peak_bytes  # four versions, not one
    (three,) = Space.of(PlanRequest(schedule="interleaved", stages_per_rank=3), 2, 32).unreplicated
    assert search(FOUND, machine(2, 100), (three,), silent)[0].schedule_options == {"stages_per_rank": 3}


@pytest.mark.parametrize(
    ("request_", "what", "who"),
    [
        (PlanRequest(schedule="1f1b", vertical_sync=True), "1f1b takes no --vertical-sync", "pipedream"),
        (PlanRequest(vertical_sync=True), "no schedule that --schedule auto tries takes --vertical-sync", "pipedream"),
        (PlanRequest(schedule="gpipe", warmup_depth=2), "gpipe takes no --warmup-depth", "eager-1f1b, pipedream, 2bw"),
        (PlanRequest(schedule="2bw", stages_per_rank=2), "no --stages-per-rank", "interleaved, zero-bubble"),
        (PlanRequest(schedule="custom"), "--schedule custom needs a schedule file", "--schedule-file"),
        (PlanRequest(schedule="custom", grid=GRID, num_microbatches=4), "has 2 microbatches, but", "omit --num"),
        (PlanRequest(schedule="custom", grid=GRID, warmup_depth=2), "custom takes no --warmup-depth", "eager-1f1b"),
        (PlanRequest(schedule="custom", grid="0F0,0B0\n0F1,0B1\n"), "runs stage 0 on ranks [0, 1]", "one row"),
    ],
)
def test_an_unsupported_option_is_refused_with_the_schedules_that_support_it(request_, what, who):
    with pytest.raises(PlanError) as caught:
        Space.of(request_, 2, 32)
    assert what in caught.value.what and who in caught.value.remedy


def test_a_grid_is_planned_for_its_own_ranks_stages_and_microbatches(tmp_path):
    wave = "0F0,3F0,3B0,0B0,0F1,3F1,3B1,0B1\n1F0,2F0,2B0,1B0,1F1,2F1,2B1,1B1\n"  # stages 0 and 3 on rank 0
    planned, _ = chosen(tmp_path, PlanRequest(schedule="custom", grid=wave))
    assert planned.plan.stage_ranks == ((0,), (1,), (1,), (0,))
    assert (planned.plan.num_microbatches, planned.plan.num_ranks, planned.plan.schedule_text) == (2, 2, wave)
    assert artifact.load(Plan, tmp_path / "plan.json", renew="") == planned.plan
    assert dataclasses.replace(planned.plan, schedule_text=wave + "#").digest != planned.plan.digest
    comparison = {
        c.name: c.plan for c in compare_plan(planned.plan, FOUND, planned.record.cluster, planned.space).contenders
    }
    assert comparison["best straight pipeline"] == planned.plan and comparison["data parallel"].schedule == "1f1b"
    assert explain_plan(planned.plan, FOUND, planned.record.cluster, planned.space).cuts
    with pytest.raises(PlanError, match="has 2 rows, one per rank, but --gpus is 3"):
        chosen(tmp_path, PlanRequest(schedule="custom", grid=wave, gpus=3))
    with pytest.raises(ScheduleError, match=r"backward-after-forward") as caught:
        chosen(tmp_path, PlanRequest(schedule="custom", grid="F0,B0\nB0,F0\n"))
    assert ">1B0@0<" in str(caught.value)


def test_another_schedule_drops_the_options_of_the_previous_one():
    stored = PlanRequest(gpus=4, schedule="pipedream", vertical_sync=True, num_microbatches=8)
    assert stored.overlaid(PlanRequest(schedule="2bw")).vertical_sync is None
    assert stored.overlaid(PlanRequest(batch_size=8)).vertical_sync is True
    grid = stored.overlaid(PlanRequest(schedule="custom", grid=GRID))
    assert (grid.gpus, grid.num_microbatches, grid.vertical_sync) == (None, None, None)
    assert stored.changes_to(grid)[-1] == "--schedule-file"


def test_many_ranks_are_searched_in_powers_of_two():
    (few, *_), (many, *_) = (Space.of(PlanRequest(), n, 4096).replicated for n in (MANY_RANKS, 2 * MANY_RANKS))
    assert (few.replica_choices, few.tolerance) == ("any", 0.0)
    assert (many.replica_choices, many.tolerance) == ("powers", 0.01)


def test_a_plan_that_no_schedule_can_run_has_infinite_time(monkeypatch):
    def refused(plan, profile, cluster):
        raise ScheduleError("rule 3 is broken")

    monkeypatch.setattr(simulated_scores, "predict", refused)
    monkeypatch.setattr(choose, "predict", refused)
    plan = make_plan(
        FOUND,
        FAST,
        PlanOptions(num_ranks=4, batch_size=32, num_microbatches=8),
        score=simulated_scores.simulated(FOUND, FAST),
    )
    assert (plan.predicted.step_seconds, plan.predicted.samples_per_second) == (math.inf, 0.0)
    with pytest.raises(ScheduleError, match="rule 3 is broken"):
        search(FOUND, FAST, (PlanOptions(num_ranks=4, batch_size=32, num_microbatches=8),), silent)


def test_a_huge_plan_keeps_the_planners_figures():
    plan = make_plan(FOUND, FAST, PlanOptions(num_ranks=4, batch_size=32, num_microbatches=8))
    most = simulated_scores.MOST_SIMULATED_ONCE
    huge = dataclasses.replace(plan, num_microbatches=most, batch_size=most, microbatch_size=1)
    assert simulated_scores.simulated(FOUND, FAST)(huge) is huge.predicted


def test_fewer_large_plans_and_no_huge_plans_are_simulated(monkeypatch):
    options = PlanOptions(num_ranks=4, batch_size=32, num_microbatches=8)
    assert simulated_scores.simulator_score(FOUND, FAST, [options]).most == 20
    monkeypatch.setattr(simulated_scores, "MOST_SIMULATED", 16)
    assert simulated_scores.simulator_score(FOUND, FAST, [options]).most == 10
    planned, _ = search(FOUND, FAST, (options,), silent)
    assert planned.predicted == predict.predict(planned, FOUND, FAST)
    monkeypatch.setattr(simulated_scores, "MOST_SIMULATED_ONCE", 16)
    score = simulated_scores.simulator_score(FOUND, FAST, [options, PlanOptions(num_ranks=2, batch_size=4)])
    assert score.most == 1
    assert score(planned) is planned.predicted


def test_the_table_of_large_plans_has_simulated_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(simulated_scores, "MOST_SIMULATED", 16)
    cluster = {"gpus": 4, "link": 1e9, "gpu_memory_bytes": 2**33}
    planned, _ = chosen(tmp_path, PlanRequest(**cluster))
    result = compare_plan(planned.plan, FOUND, planned.record.cluster, planned.space)
    assert all(c.plan.predicted == predict.predict(c.plan, FOUND, planned.record.cluster) for c in result.contenders)
    rates = [contender.plan.predicted.samples_per_second for contender in result.contenders]
    assert rates[-1] == max(rates)


def test_progress_is_silent_for_a_second():
    times, seen = iter([0.0, 0.9, 1.1]), []
    report = later(lambda what, fraction: seen.append((what, fraction)), lambda: next(times))
    report("gpipe, 4 microbatches", 0.1)
    report("1f1b, 4 microbatches", 0.5)
    assert seen == [("planning: 1f1b, 4 microbatches", 0.5)]


def interrupted_at(count):
    """Return a progress callback that raises KeyboardInterrupt at the start of a search."""
    watch = SearchProgress()

    def report(what, fraction):
        assert 0 <= fraction <= 1
        if watch.tried == count:
            raise KeyboardInterrupt

    watch.report = report
    return watch


def test_ctrl_c_keeps_the_best_plan_so_far():
    options = PlanOptions(num_ranks=4, batch_size=64)
    watch = interrupted_at(2)
    plan = make_plan(FOUND, FAST, options, progress=watch)  # 8, 16, 32, 64: more are better for this model
    assert watch.stopped
    assert (plan.num_microbatches, watch.tried, watch.total) == (16, 2, 4)


def test_ctrl_c_before_the_first_plan_is_raised():
    with pytest.raises(KeyboardInterrupt):
        make_plan(FOUND, FAST, PlanOptions(num_ranks=4, batch_size=64), progress=interrupted_at(0))


def test_ctrl_c_between_two_schedules_keeps_the_plan_of_the_first():
    choices = [
        PlanOptions(num_ranks=4, batch_size=32, num_microbatches=8, schedule=name)
        for name in ("1f1b", "gpipe", "eager-1f1b")
    ]
    watch = interrupted_at(1)
    assert make_best_plan(FOUND, FAST, choices, progress=watch).schedule == "1f1b"
    assert (watch.stopped, watch.tried, watch.total) == (True, 1, 3)


def chosen(tmp_path, request, batch_size=32):
    work = Work.begin(tmp_path, None)
    return choose_plan(FOUND, request, work, batch_size), work.notes


def test_more_ranks_than_stages_are_refused_without_replicas(tmp_path):
    with pytest.raises(PlanError, match="64 stages requested"):
        chosen(tmp_path, PlanRequest(gpus=64, replicas="never"))


def test_more_devices_than_stages_are_planned_with_replicas_and_noted(tmp_path):
    planned, notes = chosen(tmp_path, PlanRequest(gpus=64, gpu_memory_bytes=80 * 2**30, link=5e10), 256)
    assert any(stage.replicas > 1 for stage in planned.plan.stages)
    assert notes == ["64 ranks, and the model has 8 stages at most: planned with replicas"]


def test_the_table_has_the_unreplicated_pipeline_and_a_best_plan_no_slower(tmp_path):
    planned, _ = chosen(tmp_path, PlanRequest(gpus=4, link=1e9, gpu_memory_bytes=2**33, replicas="never"))
    comparison = {
        c.name: c.plan for c in compare_plan(planned.plan, FOUND, planned.record.cluster, planned.space).contenders
    }
    assert comparison["best straight pipeline"] == planned.plan
    assert comparison["data parallel"].stages[0].replicas == 4
    steps = [plan.predicted.step_seconds for plan in comparison.values()]
    assert comparison["best plan"].predicted.step_seconds == min(steps)


def test_a_schedule_with_equal_replicas_is_compared_with_its_own_replicated_plans(tmp_path):
    request_ = PlanRequest(gpus=4, link=1e9, gpu_memory_bytes=2**33, schedule="zero-bubble", replicas="never")
    planned, _ = chosen(tmp_path, request_)
    comparison = {
        c.name: c.plan for c in compare_plan(planned.plan, FOUND, planned.record.cluster, planned.space).contenders
    }
    assert {plan.schedule for plan in comparison.values()} == {"zero-bubble"}
    assert comparison["best straight pipeline"] == planned.plan
    assert comparison["data parallel"].stages[0].replicas == 4
    assert {stage.replicas for stage in comparison["best plan"].stages} in ({1}, {2}, {4})


@pytest.mark.parametrize(
    "request_", [PlanRequest(gpus=2, replicas="never"), PlanRequest(gpus=4, replicas="auto", schedule="gpipe")]
)
def test_the_explanation_belongs_to_the_plan(tmp_path, request_):
    planned, _ = chosen(tmp_path, request_)
    explanation = explain_plan(planned.plan, FOUND, planned.record.cluster, planned.space)
    assert [cut.node for cut in explanation.cuts] == [stage.first for stage in planned.plan.stages[1:]]
    assert planned.plan.predicted.step_seconds >= explanation.bound_seconds
    assert explanation.limit.startswith(("compute", "links", "memory"))


def test_with_replicas_fewer_ranks_are_tried_and_unused_ranks_noted():
    space = Space.of(PlanRequest(schedule="1f1b"), 6, 32)
    assert [(options.num_ranks, options.offered) for options in space.replicated] == [(6, 6), (3, 6), (1, 6)]
    # between two hosts a message takes longer than the whole model, and a search where links differ uses every rank
    host, slow = Level("host", 3, 1e9, 1e-5), Level("network", 2, 1e3, 1.0)
    cluster = dataclasses.replace(machine(6, 100), levels=(host, slow))
    every, _ = search(FOUND, cluster, space.replicated[:1], silent)
    planned, _ = search(FOUND, cluster, space.replicated, silent)
    assert (every.num_ranks, planned.num_ranks) == (6, 3)
    assert planned.predicted.step_seconds < every.predicted.step_seconds
    assert planned.notes[0] == "3 of 6 ranks stay unused: they would not make a step faster"


def test_a_search_with_replicas_is_not_repeated(tmp_path, monkeypatch):
    cluster = {"gpus": 4, "link": 1e9, "gpu_memory_bytes": 2**33}
    planned, _ = chosen(tmp_path, PlanRequest(**cluster, replicas="auto"))
    assert planned.every
    assert chosen(tmp_path, PlanRequest(**cluster))[0].every
    assert not chosen(tmp_path, PlanRequest(**cluster, replicas="never"))[0].every
    again = compare_plan(planned.plan, FOUND, planned.record.cluster, planned.space)
    monkeypatch.setattr("autopipe.planning.compare._best", lambda find, known: known[0] if find is None else 1 / 0)
    result = compare_plan(planned.plan, FOUND, planned.record.cluster, planned.space, every=True)
    assert result.contenders[-1].plan.predicted == again.contenders[-1].plan.predicted


def test_an_interrupted_count_is_not_compared_with_the_others(tmp_path, monkeypatch):
    settings = PlanSettings(ProfileSettings(ModelSettings(), tmp_path), batch_size=32)
    artifact.save(FOUND, Work.begin(tmp_path, None).store.profile)
    searched = scaling.search

    def interrupted(profile, cluster, choices, progress):
        plan, watch = searched(profile, cluster, choices, progress)
        watch.stopped = choices[0].num_ranks == 4
        return plan, watch

    monkeypatch.setattr(scaling, "search", interrupted)
    result = scaling.sweep_gpus(settings, (1, 2, 4, 8))
    assert [point.gpus for point in result.points] == [1, 2]
    assert "interrupted: 2 of 4 numbers of devices" in result.notes
    with pytest.raises(KeyboardInterrupt):
        scaling.sweep_gpus(settings, (4, 8))


def test_an_option_of_a_schedule_out_of_range_is_refused():
    with pytest.raises(PlanError, match="--warmup-depth 1000000 is out of range: it runs from 1 to"):
        Space.of(PlanRequest(schedule="eager-1f1b", warmup_depth=10**6), 2, 32)


def test_ctrl_c_before_the_first_of_several_options_is_raised():
    choices = [PlanOptions(num_ranks=4, batch_size=32, num_microbatches=8, schedule=name) for name in ("1f1b", "gpipe")]
    with pytest.raises(KeyboardInterrupt):
        make_best_plan(FOUND, FAST, choices, progress=interrupted_at(0))


def test_contradicting_options_are_left_to_the_search_to_refuse():
    options = PlanOptions(num_ranks=2, batch_size=4, num_microbatches=9)
    assert simulated_scores.simulator_score(FOUND, FAST, [options]).most >= 1
    with pytest.raises(PlanError, match="cannot be cut into 9 microbatches"):
        make_plan(FOUND, FAST, options)


def test_of_many_numbers_of_microbatches_a_few_are_tried():
    costs = FOUND.measurements[0].costs
    wide = dataclasses.replace(FOUND, measurements=(Measurement(1, costs), Measurement(2**20, costs)))
    counts = candidate_counts(wide, PlanOptions(num_ranks=2, batch_size=2**20))
    assert len(counts) == MOST_MICROBATCH_SIZES
    assert (counts[0], counts[-1]) == (1, 2**20) and list(counts) == sorted(set(counts))


def test_ctrl_c_within_the_first_of_several_options_ends_the_search():
    watch = interrupted_at(2)
    choices = [PlanOptions(num_ranks=4, batch_size=64, schedule=name) for name in ("1f1b", "gpipe")]
    plan = make_best_plan(FOUND, FAST, choices, progress=watch)
    assert watch.stopped and (plan.schedule, plan.num_microbatches) == ("1f1b", 16)


def test_a_sweep_divides_devices_into_teams(tmp_path):
    settings = PlanSettings(ProfileSettings(ModelSettings(), tmp_path), batch_size=32)
    member = dataclasses.replace(FOUND, workload=dataclasses.replace(FOUND.workload, team=2))
    artifact.save(member, Work.begin(tmp_path, None).store.profile)
    odd, two, eight = scaling.sweep_gpus(settings, (3, 2, 8)).points
    assert (odd.plan, odd.reason) == (None, "3 devices cannot be divided into teams of 2")
    assert (two.plan.num_ranks, two.plan.num_processes) == (1, 2)
    assert eight.plan.num_processes <= 8 and eight.plan.team == 2
    auto = ProfileSettings(ModelSettings(team=AUTO_TEAM), tmp_path)
    with pytest.raises(PlanError, match="--sweep-gpus does not compare teams of several sizes"):
        scaling.sweep_gpus(PlanSettings(auto, batch_size=32), (2,))
