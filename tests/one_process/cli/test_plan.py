"""`autopipe plan` on a stored profile: tables, other devices, sweeps over numbers of devices, PipeDream's files."""

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.stored_profiles import HERE, MIB, stored_profile

from autopipe.cli.main import autopipe
from autopipe.commands import artifact_steps
from autopipe.commands.store import PlanRecord
from autopipe.ir import artifact
from autopipe.ir.cluster import Links
from autopipe.ir.plan import Plan
from autopipe.ir.profile import Device, Measurement, NodeCost, NodeWork, PassWork, Profile
from autopipe.ir.tensor import TensorSpec
from autopipe.planning import baselines


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a command in a folder with a profile and no model file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOPIPE_REPLICAS")
    artifact.save(stored_profile(), Path(".autopipe/profile.json"))

    def call(*args, code=0):
        done = CliRunner().invoke(autopipe, ["plan", *args])
        assert done.exit_code == code, done.output
        return done

    return call


STRAIGHT = ("--replicas", "never")
ONE_STAGE = ("--schedule", "1f1b", *STRAIGHT)


def document(done):
    answer = json.loads(done.stdout)
    assert (answer["schema_version"], answer["command"]) == (1, "plan")
    return answer


def test_a_plan_needs_no_model_file_and_takes_the_batch_of_the_profile(run):
    answer = document(run("--gpus", "2", *HERE, *ONE_STAGE, "--json"))
    assert answer["batch_size"] == 16
    assert [stage["first"] for stage in answer["stages"]] == ["layer0", "layer4"]
    assert "its file was not read" in answer["notes"][0]
    assert artifact.load(Plan, Path(".autopipe/plan.json"), renew="").digest == answer["plan_digest"]


def test_stages_are_interleaved_if_that_is_faster_and_the_links_are_known(run):
    chosen = document(run("--gpus", "2", *HERE, *STRAIGHT, "--json"))
    plain = document(run("--gpus", "2", *HERE, *ONE_STAGE, "--json"))
    assert (chosen["schedule"], plain["schedule"]) == ("interleaved", "1f1b")
    assert chosen["predicted"]["bubble_fraction"] < plain["predicted"]["bubble_fraction"]
    assert document(run("--gpus", "2", *STRAIGHT, "--json"))["schedule"] == "1f1b"


def test_the_table_has_four_plans_and_a_verdict(run):
    done = run("--gpus", "2", *HERE)
    for words in ("single device", "data parallel", "best straight pipeline", "best plan", "samples/s"):
        assert words in done.stdout
    assert "A pipeline does not pay here: data parallel is the fastest" in done.stdout
    assert "For a pipeline: --replicas never." in done.stdout
    straight = run("--gpus", "2", *HERE, "--replicas", "never")
    assert "For a pipeline" not in straight.stdout and " stages on 2 ranks" in straight.stdout


def test_json_contains_the_comparison_and_the_explanation(run):
    answer = document(run("--gpus", "2", *HERE, *ONE_STAGE, "--explain", "--json"))
    names = [contender["name"] for contender in answer["comparison"]["contenders"]]
    assert names == ["single device", "data parallel", "best straight pipeline", "best plan"]
    straight = answer["comparison"]["contenders"][2]["plan"]
    assert (straight["replicas"], straight["predicted"]) == ([1, 1], answer["predicted"])
    assert answer["comparison"]["verdict"].startswith("A pipeline does not pay here")
    assert answer["explanation"][0].startswith("before layer4")
    assert answer["reasons"]["cuts"][0]["place"].startswith("before layer4")
    assert [cut["node"] for cut in answer["reasons"]["cuts"]] == ["layer4"]
    # 16 samples of 8 layers of 30 ms, on two devices
    assert answer["reasons"]["bound_seconds"] == pytest.approx(16 * 8 * 0.03 / 2)
    assert answer["reasons"]["gap"] > 0
    assert answer["reasons"]["runner_up"]["cuts"] in (["layer3"], ["layer5"])


def test_explain_gives_the_reasons_below_the_table(run):
    shown = run("--gpus", "2", *HERE, *ONE_STAGE, "--explain").stdout
    assert "why:\n  before layer4: " in shown
    assert "lower bound of 1.92 s a step" in shown


def test_replicas_are_planned_if_they_are_faster_and_not_excluded(run):
    replicas = [[stage["replicas"] for stage in document(run("--gpus", "4", *HERE, *more, "--json"))["stages"]]
                for more in ((), ("--replicas", "auto"), ONE_STAGE)]  # fmt: skip
    assert replicas == [[4], [4], [1, 1, 1, 1]]


