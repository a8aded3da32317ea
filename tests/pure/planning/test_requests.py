"""Plan requests and options: values out of range are refused by their option, and requests are combined."""

from __future__ import annotations

from typing import Any

import pytest

from autopipe.errors import PlanError
from autopipe.ir.cluster import Cluster, ClusterDevice, Level
from autopipe.planning import PlanOptions
from autopipe.planning.requests import PlanRequest

CLUSTER = Cluster((Level("node", 2, 1e9, 0.0),), (ClusterDevice("v"),), "test")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gpus": 0}, "--gpus 0 is out of range"),
        ({"batch_size": 2**31}, "--batch-size 2147483648 is out of range"),
        ({"stages_per_rank": 0}, "--stages-per-rank 0 is out of range"),
        ({"gpu_memory_bytes": 0}, "--gpu-memory is 0; it must be larger than 0"),
        ({"link": -1.0}, "--link is -1.0; it must be larger than 0"),
        ({"schedule": "1fb1"}, "unknown schedule '1fb1'"),
        ({"recompute": "sometimes"}, "unknown recompute 'sometimes'"),
    ],
)
def test_a_request_out_of_range_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlanRequest(**fields)


def test_a_cluster_replaces_figures_and_figures_replace_a_cluster() -> None:
    figures = PlanRequest(gpu_memory_bytes=2**30, link=1e9, device_name="H100-80GB")
    described = figures.overlaid(PlanRequest(cluster=CLUSTER))
    assert (described.cluster, described.gpu_memory_bytes, described.link, described.device_name) == (
        CLUSTER, None, None, None,
    )  # fmt: skip
    assert described.overlaid(PlanRequest(link=2e9)).cluster is None
    assert described.of_other_devices and not PlanRequest(gpus=2).of_other_devices


def test_a_grid_replaces_the_numbers_of_ranks_and_microbatches() -> None:
    stored = PlanRequest(gpus=4, num_microbatches=8, schedule="custom", grid="F0,B0\n")
    assert stored.overlaid(PlanRequest(grid="F0,B0\n")) == stored
    other = stored.overlaid(PlanRequest(grid="F0,F1,B0,B1\n"))
    assert (other.gpus, other.num_microbatches) == (None, None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_ranks": 0}, "num_ranks is 0; it must be at least 1"),
        ({"stages_per_rank": 0}, "stages_per_rank is 0; it must be at least 1"),
        ({"num_microbatches": 0}, "num_microbatches is 0; it must be at least 1"),
        ({"microbatch_size": -1}, "microbatch_size is -1; it must be at least 1"),
        ({"recompute": "sometimes"}, "unknown recompute 'sometimes'"),
        ({"exact_ties": "perhaps"}, "unknown exact_ties 'perhaps'"),
        ({"stages_per_rank": 2, "may_replicate": True}, "several stages per rank and different numbers of replicas"),
        ({"schedule": "1fb1"}, "unknown schedule '1fb1'"),
    ],
)
def test_an_option_out_of_range_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        PlanOptions(**{"num_ranks": 2, "batch_size": 8, **fields})


def test_a_number_of_microbatches_replaces_their_size() -> None:
    stored = PlanRequest(microbatch_size=2).overlaid(PlanRequest(num_microbatches=4))
    assert (stored.num_microbatches, stored.microbatch_size) == (4, None)


def test_options_of_an_earlier_command_are_shown_as_they_were_given() -> None:
    earlier = PlanRequest(
        gpus=2, batch_size=64, num_microbatches=2, replicas="never", vertical_sync=False, sequence=True, team=0
    )
    options = ("--num-microbatches 2", "--replicas never", "--no-vertical-sync", "--tensor-parallel auto")
    assert earlier.options_beyond(PlanRequest(batch_size=64)) == (*options, "--sequence-parallel")
    figures = PlanRequest(gpu_memory_bytes=2**30, link=1e9, averages=True, grid="F0,B0")
    assert figures.options_beyond(PlanRequest()) == ("--gpu-memory 1.00 GiB", "--link 1 GB/s", "--schedule-file")
    assert earlier.options_beyond(earlier) == ()
