"""Network addresses: the interface on the route to a peer, and sockets that listen on one address only.

No torch. A machine has several addresses, and the one that its own name resolves to is often wrong (127.0.1.1 on
Debian). Therefore the route to the peer decides.
"""

from __future__ import annotations

import contextlib
import ipaddress
import resource
import socket

import psutil

from autopipe.errors import RunError

_DISCARD_PORT = 9  # no packet is sent: connecting a datagram socket only selects the route
_BACKLOG = 4096  # the ranks of a large run connect at once; the kernel's net.core.somaxconn may be less


def resolve(host: str) -> tuple[int, str]:
    """Return (address family, address) of a host: the first that the system lists.

    Raises: RunError if the name cannot be resolved.
    """
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise RunError(
            f"the host name {host!r} cannot be resolved: {error}",
            remedy="correct the name, or give the address of the host",
        ) from None
    family, _, _, _, sockaddr = entries[0]
    return family, str(sockaddr[0])


def own_address_towards(peer: str) -> str:
    """Return this machine's address on the route to a peer. Raises: RunError without a route."""
    family, address = resolve(peer)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, _DISCARD_PORT))
        except OSError as error:
            raise RunError(
                f"no route to {peer} ({address}): {error.strerror}",
                remedy="check the network between the hosts, or name them by addresses that all of them can reach",
            ) from None
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Return the interface that has an address, "" if none has it."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return ""


def interface_towards(peer: str) -> str:
    """Return this machine's interface on the route to a peer. Raises: RunError without a route."""
    return interface_of(own_address_towards(peer))


def address_of(interface: str) -> str:
    """Return an interface's address, preferably IPv4.

    Raises: RunError if this machine has no such interface, or it has no address.
    """
    known = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in known.get(interface, ()):
            if entry.family == family:
                return entry.address.partition("%")[0]
    raise RunError(
        f"this machine ({socket.gethostname()}) has no interface {interface!r} with an address",
        remedy=f"give --interface NAME with one of: {', '.join(sorted(known))}",
    )


def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address."""
    return ipaddress.ip_address(address).is_loopback


def refuse_public(address: str, *, trusted: bool) -> None:
    """Refuse an address of the public internet, unless the user trusts the network.

    Messages between ranks have neither passwords nor encryption: any host that can connect can change the training.

    Raises: RunError.
    """
    if ipaddress.ip_address(address).is_global and not trusted:
        raise RunError(
            f"the ranks would use {address}, an address of the public internet; torch's messages between ranks "
            "have neither passwords nor encryption",
            remedy="use a private network or a VPN (--interface NAME), or --i-trust-this-network if a firewall "
            "keeps strangers out",
        )


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on one address. ``port`` 0: a free port.

    Raises: RunError if the address or the port cannot be used.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise RunError(
            f"cannot listen on {address}{f' port {port}' if port else ''}: {error.strerror}",
            remedy="stop the program that uses the port, or choose another interface (--interface NAME)",
        ) from None
    return listener


def allow_descriptors(count: int) -> None:
    """Let this process open so many descriptors, or as many as the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        permitted = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, permitted), hard))


def reach(address: str, port: int, seconds: float) -> str:
    """Connect, and return the reason for a failure, "" for success."""
    try:
        with contextlib.closing(socket.create_connection((address, port), timeout=seconds)):
            return ""
    except OSError as error:
        return error.strerror or str(error) or "timed out"


def tcp_address(address: str, port: int) -> str:
    """Return the address of a store as text."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def parse_tcp(text: str) -> tuple[str, int]:
    """Return (host, port) of the text of a store's address. Raises: ValueError if it is invalid."""
    host, colon, port = text.removeprefix("tcp://").rpartition(":")
    if not colon or not host or not port.isdigit():
        raise ValueError(f"{text!r} is not tcp://address:port")
    return host.removeprefix("[").removesuffix("]"), int(port)
