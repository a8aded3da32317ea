"""The ssh launcher: OpenSSH starts an agent on each host, the agent runs the ranks there, and this process watches all.

It uses the user's own ssh configuration, keys and jump hosts. The hosts need nothing but the same autopipe. A host that
sends nothing for six seconds is lost; a host that receives nothing for fifteen seconds ends its ranks itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopipe.ir.plan import bytes_by_rank
from autopipe.launch.remote import network, preflight, protocol
from autopipe.launch.remote.agent_pool import AgentPool, command_of, prepare_message
from autopipe.launch.remote.hosts import assign
from autopipe.launch.remote.remote_ranks import RemoteRanks
from autopipe.launch.request import LOOPBACK, HostCommand, LaunchRequest, WorkerSpec
from autopipe.launch.supervisor import Supervisor
from autopipe.workers.signals import handled_by

# a lost host is detected later than the connections that it closed
_PATIENCE_SECONDS = protocol.LOST_SECONDS + 2.0


@dataclass(frozen=True, slots=True)
class _Placement:
    """A host and its ranks."""

    host: str
    ranks: tuple[int, ...]

    def start(self, request: LaunchRequest, store: str, interface: str) -> protocol.Start:
        """Return the message that starts the ranks. The agent adds the paths of its own host."""
        return protocol.Start(1, tuple(self._spec(request, rank, store, interface) for rank in self.ranks))

    def _spec(self, request: LaunchRequest, rank: int, store: str, interface: str) -> WorkerSpec:
        return request.worker_spec(
            rank,
            store=store,
            interface=interface if store else LOOPBACK,
            host=self.host,
            local_rank=self.ranks.index(rank),
            local_world_size=len(self.ranks),
        )


def run_ranks(request: LaunchRequest, rendezvous: object = None) -> None:
    """Check the hosts, start the ranks there, and return when all are done.

    No rank is left on a host that can be reached, however this returns; on any other host, ranks end within fifteen
    seconds.

    Raises: RunError if a host cannot be reached or lacks something; WorkerError for the first failure.
    """
    placements = _placements(request)
    with handled_by(request.stop):
        pool = AgentPool([placement.host for placement in placements], request.settings)
        try:
            survey = _check(request, pool, placements)
            _start(request, pool, survey, placements)
            hosts = [placement.host for placement in placements for _ in placement.ranks]
            ranks_of = [placement.ranks for placement in placements]
            ranks = RemoteRanks(pool, ranks_of, hosts, patience_seconds=_PATIENCE_SECONDS)
            Supervisor(request, ranks).watch()
        finally:
            pool.close()


def commands(request: LaunchRequest) -> list[HostCommand]:
    """Return the command for each host, and the messages that its agent would read."""
    placements = _placements(request)
    store = "tcp://ADDRESS:PORT" if len(placements) > 1 else ""
    note = "questions before the start are left out: versions, clock, addresses, files"
    host_commands = []
    for placement in placements:
        start = placement.start(request, store, request.settings.interface)
        lines = protocol.encode(prepare_message(devices=False)) + protocol.encode(start)
        command = command_of(placement.host, request.settings)
        stdin = lines.decode().removesuffix("\n")
        host_commands.append(
            HostCommand(host=placement.host, ranks=placement.ranks, command=command, stdin=stdin, note=note)
        )
    return host_commands


def _placements(request: LaunchRequest) -> list[_Placement]:
    """Return the hosts that get ranks."""
    hosts = request.settings.hosts
    assigned = zip(hosts, assign(hosts, request.world_size), strict=True)
    return [_Placement(host.name, ranks) for host, ranks in assigned if ranks]


def _check(request: LaunchRequest, pool: AgentPool, placements: Sequence[_Placement]) -> preflight.Survey:
    """Run the preflight checks and pass their notes on. Raises: RunError for the first problem."""
    plan, devices = request.run.plan(), request.run.job().device.startswith("cuda")
    survey = preflight.survey(pool, request.settings, devices=devices)
    peak = bytes_by_rank(plan.stages)
    needed = [[peak[plan.rank_of(process)] for process in placement.ranks] for placement in placements]
    findings = preflight.first_problem(preflight.versions(survey))
    findings += preflight.first_problem(preflight.same_files(pool, request.run.path.resolve(), request.model_files))
    findings += preflight.first_problem(preflight.memory(survey, needed, devices=devices))
    findings += preflight.first_problem(preflight.clocks(survey))
    if len(survey.hosts) > 1:
        for address, _ in survey.addresses:
            network.refuse_public(address, trusted=request.settings.trust_network)
        findings += preflight.first_problem(preflight.reachable(pool, survey))
    for finding in findings:
        if finding.state == "note":
            request.on_event({"kind": "note", "text": f"{finding.host}: {finding.name}: {finding.detail}"})
    return survey


def _start(request: LaunchRequest, pool: AgentPool, survey: preflight.Survey, placements: Sequence[_Placement]) -> None:
    store = ""
    if len(survey.hosts) > 1:
        listening = pool.ask({0: protocol.Listen(survey.addresses[0][0])}, protocol.Listening)[0]
        store = network.tcp_address(listening.address, listening.port)
    interfaces = [interface for _, interface in survey.addresses]
    starts = {index: placement.start(request, store, interfaces[index]) for index, placement in enumerate(placements)}
    pool.ask(starts, protocol.Started, protocol.START_SECONDS)
