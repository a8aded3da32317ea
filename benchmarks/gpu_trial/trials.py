"""The trials, in order. Each returns what it measured, and raises TrialError with what did not hold."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch

from autopipe.ir.schedule import ScheduleSpec
from autopipe.schedules import REGISTRY, make, to_csv
from benchmarks.gpu_trial.bench import BATCH, MICROBATCHES, MODEL, Bench, NotRunError, TrialError

SAMPLES = Path(__file__).resolve().parents[2] / "sample_models"
FP32, BF16 = 1e-4, 3e-2  # the largest difference of a weight from the plain loop
MOST_SYNCHRONIZATIONS = 4  # of a rank in a step
MEMORY, TIME = 0.15, 0.25  # relative errors of the plan
EVALUATION = 0.2  # relative difference of the loss of an evaluation and that of the last step
_EXCHANGE = re.compile(r"ranks exchange tensors [^:]*: .*")


@dataclass(frozen=True, slots=True)
class Trial:
    """One thing that should hold."""

    name: str
    expected: str
    run: Callable[[Bench], str]
    alone: bool = False  # it measures times


def profile(bench: Bench, target: Path) -> str:
    """Measure the model of the trials, and move the work directory to ``target``."""
    report = bench.run("profile", str(MODEL), "--device", bench.device)
    bench.work_dir.rename(target)
    return f"{report['nodes']} operations, {report['parameters']} parameters"


def train(bench: Bench, *words: str, tolerance: float = FP32) -> str:
    """Train in stages, and compare the weights with the plain loop."""
    result = bench.train("--replicas", "never", *words)
    shape = f"{result['stages']} stages on {result['ranks']} ranks"
    exchange = _EXCHANGE.search(bench.stderr())
    return f"{shape}; {bench.equal(tolerance)}" + (f"; {exchange.group()}" if exchange else "")


def check(bench: Bench, target: Path, *words: str) -> str:
    """Compare training in stages with plain training on the same device, as ``autopipe check`` does."""
    report = bench.run("check", str(target), *bench.words, *BATCH, "--replicas", "never", *words)
    if not report["equal"]:
        raise TrialError(report["cause"] or "not equal")
    return f"relative error {report['max_relative_error']:.1e} of {report['tolerance']:.1e} allowed"


def resume(bench: Bench, *words: str) -> str:
    """Stop after half of the steps, and continue."""
    bench.train("--replicas", "never", *words, steps=4)
    bench.run("train", str(MODEL), *bench.words, "--resume", "--run-dir", "run", "--steps", "8", "--no-check")
    return bench.equal(FP32)


def strike(bench: Bench, number: signal.Signals, *words: str) -> tuple[int, str]:
    """Send a signal to rank 1 after some steps. Return the exit code and stderr of the command."""
    fixed = [str(MODEL), *bench.words, *BATCH, "--run-dir", "run", "--no-check", "--replicas", "never", "--json"]
    process = bench.start("train", *fixed, *words)
    metrics = bench.folder / "run" / "metrics.jsonl"
    while not (metrics.is_file() and metrics.read_text().count("\n") > 6):
        if process.poll() is not None or time.monotonic() > bench.end:
            bench.finish(process)
            raise TrialError(f"the run ended before the signal: {bench.stderr()[-500:]}")
        time.sleep(0.02)
    victim = None
    for child in psutil.Process(process.pid).children(recursive=True):
        if any(file.path.endswith("rank_1.log") or "/logs/rank_1" in file.path for file in child.open_files()):
            victim = child
    if victim is None:
        bench.finish(process)
        raise TrialError("the process of rank 1 was not found")
    victim.send_signal(number)
    code, _ = bench.finish(process)
    return code, bench.stderr()


def kill(bench: Bench) -> str:
    """Kill a rank. The run restarts from its checkpoint."""
    code, text = strike(bench, signal.SIGKILL, "--steps", "40", "--checkpoint-every", "4", "--max-restarts", "1")
    if code or "rank 1 failed" not in text:
        raise TrialError(f"exit code {code}: {text[-500:]}")
    return f"rank 1 named, restarted; {bench.equal(10 * FP32)}"


def hang(bench: Bench) -> str:
    """Suspend a rank. The run ends with its name."""
    begin = time.monotonic()
    code, text = strike(bench, signal.SIGSTOP, "--steps", "100000", "--watchdog", "20")
    if not code or "rank 1" not in text.rpartition("Error:")[2]:
        raise TrialError(f"exit code {code}: {text[-500:]}")
    return f"rank 1 named, {time.monotonic() - begin:.0f} s from the start of the command"


def memory(bench: Bench, *words: str) -> str:
    """Compare the planned and the measured peak of each stage."""
    peaks = bench.train("--replicas", "never", "--measure-memory", *words)["peaks"]
    errors = [peak["planned_bytes"] / peak["bytes"] - 1 for peak in peaks]
    text = f"planned against measured: {min(errors):+.0%} to {max(errors):+.0%}"
    if max(map(abs, errors)) > MEMORY:
        raise TrialError(f"{text} (allowed {MEMORY:.0%}); " + json.dumps(peaks))
    return text


def prediction(bench: Bench, target: Path) -> str:
    """Compare the predicted and the measured rate, with one rank on each GPU."""
    bench.ranks = min(bench.ranks, torch.cuda.device_count())
    words = [str(target), *bench.words, *BATCH, "--replicas", "never", "--no-check", "--steps", "60"]
    result = bench.run("train", *words)
    ratio = result["samples_per_second"] / result["predicted_samples_per_second"]
    text = f"{result['samples_per_second']:.0f} samples/s, {ratio:.2f} of the prediction"
    if abs(ratio - 1) > TIME:
        raise TrialError(f"{text} (allowed {TIME:.0%})")
    return text


def synchronizations(bench: Bench) -> str:
    """Count torch's warnings of synchronizing operations in the logs of the ranks, in steps 9 to 16."""
    if bench.environment.get("AUTOPIPE_SHARED_GPU") == "host":
        raise NotRunError("messages through host memory synchronize")
    counts = {}
    for steps in (8, 16):
        bench.train("--replicas", "never", steps=steps, GPU_TRIAL_SYNC="1", PYTHONWARNINGS="always")
        logs = sorted((bench.folder / "run" / "logs").glob("rank_*"))
        counts[steps] = [log.read_text().count("called a synchronizing CUDA operation") for log in logs]
        (bench.folder / "run").rename(bench.folder / f"run{steps}")
    each = [(late - early) / 8 for early, late in zip(counts[8], counts[16], strict=True)]
    text = f"{max(each, default=0):.1f} in a step of a rank at most"
    if max(each, default=0) > MOST_SYNCHRONIZATIONS:
        raise TrialError(f"{text} (allowed {MOST_SYNCHRONIZATIONS})")
    return text


