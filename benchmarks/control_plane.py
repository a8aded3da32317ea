"""The control plane of many ranks: the rendezvous, and the supervisor while they train.

Starts light members in a few processes. Each member connects, introduces itself and reports heartbeats as the process
of a rank does under torchrun or srun (``launch.remote.peer``), but trains nothing and does not import torch. This
process is rank 0's: it gathers the members, starts them, and watches them with the supervisor of every run. Counts the
operations on the store by which the ranks agree on their GPUs. Writes benchmarks/results/control_plane.md.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from autopipe import __version__
from autopipe.launch.rank.heartbeat import Beat
from autopipe.launch.remote import network, protocol
from autopipe.launch.remote.connections import Connections
from autopipe.launch.remote.peer import connect
from autopipe.launch.remote.rank_environment import RankIdentity
from autopipe.launch.remote.rank_host import RankHost
from autopipe.launch.remote.remote_ranks import RemoteRanks
from autopipe.launch.remote.rendezvous import PATIENCE_SECONDS, Rendezvous
from autopipe.launch.remote.stream import wait_readable
from autopipe.launch.request import LaunchRequest
from autopipe.launch.supervisor import Supervisor
from autopipe.runtime.job import RunDirectory

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results" / "control_plane.md"
INSTRUCTIONS = 100.0  # that a rank runs in a second
STEP_SECONDS = 0.5  # between two reports of a step


class LightRanks:
    """The ranks of a member: their heartbeats advance with the time."""

    def __init__(self) -> None:
        self._begin = time.monotonic()

    def waitable(self) -> list[Any]:
        """Return nothing: no process can end."""
        return []

    def beat(self, rank: int) -> Beat:
        """Return the heartbeat of a rank."""
        now = time.monotonic()
        count = int((now - self._begin) * INSTRUCTIONS)
        return Beat(count, now, False, f"{rank % 8}F{count % 64}@{count // 64}", count // 64 + 1, -1)


def members(port: int, ranks: range, world_size: int) -> None:
    """Be the processes of some ranks, until rank 0's process has closed all connections."""
    print("ready", flush=True)
    sys.stdin.readline()
    streams = {rank: connect("127.0.0.1", port) for rank in ranks}
    hosts = {}
    for rank, stream in streams.items():
        stream.send(protocol.Hello(__version__, rank, world_size, rank % 8, 8, f"host{rank // 8}"))
        hosts[rank] = RankHost(Path(), stream.send)
    waiting = dict(streams)
    while waiting:
        ready = wait_readable(waiting.values())
        for rank in [rank for rank, stream in waiting.items() if stream in ready]:
            (start,) = waiting.pop(rank).receive()
            assert isinstance(start, protocol.Start)
            hosts[rank].attempt, hosts[rank]._numbers = start.attempt, [rank]
            hosts[rank]._ranks = LightRanks()  # type: ignore[assignment]
    stepped = time.monotonic()
    while True:
        begin = time.monotonic()
        for position, host in enumerate(hosts.values()):  # spread over the interval, as in processes of their own
            host.send_beats(now=False)
            time.sleep(max(0.0, begin + protocol.BEAT_SECONDS * (position + 1) / len(hosts) - time.monotonic()))
        if world_size - 1 in hosts and time.monotonic() - stepped > STEP_SECONDS:
            stepped = time.monotonic()
            event = {"kind": "step", "rank": world_size - 1, "step": 1, "loss": 1.0, "samples": 8, "time": time.time()}
            streams[world_size - 1].send(protocol.Event(1, event))


class FinishedError(Exception):
    """The measurement is complete."""


