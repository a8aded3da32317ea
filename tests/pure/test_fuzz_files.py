"""Damaged files are used correctly or refused with what, where and what to try."""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from support.mutations import FUZZING, as_json, damaged, mutated
from support.planning_cases import CLUSTER_FILE, cluster_of, profile_of, random_graph

from autopipe.commands.store import PlanRecord, profile_digest
from autopipe.errors import ArtifactError, AutopipeError
from autopipe.ir import artifact
from autopipe.ir.cluster import Links
from autopipe.ir.cuts import Cuts
from autopipe.ir.graph import Graph
from autopipe.ir.plan import Plan
from autopipe.ir.plan_fits_graph import refuse_disagreement
from autopipe.ir.profile import Profile
from autopipe.planning import PlanOptions, make_plan
from autopipe.planning.clusters import parse_cluster, read_cluster
from autopipe.planning.requests import PlanRequest
from autopipe.runtime.job import Job

GRAPH_TXT = """node1 -- Input0 -- forward_compute_time=0.000, backward_compute_time=0.000, activation_size=0.0, parameter_size=0.000
node2 -- Linear(4, 4) -- forward_compute_time=1.500, backward_compute_time=3.000, activation_size=64.000, parameter_size=80.000
node3 -- ReLU() -- forward_compute_time=0.500, backward_compute_time=0.250, activation_size=[64.0; 32.0], parameter_size=0.000
node4 -- Add -- forward_compute_time=0.500, backward_compute_time=0.250, activation_size=64.0, parameter_size=0.000
\tnode1 -- node2
\tnode2 -- node3
\tnode2 -- node4
\tnode3 -- node4
"""  # noqa: E501 - the format has long lines


def documents() -> dict[str, Any]:
    """Return one valid value of every kind of artifact."""
    rng = random.Random(3)
    profile = profile_of(random_graph(rng, 9), rng, (2, 4))
    cluster = cluster_of(rng, 2)
    plan = make_plan(profile, cluster, PlanOptions(num_ranks=2, batch_size=8, num_microbatches=4, schedule="1f1b"))
    request = PlanRequest(
        gpus=2,
        batch_size=8,
        schedule="1f1b",
        num_microbatches=4,
        microbatch_size=None,
        recompute="auto",
        cluster=cluster,
        gpu_memory_bytes=None,
        link=None,
        replicas="never",
        device_name=None,
    )
    return {
        "profile": profile,
        "graph": profile.graph,
        "plan": plan,
        "plan-record": PlanRecord(plan.digest, profile_digest(profile), request, cluster),
        "links": Links("cpu", 1e-4, 4e9, 2e9),
        "job": Job(4, 0, 8),
    }


VALUES = documents()
USES: dict[str, Callable[[Any], object]] = {
    "profile": lambda value: make_plan(value, VALUES["plan-record"].cluster, PlanOptions(num_ranks=2, batch_size=8)),
    "graph": lambda value: [value.digest, Cuts(value).legal, refuse_disagreement(VALUES["plan"], value)],
    "plan": lambda value: [value.digest, refuse_disagreement(value, VALUES["profile"].graph)],
    "plan-record": lambda value: value.request.overlaid(PlanRequest(gpus=3)).changes_to(value.request),
    "links": lambda value: value.level(4).ring_bandwidth,
    "job": lambda value: value.device,
}


def read(kind: str, data: bytes, folder: Path) -> Any:
    """Load an artifact and use it as the next step does; return None if it is properly refused."""
    path = folder / f"{kind}.json"
    path.write_bytes(data)
    try:
        value = artifact.load(type(VALUES[kind]), path, renew="autopipe COMMAND")
    except AutopipeError as error:
        assert error.what
        assert error.where
        assert error.remedy
        str(error).encode("utf-8")
        return None
    try:
        USES[kind](value)
    except AutopipeError as error:  # such as too little memory, which the caller reports with its context
        assert error.what
        return None
    artifact.save(value, path)  # an accepted value can be saved
    assert artifact.load(type(value), path, renew="autopipe COMMAND") == value
    return value


