"""Restores ``sys.path``: the judge imports the model file of a disturbed run, beside which its faults are."""

import sys

import pytest


@pytest.fixture(autouse=True, scope="module")
def own_path():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        yield
