"""A model whose training state is much larger than its device: `--schedule spilled`, planned and measured.

Trains ``sample_models/gpt.py`` three times with the same microbatches: spilled, with the weights, gradients and
optimizer state eight times as large as the memory; without a limit; and, on a GPU, with FSDP2 and
``CPUOffloadPolicy``, whose optimizer steps on the host. On a CPU, the limit is a budget that the runtime enforces.
The predictions use the overhead that ``autopipe doctor --links`` measures first. Writes benchmarks/results/spilled.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopipe
from autopipe.planning.spilled.explain import bounds_of
from benchmarks import overlap

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "sample_models" / "gpt.py"
RESULTS = Path(__file__).resolve().parent / "results" / "spilled.md"
TIMES_LARGER = 8
BYTES_PER_PARAMETER = 16  # weight, gradient and the two of AdamW, in float32
WARM_UP = 2


def parsed() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--blocks", type=int, default=0, help="default: 16, on a GPU 40")
    parser.add_argument("--width", type=int, default=0, help="default: 512, on a GPU 2560")
    parser.add_argument("--memory", default="", help="of the device; default: an eighth of the state, on a GPU 8GiB")
    parser.add_argument("--batch-size", type=int, default=0, help="default: 8, on a GPU 64")
    parser.add_argument("--threads", type=int, default=1, help="that compute; on a CPU, two others copy")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--fsdp", action="store_true", help="only this: train with FSDP2 and print its rate")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    options.blocks = options.blocks or (40 if on_gpu else 16)
    options.width = options.width or (2560 if on_gpu else 512)
    options.batch_size = options.batch_size or (64 if on_gpu else 8)
    return options


def built(options: argparse.Namespace) -> tuple[nn.Module, Any]:
    """Return the model and its module."""
    spec = importlib.util.spec_from_file_location("gpt", MODEL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    return module.build_model(blocks=options.blocks, width=options.width), module


def rate_of_fsdp(options: argparse.Namespace, microbatch: int) -> float:
    """Return the samples per second of FSDP2 with its parameters, gradients and optimizer on the host."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517", "RANK": "0", "WORLD_SIZE": "1"}
    mesh = init_device_mesh("cuda", (1,))
    model, module = built(options)
    policy = CPUOffloadPolicy()
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    data = iter(module.data(batch_size=options.batch_size))
    start = 0.0
    for step in range(WARM_UP + options.steps):
        if step == WARM_UP:
            torch.cuda.synchronize()
            start = time.perf_counter()
        inputs, targets = (part.cuda() for part in next(data))
        count = options.batch_size // microbatch
        for x, y in zip(inputs.chunk(count), targets.chunk(count), strict=True):
            (module.loss(model(x), y) / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    torch.distributed.destroy_process_group()
    return options.steps * options.batch_size / (time.perf_counter() - start)


def pipeline(options: argparse.Namespace, folder: Path, **changes: Any) -> autopipe.Pipeline:
    """Return the pipeline of a measurement."""
    return autopipe.Pipeline(
        MODEL,
        work_dir=folder,
        device=options.device,
        arg={"blocks": options.blocks, "width": options.width},
        batch_size=options.batch_size,
        gpus=1,
        threads_per_rank=options.threads,
        **changes,
    )


def measured_rate(trained: autopipe.Pipeline, options: argparse.Namespace, run_dir: Path) -> tuple[float, Any]:
    """Train, and return the samples per second of the median step after the first ones, and the result."""
    ends: list[float] = []

    def note(kind: str, fields: Any) -> None:
        if kind == "step":
            ends.append(fields["seconds"])

    result = trained.train(steps=WARM_UP + options.steps, check=False, run_dir=run_dir, on_event=note)
    steps = [after - before for before, after in itertools.pairwise(ends[WARM_UP - 1 :])]
    return options.batch_size / statistics.median(steps), result


def calibrate(folder: Path) -> None:
    """Measure what the runtime adds to the operations, and the bandwidth between device and host."""
    work_dir = folder / "spilled"
    command = [str(Path(sys.executable).with_name("autopipe")), "doctor", "--links", "--work-dir", str(work_dir)]
    subprocess.run(command, check=True, capture_output=True)
    (folder / "free").mkdir()
    shutil.copy(work_dir / "links.json", folder / "free")


def main() -> None:
    """Measure and write the table."""
    options = parsed()
    if options.fsdp:
        print(json.dumps(rate_of_fsdp(options, options.batch_size)))
        return
    count = sum(parameter.numel() for parameter in built(options)[0].parameters())
    state = BYTES_PER_PARAMETER * count
    memory = options.memory or ("8GiB" if options.device == "cuda" else f"{state // TIMES_LARGER}B")
    with tempfile.TemporaryDirectory(prefix="autopipe-bench-") as scratch:
        folder = Path(scratch)
        calibrate(folder)
        spilled = pipeline(options, folder / "spilled", schedule="spilled", gpu_memory=memory)
        plan = spilled.plan()
        rate, result = measured_rate(spilled, options, folder / "run-spilled")
        microbatch = plan.plan.microbatch_size
        free = pipeline(options, folder / "free", schedule="1f1b", microbatch_size=microbatch, gpu_memory="1TiB")
        rate_of_whole, whole = measured_rate(free, options, folder / "run-free")
        bounds = bounds_of(plan.plan, plan.profile, plan.cluster)
    fsdp = "not run: without a GPU"
    if options.device == "cuda":
        command = [
            sys.executable,
            "-m",
            "benchmarks.spilled",
            "--device",
            "cuda",
            "--fsdp",
            "--steps",
            str(options.steps),
        ]
        command += ["--blocks", str(options.blocks), "--width", str(options.width), "--batch-size", str(microbatch)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        fsdp = f"{json.loads(done.stdout):.2f}" if done.returncode == 0 else f"failed: {done.stderr[-300:]}"
    rates = {"rate": rate, "rate_of_whole": rate_of_whole}
    write(options, plan.plan, result, whole, fsdp, memory=memory, state=state, bounds=bounds, **rates)


def write(options: argparse.Namespace, plan: Any, result: Any, whole: Any, fsdp: str, **figures: Any) -> None:
    """Write the results."""
    machine = torch.cuda.get_device_name() if options.device == "cuda" else "a CPU; not run on a GPU"
    load = os.getloadavg()[0]
    bound = sum(max(entry.seconds.values()) for entry in figures["bounds"])
    rows = [
        f"| spilled, {len(plan.stages)} stages | {figures['rate']:.2f} | {result.predicted_samples_per_second:.2f} |",
        f"| no limit, one stage | {figures['rate_of_whole']:.2f} | {whole.predicted_samples_per_second:.2f} |",
        f"| FSDP2 with CPUOffloadPolicy | {fsdp} | |",
    ]
    copied = [
        f"| to the {entry.to} | {entry.bytes / 1e6:.1f} | {entry.planned_bytes / 1e6:.1f} |" for entry in result.copied
    ]
    lines = [
        "# A model larger than its device",
        "",
        f"`sample_models/gpt.py` with {options.blocks} blocks of width {options.width}: "
        f"{figures['state'] / 1e6:.0f} MB "
        f"of weights, gradients and optimizer state, on a device with {figures['memory']}. {plan.num_microbatches} "
        f"microbatches of {plan.microbatch_size}. {machine}, {platform.machine()}, {os.cpu_count()} cores, load "
        f"{load:.1f}, torch {torch.__version__}. Rates are of the median step after the "
        f"first two; predictions use the figures of `autopipe doctor --links`.",
        "",
        "| | samples/s | predicted |",
        "|---|---|---|",
        *rows,
        "",
        "| copied a step | measured MB | planned MB |",
        "|---|---|---|",
        *copied,
        "",
        "| copies / computation, forward | backward | ideal / measured |",
        "|---|---|---|",
        *overlap.rows(),
        "",
        "The last table is of the lanes of a run with copies and computation that sleep (`benchmarks/overlap.py`).",
        "",
        f"If every copy overlapped with computation, a step would take {bound:.2f} s; "
        f"{plan.predicted.step_seconds:.2f} s are predicted.",
    ]
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(RESULTS.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
