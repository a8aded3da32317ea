"""Host lists (``h1:2,h2:2``, or a file of ``h1 slots=2`` lines) and the assignment of ranks to hosts.

A host's name becomes a word of the ssh command. Therefore only valid names and addresses are accepted: they never begin
with ``-`` and contain no character that a shell would interpret.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autopipe.errors import RunError, counted
from autopipe.launch.request import Host

HERE = ("localhost", "127.0.0.1")
_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?", re.ASCII)
_ADDRESS = re.compile(r"(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*@)?\[(?P<address>[0-9A-Fa-f:.]+)\]", re.ASCII)
_SLOTS = re.compile(r"slots=(?P<slots>\d+)", re.ASCII)
_MOST_SLOTS = 4096
_LONGEST_NAME = 253


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse ``h1:2,user@h2:2,[fe80::1]:2``; without ``:n`` a host takes an equal share.

    Raises: ValueError with the invalid part.
    """
    return _distinct([_host(part.strip(), text) for part in text.split(",")])


def checked_hosts(hosts: Sequence[Host | str]) -> tuple[Host, ...]:
    """Return hosts given in Python, each of them a ``Host`` or a text such as ``h1:2``.

    Raises: ValueError with the invalid host.
    """
    return _distinct([_checked(host) for host in hosts])


def _checked(host: Any) -> Host:
    if isinstance(host, str):
        return _host(host.strip(), host)
    if not isinstance(host, Host) or not isinstance(host.name, str):
        raise ValueError(f"{host!r} is not a host such as 'h1:2'")
    user, at, address = host.name.rpartition("@")
    name = _name(f"{user}{at}[{address}]" if ":" in address else host.name)
    if type(host.slots) is not int or not 0 <= host.slots <= _MOST_SLOTS:
        raise ValueError(f"{name}: slots must be a whole number from 0 to {_MOST_SLOTS}, got {host.slots!r}")
    return Host(name, host.slots)


def _host(part: str, text: str) -> Host:
    address = _ADDRESS.match(part)
    name, slots = (address[0], part[address.end() :]) if address else part.partition(":")[::2]
    if address:
        if slots and not slots.startswith(":"):
            raise ValueError(f"{part!r} is not [address]:slots")
        return Host(_name(name), _slots(slots[1:], part) if slots else 0)
    if not name:
        raise ValueError(f"{text!r}: a host has no name")
    return Host(_name(name), _slots(slots, part) if ":" in part else 0)


def _name(text: str) -> str:
    """Return a name in the form that ssh accepts. Raises: ValueError if it is invalid."""
    address = _ADDRESS.fullmatch(text)
    if address:
        try:
            ipaddress.IPv6Address(address["address"])
        except ValueError:
            raise ValueError(f"{text!r} is not an IPv6 address") from None
        return f"{address['user'] or ''}{address['address']}"
    if len(text) > _LONGEST_NAME or not _NAME.fullmatch(text):
        raise ValueError(f"{text!r} cannot be a host: letters, digits, '.', '-' and '_', as in [user@]name[:slots]")
    return text


def _slots(text: str, part: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:6]) <= _MOST_SLOTS:
        raise ValueError(f"{part!r}: slots must be a whole number from 1 to {_MOST_SLOTS}")
    return int(text)


def parse_hostfile(text: str) -> tuple[Host, ...]:
    """Parse lines of ``name slots=n`` (``slots=n`` is optional); ``#`` begins a comment.

    Raises: ValueError with the invalid line.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = _SLOTS.fullmatch(words[1]) if len(words) == 2 else None
        if len(words) > 2 or (len(words) == 2 and not slots):
            raise ValueError(f"line {number}, {line.strip()!r}, is not 'name slots=n'")
        hosts.append(Host(_name(words[0]), _slots(slots["slots"], line.strip()) if slots else 0))
    return _distinct(hosts)


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Read a host file. Raises: ValueError if it cannot be read or is invalid."""
    try:
        return parse_hostfile(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _distinct(hosts: list[Host]) -> tuple[Host, ...]:
    if not hosts:
        raise ValueError("the list of hosts is empty")
    name, times = Counter(host.name for host in hosts).most_common(1)[0]
    if times > 1:
        raise ValueError(f"{name} is listed {times} times; list it once with its slots, as in {name}:{times}")
    return tuple(hosts)


def total_slots(hosts: Sequence[Host]) -> int | None:
    """Return the total number of slots, None unless every host gives its own."""
    return sum(host.slots for host in hosts) if hosts and all(host.slots for host in hosts) else None


def assign(hosts: Sequence[Host], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host: consecutive ranks, in the order of the hosts.

    Hosts without slots share the remaining ranks equally. A host may get no rank.

    Raises: RunError if the ranks do not fit.
    """
    fixed = sum(host.slots for host in hosts)
    open_hosts = sum(not host.slots for host in hosts)
    if fixed < num_ranks and not open_hosts:
        raise RunError(
            f"the plan has {counted(num_ranks, 'rank')}, the hosts have {counted(fixed, 'slot')}",
            where=", ".join(f"{host.name}:{host.slots}" for host in hosts),
            remedy=f"give more slots or hosts, or plan for fewer ranks (--gpus {fixed})",
        )
    rest = max(num_ranks - fixed, 0)
    assigned, first, seen = [], 0, 0
    for host in hosts:
        count = host.slots
        if not count:
            count = rest * (seen + 1) // open_hosts - rest * seen // open_hosts
            seen += 1
        last = min(first + count, num_ranks)
        assigned.append(tuple(range(first, last)))
        first = last
    return tuple(assigned)