def test_replicas_divide_the_optimizer_state_where_memory_is_short(run):
    # 8 MiB of weights, as much of gradients, and 160 MiB of optimizer state
    heavy = dataclasses.replace(stored_profile(), optimizer_bytes_per_byte=20.0)
    artifact.save(heavy, Path(".autopipe/profile.json"))
    words = ("--gpus", "4", "--link", "10GB/s", "--schedule", "1f1b", "--json")
    plans = {}
    for memory, setting in (("8GiB", "auto"), ("120MiB", "auto"), ("120MiB", "never")):
        shown = document(run(*words, "--gpu-memory", memory, "--shard-optimizer", setting))
        plan = artifact.load(Plan, Path(".autopipe/plan.json"), renew="")
        divided = any("divide its optimizer state, which takes up to 100 MiB less" in note for note in plan.notes)
        plans[memory, setting] = [stage["replicas"] for stage in shown["stages"]], divided
        assert plan.shard_optimizer == divided
    assert plans["8GiB", "auto"] == ([4], False)
    assert plans["120MiB", "auto"] == ([4], True)
    replicas, divided = plans["120MiB", "never"]
    assert not divided
    assert len(replicas) > 1


def test_replicas_that_average_statistics_must_be_requested(run):
    profile = artifact.load(Profile, Path(".autopipe/profile.json"), renew="")
    nodes = tuple(
        dataclasses.replace(node, buffers=("bn.mean",), buffers_written=("bn.mean",)) if place == 2 else node
        for place, node in enumerate(profile.graph.nodes)
    )
    graph = dataclasses.replace(profile.graph, nodes=nodes, buffers={"bn.mean": TensorSpec((4,), "float32")})
    artifact.save(dataclasses.replace(profile, graph=graph), Path(".autopipe/profile.json"))
    shown = document(run("--gpus", "4", *HERE, "--schedule", "1f1b", "--json"))
    assert [stage["replicas"] for stage in shown["stages"]] == [1, 1, 1, 1]
    assert any("would average a buffer that the forward writes (bn.mean)" in note for note in shown["notes"])
    asked = document(run("--gpus", "4", *HERE, "--replicas", "auto", "--json"))
    assert [stage["replicas"] for stage in asked["stages"]] == [4]


def test_a_parameter_that_stages_would_read_in_different_versions_is_refused(run):
    profile = artifact.load(Profile, Path(".autopipe/profile.json"), renew="")
    tied = profile.graph.nodes[0].parameters
    nodes = (*profile.graph.nodes[:-1], dataclasses.replace(profile.graph.nodes[-1], parameters=tied))
    artifact.save(
        dataclasses.replace(profile, graph=dataclasses.replace(profile.graph, nodes=nodes)),
        Path(".autopipe/profile.json"),
    )
    words = ("--gpus", "4", *HERE, *STRAIGHT, "--schedule", "pipedream")
    refused = run(*words, code=1).output
    assert "pipedream cannot keep layer0.weight tied: in minibatch t stage 0 reads version t - 1" in refused
    assert "--vertical-sync" in refused and not Path(".autopipe/plan.json").exists()
    assert len(document(run(*words, "--vertical-sync", "--json"))["stages"]) == 4


def test_a_large_last_layer_is_planned_as_in_the_pipedream_paper(run):
    """PipeDream's 15-1: the compute on fifteen ranks, and the parameters of the last layer on one."""
    profile = artifact.load(Profile, Path(".autopipe/profile.json"), renew="")
    last = profile.graph.nodes[-1].name
    parameters = profile.graph.parameters | {f"{last}.weight": TensorSpec((256 * MIB,), "float32", True)}
    graph = dataclasses.replace(profile.graph, parameters=parameters)
    costs = {node.name: NodeCost(0.01, 0.02, 4096, MIB) for node in graph.nodes}
    costs[last] = NodeCost(0.004, 0.008, 4096, MIB)
    measured = (Measurement(1, costs),)
    artifact.save(dataclasses.replace(profile, graph=graph, measurements=measured), Path(".autopipe/profile.json"))
    words = ("--gpus", "16", "--gpu-memory", "16GiB", "--link", "10Gbit/s", "--batch-size", "240")
    shown = document(run(*words, "--microbatch-size", "1", "--json"))
    assert [stage["replicas"] for stage in shown["stages"]] == [15, 1]


def test_more_devices_than_stages_are_planned_with_replicas(run):
    given = ("--gpus", "512", "--gpu-memory", "80GiB", "--link", "400Gbit/s", "--batch-size", "2048")
    answer = document(run(*given, "--json"))
    assert answer["ranks"] <= 512
    assert answer["comparison"]["contenders"][2]["plan"] is None
    assert "512 stages requested" in answer["comparison"]["contenders"][2]["reason"]
    shown = run(*given)
    assert "no best straight pipeline: 512 stages requested" in shown.stdout
    assert "the model has 8 stages at most: planned with replicas" in shown.stderr


