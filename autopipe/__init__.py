"""Train an existing PyTorch model, unchanged, in pipeline stages.

    import autopipe

    pipe = autopipe.Pipeline("gpt.py", gpus=4, batch_size=64)
    pipe.check(steps=2).equal              # the same training as the plain loop?
    run = pipe.train(steps=500, on_event=print)
    pipe.export("model.safetensors")

The names in ``__all__`` are the public interface. Everything else, including all modules of the package, may change in
any release. Importing the package does not import torch: the names are loaded when they are used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopipe.errors import (
        ArtifactError,
        AutopipeError,
        InternalError,
        ModelFileError,
        PlanError,
        ProfileError,
        RunError,
        ScheduleError,
        TraceError,
        WorkerError,
    )
    from autopipe.pipeline import Pipeline
    from autopipe.report.results import (
        CheckReport,
        EvaluateResult,
        ExportResult,
        PlanResult,
        ProfileResult,
        SweepResult,
        TrainResult,
    )
    from autopipe.sweep.api import sweep

__version__ = "0.1.0"
__all__ = [
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


def __getattr__(name: str) -> Any:
    """Load a public name from its module. Raises: AttributeError for any other name."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "sweep":  # a package that can be called
        return importlib.import_module(f"{__name__}.sweep")
    module = "errors" if name.endswith("Error") else "pipeline" if name == "Pipeline" else "report.results"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
