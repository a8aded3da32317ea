"""The variables of a launcher are read as the identity of a rank, or refused with the variable."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.errors import RunError
from autopipe.launch.remote.rank_environment import RankIdentity, first_host, read_identity

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPIEXEC = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1", "MASTER_ADDR": "10.0.0.1"}


def test_torchrun_sets_every_variable() -> None:
    assert read_identity(TORCHRUN) == RankIdentity(
        launcher="torchrun",
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        address="node1",
        port=29400,
        attempt=2,
        store_exists=True,
    )


def test_srun_sets_every_variable_and_all_ranks_derive_the_same_address() -> None:
    results = read_identity(SRUN)
    assert (results.launcher, results.rank, results.world_size) == ("srun", 2, 3)
    assert (results.local_rank, results.local_world_size, results.address) == (0, 1, "n1")
    first = read_identity({**SRUN, "SLURM_PROCID": "0", "SLURM_NODEID": "0"})
    assert (first.address, first.port, first.local_world_size) == (results.address, results.port, 2)
    assert read_identity({**SRUN, "SLURM_STEP_ID": "1"}).port != results.port
    assert read_identity({**SRUN, "SLURM_JOB_ID": "18"}).port != results.port


def test_mpirun_on_one_host_needs_no_address() -> None:
    results = read_identity(MPIRUN)
    assert (results.rank, results.world_size, results.local_rank, results.one_host) == (1, 2, 1, True)
    assert (results.address, results.port) == ("127.0.0.1", 29500)


def test_mpirun_on_several_hosts_needs_an_address() -> None:
    with pytest.raises(RunError, match="MASTER_ADDR is not set"):
        read_identity({**MPIRUN, "OMPI_COMM_WORLD_SIZE": "4"})
    assert read_identity(MPIEXEC).address == "10.0.0.1"


def test_torchrun_takes_precedence_over_srun() -> None:
    assert read_identity({**SRUN, **TORCHRUN}).launcher == "torchrun"


def test_variables_of_the_master_take_precedence() -> None:
    results = read_identity({**SRUN, "MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "999"})
    assert (results.address, results.port) == ("10.1.2.3", 999)


def test_a_batch_script_is_not_a_rank() -> None:
    batch = {name: value for name, value in SRUN.items() if not name.startswith("SLURM_STEP")}
    with pytest.raises(RunError, match="no launcher has set"):
        read_identity(batch)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_refused_with_its_name(name: str) -> None:
    with pytest.raises(RunError, match=rf"\b{name} is not set"):
        read_identity({key: value for key, value in TORCHRUN.items() if key != name})


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"RANK": "4"}, ["RANK=4", "WORLD_SIZE=4"]),
        ({"RANK": "-1"}, ["RANK='-1'"]),
        ({"WORLD_SIZE": "four"}, ["WORLD_SIZE='four'"]),
        ({"WORLD_SIZE": "0"}, ["WORLD_SIZE='0'"]),
        ({"LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"]),
        ({"LOCAL_WORLD_SIZE": "5"}, ["LOCAL_WORLD_SIZE=5", "WORLD_SIZE=4"]),
        ({"MASTER_PORT": "65536"}, ["MASTER_PORT=65536"]),
        ({"RANK": "٣"}, ["RANK="]),  # a digit that no launcher writes
    ],
)
def test_an_impossible_value_is_refused_with_its_variable(changed: dict[str, str], named: list[str]) -> None:
    with pytest.raises(RunError) as caught:
        read_identity({**TORCHRUN, **changed})
    assert all(name in caught.value.what for name in named)


@pytest.mark.parametrize("text", ["2(x", "x", "2,,1", "2", "0(x2)"])
def test_a_count_per_node_that_does_not_cover_this_node_is_refused(text: str) -> None:
    with pytest.raises(RunError, match="SLURM_STEP_TASKS_PER_NODE"):
        read_identity({**SRUN, "SLURM_STEP_TASKS_PER_NODE": text})


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("n1", "n1"),
        ("n[1-2]", "n1"),
        ("n[07,09-12],login", "n07"),
        ("rack[2-3,7]node[01-12],login", "rack2node01"),
        ("a,b[1-3]", "a"),
        ("", ""),
    ],
)
def test_the_first_of_a_host_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


NAMES = [*TORCHRUN, *SRUN, *MPIRUN, *MPIEXEC]
VALUES = st.one_of(st.integers(-2, 70000).map(str), st.text(max_size=8), st.sampled_from(["2(x3)", "n[1-", "]", "1,1"]))


@given(st.dictionaries(st.sampled_from(NAMES), VALUES))
def test_any_environment_is_a_consistent_identity_or_a_clear_error(environment: dict[str, str]) -> None:
    try:
        results = read_identity(environment)
    except RunError as error:
        assert error.where == "the environment" or error.where.startswith("the environment:")
        return
    assert 0 <= results.rank < results.world_size
    assert 0 <= results.local_rank < results.local_world_size
    assert 0 < results.port < 65536
    assert results.address


@given(st.integers(1, 64).flatmap(lambda world: st.tuples(st.just(world), st.integers(0, world - 1))))
def test_every_rank_of_torchrun_has_its_identity(pair: tuple[int, int]) -> None:
    world, rank = pair
    environment = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    results = read_identity(environment)
    assert (results.rank, results.world_size) == (rank, world)
