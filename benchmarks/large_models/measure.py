"""Models that no machine here holds: profiles, plans, the error of estimates, and the memory of a rank's build.

Each figure comes from a fresh process. Writes one section at a time of benchmarks/results/large_models.md:
``measure.py profile errors build plan``, by default all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "benchmarks/large_models/llama.py"
RESULTS = ROOT / "benchmarks/results/large_models.md"
SAMPLES = ("gpt", "resnet", "unet")
STAGES, BLOCKS = 4, 24  # of the 2 B model
DEVICE = ("--device-name", "H100-SXM", "--link", "400Gbit/s")
SEARCH = ("--schedule", "1f1b", "--replicas", "never", "--microbatch-size", "1")
LIMIT = 500  # seconds of a command
TITLE = "# Large models\n\n`make bench-large` writes this page, each section by its own run.\n"


def run(*words: str) -> tuple[str, str, float, float, int]:
    """Run a command. Return stdout, stderr, seconds, CPU seconds and the peak resident bytes of its largest process."""
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(["timeout", str(LIMIT), *words], stdout=out, stderr=err, cwd=ROOT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0), err.seek(0)
        texts = out.read(), err.read()
    seconds = time.perf_counter() - start
    # timeout's children are waited for by it, so that this is the largest of them
    return *texts, seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def autopipe(*words: str) -> tuple[str, str, float, float, int]:
    """Run autopipe in a fresh process."""
    return run(sys.executable, "-m", "autopipe.cli", *words)


def gib(count: float) -> str:
    """Return bytes as text."""
    return f"{count / 2**30:.2f} GiB"


def section_profile(work: Path) -> list[str]:
    """Profile both models, without an option that says how."""
    lines = ["| model | time | CPU time | peak memory |", "|---|---|---|---|"]
    for size in ("7b", "70b"):
        out, err, seconds, cpu, peak = autopipe(
            "profile", str(MODEL), "--arg", f"size={size}", "--work-dir", str(work / size), "--json"
        )
        assert out, err
        assert json.loads(out)["device"]["kind"] == "none"
        lines.append(f"| {size} | {seconds:.0f} s | {cpu:.0f} s | {gib(peak)} |")
    return [
        "`autopipe profile benchmarks/large_models/llama.py --arg size=SIZE`, microbatches of 1, 2, 4, 8:",
        "",
        *lines,
    ]


def section_plan(work: Path) -> list[str]:
    """Plan both models for GPUs that hold them, and for GPUs that do not."""
    lines = ["| model | GPUs | time | peak memory | stages: time of a microbatch | memory | step |"]
    lines.append("|---|---|---|---|---|---|---|")
    refused = []
    for size, gpus in (("70b", 4), ("70b", 16), ("7b", 16)):
        folder = work / size
        if not (folder / "profile.json").exists():
            autopipe("profile", str(MODEL), "--arg", f"size={size}", "--work-dir", str(folder))
        words = ("plan", "--gpus", str(gpus), *DEVICE, *SEARCH, "--work-dir", str(folder), "--json")
        out, err, seconds, _, peak = autopipe(*words)
        cost = f"| {size} | {gpus} | {seconds:.0f} s | {gib(peak)} |"
        plan = json.loads(out) if out else {}
        if "stages" not in plan:
            assert "are available" in err, err or f"not finished in {LIMIT} s"
            lines.append(f"{cost} refused | | |")
            refused.append(f"- {size} on {gpus} GPUs: `{' '.join(err[err.lower().rfind('error') :].split())}`")
            continue
        times = [stage["seconds"] for stage in plan["stages"]]
        sizes = [stage["peak_bytes"] for stage in plan["stages"]]
        lines.append(
            f"{cost} {len(times)}: {min(times):.3f} to {max(times):.3f} s | {gib(min(sizes))} to {gib(max(sizes))} | "
            f"{plan['predicted']['step_seconds']:.2f} s |"
        )
    return [
        f"`autopipe plan --gpus N {' '.join((*DEVICE, *SEARCH))}`, of the counted profiles:",
        "",
        *lines,
        "",
        *refused,
    ]


def section_errors(work: Path) -> list[str]:
    """Compare estimated with measured times where both are known: on one thread of this CPU."""
    import torch

    from autopipe.ir import artifact
    from autopipe.ir.profile import Profile
    from autopipe.planning.cost.datasheets import Datasheet, on_datasheet

    torch.set_num_threads(1)
    a, large, target = torch.randn(1024, 1024), torch.zeros(1 << 24), torch.ones(1 << 24)
    peak = 2 * 1024**3 / best(lambda: a @ a)
    bandwidth = 2 * large.nbytes / best(lambda: target.copy_(large))
    source = "measured by this benchmark"
    sheet = Datasheet(
        name="this CPU",
        memory_bytes=1 << 34,
        memory_bandwidth=bandwidth,
        link_bandwidth=bandwidth,
        fp32_flops=peak,
        tensor_flops=peak,
        bf16=True,
        source=source,
    )
    lines = [
        f"One thread, float32: {peak / 1e9:.0f} GFLOP/s in a product of 1024 x 1024, {bandwidth / 1e9:.1f} GB/s in a "
        "copy.",
        "",
        "| model | microbatch | measured | estimated | error |",
        "|---|---|---|---|---|",
    ]
    for name in SAMPLES:
        folder = work / name
        words = ("--work-dir", str(folder), "--microbatch-sizes", "4", "--no-verify")
        err = autopipe("profile", str(ROOT / f"sample_models/{name}.py"), *words)[1]
        if not (folder / "profile.json").exists():
            lines.append(f"| {name} | 4 | not measured: {' '.join(err.split())[-120:]} | | |")
            continue
        profile = artifact.load(Profile, folder / "profile.json", renew="")
        real, estimated = (step_seconds(p) for p in (profile, on_datasheet(profile, sheet, "fp32")))
        change = estimated / real - 1
        lines.append(f"| {name} | 4 | {real * 1e3:.1f} ms | {estimated * 1e3:.1f} ms | {change:+.0%} |")
    return [*lines, "", "A step is one forward, one backward and one update of all parameters."]


def best(call: Any, repeats: int = 7) -> float:
    """Return the least seconds of a call."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def step_seconds(profile: Any) -> float:
    """Return the seconds of forward, backward and update."""
    costs = profile.measurements[0].costs.values()
    passes = sum(cost.forward_seconds + cost.backward_seconds for cost in costs)
    return passes + profile.optimizer_seconds_per_byte * profile.trained_bytes


