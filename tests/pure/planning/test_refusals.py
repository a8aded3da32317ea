"""Impossible plans are refused with the numbers and a remedy."""

import dataclasses

import pytest
from support.planning_cases import chain, machine

from autopipe.errors import PlanError
from autopipe.ir.cluster import MOST_RANKS
from autopipe.ir.plan import Stage
from autopipe.ir.tensor import TensorSpec
from autopipe.planning import PlanOptions, make_plan
from autopipe.planning.cost.ownership import check_every_parameter
from autopipe.schedules import REGISTRY


def refusal(profile, cluster, options):
    with pytest.raises(PlanError) as caught:
        make_plan(profile, cluster, options)
    return caught.value


def test_more_stages_than_cuts_are_refused():
    error = refusal(chain(4), machine(5), PlanOptions(num_ranks=5, batch_size=8))
    assert error.what == "5 stages requested, but the model has 3 legal cuts: at most 4 stages"
    assert error.where == "graph of chain.py"
    assert error.remedy == "use 4 ranks or fewer (--stages-per-rank multiplies the stages)"


def test_more_ranks_than_the_cluster_has_are_refused():
    error = refusal(chain(4), machine(2), PlanOptions(num_ranks=3, batch_size=8))
    assert error.what == "3 ranks requested, but the cluster has 2: 2 (host)"
    assert error.remedy == "use at most 2 ranks, or describe a larger cluster"


def test_a_batch_smaller_than_its_microbatches_is_refused():
    error = refusal(chain(), machine(2), PlanOptions(num_ranks=2, batch_size=3, num_microbatches=4))
    assert error.what == "a batch of 3 samples cannot be cut into 4 microbatches: each needs at least one"
    assert error.remedy == "use --batch-size 4 or larger, or --num-microbatches 3 or fewer"


def test_a_microbatch_larger_than_the_batch_is_refused():
    error = refusal(chain(), machine(2), PlanOptions(num_ranks=2, batch_size=3, microbatch_size=4))
    assert error.what == "a microbatch of 4 samples is larger than the batch of 3"


def test_counts_that_contradict_each_other_are_refused():
    error = refusal(chain(), machine(2), PlanOptions(num_ranks=2, batch_size=16, num_microbatches=3, microbatch_size=4))
    assert error.what == "3 microbatches of 4 samples do not make a batch of 16"
    assert error.remedy == "omit one of the three (4 microbatches of 4 do)"


def test_fewer_microbatches_than_the_schedule_needs_are_refused():
    kind = dataclasses.replace(REGISTRY["1f1b"], name="strict", min_microbatches=lambda p, depth: 2 * p)
    error = refusal(
        chain(), machine(2), PlanOptions(num_ranks=2, batch_size=16, num_microbatches=3, schedule="strict", kind=kind)
    )
    assert error.what == "schedule 'strict' with 2 stages needs at least 4 microbatches, but 3 are requested"
    assert error.remedy == "use 4 microbatches (a batch of 4 samples or more), fewer ranks, or another schedule"
    error = refusal(chain(), machine(2), PlanOptions(num_ranks=2, batch_size=3, schedule="strict", kind=kind))
    assert error.what == "schedule 'strict' with 2 stages needs at least 4 microbatches, but a batch of 3 has 3"


def test_plans_with_too_few_microbatches_for_their_stages_are_refused_with_replicas():
    kind = dataclasses.replace(REGISTRY["1f1b"], name="strict", min_microbatches=lambda p, depth: 4 * p - 3)
    options = PlanOptions(
        num_ranks=2, batch_size=4, num_microbatches=4, schedule="strict", kind=kind, may_replicate=True
    )
    # one stage does not fit, and two stages need 5 microbatches
    error = refusal(chain(saved=2**20, weight=2**30), machine(2, 12), options)
    assert error.what == "schedule 'strict' with 2 stages needs at least 5 microbatches, but 4 are requested"


@pytest.mark.parametrize("schedule", sorted(REGISTRY))
def test_the_smallest_count_of_every_schedule_is_accepted_and_one_less_refused(schedule):
    least, ranks = max(1, REGISTRY[schedule].least_microbatches(4)), 1 if REGISTRY[schedule].spills else 4

    def options(count):
        return PlanOptions(num_ranks=ranks, batch_size=8, num_microbatches=count, schedule=schedule)

    assert make_plan(chain(), machine(4), options(least)).num_microbatches == least
    if least > 1:
        refusal(chain(), machine(4), options(least - 1))


def test_a_parameter_in_no_stage_is_refused():
    graph = chain(2).graph
    stages = [Stage(0, 0, 2, "layer0", "layer1", (0,), ("layer0.weight",), 0.0, 0.0, 0)]
    with pytest.raises(PlanError) as caught:
        check_every_parameter(graph, stages)
    assert caught.value.what == "parameter 'layer1.weight' is in no stage (1 of 2 parameters)"
    foreign = dataclasses.replace(stages[0], parameters=("layer0.weight", "layer1.weight", "other"))
    with pytest.raises(PlanError, match="'other' is in a stage but not in the model"):
        check_every_parameter(graph, [foreign])


