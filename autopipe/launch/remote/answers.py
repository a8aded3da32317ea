"""Answers to the questions of a watcher about this host, before ranks start here. Each takes and returns JSON."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autopipe.errors import AutopipeError, RunError
from autopipe.launch.remote import host_description, network, protocol
from autopipe.launch.remote.rank_host import RankHost, file_digest
from autopipe.workers.fork_server import preload


def answer(ask: protocol.Ask, host: RankHost) -> protocol.Answer | protocol.Fail:
    """Return the answer to a question. ``host``: listens for the ranks that it will start."""
    questions: dict[str, Callable[..., Any]] = {
        "prepare": prepare,
        "clock": time.time_ns,
        "digests": digests,
        "address": address,
        "listen": host.listen,
        "reach": reach,
    }
    try:
        return protocol.Answer(questions[ask.question](**ask.arguments))
    except AutopipeError as error:
        return protocol.Fail.of(error)
    except (OSError, KeyError, TypeError) as error:
        return protocol.Fail.of(RunError(f"no answer to {ask.question!r}: {type(error).__name__}: {error}"))


def prepare(folder: str, environment: dict[str, str], devices: bool) -> dict[str, Any]:
    """Enter a folder, set variables, begin to import torch, and describe this host. ``devices``: its GPUs, too."""
    os.environ.update(environment)
    exists = Path(folder).is_dir()
    if exists:
        os.chdir(folder)
    preload()
    return {**host_description.collect(devices=devices), "folder": exists}


def digests(paths: list[str]) -> dict[str, str]:
    """Return the SHA-256 of files by path, "" for one that cannot be read."""
    return {path: file_digest(Path(path)) for path in paths}


def address(interface: str, towards: str) -> tuple[str, str]:
    """Return (address, interface) of this host: of the interface, or "" for the one on the route to ``towards``."""
    own = network.address_of(interface) if interface else network.own_address_towards(towards)
    return own, network.interface_of(own)


def reach(targets: list[tuple[str, str, int]], seconds: float) -> dict[str, str]:
    """Connect to (name, address, port) of other hosts, and return the reasons of those that cannot be reached."""
    reasons = {name: network.reach(host, port, seconds) for name, host, port in targets}
    return {name: reason for name, reason in reasons.items() if reason}
