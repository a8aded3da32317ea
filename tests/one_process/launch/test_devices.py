"""A rank on a GPU: which one it takes, and whether the ranks use NCCL."""

from __future__ import annotations

import os
import threading
import types
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopipe.errors import RunError
from autopipe.launch.rank import devices, numa, store
from autopipe.launch.request import WorkerSpec


def spec(rank: int, world_size: int, *, local_rank: int, local_world_size: int) -> WorkerSpec:
    return WorkerSpec(
        run="run",
        rank=rank,
        world_size=world_size,
        store="file:///x",
        heartbeats="",
        body="train",
        timeout_seconds=10.0,
        local_rank=local_rank,
        local_world_size=local_world_size,
    )


@dataclass
class Events:
    """Takes the events of a rank."""

    events: list[dict[str, Any]] = field(default_factory=list)

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})

    @property
    def notes(self) -> list[str]:
        return [event["text"] for event in self.events if event["kind"] == "note"]


def choose(
    monkeypatch: pytest.MonkeyPatch, specs: list[WorkerSpec], visible: list[list[str]]
) -> tuple[list[Any], Events]:
    """Let all ranks choose at once. ``visible``: the GPUs of each rank. Returns their answers or errors."""
    here = threading.local()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(here.gpus))
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: types.SimpleNamespace(uuid=here.gpus[i]))
    store, reporter, answers = dist.HashStore(), Events(), [None] * len(specs)

    def run(index: int) -> None:
        here.gpus = visible[index]
        try:
            answers[index] = devices.choose_gpu(specs[index], (), store, reporter)
        except RunError as error:
            answers[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(specs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return answers, reporter


def test_ranks_that_each_see_one_gpu_of_their_own_use_nccl(monkeypatch):
    """Ray, Kubernetes and srun --gpus-per-task=1 make one GPU visible to each rank."""
    specs = [spec(rank, 4, local_rank=rank, local_world_size=4) for rank in range(4)]
    answers, reporter = choose(monkeypatch, specs, [[f"gpu-{rank}"] for rank in range(4)])
    assert answers == [True] * 4
    assert reporter.notes == [
        "ranks exchange tensors over NCCL, and through host memory while kernels are loaded: each has its own GPU"
    ]


def test_ranks_that_see_all_gpus_take_one_each(monkeypatch):
    specs = [spec(rank, 4, local_rank=rank, local_world_size=4) for rank in range(4)]
    answers, reporter = choose(monkeypatch, specs, [[f"gpu-{i}" for i in range(4)]] * 4)
    assert answers == [True] * 4
    assert sorted(event["index"] for event in reporter.events if event["kind"] == "device") == [0, 1, 2, 3]


def test_more_ranks_than_gpus_exchange_tensors_through_the_host(monkeypatch):
    specs = [spec(rank, 3, local_rank=rank, local_world_size=3) for rank in range(3)]
    answers, reporter = choose(monkeypatch, specs, [["gpu-0", "gpu-1"]] * 3)
    assert answers == [False] * 3
    assert reporter.notes == ["ranks exchange tensors through host memory: 1 of 3 ranks share a GPU with another"]


def test_a_launcher_without_local_ranks_is_refused(monkeypatch):
    """All ranks would take the first of eight GPUs."""
    specs = [spec(rank, 2, local_rank=0, local_world_size=2) for rank in range(2)]
    answers, _ = choose(monkeypatch, specs, [[f"gpu-{i}" for i in range(8)]] * 2)
    assert all(isinstance(answer, RunError) for answer in answers)
    assert "rank 0 would share its GPU with another rank, although 8 GPUs can be used here" in answers[0].what
    assert "LOCAL_RANK" in answers[0].remedy


def test_ranks_that_must_share_on_one_host_do_not_stop_those_of_another(monkeypatch):
    specs = [spec(rank, 4, local_rank=rank % 2, local_world_size=2) for rank in range(4)]
    answers, _ = choose(monkeypatch, specs, [["a-0"], ["a-0"], ["b-0", "b-1"], ["b-0", "b-1"]])
    assert answers == [False] * 4


@pytest.mark.parametrize(("value", "nccl"), [("host", False), ("nccl", True)])
def test_sharing_a_gpu_on_purpose_is_permitted(monkeypatch, value, nccl):
    monkeypatch.setenv(devices.SHARED_GPU, value)
    specs = [spec(rank, 2, local_rank=rank, local_world_size=2) for rank in range(2)]
    answers, _ = choose(monkeypatch, specs, [["gpu-0"]] * 2)
    assert answers == [nccl] * 2


def test_a_gpu_on_which_cuda_does_not_start_is_named(monkeypatch):
    """The text is that of an H200 with too many processes."""

    def refuse(index: int) -> None:
        raise RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in ...")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    rank = spec(2, 4, local_rank=2, local_world_size=4)
    with pytest.raises(RunError) as raised:
        devices.choose_gpu(rank, (), dist.HashStore(), Events())  # type: ignore[arg-type]
    assert raised.value.what == "rank 2 cannot start CUDA on GPU 0: CUDA error: out of memory"
    assert "AUTOPIPE_SHARED_GPU=host" in raised.value.remedy


def test_a_rank_without_a_gpu_is_refused(monkeypatch):
    (answer,), _ = choose(monkeypatch, [spec(0, 1, local_rank=0, local_world_size=1)], [[]])
    assert "rank 0 has no usable GPU: 0 GPUs visible" in answer.what


class Counted:
    """A store that counts its operations."""

    def __init__(self, store: Any) -> None:
        self.store, self.operations = store, 0

    def __getattr__(self, name: str) -> Any:
        self.operations += 1
        return getattr(self.store, name)


def test_the_agreement_takes_seven_operations_of_each_rank_at_most():
    world, store = 512, dist.HashStore()
    counts = [0] * world

    def run(rank: int) -> None:
        counted = Counted(store)
        assert devices.agree_on_devices(counted, world, f"gpu-{rank // 2}") == (world // 2, True)
        counts[rank] = counted.operations

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert max(counts) <= 7 and min(counts) >= 3


def test_the_environment_of_a_gpu_rank_is_the_users_but_for_the_hardware_queues(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("NCCL_MAX_P2P_NCHANNELS", "2")
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    monkeypatch.setattr(devices.os, "environ", devices.os.environ.copy())
    devices.apply_settings(Path("/run/logs"))
    environment = devices.os.environ
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert environment["NCCL_MAX_P2P_NCHANNELS"] == "2"
    assert environment["TORCH_GLOO_LAZY_INIT"] == "1"
    assert environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert environment["TORCH_FR_DUMP_TEMP_FILE"] == "/run/logs/nccl-rank-"


def test_ranks_that_share_a_gpu_through_host_memory_have_fewer_hardware_queues(monkeypatch):
    monkeypatch.setenv(devices.SHARED_GPU, "host")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setattr(devices.os, "environ", devices.os.environ.copy())
    devices.apply_settings(Path("/run/logs"))
    assert devices.os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"


def test_a_rank_runs_on_the_cpus_beside_its_gpu(tmp_path, monkeypatch):
    """All threads of the process are bound, within the CPUs that were permitted before."""
    bound: dict[int, set[int]] = {}
    monkeypatch.setattr(numa.os, "sched_getaffinity", lambda pid: {2, 3, 4, 5})
    monkeypatch.setattr(numa.os, "sched_setaffinity", bound.__setitem__)
    for address, cpus in (("0000:3b:00.0", "0-3,64-67"), ("0000:5e:00.0", "0-127"), ("0000:af:00.0", "8-15")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "local_cpulist").write_text(cpus + "\n")
    assert numa.bind_to_device("0000:5E:00.0", tmp_path) == ()  # it changes nothing
    assert numa.bind_to_device("0000:af:00.0", tmp_path) == ()  # not permitted
    assert numa.bind_to_device("0000:00:00.0", tmp_path) == () == numa.bind_to_device("", tmp_path)  # unknown
    assert not bound
    assert numa.bind_to_device("0000:3B:00.0", tmp_path) == (2, 3)
    assert bound[os.getpid()] == {2, 3} and len(bound) == len(list(Path("/proc/self/task").iterdir()))


def test_the_address_of_a_gpu_is_the_kernels(monkeypatch):
    known = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=59, pci_device_id=1)
    for properties, address in ((known, "0000:3b:01.0"), (types.SimpleNamespace(), "")):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index, properties=properties: properties)
        assert devices._pci_address(0) == address


def test_nccl_uses_exactly_the_interface_and_not_all_whose_names_begin_with_it(monkeypatch):
    monkeypatch.setattr(store.os, "environ", {})
    over_tcp = replace(spec(0, 1, local_rank=0, local_world_size=1), store="tcp://h:1", interface="eth0")
    store.choose_interface(over_tcp.store, over_tcp.interface)
    assert store.os.environ == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}
