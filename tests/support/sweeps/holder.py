"""A process that takes the token of a device, and has a child with the socket. It is started by spawn."""

from __future__ import annotations

import os
import time

from autopipe.runtime.spilling.token import DeviceToken

MOST_SECONDS = 20.0


def take_and_sleep(address: str, ready: object, child: object) -> None:
    client = DeviceToken(address, lambda _: None)
    client.take()
    if os.fork() == 0:  # a child with the socket, which lives on
        child.set()  # type: ignore[attr-defined]
        time.sleep(MOST_SECONDS)
        os._exit(0)
    ready.set()  # type: ignore[attr-defined]
    time.sleep(MOST_SECONDS)