def section_build(work: Path) -> list[str]:
    """Build every stage of a model of 2 B parameters as its rank does, each in a fresh process."""
    lines = ["| what is built | its parameters | time | peak memory | beyond the import and its parameters |"]
    lines.append("|---|---|---|---|---|")
    initial = work / "initial.json"
    for stage in (-1, *range(STAGES)):
        out, err, *_ = run(sys.executable, str(Path(__file__)), "--stage", str(stage), "--initial", str(initial))
        assert out, err
        built = json.loads(out)
        name = "all, as every rank did before" if stage < 0 else f"stage {stage}"
        beyond = built["peak"] - built["imported"] - built["own"]
        lines.append(
            f"| {name} | {gib(built['own'])} | {built['seconds']:.1f} s | {gib(built['peak'])} | {gib(beyond)} |"
        )
    largest = max(built["largest"], 1)
    return [
        f"Llama of 2.07e9 parameters in float32, {STAGES} stages of {BLOCKS // STAGES} blocks, one thread. The largest "
        f"parameter has {gib(largest)}.",
        "",
        *lines,
    ]


def build_stage(index: int, initial: Path) -> None:
    """Build one stage, or with -1 the complete model, and print its figures as JSON.

    ``initial``: the file of the complete model's digests, which its build writes.
    """
    import resource

    import torch

    from autopipe.ir import artifact
    from autopipe.ir.initial_values import InitialValues
    from autopipe.ir.tensor import TensorSpec
    from autopipe.runtime.checkpoint.initial import build_stages
    from autopipe.stage import Stage
    from autopipe.workload import LoadOptions, Workload

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    torch.set_num_threads(1)
    workload = Workload(LoadOptions(str(MODEL), arguments={"size": "2b"}).spec())
    model = workload.build_model(empty=True)
    specs = {name: TensorSpec(tuple(p.shape), "float32", True) for name, p in model.named_parameters()}
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    del model
    each = BLOCKS // STAGES
    modules = [f"blocks.{block}" for block in range(index * each, (index + 1) * each)]
    modules = ["tokens"] * (index == 0) + modules + ["norm", "head"] * (index == STAGES - 1)
    code = type("Part", (Stage,), {"MODULES": tuple(modules), "INDEX": max(index, 0)})
    graph: Any = type("Parameters", (), {"parameters": specs, "aliases": {}})
    imported, start = peak(), time.perf_counter()
    if index < 0:
        part = workload.build_model()
        artifact.save(workload.models.initial, initial)
    else:
        digests = artifact.load(InitialValues, initial, renew="")
        part = build_stages([code], workload, {}, None, graph, digests)[0]
    seconds = time.perf_counter() - start
    own = sum(p.numel() * p.element_size() for p in part.parameters())
    figures = {"own": own, "seconds": seconds, "peak": peak(), "imported": imported, "largest": largest}
    print(json.dumps(figures))


SECTIONS = {"profile": section_profile, "plan": section_plan, "errors": section_errors, "build": section_build}
TITLES = {
    "profile": "Time and memory of profile",
    "plan": "Plans",
    "errors": "Errors of estimates",
    "build": "Memory of a rank's build",
}


def main() -> None:
    """Run the sections that were named and replace them in the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", choices=[[], *SECTIONS], default=[])
    parser.add_argument("--work", type=Path, help="keep the profiles here, and plan from those that are here")
    parser.add_argument("--stage", type=int)
    parser.add_argument("--initial", type=Path, default=Path("initial.json"))
    options = parser.parse_args()
    if options.stage is not None:
        build_stage(options.stage, options.initial)
        return
    import torch

    for name in options.sections or SECTIONS:
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory() as folder:
            lines = SECTIONS[name](options.work or Path(folder))
        machine = (
            f"{platform.machine()}, {os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB, torch "
            f"{torch.__version__}; load {load:.1f} before and {os.getloadavg()[0]:.1f} after."
        )
        parts = RESULTS.read_text().split("\n## ")[1:] if RESULTS.exists() else []
        kept = {part.partition("\n")[0]: part.partition("\n")[2].strip() for part in parts}
        kept[TITLES[name]] = "\n".join((machine, "", *lines)).strip()
        written = [f"\n## {title}\n\n{kept[title]}\n" for title in TITLES.values() if title in kept]
        RESULTS.write_text(TITLE + "".join(written))


if __name__ == "__main__":
    main()