def test_an_unused_parameter_is_assigned_with_its_module_and_noted(caplog):
    profile = chain(4)
    spec = TensorSpec((8,), "float32", True)
    graph = dataclasses.replace(
        profile.graph,
        parameters={"layer1.spare": spec, "elsewhere.bias": spec, **profile.graph.parameters},
        buffers={"layer0.table": spec},
    )
    plan = make_plan(
        dataclasses.replace(profile, graph=graph),
        machine(4),
        PlanOptions(num_ranks=4, batch_size=8, num_microbatches=4),
    )
    assert plan.stages[1].parameters == ("layer1.spare", "layer1.weight")
    assert plan.stages[3].parameters == ("elsewhere.bias", "layer3.weight")
    assert [stage.buffers for stage in plan.stages] == [("layer0.table",), (), (), ()]
    assert plan.notes == (
        "parameter layer1.spare is read by nothing; stage 1 keeps it",
        "parameter elsewhere.bias is read by nothing; stage 3 keeps it",
        "buffer layer0.table is read by nothing; stage 0 keeps it",
    )


def test_too_little_memory_is_refused_with_the_stage_and_its_bytes():
    # layers 1 to 3: weight, gradient and Adam's two, 3 x 4 x 0.25 GiB; one in flight: 3 layers and 2 samples of 1 GiB,
    # and 2/16 GiB received. One layer more and one less is worse: 10 GiB on stage 0, for its two in flight.
    error = refusal(
        chain(), machine(2, 9), PlanOptions(num_ranks=2, batch_size=8, num_microbatches=4, recompute="never")
    )
    assert error.what == "stage 1 needs 9.12 GiB, but 9 GiB are available, in the plan that exceeds memory least"
    assert error.where == "stage 1 of 2 (layer1 .. layer3) on V100, 4 microbatches of 2, schedule 1f1b"


@pytest.mark.parametrize(
    ("memory", "options", "remedy", "cure"),
    [
        (
            9,
            PlanOptions(num_ranks=2, batch_size=8, num_microbatches=4, recompute="never"),
            "recompute the activations",
            {"recompute": "auto"},
        ),
        (
            5.5,
            PlanOptions(num_ranks=2, batch_size=8, num_microbatches=4, recompute="stage"),
            "use --microbatch-size 1",
            {"num_microbatches": 8},
        ),
        (
            3.7,
            PlanOptions(num_ranks=2, batch_size=8, num_microbatches=8, recompute="stage"),
            "use 4 ranks",
            {"num_ranks": 4},
        ),
    ],
)
def test_the_remedy_for_too_little_memory_works(memory, options, remedy, cure):
    error = refusal(chain(), machine(8, memory), options)
    assert error.remedy.startswith(remedy)
    make_plan(chain(), machine(8, memory), dataclasses.replace(options, **cure))


def test_no_other_number_of_microbatches_is_suggested_for_a_schedule_given_as_text():
    options = PlanOptions(num_ranks=2, batch_size=8, num_microbatches=4, stage_ranks=(0, 1), recompute="stage")
    error = refusal(chain(), machine(8, 5.5), options)
    assert error.remedy.startswith("no smaller change fits: use devices with ")


def test_if_no_change_fits_a_device_that_would_is_named():
    error = refusal(chain(), machine(4, 0.5), PlanOptions(num_ranks=4, batch_size=4, num_microbatches=4))
    assert error.remedy.startswith("no smaller change fits: use devices with 2.25 GiB")
    make_plan(chain(), machine(4, 2.25), PlanOptions(num_ranks=4, batch_size=4, num_microbatches=4))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_with_replicas_the_named_device_fits(ranks):
    free = PlanOptions(num_ranks=ranks, batch_size=16, num_microbatches=16, may_replicate=True, recompute="never")
    error = refusal(chain(), machine(ranks, 0.5), free)
    gibibytes = float(error.remedy.split("use devices with ")[1].split(" GiB")[0])
    make_plan(chain(), machine(ranks, gibibytes), free)
    with pytest.raises(PlanError):
        make_plan(chain(), machine(ranks, gibibytes * 0.4), free)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_ranks": 0}, "num_ranks is 0; it must be at least 1"),
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        ({"num_microbatches": 0}, "num_microbatches is 0; it must be at least 1"),
        ({"recompute": "alwys"}, "Did you mean 'always'"),
        ({"schedule": "gpip"}, "Did you mean 'gpipe'"),
        (
            {"schedule": "interleaved", "may_replicate": True},
            "schedule 'interleaved' needs the same number of replicas at every stage",
        ),
        (
            {"replicas": 2, "kind": dataclasses.replace(REGISTRY["1f1b"], replicas=False)},
            "schedule '1f1b' does not support replicated stages",
        ),
        (
            {"replicas": 3},
            "3 replicas of every stage cannot have equal shares of 2 ranks",
        ),
        (
            {"replicas": 2, "may_replicate": True},
            "replicas is 2, which excludes may_replicate",
        ),
        (
            {"stages_per_rank": 2, "may_replicate": True},
            "several stages per rank and different numbers of replicas exclude each other",
        ),
        ({"kind": REGISTRY["gpipe"]}, "kind describes schedule 'gpipe', but schedule is '1f1b'"),
    ],
)
def test_a_meaningless_option_is_refused(arguments, message):
    with pytest.raises(PlanError, match=message):
        PlanOptions(**{"num_ranks": 2, "batch_size": 8, **arguments})


def test_consistent_counts_and_sizes_are_accepted():
    options = PlanOptions(num_ranks=2, batch_size=8, num_microbatches=4, microbatch_size=2)
    assert make_plan(chain(), machine(2, 0), options).num_microbatches == 4


def test_no_cluster_larger_than_the_largest_is_suggested():
    options = PlanOptions(
        num_ranks=MOST_RANKS,
        replicas=MOST_RANKS // 2,
        batch_size=MOST_RANKS // 2,
        num_microbatches=MOST_RANKS // 2,
        recompute="stage",
    )
    error = refusal(chain(), machine(MOST_RANKS, 0.5), options)
    assert error.remedy.startswith("no smaller change fits: use devices with ")