def test_more_ranks_of_this_machine_than_stages_take_replicas(run):
    assert "the model has 8 stages at most: planned with replicas" in run("--gpus", "9").stderr
    assert "9 stages requested" in run("--gpus", "9", *STRAIGHT, code=1).stderr


def test_a_plan_for_a_named_device_is_marked_as_an_estimate(run):
    slow = document(run("--gpus", "2", *HERE, "--json"))
    fast = document(run("--gpus", "2", "--link", "10GB/s", "--device-name", "H100-SXM", "--json"))
    assert 2.3 < slow["predicted"]["step_seconds"] / fast["predicted"]["step_seconds"] < 2.4
    assert any("H100-80GB: estimate from datasheets" in note for note in fast["notes"])
    assert fast["cluster"]["devices"][0]["memory_bytes"] == 80 * 10**9
    assert "Did you mean 'H100-80GB'?" in run("--gpus", "2", "--device-name", "H100-80G", code=1).stderr


def test_a_profile_of_a_cpu_is_planned_for_a_named_device_as_an_estimate(run):
    profile = stored_profile()
    work = NodeWork(PassWork(10**12, 10**6, 10**6), PassWork(2 * 10**12, 10**6, 10**6))
    measurements = tuple(dataclasses.replace(m, work=dict.fromkeys(m.costs, work)) for m in profile.measurements)
    device = Device("cpu", "some cpu", 2**34)
    artifact.save(
        dataclasses.replace(profile, device=device, measurements=measurements), Path(".autopipe/profile.json")
    )
    options = "--gpus", "2", "--num-microbatches", "4", "--schedule", "1f1b", "--device-name", "H100-SXM"
    answer = document(run(*options, *STRAIGHT, "--json"))
    # 3 TFLOP a layer at 60 % of 67 TFLOP/s, four layers a stage, four microbatches and one to fill
    assert answer["predicted"]["step_seconds"] == pytest.approx(5 * 4 * 3 / (0.6 * 67), rel=0.01)
    assert answer["estimate"].startswith(
        "estimate, without measurements on such a device: operations and bytes counted"
    )
    shown = run(*options)
    assert "\nestimated: " in shown.stdout
    assert "at 60% of 67 TFLOP/s (fp32) and 3350 GB/s" in " ".join(shown.stderr.split())
    run(*options, *STRAIGHT)
    simulated = json.loads(CliRunner().invoke(autopipe, ["simulate", "--json"]).stdout)
    assert simulated["seconds"] == pytest.approx(answer["predicted"]["step_seconds"])


def test_a_stored_record_keeps_the_request(run):
    run("--gpus", "2", "--replicas", "auto", "--device-name", "H100-SXM")
    record = artifact.load(PlanRecord, Path(".autopipe/question/plan-record.json"), renew="")
    assert (record.request.replicas, record.request.device_name) == ("auto", "H100-SXM")