def written(kind: str, folder: Path) -> bytes:
    artifact.save(VALUES[kind], folder / f"{kind}.json")
    return (folder / f"{kind}.json").read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("kind", VALUES)
def test_a_written_artifact_is_read(kind: str, folder: Path) -> None:
    assert read(kind, written(kind, folder), folder) == VALUES[kind]


@pytest.mark.parametrize("kind", VALUES)
def test_a_changed_artifact_is_the_same_or_refused(kind: str, folder: Path) -> None:
    document = json.loads(written(kind, folder))

    @FUZZING
    @given(mutated(document))
    def check(changed: Any) -> None:
        value = read(kind, as_json(changed), folder)
        if value is not None and changed.get("digest") is not None:
            assert value == VALUES[kind]

    check()


@pytest.mark.parametrize("kind", VALUES)
def test_an_artifact_without_a_digest_is_consistent_or_refused(kind: str, folder: Path) -> None:
    document = json.loads(written(kind, folder))
    del document["digest"]

    @FUZZING
    @given(mutated(document))
    def check(changed: Any) -> None:
        value = read(kind, as_json(changed), folder)
        if isinstance(value, Plan):
            says_what_it_does(value)

    check()


def says_what_it_does(plan: Plan) -> None:
    """Assert that only figures, names and the cutting of the batch differ from the plan of the graph."""
    graph, known = VALUES["profile"].graph, VALUES["plan"]
    assert plan.graph_digest == graph.digest
    assert sorted({name for stage in plan.stages for name in stage.parameters}) == sorted(graph.parameters)
    assert plan.microbatch_size * plan.num_microbatches >= plan.batch_size >= plan.num_microbatches >= 1
    kept = [(b.value, b.producer, b.consumers, b.spec) for b in plan.boundaries]
    assert kept == [(b.value, b.producer, b.consumers, b.spec) for b in known.boundaries] or plan.stages != known.stages


@pytest.mark.parametrize("kind", VALUES)
def test_changed_bytes_are_detected(kind: str, folder: Path) -> None:
    original = written(kind, folder)

    @FUZZING
    @given(damaged(original))
    def check(data: bytes) -> None:
        value = read(kind, data, folder)
        assert value is None or value == VALUES[kind] or b'"digest"' not in data

    check()


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (lambda d: d.update(num_microbatches=0), "a batch of 8 samples cannot be split into 0 microbatches"),
        (lambda d: d.update(microbatch_size=3), "4 microbatches of 3 samples do not make a batch of 8"),
        (lambda d: d["stages"][0].update(last="nowhere"), "stage 0 is named .*, but its cuts are at"),
        (lambda d: d["stages"][1].update(ranks=[0]), r"the stages must use all of 2 ranks, and use \[0\]"),
        (lambda d: d["stages"][1].update(ranks=[1, 1]), "needs at least one rank, and each rank once"),
        (lambda d: d["stages"][0]["parameters"].pop(), "without its parameter|is in no stage"),
        (lambda d: d["boundaries"].pop(), "it sends .*, but its cuts send"),
        (lambda d: d["boundaries"][0].update(consumers=[0]), "does not go forward"),
        (lambda d: d["boundaries"][0].update(consumers=[7]), "but its cuts send|goes to stage 7; there are 2 stages"),
        (lambda d: d.update(num_ranks=10**9), "all of 1000000000 ranks"),
        (lambda d: d["predicted"].update(step_seconds=-1.0), "a prediction must be at least 0"),
        (lambda d: d["workload"].update(seed=2**64), "below 2"),
        (lambda d: d["workload"].update(precision="fp4"), "unknown precision 'fp4'"),
    ],
)
def test_an_impossible_plan_is_refused_with_its_values(folder, change, shown) -> None:
    document = json.loads(written("plan", folder))
    del document["digest"]
    change(document)
    (folder / "plan.json").write_bytes(as_json(document))
    with pytest.raises(ArtifactError, match=shown):
        refuse_disagreement(artifact.load(Plan, folder / "plan.json", renew="autopipe plan"), VALUES["profile"].graph)


