"""The ssh launcher: OpenSSH starts a peer on each host, the peer runs the ranks there, and this process watches all.

It uses the user's own ssh configuration, keys and jump hosts. The hosts need nothing but the same autopipe. A host that
sends nothing for six seconds is lost; a host that receives nothing for fifteen seconds ends its ranks itself. Messages
travel over ssh itself, so that no host needs a way to this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopipe.ir.plan import bytes_by_rank
from autopipe.launch.remote import network, preflight, protocol
from autopipe.launch.remote.hosts import assign
from autopipe.launch.remote.remote_ranks import RemoteRanks
from autopipe.launch.remote.ssh_peers import SshPeers, command_of, first_question
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
        """Return the message that starts the ranks. The peer adds the paths of its own host."""
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
    hosts = [placement.host for placement in placements]
    with handled_by(request.stop), SshPeers(hosts, request.settings) as peers:
        survey = _check(request, peers, placements)
        _start(request, peers, survey, placements)
        host_of = [placement.host for placement in placements for _ in placement.ranks]
        ranks_of = [placement.ranks for placement in placements]
        ranks = RemoteRanks(peers, ranks_of, host_of, patience_seconds=_PATIENCE_SECONDS, stop=request.stop)
        Supervisor(request, ranks).watch()


def commands(request: LaunchRequest) -> list[HostCommand]:
    """Return the command for each host, and the messages that its peer would read."""
    placements = _placements(request)
    store = "tcp://ADDRESS:PORT" if len(placements) > 1 else ""
    note = "questions before the start are left out: versions, clock, addresses, files"
    host_commands = []
    for placement in placements:
        start = placement.start(request, store, request.settings.interface)
        lines = protocol.encode(first_question(devices=False)) + protocol.encode(start)
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


def _check(request: LaunchRequest, peers: SshPeers, placements: Sequence[_Placement]) -> preflight.Survey:
    """Run the preflight checks and pass their notes on. Raises: RunError for the first problem."""
    plan, devices = request.run.plan(), request.run.job().device.startswith("cuda")
    survey = preflight.survey(peers, request.settings, devices=devices)
    peak = bytes_by_rank(plan.stages)
    needed = [[peak[plan.rank_of(process)] for process in placement.ranks] for placement in placements]
    findings = preflight.first_problem(preflight.versions(survey))
    findings += preflight.first_problem(preflight.same_files(peers, request.run.path.resolve(), request.model_files))
    findings += preflight.first_problem(preflight.memory(survey, needed, devices=devices))
    findings += preflight.first_problem(preflight.clocks(survey))
    if len(survey.hosts) > 1:
        for address, _ in survey.addresses:
            network.refuse_public(address, trusted=request.settings.trust_network)
        findings += preflight.first_problem(preflight.reachable(peers, survey))
    for finding in findings:
        if finding.state == "note":
            request.on_event({"kind": "note", "text": f"{finding.host}: {finding.name}: {finding.detail}"})
    return survey


def _start(request: LaunchRequest, peers: SshPeers, survey: preflight.Survey, placements: Sequence[_Placement]) -> None:
    store = ""
    if len(survey.hosts) > 1:
        address = survey.addresses[0][0]
        store = network.tcp_address(address, peers.ask({0: protocol.Ask("listen", {"address": address})})[0])
    places = zip(placements, survey.addresses, strict=True)
    peers.start([placement.start(request, store, interface) for placement, (_, interface) in places])
