"""The Ray launcher: a placement group with one actor a rank, each of which runs the command with ``--launcher env``.

::

    this process --placement group--> actors, sorted by node --> `autopipe train --launcher env`, once a rank
         <------------------ the output of rank 0, line by line -----------------

Ray places the actors and forwards output; the ranks find and watch one another as under any other cluster's launcher.
Ray assigns bundles to nodes in any order, so the actors are sorted by node before they get their ranks: neighbouring
stages share a host.
"""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopipe.errors import RunError, counted
from autopipe.launch.forwarding import forwarded
from autopipe.launch.request import cpus_of_rank

PLACE_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RayRun:
    """One run on a Ray cluster."""

    command: tuple[str, ...]  # of each rank
    ranks: int
    folder: Path  # the working directory, on every node
    threads: int = 1  # of a rank
    gpus: bool = False

    def start(self, write: Callable[[str, str], None]) -> int:
        """Run on the cluster of RAY_ADDRESS, or that of this machine, and return rank 0's exit code.

        ``write``: receives (out or err, a line) of rank 0's output.

        Raises: RunError if Ray is not installed, does not answer, or has too few devices.
        """
        ray = _ray()
        try:
            ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False, configure_logging=False)
        except (ConnectionError, RuntimeError) as error:
            raise RunError(
                f"no Ray cluster answers: {str(error).splitlines()[0]}",
                remedy="ray start --head here, or set RAY_ADDRESS",
            ) from None
        try:
            return self._run(ray, write)
        finally:
            ray.shutdown()  # the actors and their placement group end with this connection

    def _run(self, ray: Any, write: Callable[[str, str], None]) -> int:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        cpus = min([cpus_of_rank(self.threads, gpus=self.gpus), *(_cpus_per_gpu(ray) if self.gpus else ())])
        needs = {"CPU": cpus, **({"GPU": 1} if self.gpus else {})}
        group = placement_group([needs] * self.ranks, strategy="PACK")
        if not group.wait(PLACE_SECONDS):
            raise RunError(
                f"Ray could not place {counted(self.ranks, 'rank')} of {needs} each within {PLACE_SECONDS:.0f} s",
                where=f"the cluster has {ray.cluster_resources()}",
                remedy="fewer ranks (--gpus), fewer --threads-per-rank, or more nodes",
            )
        kind = ray.remote(Rank)
        actors = [
            kind.options(
                num_cpus=cpus,
                num_gpus=1 if self.gpus else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            ).remote()
            for index in range(self.ranks)
        ]
        places: list[tuple[str, str]] = ray.get([actor.place.remote() for actor in actors])
        order = sorted(range(self.ranks), key=lambda index: (places[index][0] != places[0][0], places[index], index))
        address = places[order[0]][1]
        port = ray.get(actors[order[0]].free_port.remote(address))
        environments = contracts([places[index][0] for index in order], address, port)
        passed = forwarded(os.environ)
        outputs = [
            actors[index]
            .run.options(num_returns="streaming")
            .remote(self.command, str(self.folder), {**passed, **environment})
            for index, environment in zip(order, environments, strict=True)
        ]
        return _forward(ray, outputs[0], write)


def contracts(nodes: list[str], address: str, port: int) -> list[dict[str, str]]:
    """Return torchrun's variables for each rank. ``nodes``: the node of each rank; ranks of a node are adjacent."""
    counts, seen = Counter(nodes), Counter[str]()
    environments = []
    for rank, node in enumerate(nodes):
        environments.append(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(nodes)),
                "LOCAL_RANK": str(seen[node]),
                "LOCAL_WORLD_SIZE": str(counts[node]),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
            }
        )
        seen[node] += 1
    return environments


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise RunError("--launcher ray: Ray is not installed", remedy="pip install 'autopipe-train[ray]'") from None
    return ray


def _cpus_per_gpu(ray: Any) -> Iterator[int]:
    """Yield how many CPUs each node has for one of its GPUs."""
    for node in ray.nodes():
        resources = node.get("Resources", {})
        if node.get("Alive") and resources.get("GPU"):
            yield max(int(resources.get("CPU", 0) // resources["GPU"]), 1)


def _forward(ray: Any, lines: Any, write: Callable[[str, str], None]) -> int:
    """Forward the output of rank 0 until the rank ends, and return its exit code."""
    try:
        for reference in lines:
            stream, text = ray.get(reference)
            if stream == "code":
                return int(text)
            write(stream, text)
    except ray.exceptions.RayError as error:
        raise RunError(
            f"Ray lost the actor of rank 0: {str(error).splitlines()[0]}",
            remedy="ray status, and the logs of that node",
        ) from None
    raise RunError("rank 0 ended without an exit code", remedy="ray status, and the logs of its node")


class Rank:
    """An actor that runs one rank."""

    def place(self) -> tuple[str, str]:
        """Return the node of the actor, and its address."""
        import ray

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def free_port(self, address: str) -> int:
        """Return a port that is free now."""
        with socket.socket() as probe:
            probe.bind((address, 0))
            return int(probe.getsockname()[1])

    def run(self, command: tuple[str, ...], folder: str, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """Run one rank; yield (out or err, a line) of its output, and then ("code", its exit code)."""
        exec_with_parent_death_signal = (sys.executable, "-m", "autopipe.workers.parent_death", *command)
        process = subprocess.Popen(
            exec_with_parent_death_signal,
            cwd=folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        output: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()

        def pump(name: str, stream: Any) -> None:
            for line in stream:
                output.put((name, line))
            output.put(None)

        streams = {"out": process.stdout, "err": process.stderr}
        for name, stream in streams.items():
            threading.Thread(target=pump, args=(name, stream), daemon=True).start()
        open_streams = len(streams)
        while open_streams:
            entry = output.get()
            if entry is None:
                open_streams -= 1
            else:
                yield entry
        yield "code", str(process.wait())
