"""The ssh launcher: an agent on each host, started by plain OpenSSH, runs the ranks there; this process watches all.

It keeps to the user's own ssh configuration, keys and jump hosts, and needs nothing on the hosts but the same autopipe.
A host that says nothing for six seconds is lost; a host that hears nothing for fifteen ends its ranks itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autopipe.ir import artifact
from autopipe.ir.plan import bytes_by_rank
from autopipe.launch.rank.heartbeat import Beat
from autopipe.launch.rank.signals import handled_by
from autopipe.launch.remote import network, preflight
from autopipe.launch.remote.agent_pool import LOST_SECONDS, Agents, command_of, hello
from autopipe.launch.remote.hosts import assign
from autopipe.launch.request import LOOPBACK, HostCommand, LaunchRequest, WorkerSpec
from autopipe.launch.supervisor import Supervisor
from autopipe.workload.target.targets import Target

_ANSWERS = ("started", "odd", "ended", "facts", "clock", "digests", "address", "probing", "listening", "reached")
_STACKS_SECONDS = 2.0
# until torch is imported, on a host whose Python lies on a slow disk
_START_SECONDS = 300.0


class AgentRanks:
    """The ranks of a run behind their agents. ``ranks_of``: the ranks of each agent's host."""

    # that a host is gone is noticed later than that its connections are closed
    patience_seconds = LOST_SECONDS + 2.0

    def __init__(self, agents: Agents, ranks_of: Sequence[Sequence[int]]) -> None:
        self.hosts = tuple(link.host for link, ranks in zip(agents.links, ranks_of, strict=True) for _ in ranks)
        self._agents, self._ranks_of = agents, ranks_of
        self._beats = [Beat(0, time.monotonic(), False, "starting") for _ in self.hosts]

    def poll(self, timeout: float) -> Iterator[dict[str, Any]]:
        """Return what ranks said, which ended, and which hosts are lost, within ``timeout`` seconds."""
        for index, message in self._agents.hear(timeout):
            link = self._agents.links[index]
            kind = message["kind"]
            if kind == "beats":
                self._note(message["beats"])
            elif kind == "gone":
                yield {
                    **message,
                    "kind": "lost",
                    "host": link.host,
                    "ranks": self._ranks_of[index],
                    "time_ns": time.time_ns(),
                }
            elif kind not in _ANSWERS:
                yield _in_our_time(message, link.offset_ns)

    def _note(self, beats: Sequence[tuple[int, int, float, bool, str, int, int]]) -> None:
        now = time.monotonic()
        for rank, count, age, waiting, doing, bound, stop in beats:
            self._beats[rank] = Beat(count, now - age, waiting, doing, bound, stop)

    def beats(self) -> list[Beat]:
        """Return the last note that each rank's agent passed on."""
        return self._beats

    def set_stop(self, before: int, agreed: bool) -> None:
        """Tell every rank before which minibatch it is to stop."""
        self._agents.tell({"kind": "stop", "before": before, "agreed": agreed})

    def write_stacks(self) -> dict[int, str]:
        """Let every rank write its stacks into its log; return what its agent finds odd about it."""
        from autopipe.errors import RunError

        indices = range(len(self._agents.links))
        try:
            answers = self._agents.ask({i: {"kind": "stacks"} for i in indices}, "odd", _STACKS_SECONDS)
        except RunError:
            return {}  # a host that does not answer is found lost, and that says more
        return {int(rank): text for answer in answers.values() for rank, text in answer["odd"].items()}

    def end(self) -> None:
        """End all agents and their ranks."""
        self._agents.close()


def _in_our_time(message: dict[str, Any], offset_ns: int) -> dict[str, Any]:
    """Return an event of a host in this machine's time."""
    told = dict(message)
    if "time_ns" in told:
        told["time_ns"] -= offset_ns
    if "time" in told:
        told["time"] -= offset_ns / 1e9
    if "spans" in told:
        shift = offset_ns / 1e9
        told["spans"] = [(what, start - shift, end - shift) for what, start, end in told["spans"]]
    return told


