"""What an elastic run continues with: the remaining hosts and the ranks that fit there, or the other devices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autopipe.commands.loop import refuse_impossible
from autopipe.commands.settings import ModelSettings, PlanSettings, ProfileSettings, TrainSettings
from autopipe.commands.training.attempts import Attempts, _model_files
from autopipe.commands.training.listener import Listener
from autopipe.errors import WorkerError
from autopipe.ir.profile import WorkloadSpec
from autopipe.launch.remote.hosts import parse_hosts
from autopipe.launch.request import LaunchSettings
from autopipe.runtime.job import RunDirectory


def ignore(kind: str, fields: Mapping[str, Any]) -> None:
    pass


def attempts(tmp_path: Path, hosts: str, ranks: int) -> Attempts:
    """Return the attempts of a run with so many ranks."""
    launch = LaunchSettings(hosts=parse_hosts(hosts) if hosts else ())
    plan = PlanSettings(ProfileSettings(ModelSettings("net.py"), work_dir=tmp_path))
    settings = TrainSettings(plan, elastic=True, launch=launch)
    run = RunDirectory(tmp_path / "run")
    listener = Listener(run, ignore, ranks)
    listener.begin(ranks)
    prepared: Any = SimpleNamespace(plan=SimpleNamespace(num_ranks=ranks, num_processes=ranks))
    return Attempts(settings, prepared, run, listener, ignore, lambda *event: pytest.fail("no job is wanted"), no_probe)


def test_a_hook_in_the_model_file_is_no_file_of_its_own() -> None:
    hooks = {"loss": ":criterion", "data": "/a/batches.py:loader", "optimizer": "torch.optim:Adam"}
    plan: Any = SimpleNamespace(workload=WorkloadSpec("/a/net.py:Net", arguments={}, hooks=hooks, inputs=(), seed=0))
    assert _model_files(plan) == (Path("/a/batches.py"), Path("/a/net.py"))


def no_probe() -> Any:
    pytest.fail("nothing asks whether the data repeats")


def left(run: Attempts, rank: int, host: str) -> int:
    return run._remaining_ranks(WorkerError("the process was killed by SIGKILL", rank=rank, host=host))


@pytest.mark.parametrize(
    ("hosts", "ranks", "lost", "expected"),
    [
        ("a:2,b:2", 4, "b", 2),
        ("a:2,b:2", 3, "b", 2),  # b had one rank, and a has at most two slots
        ("a:2,b:2", 3, "a", 2),
        ("a:4,b:4", 4, "a", 4),  # b was unused
        ("a,b", 4, "b", 2),
        ("a,b,c", 4, "a", 3),  # 1, 1 and 2 ranks
        ("a,b,c", 4, "c", 2),
        ("a:4,b", 4, "a", 1),
    ],
)
def test_the_remaining_hosts_get_as_many_ranks_as_fit(
    hosts: str, ranks: int, lost: str, expected: int, tmp_path: Path
) -> None:
    run = attempts(tmp_path, hosts, ranks)
    assert left(run, 0, lost) == expected
    assert [host.name for host in run.settings.launch.hosts] == [h.name for h in parse_hosts(hosts) if h.name != lost]


@pytest.mark.parametrize(("hosts", "host"), [("", ""), ("far", "far")])
def test_a_failed_gpu_is_left_out_by_its_number(hosts: str, host: str, tmp_path: Path) -> None:
    run = attempts(tmp_path, hosts, 3)
    for rank, index in enumerate((0, 2, 3)):
        run.listener({"kind": "device", "rank": rank, "index": index, "others": 2})
    assert left(run, 1, host) == 2
    assert run.settings.excluded_devices == (2,)
    run.listener.begin(2)
    run.listener({"kind": "device", "rank": 0, "index": 3, "others": 1})
    assert left(run, 0, host) == 2
    assert run.settings.excluded_devices == (2, 3)


def test_the_only_gpu_of_a_host_is_used_again_and_a_cpu_is_never_left_out(tmp_path: Path) -> None:
    run = attempts(tmp_path, "", 2)
    run.listener({"kind": "device", "rank": 0, "index": 0, "others": 0})
    assert left(run, 0, "") == left(run, 1, "") == 1
    assert run.settings.excluded_devices == ()


def test_a_hook_of_the_model_file_is_no_other_file(tmp_path: Path) -> None:
    hooks = {"optimizer": ":get_optimizer", "data": ":batches", "loss": "torch.nn:MSELoss"}
    spec = SimpleNamespace(target="net.py", hooks=hooks)
    plan: Any = SimpleNamespace(workload=spec)
    assert _model_files(plan) == (Path("net.py"),)
    prepared: Any = SimpleNamespace(plan=plan, workload=SimpleNamespace(spec=spec))
    refuse_impossible(attempts(tmp_path, "", 2).settings, prepared)