def measure(world_size: int, processes: int, seconds: float, scratch: Path) -> dict[str, float]:
    """Return the seconds of the rendezvous and of the start, and the supervisor's share of one core."""
    listener = network.listen("127.0.0.1")
    port = listener.getsockname()[1]
    bounds = [1 + (world_size - 1) * index // processes for index in range(processes + 1)]
    children = [
        subprocess.Popen(
            [sys.executable, __file__, "--members", str(port), str(a), str(b), str(world_size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
        )
        for a, b in itertools.pairwise(bounds)
    ]
    try:
        for child in children:
            assert child.stdout is not None and child.stdout.readline()
        identity = RankIdentity(
            launcher="torchrun", rank=0, world_size=world_size, local_rank=0, local_world_size=8, address="127.0.0.1",
            port=port,
        )  # fmt: skip
        rendezvous = Rendezvous(identity, listener)
        begin = time.monotonic()
        for child in children:
            assert child.stdin is not None
            child.stdin.write(b"\n")
            child.stdin.flush()
        rendezvous.gather(120)
        gathered = time.monotonic()
        peers = [peer for _, peer in sorted(rendezvous.peers.items())]
        started = gathered
        marks: list[tuple[float, float]] = []

        def on_event(event: Mapping[str, Any]) -> None:
            now = time.monotonic()
            if event["kind"] == "tick" and now - started > 2.0:
                marks.append((now, time.process_time()))
                if now - marks[0][0] > seconds:
                    raise FinishedError

        request = LaunchRequest(run=RunDirectory(scratch), world_size=world_size, on_event=on_event)
        for rank, peer in enumerate(peers, start=1):
            peer.send(protocol.Start(1, (request.worker_spec(rank, store="tcp://127.0.0.1:1"),)))
        started = time.monotonic()
        hosts = ["", *(peer.host for peer in peers)]
        ranks_of = [(rank,) for rank in range(1, world_size)]
        # rank 0 has no process here: its heartbeat stays the first
        ranks = RemoteRanks(Connections(peers), ranks_of, hosts, patience_seconds=PATIENCE_SECONDS)
        with contextlib.suppress(FinishedError):
            Supervisor(request, ranks).watch()
        age = max(time.monotonic() - beat.seconds for beat in ranks.beats()[1:])
        rendezvous.close()
    finally:
        for child in children:
            child.kill()
            child.wait()
    (first, cpu), (last, cpu_then) = marks[0], marks[-1]
    return {
        "rendezvous": gathered - begin,
        "start": started - gathered,
        "share": (cpu_then - cpu) / (last - first),
        "age": age,
    }


def store_operations(world_size: int) -> int:
    """Return how many operations on the store the ranks need to agree on their GPUs."""
    import threading

    import torch.distributed as dist

    from autopipe.launch.rank.devices import agree_on_devices

    store, lock, total = dist.HashStore(), threading.Lock(), 0  # type: ignore[attr-defined]

    class Counted:
        def __getattr__(self, name: str) -> Any:
            nonlocal total
            with lock:
                total += 1
            return getattr(store, name)

    threads = [
        threading.Thread(target=agree_on_devices, args=(Counted(), world_size, f"gpu {rank}"))
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return total


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--processes", type=int, default=4, help="that hold the members")
    parser.add_argument("--seconds", type=float, default=10.0, help="of watching")
    parser.add_argument("--dry", action="store_true", help="write no results")
    parser.add_argument("--members", nargs=4, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.members:
        port, first, end, world_size = arguments.members
        members(port, range(first, end), world_size)
        return
    load = os.getloadavg()[0]
    lines = [
        "# The control plane of many ranks",
        "",
        f"Light members in {arguments.processes} processes, one connection a rank, {arguments.seconds:.0f} s of "
        f"watching. {platform.machine()}, {os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB; "
        f"load average before: {load:.1f}. The members share the cores with the process that is measured.",
        "",
        "| ranks | rendezvous | start messages | supervisor, of one core | oldest heartbeat | store operations |",
        "|---|---|---|---|---|---|",
    ]
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as scratch:
            row = measure(size, arguments.processes, arguments.seconds, Path(scratch))
        operations = store_operations(size)
        lines.append(
            f"| {size} | {row['rendezvous']:.2f} s | {row['start']:.2f} s | {row['share']:.1%} | {row['age']:.1f} s "
            f"| {operations} ({operations / size:.1f} a rank) |"
        )
        print(lines[-1], flush=True)
    if not arguments.dry:
        RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