def run_ranks(request: LaunchRequest, rendezvous: object = None) -> None:
    """Look at the hosts, start the ranks there, and return when all are done.

    Raises: RunError where a host cannot be reached or lacks something; WorkerError for the first failure. Whatever way
    it ends, no rank is left on a host that can be reached, and none for longer than fifteen seconds on another.
    """
    places = _places(request)
    with handled_by(request.stop):
        agents = Agents([host for host, _ in places], request.settings)
        try:
            found = _look(request, agents, [ranks for _, ranks in places])
            _start(request, agents, found, [ranks for _, ranks in places])
            ranks = AgentRanks(agents, [ranks for _, ranks in places])
            Supervisor(request, ranks).watch()
        finally:
            agents.close()


def commands(request: LaunchRequest) -> list[HostCommand]:
    """Return the command for each host, and what the agent there would read."""
    places = _places(request)
    store = "tcp://ADDRESS:PORT" if len(places) > 1 else ""
    hosts = []
    for host, ranks in places:
        specs = [_spec(request, host, rank, ranks, store, request.settings.interface) for rank in ranks]
        lines = [hello(host, devices=False), {"kind": "start", "specs": [artifact.encode(spec) for spec in specs]}]
        text = "\n".join(json.dumps(line) for line in lines)
        note = "questions before the start are left out: versions, clock, addresses, files"
        command = command_of(host, request.settings)
        hosts.append(HostCommand(host=host, ranks=ranks, command=command, stdin=text, note=note))
    return hosts


def _places(request: LaunchRequest) -> list[tuple[str, tuple[int, ...]]]:
    """Return the hosts that get ranks, with them."""
    hosts = request.settings.hosts
    return [(h.name, ranks) for h, ranks in zip(hosts, assign(hosts, request.world_size), strict=True) if ranks]


def _look(request: LaunchRequest, agents: Agents, ranks_of: Sequence[Sequence[int]]) -> preflight.Survey:
    """Do the preflight. Raises: RunError for the first problem."""
    plan, devices = request.run.plan(), request.run.job().device.startswith("cuda")
    found = preflight.survey(agents, request.settings, devices=devices)
    peak = bytes_by_rank(plan.stages)
    needed = [[peak[rank] for rank in ranks] for ranks in ranks_of]
    targets = [Target.parse(text) for text in (plan.workload.target, *plan.workload.hooks.values())]
    models = sorted({Path(target.location) for target in targets if target.is_file})
    taken = preflight.first_problem(preflight.versions(found))
    taken += preflight.first_problem(preflight.same_files(agents, request.run.path.resolve(), models))
    taken += preflight.first_problem(preflight.memory(found, needed, devices=devices))
    taken += preflight.first_problem(preflight.clocks(found))
    if len(found.hosts) > 1:
        for address, _ in found.addresses:
            network.refuse_public(address, trusted=request.settings.trust_network)
        taken += preflight.first_problem(preflight.reachable(agents, found))
    for finding in taken:
        if finding.state == "note":
            request.on_event({"kind": "note", "text": f"{finding.host}: {finding.name}: {finding.found}"})
    return found


def _start(request: LaunchRequest, agents: Agents, found: preflight.Survey, ranks_of: Sequence[Sequence[int]]) -> None:
    store = ""
    if len(found.hosts) > 1:
        place = agents.ask({0: {"kind": "listen", "address": found.addresses[0][0]}}, "listening")[0]
        store = network.tcp_address(place["address"], place["port"])
    messages = {}
    for index, (host, ranks) in enumerate(zip(found.hosts, ranks_of, strict=True)):
        specs = [_spec(request, host, rank, ranks, store, found.addresses[index][1]) for rank in ranks]
        messages[index] = {"kind": "start", "specs": [artifact.encode(spec) for spec in specs]}
    agents.ask(messages, "started", _START_SECONDS)


def _spec(request: LaunchRequest, host: str, rank: int, ranks: Sequence[int], store: str, interface: str) -> WorkerSpec:
    return request.worker_spec(
        rank,
        store=store,
        interface=interface if store else LOOPBACK,
        host=host,
        local_rank=ranks.index(rank),
        local_world_size=len(ranks),
    )
