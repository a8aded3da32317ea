"""Rows that may load kernels."""

from __future__ import annotations

from autopipe.runtime.first_kernels import MINIBATCHES, FirstKernels

TRAINING, SHORT, EVALUATION = (True, "train", 8), (True, "train", 3), (False, "train", 8)


def test_the_first_minibatches_of_each_kind_may_load_kernels() -> None:
    kernels = FirstKernels()
    assert [kernels.may_load([[TRAINING, TRAINING]]) for _ in range(MINIBATCHES + 1)] == [True] * MINIBATCHES + [False]
    assert kernels.may_load([[EVALUATION]])
    assert not kernels.may_load([[TRAINING]])


def test_one_unknown_microbatch_decides() -> None:
    kernels = FirstKernels()
    for _ in range(MINIBATCHES):
        kernels.may_load([[TRAINING]])
    assert kernels.may_load([[TRAINING], [TRAINING, SHORT]])


def test_a_row_counts_each_of_its_minibatches() -> None:
    kernels = FirstKernels()
    assert kernels.may_load([[TRAINING]] * MINIBATCHES)
    assert not kernels.may_load([[TRAINING]])
