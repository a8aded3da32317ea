"""``make zoo-third REPOSITORIES=FOLDER``: writes benchmarks/results/third_party.md.

FOLDER holds the repositories, each checked out under its own name (``vit-pytorch``, ``nanoGPT``). Nothing is fetched: a
model whose repository or packages are missing is listed as absent. Each model goes through ``autopipe check`` in a
process of its own: three stages under 1f1b, two steps of 8 samples in 4 microbatches.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
AUTOPIPE = Path(sys.executable).with_name("autopipe")
OPTIONS = "--gpus 3 --schedule 1f1b --device cpu --steps 2 --batch-size 8 --num-microbatches 4 --replicas never --json"
ENDS = ("exact", "equal", "refused", "absent", "timeout", "crashed", "wrong")
BAD = ("crashed", "wrong")
BUGS = ("Bug", "InternalError")  # types of errors in the JSON document of autopipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """One entry of the ``MODELS`` of a file in ``models/``."""

    file: Path  # where it is defined
    name: str  # the function that builds it
    data: str  # the function that gives its batches, in the same file
    loss: str  # a function of the same file, or module:function
    options: str = ""  # in place of those of OPTIONS

    @property
    def label(self) -> str:
        """The name in the table, such as ``vision/simple_vit``."""
        return f"{self.file.stem}/{self.name}"

    def command(self, work_dir: Path) -> list[str]:
        """The command that checks it."""
        loss = self.loss if ":" in self.loss else f"{self.file}:{self.loss}"
        target = ["check", f"{self.file}:{self.name}", "--data", f"{self.file}:{self.data}", "--loss", loss]
        return [str(AUTOPIPE), *target, *OPTIONS.split(), *self.options.split(), "--work-dir", str(work_dir)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """How the check of one model ended."""

    label: str
    end: str  # one of ENDS
    seconds: float
    error: float = 0.0  # the largest relative difference, if it is equal but not exact
    message: str = ""  # why it was refused
    options: str = ""  # those of the model


def catalogue() -> list[Model]:
    """Return the models of all files, without importing them."""
    models = []
    for file in sorted((HERE / "models").glob("[!_]*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODELS":
                table = ast.literal_eval(node.value)
                for name, (data, loss, *options) in table.items():
                    models.append(Model(file=file, name=name, data=data, loss=loss, options=" ".join(options)))
    return models


def row_of(model: Model, stdout: str, seconds: float) -> Row:
    """Return the row for the JSON document that the command printed."""
    try:
        document = json.loads(stdout)
    except ValueError:
        return Row(label=model.label, end="crashed", seconds=seconds, message="no JSON document: " + stdout[-200:])
    if "equal" in document:
        error = document["max_relative_error"]
        end = "exact" if document["bitwise"] else "equal" if document["equal"] else "wrong"
        return Row(label=model.label, end=end, seconds=seconds, error=0.0 if end == "exact" else error)
    failure = document["error"]
    message = str(failure["what"]) + (f" — at {failure['at']}" if failure.get("at") else "")
    if "ModuleNotFoundError" in message:
        end = "absent"
    elif failure["type"] in BUGS:
        end = "crashed"
    else:
        end = "refused"
    return Row(label=model.label, end=end, seconds=seconds, message=message)


def check(model: Model, environment: dict[str, str], limit_seconds: float) -> Row:
    """Run ``autopipe check`` for one model."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="autopipe-third-party-") as folder:
        process = subprocess.Popen(
            model.command(Path(folder) / "work"),
            cwd=folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            stdout, _ = process.communicate(timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return Row(label=model.label, end="timeout", seconds=limit_seconds, message=f"over {limit_seconds:g} s")
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    row = row_of(model, stdout, time.monotonic() - begin)
    message = row.message.replace(f"{ROOT}/", "").replace(f"{environment['AUTOPIPE_THIRD_PARTY']}/", "")
    return dataclasses.replace(row, message=message, options=model.options)


def table(rows: list[Row]) -> str:
    """Return the page."""
    counts = Counter(row.end for row in rows)
    tried = len(rows) - counts["absent"]
    share = 100 * (counts["exact"] + counts["equal"]) / max(tried, 1)
    lines = [
        "# Models of public repositories",
        "",
        f"`autopipe check MODEL {OPTIONS}`, each in a process of its own; the code of the models is unmodified.",
        f"torch {metadata.version('torch')}, Python {platform.python_version()}, {os.cpu_count()} processors.",
        "Seconds are wall time.",
        "",
        f"{tried} models: "
        + ", ".join(f"{counts[end]} {end}" for end in ENDS if end != "absent" and counts[end])
        + ".",
        f"{share:.1f} % exact or equal." + (f" {counts['absent']} absent on this machine." if counts["absent"] else ""),
        "",
        "| model | result | s | reason |",
        "|---|---|---:|---|",
    ]
    for row in rows:
        result = f"equal, {row.error:.1e}" if row.end == "equal" else row.end
        message = " ".join([*row.message.split(), *([f"with {row.options}"] if row.options else [])]).replace(
            "|", "\\|"
        )
        lines.append(f"| {row.label} | {result} | {row.seconds:.0f} | {message} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Check the requested models; return 1 if a model is wrong or the command crashed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repositories", type=Path, help="folder of checked-out repositories")
    parser.add_argument("names", nargs="*", help="such as vision/cait or vision [default: all models]")
    parser.add_argument("--jobs", type=int, default=1, help="checks at the same time")
    parser.add_argument("--limit", type=float, default=240, help="seconds for each model")
    parser.add_argument("--output", type=Path, help="page to write; for all models benchmarks/results/third_party.md")
    arguments = parser.parse_args()
    if not arguments.repositories.is_dir():
        parser.error(f"{arguments.repositories} is not a folder of repositories")
    models = [
        model
        for model in catalogue()
        if not arguments.names or model.label in arguments.names or model.file.stem in arguments.names
    ]
    if not models:
        parser.error(f"no such model: {' '.join(arguments.names)}")
    environment = {
        **os.environ,
        "AUTOPIPE_THIRD_PARTY": str(arguments.repositories.resolve()),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        pending = [pool.submit(check, model, environment, arguments.limit) for model in models]
        for future in concurrent.futures.as_completed(pending):
            row = future.result()
            print(f"{row.label:40} {row.end:8} {row.seconds:5.0f} s  {row.message[:200]}", flush=True)
    rows = [future.result() for future in pending]
    page = arguments.output or (None if arguments.names else ROOT / "benchmarks" / "results" / "third_party.md")
    if page is not None:
        page.write_text(table(rows), encoding="utf-8")
        print(f"wrote {page}")
    return int(any(row.end in BAD for row in rows))


if __name__ == "__main__":
    sys.exit(main())
