"""``Setting``: a model, a plan, and the command that is damaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SIZES = ("--device", "cpu", "--batch-size", "16", "--num-microbatches", "4")
TWO = ("--gpus", "2", "--schedule", "1f1b")
REPLICAS = ("--gpus", "2", "--schedule", "1f1b", "--replicas", "auto")
MEMORY = ("--gpu-memory", "70KiB")
NO_NORM = ("--arg", "norm=False")
AUDITS = ("train", "--no-check", "--steps", "9", "--audit-every", "2", "--run-dir", "run")
FIRST = ("train", "--steps", "2", "--run-dir", "run", "--audit-every", "0")
SAVED = ("train", "--no-check", "--steps", "4", "--run-dir", "run", "--checkpoint-every", "2", "--audit-every", "0")
SHORT = ("train", "--steps", "6", "--run-dir", "run")


@dataclass(frozen=True, slots=True)
class Setting:
    """How a pair runs. The commands of a folder run once without damage; every pair works on a copy of it."""

    name: str
    # the command that is damaged
    command: tuple[str, ...]
    # options of its plan
    plan: tuple[str, ...] = TWO
    # options of its profile, such as the precision
    profile: tuple[str, ...] = ()
    # a command that runs before, without damage
    before: tuple[str, ...] = ()
    # the model file: one of this folder, or of sample_models
    model: str = "model.py"
    # its exit code without damage
    code: int = 0

    def words(self, command: Sequence[str]) -> tuple[str, ...]:
        """Return the words of a command, with the model and the options of its profile and plan."""
        if self.model in command:
            return tuple(command)
        return command[0], self.model, *self.profile, *(() if command[0] == "profile" else self.plan), *command[1:]


def _check(name: str, *words: str, **fields: object) -> Setting:
    return Setting(name, ("check", *words), **fields)  # type: ignore[arg-type]


def _schedule(name: str, gpus: int = 2, *words: str) -> tuple[str, ...]:
    return ("--gpus", str(gpus), "--schedule", name, *words)


RESUMED = (*AUDITS[:2], "--steps", "4", "--run-dir", "run", "--checkpoint-every", "2")
RESUME = ("train", "--no-check", "--resume", "--steps", "9", "--run-dir", "run")
LARGE_LOSS = ("--precision", "fp16", "--loss", "model.py:large_loss", *NO_NORM)
_ALL = [
    _check("fp32"),
    _check("two", "--steps", "2", model="complex_model.py"),
    _check("fp32-6", "--steps", "6"),
    _check("eager", plan=_schedule("eager-1f1b")),
    _check("signs", profile=("--optimizer", "model.py:signs")),
    _check("bf16", profile=("--precision", "bf16")),
    _check("fp16", profile=("--precision", "fp16")),
    _check("big16", profile=LARGE_LOSS),
    _check("nan", profile=("--loss", "model.py:nan_loss"), code=1),
    _check("compile", "--compile"),
    _check("clip", "--clip-grad-norm", "0.5"),
    _check("ema", plan=(*TWO, "--ema", "0.9")),
    _check("deferred", "--deferred-batch-norm"),
    _check("recompute", plan=(*TWO, "--recompute", "stage")),
    _check("recompute-block", plan=(*TWO, "--recompute", "block")),
    _check("bigtie", profile=("--arg", "tokens=600")),
    _check("interleaved", plan=_schedule("interleaved")),
    _check("zero-bubble", plan=_schedule("zero-bubble")),
    _check("2bw", plan=_schedule("2bw")),
    _check("2bw-complex", plan=_schedule("2bw"), model="complex_model.py"),
    _check("2bw-5", "--steps", "5", plan=_schedule("2bw")),
    _check("pipedream", plan=_schedule("pipedream"), profile=("--arg", "tied=False")),
    _check("pipedream-5", "--steps", "5", plan=_schedule("pipedream"), profile=("--arg", "tied=False")),
    _check("spilled3", plan=("--gpus", "1", "--schedule", "spilled", *MEMORY)),
    _check("spilled3-4", "--steps", "4", plan=("--gpus", "1", "--schedule", "spilled", *MEMORY)),
    _check("replicas", plan=REPLICAS, profile=NO_NORM),
    _check("replicas-bf16", plan=REPLICAS, profile=(*NO_NORM, "--precision", "bf16")),
    _check("rep-bn", plan=REPLICAS),
    _check("rep-complex", plan=REPLICAS, model="complex_model.py"),
    _check("tp2", plan=("--gpus", "2"), profile=("--tensor-parallel", "2")),
    _check("tp2x2", plan=("--gpus", "4"), profile=("--tensor-parallel", "2", *NO_NORM)),
    _check(
        "tp2-seq",
        plan=("--gpus", "2"),
        profile=("--tensor-parallel", "2", "--sequence-parallel", *NO_NORM),
    ),
    _check("sample-gpt", model="gpt.py"),
    _check("complex", model="complex_model.py"),
    Setting("train-first", FIRST),
    Setting("train", SHORT),
    Setting("train-2bw", SHORT, plan=_schedule("2bw")),
    Setting("train-eval", ("train", "--steps", "4", "--eval-every", "2", "--run-dir", "run")),
    Setting("train-ignore-nan", (*FIRST, "--on-nonfinite", "warn"), profile=("--loss", "model.py:nan_loss")),
    Setting("audit", AUDITS),
    Setting("audit-bf16", AUDITS, profile=("--precision", "bf16")),
    Setting("audit-fp16", AUDITS, profile=("--precision", "fp16")),
    Setting("audit-big16", AUDITS, profile=LARGE_LOSS),
    Setting("train-big16", ("train", "--steps", "9", "--run-dir", "run"), profile=LARGE_LOSS),
    Setting("saved", SAVED),
    Setting("saved-replicas", SAVED, plan=REPLICAS, profile=NO_NORM),
    Setting("saved-tp2", SAVED, plan=("--gpus", "2"), profile=("--tensor-parallel", "2")),
    Setting("saved-ema", SAVED, plan=(*TWO, "--ema", "0.9")),
    Setting("audit-clip", (*AUDITS, "--clip-grad-norm", "0.5")),
    Setting("audit-ema", AUDITS, plan=(*TWO, "--ema", "0.9")),
    Setting("audit-2bw", AUDITS, plan=_schedule("2bw")),
    Setting("audit-compile", (*AUDITS, "--compile")),
    Setting("audit-replicas", AUDITS, plan=REPLICAS, profile=NO_NORM),
    Setting("audit-complex", AUDITS, model="complex_model.py"),
    Setting("audit-recompute", AUDITS, plan=(*TWO, "--recompute", "stage")),
    Setting("audit-rep-bn", AUDITS, plan=REPLICAS),
    Setting("resume", RESUME, before=RESUMED),
    Setting("resume-audit", (*RESUME, "--audit-every", "2"), before=RESUMED),
    Setting("resume-first", ("train", *RESUME[2:]), before=RESUMED),
    Setting("resume-ema", RESUME, before=RESUMED, plan=(*TWO, "--ema", "0.9")),
    Setting("resume-2bw", RESUME, before=RESUMED, plan=_schedule("2bw")),
    Setting("resume-fp16", RESUME, before=RESUMED, profile=("--precision", "fp16")),
    Setting("resume-replicas", RESUME, before=RESUMED, plan=REPLICAS, profile=NO_NORM),
    Setting("resume-tp2", RESUME, before=RESUMED, plan=("--gpus", "2"), profile=("--tensor-parallel", "2")),
    Setting("resume-spilled", RESUME, before=RESUMED, plan=("--gpus", "1", "--schedule", "spilled", *MEMORY)),
    Setting("resume-audit-ema", (*RESUME, "--audit-every", "2"), before=RESUMED, plan=(*TWO, "--ema", "0.9")),
    Setting("resume-audit-2bw", (*RESUME, "--audit-every", "2"), before=RESUMED, plan=_schedule("2bw")),
    Setting("resume-audit-fp16", (*RESUME, "--audit-every", "2"), before=RESUMED, profile=("--precision", "fp16")),
    Setting("eval", ("eval", "run", "--target", "model.py"), before=RESUMED),
    Setting("eval-ema", ("eval", "run", "--target", "model.py", "--ema"), before=RESUMED, plan=(*TWO, "--ema", "0.9")),
    Setting("run", ("run", "script.py", "--gpus", "2"), model="script.py"),
]
SETTINGS = {setting.name: setting for setting in _ALL}