def test_ctrl_c_during_the_comparison_keeps_the_plan(run, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(artifact_steps, "compare_plan", interrupted)
    answer = document(run("--gpus", "2", *HERE, "--json"))
    assert answer["comparison"] is None
    assert "interrupted: the plan was written, but not compared with other plans" in answer["notes"]
    assert baselines.compare_plan is not interrupted


def test_a_sweep_has_a_row_a_bar_and_a_point_for_each_number(run):
    answer = document(run("--sweep-gpus", "1,2,4", *HERE, "--json"))
    assert [point["gpus"] for point in answer["points"]] == [1, 2, 4]
    steps_ = [point["step_seconds"] for point in answer["points"]]
    assert steps_ == sorted(steps_, reverse=True)
    # 30 ms a layer and sample: 8 * 0.03 s of one device, a million times
    assert answer["points"][0]["device_hours_per_million_samples"] == pytest.approx(8 * 0.03 * 1e6 / 3600, rel=1e-3)
    shown = run("--sweep-gpus", "1,2,4", *HERE).stdout
    assert "device-hours a million" in shown
    assert shown.count("|#") == 3
    assert not Path(".autopipe/plan.json").exists()


def test_a_number_without_a_plan_shows_its_reason(run):
    answer = document(run("--sweep-gpus", "1,64", *HERE, "--replicas", "never", "--json"))
    assert answer["points"][1]["plan"] is None
    assert "64 stages requested" in answer["points"][1]["reason"]
    assert "no plan for any of 64 devices" in run("--sweep-gpus", "64", "--replicas", "never", code=1).stderr


def test_a_sweep_widens_the_outermost_level_of_a_cluster_file(run):
    text = "".join(f'[[level]]\nname = "{n}"\ncount = 2\nbandwidth = "{b}GB/s"\n' for n, b in (("a", 10), ("b", 1)))
    Path("cluster.toml").write_text(text)
    answer = document(run("--sweep-gpus", "2,8", "--cluster", "cluster.toml", "--json"))
    assert all(point["plan"] for point in answer["points"])


def test_a_sweep_refuses_contradicting_options(run):
    assert "--sweep-gpus and --gpus exclude each other" in run("--sweep-gpus", "1,2", "--gpus", "2", code=2).stderr


@pytest.mark.parametrize(
    ("args", "code", "shown"),
    [
        (("--gpus", "2", "--cluster", "c.toml", "--device-name", "H100-SXM"), 2, "exclude each other"),
    ],
)
def test_contradicting_options_are_named(run, args, code, shown):
    Path("c.toml").write_text('[[level]]\ncount = 2\nbandwidth = "1GB/s"\n')
    assert shown in run(*args, code=code).stderr


def test_without_a_batch_size_in_the_profile_the_model_file_is_loaded(run):
    artifact.save(dataclasses.replace(stored_profile(), batch_size=0), Path(".autopipe/profile.json"))
    assert "gone.py" in run("--gpus", "2", code=1).stderr
    assert document(run("--gpus", "2", "--batch-size", "8", "--json"))["batch_size"] == 8


def test_measured_links_replace_assumptions(run):
    assert any("assumed" in note for note in document(run("--gpus", "2", "--json"))["notes"])
    artifact.save(Links("cuda", 1e-5, 3e9, 2e9), Path(".autopipe/links.json"))
    answer = document(run("--gpus", "2", "--json"))
    assert answer["cluster"]["source"] == "measured"
    (level,) = answer["cluster"]["levels"]
    assert (level["bandwidth"], level["latency_seconds"], level["all_reduce_bandwidth"]) == (3e9, 1e-5, 2e9)
    assert not any("assumed" in note for note in answer["notes"])


def test_plans_beyond_one_host_name_the_assumed_network(run):
    notes = document(run("--gpus", "16", "--replicas", "auto", "--json"))["notes"]
    assert any("assumed: 2 hosts of 8 GPUs, 10 GB/s between them" in note for note in notes), notes
    artifact.save(Links("cuda", 1e-5, 3e9, 2e9), Path(".autopipe/links.json"))
    notes = document(run("--gpus", "16", "--replicas", "auto", "--json"))["notes"]
    assert any("assumed: 2 hosts of 8 GPUs" in note for note in notes), notes
    assert not any("assumed" in note for note in document(run("--gpus", "16", "--link", "1GB/s", "--json"))["notes"])


def test_links_of_another_kind_of_device_are_not_used(run):
    artifact.save(Links("cpu", 1e-5, 3e9, 2e9), Path(".autopipe/links.json"))
    assert document(run("--gpus", "2", "--json"))["cluster"]["source"] == "assumed"


def test_a_slow_all_reduce_makes_data_parallelism_slow(run):
    rates = []
    for ring in (3e9, 3e7):
        artifact.save(Links("cuda", 1e-5, 3e9, ring), Path(".autopipe/links.json"))
        contenders = document(run("--gpus", "2", "--json"))["comparison"]["contenders"]
        rates.append([contenders[k]["plan"]["predicted"]["step_seconds"] for k in (1, 2)])
    # 8 MiB of weights: over a quarter of a second at 30 MB/s, negligible at 3 GB/s
    assert rates[1][0] - rates[0][0] == pytest.approx(8 * MIB / 3e7 - 8 * MIB / 3e9, rel=0.01)
    assert rates[1][1] == rates[0][1]


@pytest.mark.parametrize(
    ("faster", "words", "noted"),
    [
        (100, ("--batch-size", "64"), True),
        (100, ("--batch-size", "32"), False),
        (100, ("--batch-size", "64", "--microbatch-size", "4"), False),
        (1, ("--batch-size", "64"), False),  # a microbatch of 16 takes four seconds
    ],
)
def test_a_large_minibatch_without_measured_large_microbatches_is_noted(run, faster, words, noted):
    profile = stored_profile()
    measured = [
        dataclasses.replace(
            each,
            costs={
                name: dataclasses.replace(
                    cost, forward_seconds=cost.forward_seconds / faster, backward_seconds=cost.backward_seconds / faster
                )
                for name, cost in each.costs.items()
            },
        )
        for each in profile.measurements
    ]
    artifact.save(dataclasses.replace(profile, measurements=tuple(measured)), Path(".autopipe/profile.json"))
    notes = document(run("--gpus", "2", *words, "--json"))["notes"]
    expected = "no microbatch of more than 4 samples was measured; larger ones may be faster for a minibatch of 64"
    expected += ": autopipe profile gone.py --microbatch-sizes 1,2,4,8,16"
    assert (expected in notes) == noted, notes
