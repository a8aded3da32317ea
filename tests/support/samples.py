"""The sample models, and the packages that some of them need."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopipe.workload import LoadOptions, Workload, load_workload

SAMPLES = Path(__file__).resolve().parents[2] / "sample_models"
NAMES = sorted(path.stem for path in SAMPLES.glob("*.py"))
REQUIRED_PACKAGES = {"resnet": "sklearn", "unet": "sklearn", "vgg16": "sklearn", "hf_llama": "transformers"}


def load_sample(name: str) -> Workload:
    """Load a sample model; skip the test if its package is not installed."""
    if name in REQUIRED_PACKAGES:
        pytest.importorskip(REQUIRED_PACKAGES[name])
    return load_workload(LoadOptions(str(SAMPLES / f"{name}.py")))
