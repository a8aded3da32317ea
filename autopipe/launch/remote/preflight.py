"""Checks of the hosts before ranks start there. Every problem comes with its fix.

::

    peers --survey--> Survey (facts, clocks, addresses) --+--> versions, memory, clocks    do the hosts fit together?
      |                                                   |
      +--reachable: every host to every other ------------+
      +--same_files: run directory, plan, stages, model --+--> findings, in this order
"""

from __future__ import annotations

import importlib.metadata
import platform
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopipe import __version__
from autopipe.errors import RunError
from autopipe.launch.remote import network, protocol
from autopipe.launch.remote.host_description import Finding
from autopipe.launch.remote.rank_host import file_digest
from autopipe.launch.remote.ssh_peers import SshPeers, first_question
from autopipe.launch.request import LaunchSettings
from autopipe.units import GIB, as_size_option, in_bytes

LEAST_MEMORY_BYTES = 2 * GIB
CLOCK_SECONDS = 1.0
_CLOCK_ROUNDS = 5
_REACH_SECONDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The descriptions of the hosts, in the order of the hosts."""

    hosts: tuple[str, ...]
    facts: tuple[Mapping[str, Any], ...]  # of ``remote.answers.prepare``
    offsets_seconds: tuple[float, ...]  # each host's clock minus this machine's
    addresses: tuple[tuple[str, str], ...]  # (address, interface) towards the other hosts


def survey(peers: SshPeers, settings: LaunchSettings, *, devices: bool) -> Survey:
    """Describe every host. Raises: RunError for a host that cannot be reached or does not answer."""
    facts = tuple(peers.ask_all(first_question(devices=devices)))
    for index, peer in enumerate(peers.peers):
        peer.offset_ns = _clock_offset_ns(peers, index)
    questions = {
        index: protocol.Ask("address", {"interface": settings.interface, "towards": _other_host(facts, index)})
        for index in range(len(facts))
    }
    addresses = peers.ask(questions)
    return Survey(
        hosts=tuple(peer.host for peer in peers.peers),
        facts=facts,
        offsets_seconds=tuple(peer.offset_ns / 1e9 for peer in peers.peers),
        addresses=tuple((addresses[index][0], addresses[index][1]) for index in questions),
    )


def _other_host(facts: Sequence[Mapping[str, Any]], index: int) -> str:
    """Return the address of another host, which determines a host's route; loopback for a single host.

    A host without ssh is this machine; the others know it as the source of their ssh connections.
    """
    others = [str(fact["reached_at"] or facts[index]["reached_from"]) for i, fact in enumerate(facts) if i != index]
    remote = [address for address in others if address and not network.is_loopback(address)]
    return (remote or ["127.0.0.1"])[0]


def _clock_offset_ns(peers: SshPeers, index: int) -> int:
    """Return a host's clock minus this one's, in nanoseconds.

    It uses the fastest of several round trips, and assumes that both directions take equally long.
    """
    rounds = []
    for _ in range(_CLOCK_ROUNDS):
        sent = time.time_ns()
        there = int(peers.ask({index: protocol.Ask("clock", {})})[index])
        received = time.time_ns()
        rounds.append((received - sent, there - (sent + received) // 2))
    return min(rounds)[1]


def versions(survey: Survey) -> Iterator[Finding]:
    """Compare versions: autopipe and torch must equal this machine's, and Python in its first two numbers.

    This machine may have another build of torch (``+cpu``) than hosts with GPUs; the hosts must have the same build.
    """
    for host, facts in zip(survey.hosts, survey.facts, strict=True):
        yield from versions_of(host, facts, survey.hosts[0], survey.facts[0])
        if not facts["folder"]:
            detail = f"{Path.cwd()} does not exist on this host; its ranks start in the home directory"
            yield Finding("folder", "note", detail, host=host)


def versions_of(
    host: str, facts: Mapping[str, Any], first_host: str, first_facts: Mapping[str, Any]
) -> Iterator[Finding]:
    """Compare the versions of one host with this machine's, and its build of torch with the first host's."""
    here = {"autopipe": __version__, "torch": importlib.metadata.version("torch"), "python": platform.python_version()}
    for name, wanted in here.items():
        version, first = str(facts.get(name) or ""), str(first_facts.get(name) or "")
        differs_here = comparable(name, version) != comparable(name, wanted)
        if not differs_here and (name != "torch" or version == first):
            yield Finding(name, "ok", version, host=host)
            continue
        other = wanted if differs_here else first
        where = "here" if other == wanted else f"on {first_host}"
        package = {"autopipe": "autopipe-train", "torch": "torch"}.get(name)
        fix = f"pip install {package}=={other} on {host}" if package else f"use Python {other} on {host}"
        detail = f"{version or 'not installed'}; {where} it is {other}"
        yield Finding(name, "problem", detail, f"{fix}, or name one with --remote-python", host)


def comparable(name: str, version: str) -> str:
    """Return the part of a version that must be equal."""
    return ".".join(version.split(".")[:2]) if name == "python" else version.partition("+")[0]


def memory(survey: Survey, needed_bytes: Sequence[Sequence[int]], *, devices: bool) -> Iterator[Finding]:
    """Compare free memory with the predicted bytes of each host's ranks; without a prediction, with a minimum.

    ``devices``: the ranks run on GPUs, one each as long as there are enough.
    """
    for host, facts, needed in zip(survey.hosts, survey.facts, needed_bytes, strict=True):
        free, wanted = int(facts["memory_bytes"]), sum(needed) or LEAST_MEMORY_BYTES
        if devices:
            yield from _device_memory(host, facts["gpus"], needed)
            wanted = LEAST_MEMORY_BYTES
        short = free < wanted
        fix = f"end other programs on {host}, or give it fewer ranks" if short else ""
        detail = f"{in_bytes(free)} free, {in_bytes(wanted)} needed"
        yield Finding("memory", "problem" if short else "ok", detail, fix, host)


def _device_memory(host: str, gpus: Sequence[Sequence[Any]], needed: Sequence[int]) -> Iterator[Finding]:
    if not gpus:
        fix = "check nvidia-smi on this host, or use --device cpu"
        yield Finding("GPUs", "problem", "the driver reports no GPU", fix, host)
        return
    loads = [0] * len(gpus)
    for local, load in enumerate(needed):
        loads[local % len(gpus)] += load
    for index, ((name, free, total), load) in enumerate(zip(gpus, loads, strict=True)):
        short = free < load
        fix = f"end what else uses it, or plan with --gpu-memory {as_size_option(free)}" if short else ""
        detail = f"{name}, {in_bytes(free)} of {in_bytes(total)} free, {in_bytes(load)} needed"
        yield Finding(f"cuda:{index}", "problem" if short else "ok", detail, fix, host)


def clocks(survey: Survey) -> Iterator[Finding]:
    """Report the clock offsets. They only order the events of the hosts, so a large one is not a problem."""
    for host, offset in zip(survey.hosts, survey.offsets_seconds, strict=True):
        far = abs(offset) > CLOCK_SECONDS
        fix = f"run a time service (chrony, systemd-timesyncd) on {host}" if far else ""
        yield Finding("clock", "note" if far else "ok", f"{offset * 1e3:+.1f} ms from this machine's", fix, host)


def reachable(peers: SshPeers, survey: Survey) -> Iterator[Finding]:
    """Connect every host to every other, at the addresses that the ranks use."""
    if len(survey.hosts) == 1:
        return
    own = [address for address, _ in survey.addresses]
    ports = peers.ask({index: protocol.Ask("listen", {"address": address}) for index, address in enumerate(own)})
    targets = [(host, own[index], ports[index]) for index, host in enumerate(survey.hosts)]
    questions = {
        index: protocol.Ask("reach", {"targets": targets[:index] + targets[index + 1 :], "seconds": _REACH_SECONDS})
        for index in ports
    }
    reasons = peers.ask(questions)
    for index, host in enumerate(survey.hosts):
        address, interface = survey.addresses[index]
        for name, reason in reasons[index].items():
            peer_address = own[survey.hosts.index(name)]
            yield Finding(
                "network",
                "problem",
                f"{address} ({interface}) cannot reach {name} at {peer_address}: {reason}",
                "open the firewall between these hosts for each other, or choose another network with --interface",
                host,
            )
        if not reasons[index]:
            yield Finding("network", "ok", f"{address} ({interface}) reaches every other host", host=host)


def same_files(peers: SshPeers, folder: Path, models: Sequence[Path]) -> Iterator[Finding]:
    """Compare the files that the hosts read with those of this machine.

    A file with a random content shows whether ``folder`` is the same directory. ``models``: the user's own files.

    Raises: RunError if the directory cannot be written.
    """
    secret = folder / f".shared-{secrets.token_hex(8)}"
    try:
        secret.write_text(secrets.token_hex(32), encoding="ascii")
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error.strerror}", remedy="choose another --run-dir") from None
    try:
        paths = [folder / name for name in ("job.json", "plan.json", "graph.json")]
        paths += [path for path in sorted((folder / "stages").rglob("*")) if path.is_file()]
        here = {str(path): file_digest(path) for path in (secret, *paths, *models)}
        answers = peers.ask_all(protocol.Ask("digests", {"paths": list(here)}))
    finally:
        secret.unlink(missing_ok=True)
    for peer, digests in zip(peers.peers, answers, strict=True):
        if digests[str(secret)] != here[str(secret)]:
            yield Finding(
                "run directory",
                "problem",
                f"{folder} is another folder on this host",
                "name one with --run-dir that all hosts share, such as on NFS",
                peer.host,
            )
            continue
        yield Finding("run directory", "ok", f"{folder} is shared", host=peer.host)
        different = [path for path in here if digests[path] != here[path]]
        for path in different:
            what = "differs on this host (SHA-256 mismatch)" if digests[path] else "does not exist on this host"
            detail = f"{path} {what}"
            fix = f"copy it to {peer.host}, or keep it where all hosts share it"
            yield Finding("model" if Path(path) in models else "plan", "problem", detail, fix, peer.host)
        if not different:
            yield Finding("model and plan", "ok", "the same files", host=peer.host)


def same_modules(peers: SshPeers, paths: Sequence[Path]) -> Iterator[Finding]:
    """Compare source files with those of this machine. A host may lack a file."""
    here = {str(path): file_digest(path) for path in paths}
    answers = peers.ask_all(protocol.Ask("digests", {"paths": list(here)}))
    for peer, digests in zip(peers.peers, answers, strict=True):
        for path, digest in here.items():
            there = digests[path]
            if there and there != digest:
                detail = f"{path} has the SHA-256 {there[:16]}... on this host, and {digest[:16]}... here"
                fix = f"copy it to {peer.host}, or keep it where all hosts share it"
                yield Finding("script", "problem", detail, fix, peer.host)
        yield Finding("script", "ok", "the same modules", host=peer.host)


def first_problem(findings: Iterator[Finding]) -> list[Finding]:
    """Return findings if none is a problem. Raises: RunError for the first that is, without running later checks."""
    passed = []
    for finding in findings:
        if finding.state == "problem":
            raise RunError(
                f"{finding.name}: {finding.detail}",
                where=f"host {finding.host}" if finding.host else "",
                remedy=finding.fix,
            )
        passed.append(finding)
    return passed