def replicas(bench: Bench, *words: str) -> str:
    """Train with as many replicas as ranks, where the planner finds that fastest."""
    result = bench.train("--replicas", "auto", *words)
    if result["stages"] >= result["ranks"]:
        raise TrialError(f"the plan has {result['stages']} stages on {result['ranks']} ranks, and no replicas")
    return f"{result['stages']} stages on {result['ranks']} ranks; {bench.equal(FP32)}"


def spilled(bench: Bench) -> str:
    """Compare a model whose training state is almost three times as large as the memory that it may use."""
    size = ("--arg", "blocks=12", "--arg", "width=768")
    words = ("--gpus", "1", "--schedule", "spilled", "--gpu-memory", "512MiB")
    return check(bench, SAMPLES / "gpt.py", *size, *words)


def evaluate(bench: Bench) -> str:
    """Evaluate a run on its training data, in stages."""
    last = bench.train("--replicas", "never")["losses"][-1]
    loss = bench.run("eval", "run", "--eval-data", f"{MODEL}:data")["loss"]
    text = f"loss {loss:.4f}, in the last step {last:.4f}"
    if abs(loss / last - 1) > EVALUATION:
        raise TrialError(text)
    return text


def sweep(bench: Bench) -> str:
    """Train two jobs of one structure on one device, in leases, and compare them with runs of their own."""
    text = f"""
devices = 1
lease = "1s"
[defaults]
steps = 40
batch-size = 16
num-microbatches = {MICROBATCHES}
device = "{bench.device}"
gpus = 1
[[job]]
target = "{MODEL}"
grid = {{ lr = [0.02, 0.01] }}
"""
    (bench.folder / "sweep.toml").write_text(text)
    jobs = bench.run("sweep", "sweep.toml")["jobs"]
    if [job["status"] for job in jobs] != ["done", "done"]:
        raise TrialError(json.dumps(jobs))
    leases = sum(job["leases"] for job in jobs)
    return f"{leases} leases; " + "; ".join(bench.equal(FP32, job["run_dir"]) for job in jobs)