def test_a_changed_digit_is_detected_unless_the_digest_is_renewed(folder: Path) -> None:
    document = json.loads(written("profile", folder))
    document["measurements"][0]["costs"]["n0"]["forward_seconds"] *= 2
    path = folder / "profile.json"
    path.write_bytes(as_json(document))
    with pytest.raises(ArtifactError, match="was modified after it was written") as caught:
        artifact.load(Profile, path, renew="autopipe profile TARGET")
    assert "autopipe profile TARGET" in caught.value.remedy
    assert 'delete its "digest" line' in caught.value.remedy
    del document["digest"]
    path.write_bytes(as_json(document))
    assert artifact.load(Profile, path, renew="").measurements != VALUES["profile"].measurements


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('{"kind": "Links", "kind": "Links"}', 'key "kind" appears twice'),
        ('{"kind": NaN}', "NaN is not allowed as a number"),
        ("[" * 100_000, "it is not JSON"),
        ("9" * 5000, "it is not JSON"),
        ("", "it is not JSON"),
        ("[]", "it does not contain an object"),
        ('{"kind": "Graph", "schema_version": "1"}', "it is a Graph of format"),
    ],
)
def test_invalid_json_is_reported_as_damaged(folder: Path, text: str, shown: str) -> None:
    path = folder / "graph.json"
    path.write_text(text)
    with pytest.raises(ArtifactError, match=r"graph\.json is damaged: ") as caught:
        artifact.load(Graph, path, renew="autopipe train")
    assert shown in caught.value.what
    assert caught.value.remedy == "autopipe train"


# -- files of other formats --------------------------------------------------------------------------------------------


def refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except AutopipeError as error:
        assert error.what
        assert error.where
        assert error.remedy
        return True
    return False


def plan_on(profile: Profile, cluster: Any) -> object:
    ranks = min(cluster.num_ranks, 2)
    return make_plan(profile, cluster, PlanOptions(num_ranks=ranks, batch_size=8, num_microbatches=4))


def test_a_changed_cluster_file_describes_a_cluster_or_is_refused() -> None:
    @FUZZING
    @given(mutated(tomllib.loads(CLUSTER_FILE)))
    def check(document: Any) -> None:
        value: list[Any] = []
        if not refused(lambda: value.append(parse_cluster(document, "cluster.toml"))):
            cluster = value[0]
            assert cluster.num_ranks >= 1
            assert all(level.bandwidth > 0 and level.latency_seconds >= 0 for level in cluster.levels)
            try:
                plan_on(VALUES["profile"], cluster)
            except AutopipeError as error:
                assert error.what

    check()


def test_changed_bytes_of_a_cluster_file_never_cause_a_traceback(folder: Path) -> None:
    path = folder / "cluster.toml"

    @FUZZING
    @given(damaged(CLUSTER_FILE.encode()))
    def check(data: bytes) -> None:
        path.write_bytes(data)
        refused(lambda: read_cluster(path))

    check()


@pytest.mark.parametrize(
    "text",
    [
        CLUSTER_FILE.replace("count = 4", "count = 1000000000"),
        CLUSTER_FILE.replace('"16GiB"', '"1e99GiB"'),
        CLUSTER_FILE.replace('"10GB/s"', '"0GB/s"'),
        CLUSTER_FILE.replace('"5us"', '"1e99s"'),
        CLUSTER_FILE.replace("[device]", "device = 3\n[other]"),
        CLUSTER_FILE.replace("speed = 1.0", "speed = nan"),
        "a = " + "[" * 5000,
    ],
)
def test_an_impossible_cluster_is_refused(folder: Path, text: str) -> None:
    (folder / "cluster.toml").write_text(text)
    assert refused(lambda: read_cluster(folder / "cluster.toml"))
