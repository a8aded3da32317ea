"""Host lists: ``h1:2,h2:2`` or a file of ``h1 slots=2`` lines, and which rank runs on which host.

A host's name becomes a word of the ssh command, so only what can be a name or an address is taken: it never begins with
``-``, and holds nothing that a shell would read.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from autopipe.errors import RunError, counted
from autopipe.launch.request import Host

HERE = ("localhost", "127.0.0.1")
_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?", re.ASCII)
_ADDRESS = re.compile(r"(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*@)?\[(?P<address>[0-9A-Fa-f:.]+)\]", re.ASCII)
_SLOTS = re.compile(r"slots=(?P<slots>\d+)", re.ASCII)
_MOST_SLOTS = 4096
_LONGEST_NAME = 253


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read ``h1:2,user@h2:2,[fe80::1]:2``; without ``:n`` a host takes its share.

    Raises: ValueError, with the part that cannot be a host.
    """
    return _distinct([_host(part.strip(), text) for part in text.split(",")])


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
    """Return a name as ssh takes it. Raises: ValueError where it can be none."""
    address = _ADDRESS.fullmatch(text)
    if address:
        try:
            ipaddress.IPv6Address(address["address"])
        except ValueError:
            raise ValueError(f"{text!r} is no IPv6 address") from None
        return f"{address['user'] or ''}{address['address']}"
    if len(text) > _LONGEST_NAME or not _NAME.fullmatch(text):
        raise ValueError(f"{text!r} cannot be a host: letters, digits, '.', '-' and '_', as in [user@]name[:slots]")
    return text


def _slots(text: str, part: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:6]) <= _MOST_SLOTS:
        raise ValueError(f"{part!r}: slots are a whole number from 1 to {_MOST_SLOTS}")
    return int(text)


def parse_hostfile(text: str) -> tuple[Host, ...]:
    """Read lines of ``name slots=n`` (``slots=n`` may be left out); ``#`` begins a comment.

    Raises: ValueError, with the line that cannot be a host.
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = _SLOTS.fullmatch(words[1]) if len(words) == 2 else None
        if len(words) > 2 or (len(words) == 2 and not slots):
            raise ValueError(f"line {number}, {line.strip()!r}, is not 'name slots=n'")
        found.append(Host(_name(words[0]), _slots(slots["slots"], line.strip()) if slots else 0))
    return _distinct(found)


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Read a host file. Raises: ValueError where it cannot be read, or is none."""
    try:
        return parse_hostfile(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _distinct(hosts: list[Host]) -> tuple[Host, ...]:
    if not hosts:
        raise ValueError("no host is named")
    name, times = Counter(host.name for host in hosts).most_common(1)[0]
    if times > 1:
        raise ValueError(f"{name} is named {times} times; give it its slots once, as in {name}:{times}")
    return tuple(hosts)


def total_slots(hosts: Sequence[Host]) -> int | None:
    """Return how many ranks the hosts take, None where not all of them say."""
    return sum(host.slots for host in hosts) if hosts and all(host.slots for host in hosts) else None


def assign(hosts: Sequence[Host], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host: neighbours stay together, hosts are filled in the order they are named.

    What the hosts that name no slots take is shared evenly among them. A host may get none.

    Raises: RunError where the ranks do not fit.
    """
    fixed = sum(host.slots for host in hosts)
    open_hosts = sum(not host.slots for host in hosts)
    if fixed < num_ranks and not open_hosts:
        raise RunError(
            f"the plan has {counted(num_ranks, 'rank')}, the hosts have {counted(fixed, 'slot')}",
            where=", ".join(f"{host.name}:{host.slots}" for host in hosts),
            remedy=f"name more slots or hosts, or plan for fewer ranks (--gpus {fixed})",
        )
    rest = max(num_ranks - fixed, 0)
    found, first, seen = [], 0, 0
    for host in hosts:
        count = host.slots
        if not count:
            count = rest * (seen + 1) // open_hosts - rest * seen // open_hosts
            seen += 1
        last = min(first + count, num_ranks)
        found.append(tuple(range(first, last)))
        first = last
    return tuple(found)