def doctor(bench: Bench) -> str:
    """Measure the links between two ranks, and what the runtime adds to the operations."""
    links = bench.run("doctor", "--links")["links"]
    text = f"{1e6 * links['latency_seconds']:.0f} us latency, {links['bandwidth'] / 1e9:.2f} GB/s"
    if not (0 < links["latency_seconds"] < 1 and links["bandwidth"] > 1e6):
        raise TrialError(text)
    return text


def trials(device: str) -> list[Trial]:
    """Return the trials for a device, in the order in which they run: what is most telling first."""
    same = "the weights of the plain loop"
    rows = [Trial(f"train {name}", same, partial(_train, name)) for name in REGISTRY]
    rows += [
        Trial("replicas", same, replicas),
        Trial("replicas with clipping", same, lambda bench: replicas(bench, "--clip-grad-norm", "1.0")),
        Trial("clipping", same, lambda bench: train(bench, "--clip-grad-norm", "1.0")),
        Trial("exact ties", same, lambda bench: train(bench, "--exact-ties", "always")),
        Trial("bf16", same, lambda bench: train(bench, "--precision", "bf16", tolerance=BF16)),
        Trial("recompute by block", same, lambda bench: train(bench, "--recompute", "block")),
        Trial("kill a rank", "named, restarted, equal weights", kill),
        Trial("suspend a rank", "named within the watchdog's time", hang),
        Trial("resume", same, resume),
        Trial("resume with 2bw", same, lambda bench: resume(bench, "--schedule", "2bw")),
    ]
    for sample in ("gpt.py", "resnet.py", "unet.py"):
        rows.append(Trial(f"check {sample}", "equal to plain training", partial(check, target=SAMPLES / sample)))
    rows += [
        Trial("check --compile", "equal to plain training", lambda b: check(b, MODEL, "--compile", "--gpus", "2")),
        Trial("check bf16", "equal to plain training", lambda b: check(b, SAMPLES / "unet.py", "--precision", "bf16")),
        Trial("check fp16", "equal to plain training", lambda b: check(b, MODEL, "--precision", "fp16")),
        Trial("memory", f"within {MEMORY:.0%} of the plan", memory),
        Trial("memory of gpipe", f"within {MEMORY:.0%} of the plan", lambda b: memory(b, "--schedule", "gpipe")),
    ]
    teams = ("--tensor-parallel", "2")
    rows += [
        Trial("tensor parallel", same, lambda b: train(b, *teams)),
        Trial("check tensor parallel", "equal to plain training", lambda b: check(b, SAMPLES / "gpt.py", *teams)),
        Trial(
            "check sequence parallel",
            "equal to plain training",
            lambda b: check(b, SAMPLES / "gpt.py", *teams, "--sequence-parallel"),
        ),
        Trial("check hf_llama.py", "equal to plain training", partial(check, target=SAMPLES / "hf_llama.py")),
        Trial("evaluate", "a loss near that of training", evaluate),
        Trial("sweep", "two jobs in turn, equal weights", sweep),
        Trial("doctor --links", "figures of all links", doctor, alone=True),
    ]
    if device == "cuda":  # on a CPU with fewer cores than ranks, the ranks slow each other down
        rows.append(Trial("prediction", f"within {TIME:.0%}", lambda b: prediction(b, SAMPLES / "gpt.py"), alone=True))
        most = f"at most {MOST_SYNCHRONIZATIONS} in a step"
        rows.append(Trial("synchronizations", most, synchronizations))
        rows.append(Trial("check spilled", "equal to plain training", spilled))
    return rows


def _train(schedule: str, bench: Bench) -> str:
    if schedule != "custom":
        versions = ["--vertical-sync"] if schedule == "pipedream" else []  # the model has tied parameters
        ranks = ["--gpus", "1"] if REGISTRY[schedule].spills else []
        return train(bench, "--schedule", schedule, *versions, *ranks)
    own = make("gpipe", ScheduleSpec(tuple((rank,) for rank in range(bench.ranks)), MICROBATCHES))
    (bench.folder / "own.csv").write_text(to_csv(own))
    return train(bench, "--schedule-file", "own.csv")
