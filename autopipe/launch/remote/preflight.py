"""Before ranks are started on several hosts: is everything there that they need? Each finding that is not has its fix.

::

    agents --survey--> Survey (facts, clocks, addresses) --+--> versions, memory, clocks    does it fit together?
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
from autopipe.launch.remote import network
from autopipe.launch.remote.agent import file_digest
from autopipe.launch.remote.agent_pool import Agents, hello
from autopipe.launch.remote.finding import Finding
from autopipe.launch.request import LaunchSettings
from autopipe.units import in_bytes

LEAST_MEMORY_BYTES = 2 * 2**30
CLOCK_SECONDS = 1.0
_CLOCK_ROUNDS = 5
_REACH_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Survey:
    """What the hosts are like, in their order. ``addresses``: (address, interface) towards the other hosts.

    ``offsets_seconds``: each clock less this machine's.
    """

    hosts: tuple[str, ...]
    facts: tuple[Mapping[str, Any], ...]
    offsets_seconds: tuple[float, ...]
    addresses: tuple[tuple[str, str], ...]


def survey(agents: Agents, settings: LaunchSettings, *, devices: bool) -> Survey:
    """Ask every host what it has. Raises: RunError for a host that cannot be reached or asked."""
    indices = range(len(agents.links))
    names = tuple(link.host for link in agents.links)
    found = agents.ask({i: hello(names[i], devices=devices) for i in indices}, "facts")
    facts = tuple(found[i] for i in indices)
    for index, link in enumerate(agents.links):
        link.offset_ns = _clock_offset_ns(agents, index)
    asked = {i: {"kind": "address", "interface": settings.interface, "towards": _peer(facts, i)} for i in indices}
    places = agents.ask(asked, "address")
    return Survey(
        names,
        facts,
        tuple(link.offset_ns / 1e9 for link in agents.links),
        tuple((places[i]["address"], places[i]["interface"]) for i in indices),
    )


def _peer(facts: Sequence[Mapping[str, Any]], index: int) -> str:
    """Return the address of another host, by which a host finds the way to them; its own where it is alone.

    A host without ssh is this machine, and known to the others by where their ssh came from.
    """
    others = [str(fact["reached_at"] or facts[index]["reached_from"]) for i, fact in enumerate(facts) if i != index]
    away = [address for address in others if address and not network.is_loopback(address)]
    return (away or ["127.0.0.1"])[0]


def _clock_offset_ns(agents: Agents, index: int) -> int:
    """Return how far a host's clock is ahead, from the quickest of a few answers: half of its way is there and back."""
    rounds = []
    for number in range(_CLOCK_ROUNDS):
        sent = time.time_ns()
        answer = agents.ask({index: {"kind": "clock", "id": number}}, "clock")[index]
        back = time.time_ns()
        rounds.append((back - sent, int(answer["time_ns"]) - (sent + back) // 2))
    return min(rounds)[1]


def versions(found: Survey) -> Iterator[Finding]:
    """Compare versions: the same autopipe and Python as here, but for Python's last number, and the same torch.

    This machine may have torch in another build (``+cpu``) than hosts with GPUs; those must agree in that too.
    """
    here = {"autopipe": __version__, "torch": importlib.metadata.version("torch"), "python": platform.python_version()}
    for host, facts in zip(found.hosts, found.facts, strict=True):
        for name, wanted in here.items():
            have, first = str(facts[name]), str(found.facts[0][name])
            if _comparable(name, have) == _comparable(name, wanted) and (name != "torch" or have == first):
                yield Finding(name, "ok", have, host=host)
                continue
            other = wanted if _comparable(name, have) != _comparable(name, wanted) else first
            told = f"{have or 'not installed'}; {'here' if other == wanted else f'on {found.hosts[0]}'} it is {other}"
            package = {"autopipe": "autopipe-train", "torch": "torch"}.get(name)
            fix = f"pip install {package}=={other} on {host}" if package else f"use Python {other} on {host}"
            yield Finding(name, "problem", told, f"{fix}, or name one with --remote-python", host)
        if not facts["folder"]:
            yield Finding("folder", "note", f"{Path.cwd()} is not there; ranks start in the home folder", host=host)


def _comparable(name: str, version: str) -> str:
    """Return what of a version must be the same."""
    return ".".join(version.split(".")[:2]) if name == "python" else version.partition("+")[0]


def memory(found: Survey, needed_bytes: Sequence[Sequence[int]], *, devices: bool) -> Iterator[Finding]:
    """Compare free memory with what the ranks of each host are predicted to need; nothing predicted: a least amount.

    ``devices``: the ranks run on GPUs, one each as far as there are.
    """
    for host, facts, needed in zip(found.hosts, found.facts, needed_bytes, strict=True):
        free, wanted = int(facts["memory_bytes"]), sum(needed) or LEAST_MEMORY_BYTES
        if devices:
            yield from _device_memory(host, facts["gpus"], needed)
            wanted = LEAST_MEMORY_BYTES
        short = free < wanted
        fix = f"end other programs on {host}, or give it fewer ranks" if short else ""
        text = f"{in_bytes(free)} free, {in_bytes(wanted)} needed"
        yield Finding("memory", "problem" if short else "ok", text, fix, host)


def _device_memory(host: str, gpus: Sequence[Sequence[Any]], needed: Sequence[int]) -> Iterator[Finding]:
    if not gpus:
        yield Finding("GPUs", "problem", "the driver shows none", "check nvidia-smi there, or use --device cpu", host)
        return
    loads = [0] * len(gpus)
    for local, load in enumerate(needed):
        loads[local % len(gpus)] += load
    for index, ((name, free, total), load) in enumerate(zip(gpus, loads, strict=True)):
        short = free < load
        fix = f"end what else uses it, or plan with --gpu-memory {free // 2**30}GiB" if short else ""
        text = f"{name}, {in_bytes(free)} of {in_bytes(total)} free, {in_bytes(load)} needed"
        yield Finding(f"cuda:{index}", "problem" if short else "ok", text, fix, host)


def clocks(found: Survey) -> Iterator[Finding]:
    """Tell how far the clocks are apart; events of the hosts are put in order with it, so nothing depends on it."""
    for host, offset in zip(found.hosts, found.offsets_seconds, strict=True):
        far = abs(offset) > CLOCK_SECONDS
        fix = f"let a time service (chrony, systemd-timesyncd) run on {host}" if far else ""
        yield Finding("clock", "note" if far else "ok", f"{offset * 1e3:+.1f} ms from this machine's", fix, host)


def reachable(agents: Agents, found: Survey) -> Iterator[Finding]:
    """Let every host connect to every other, at the addresses at which the ranks would."""
    if len(found.hosts) == 1:
        return
    asked = {i: {"kind": "probe", "address": address} for i, (address, _) in enumerate(found.addresses)}
    ports = {i: answer["port"] for i, answer in agents.ask(asked, "probing").items()}
    targets = [(host, found.addresses[i][0], ports[i]) for i, host in enumerate(found.hosts)]
    reach = {i: {"targets": targets[:i] + targets[i + 1 :], "seconds": _REACH_SECONDS} for i in ports}
    answers = agents.ask({i: {"kind": "reach", **message} for i, message in reach.items()}, "reached")
    for index, host in enumerate(found.hosts):
        address, interface = found.addresses[index]
        for name, why in answers[index]["failures"]:
            there = found.addresses[found.hosts.index(name)][0]
            yield Finding(
                "network",
                "problem",
                f"{address} ({interface}) cannot reach {name} at {there}: {why}",
                "open the firewall between these hosts for each other, or choose another network with --interface",
                host,
            )
        if not answers[index]["failures"]:
            yield Finding("network", "ok", f"{address} ({interface}) reaches every other host", host=host)


def same_files(agents: Agents, folder: Path, models: Sequence[Path]) -> Iterator[Finding]:
    """Compare what the hosts read with what is here: the run directory by a file with a secret, then all that counts.

    ``models``: the user's own files.

    Raises: RunError where the folder cannot be written.
    """
    secret = folder / f".shared-{secrets.token_hex(8)}"
    try:
        secret.write_text(secrets.token_hex(32), encoding="ascii")
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error.strerror}", remedy="choose another --run-dir") from None
    try:
        told = [folder / name for name in ("job.json", "plan.json", "graph.json")]
        told += [path for path in sorted((folder / "stages").rglob("*")) if path.is_file()]
        here = {str(path): file_digest(path) for path in (secret, *told, *models)}
        asked = {i: {"kind": "digests", "paths": list(here)} for i in range(len(agents.links))}
        answers = agents.ask(asked, "digests")
    finally:
        secret.unlink(missing_ok=True)
    for index, link in enumerate(agents.links):
        there = answers[index]["digests"]
        if there[str(secret)] != here[str(secret)]:
            yield Finding(
                "run directory",
                "problem",
                f"{folder} is not the same folder there",
                "name one with --run-dir that all hosts share, such as on NFS",
                link.host,
            )
            continue
        yield Finding("run directory", "ok", f"{folder} is shared", host=link.host)
        other = [path for path in here if there[path] != here[path]]
        for path in other:
            known = "is not there" if not there[path] else "is another file there: its SHA-256 differs"
            fix = f"copy it to {link.host}, or keep it where all hosts share it"
            yield Finding("model" if Path(path) in models else "plan", "problem", f"{path} {known}", fix, link.host)
        if not other:
            yield Finding("model and plan", "ok", "the same files", host=link.host)


def first_problem(findings: Iterator[Finding]) -> list[Finding]:
    """Take findings as long as none is a problem, and return them. Raises: RunError for the first that is one."""
    taken = []
    for finding in findings:
        if finding.state == "problem":
            raise RunError(
                f"{finding.name}: {finding.found}",
                where=f"host {finding.host}" if finding.host else "",
                remedy=finding.fix,
            )
        taken.append(finding)
    return taken
