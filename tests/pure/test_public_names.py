"""The public interface is what ``autopipe.__all__`` names, and importing it loads no torch."""

import subprocess
import sys
from pathlib import Path

import autopipe
from autopipe import errors

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = [
    "ArtifactError",
    "AutopipeError",
    "CheckReport",
    "EvaluateResult",
    "ExportResult",
    "InternalError",
    "ModelFileError",
    "Pipeline",
    "PlanError",
    "PlanResult",
    "ProfileError",
    "ProfileResult",
    "RunError",
    "ScheduleError",
    "SweepResult",
    "TraceError",
    "TrainResult",
    "WorkerError",
    "__version__",
    "sweep",
]


def test_the_public_names_are_exactly_these():
    assert autopipe.__all__ == sorted(autopipe.__all__) == PUBLIC
    assert dir(autopipe) == PUBLIC


def test_every_public_name_is_defined_and_no_other():
    assert autopipe.RunError is errors.RunError
    assert [name for name in PUBLIC if getattr(autopipe, name).__class__ is type] == [
        name for name in PUBLIC if name not in ("__version__", "sweep")
    ]
    assert callable(autopipe.sweep)
    assert not hasattr(autopipe, "Pipelines")


def test_a_pipeline_is_built_without_loading_torch():
    code = (
        "import autopipe, sys\n"
        "autopipe.Pipeline('gpt.py', gpus=2, arg={'width': 64})\n"
        "assert callable(autopipe.sweep)\n"
        "print([name for name in ('torch', 'numpy', 'pandas', 'click', 'rich') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("[]\n", "")
