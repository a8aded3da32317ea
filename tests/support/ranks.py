"""Run a function in several processes with a time limit, and end all of them."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from autopipe.workers.fork_server import preload


def _run(function: Callable[..., Any], rank: int, world: int, store: str, connection: Connection, args: tuple) -> None:
    import os

    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    from autopipe.runtime.transport.distributed import start_process_group

    try:
        start_process_group(dist.FileStore(store, world), rank, world, timeout_seconds=30)
        connection.send(("ok", function(rank, world, *args)))
    except BaseException:
        connection.send(("error", traceback.format_exc()))


def run_ranks(function: Callable[..., Any], world: int, *args: Any, seconds: float = 60.0) -> list[Any]:
    """Return the results of ``function(rank, world, *args)`` by rank. A failure or a timeout is an error."""
    preload()  # the only fork server of this process, which commands use, too
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        try:
            for rank in range(world):
                receive, send = context.Pipe(duplex=False)
                store = str(Path(folder) / "store")
                process = context.Process(target=_run, args=(function, rank, world, store, send, args), daemon=True)
                process.start()
                send.close()
                pipes.append(receive)
                processes.append(process)
            answers = []
            for rank, pipe in enumerate(pipes):
                assert pipe.poll(seconds), f"rank {rank} did not answer within {seconds} s"
                kind, answer = pipe.recv()
                assert kind == "ok", answer
                answers.append(answer)
            return answers
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()
