"""``make zoo``: test every model in a process of its own, with a time limit; writes benchmarks/results/zoo.md.

Each model is captured, planned in three stages and generated; then two training steps in those stages are compared with
the model itself, at two batch sizes and two seeds, with dropout.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import os
import queue
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.zoo.table import summary, write_table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SETS = ("first", "more")
REPRESENTATIVE = (
    "transformers/gpt2", "transformers/llama", "transformers/mixtral", "transformers/bert", "transformers/albert",
    "transformers/t5", "transformers/vit", "own/batch norm", "own/custom function", "own/packed lstm", "own/in place",
    "own/experts",
)  # fmt: skip


class Server:
    """A process that imports everything once and forks a process for each model (``benchmarks.zoo.one``)."""

    def __init__(self, *options: str) -> None:
        self._command = [sys.executable, "-W", "ignore", "-m", "benchmarks.zoo.one", "--serve", *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
        self._process = subprocess.Popen(
            self._command, cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def run(self, name: str, limit_seconds: int) -> dict[str, Any]:
        """Test one model and return its row."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{limit_seconds} {name}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        return dict(json.loads(line)) if line else {"name": name, "result": "failed", "reason": "its process has ended"}

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def keep(rows: list[dict[str, Any]]) -> None:
    """Write the results, with those of earlier runs for the models that this run did not test."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / "zoo.json"
    known = {row["name"]: row for row in json.loads(path.read_text(encoding="utf-8"))} if path.exists() else {}
    known.update({row["name"]: row for row in rows})
    sets = {which: [known[name] for name in listed(which) if name in known] for which in SETS}
    results = [row for rows in sets.values() for row in rows]
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    write_table(sets, RESULTS / "zoo.md")


@functools.cache
def listed(which: str) -> list[str]:
    """Return the models of a set."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.zoo.one", "--list", which]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in output.split("\n") if name]


def main() -> int:
    """Test the requested models; return 1 if a model is wrong or failed, or a representative one is not exact."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="such as transformers/gpt2 or timm [default: all]")
    parser.add_argument("--representative", action="store_true", help="a dozen models of all kinds")
    parser.add_argument("--limit", type=int, default=300, help="seconds for one model")
    parser.add_argument("--jobs", type=int, default=1, help="models at the same time; times are accurate with one")
    parser.add_argument("--set", choices=[*SETS, "all"], default="all", help="the first models, or more of them")
    parser.add_argument("--no-export", action="store_true", help="do not time torch.export")
    options = parser.parse_args()
    names = [name for which in SETS if options.set in (which, "all") for name in listed(which)]
    if options.representative:
        names = [name for name in names if name in REPRESENTATIVE]
    elif options.names:
        names = [name for name in names if name in options.names or name.partition("/")[0] in options.names]
    more = ["--no-export"] if options.no_export or options.representative else []
    rows = []
    servers: queue.SimpleQueue[Server] = queue.SimpleQueue()
    started = [Server(*more) for _ in range(options.jobs)]
    for server in started:
        servers.put(server)

    def tested(name: str) -> dict[str, Any]:
        server = servers.get()
        try:
            return server.run(name, options.limit)
        finally:
            servers.put(server)

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(tested, names):
            rows.append(row)
            seconds, reason = row.get("capture_seconds", 0), row.get("reason", "")[:100]
            print(f"{row['name']:42} {row['result']:12} {seconds:6.1f} s  {reason}", flush=True)
            if not options.representative:
                keep(rows)
    for server in started:
        server.close()
    print(summary(rows))
    if options.representative:
        return int(any(row["result"] != "exact" for row in rows))
    return int(any(row["result"] in ("wrong", "failed") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
