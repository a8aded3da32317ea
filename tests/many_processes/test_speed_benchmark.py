"""``make bench`` in its smallest pieces: autopipe and its peer train the same stages to the same losses."""

from pathlib import Path

import pytest

from benchmarks.speed.case import Options, pipeline_words
from benchmarks.speed.cases.host_cost import SYSTEMS, HostCost
from benchmarks.speed.running import SAMPLES, prepare, same_losses, train, train_peers


@pytest.mark.slow
def test_the_host_cost_of_two_ranks(tmp_path: Path) -> None:
    case = HostCost(Options(tmp_path, quick=True), ranks=2, microbatches=4)
    case.round(0)  # ends with SystemExit if the losses differ, or a rank did not measure itself
    for name in SYSTEMS:
        assert min(case.processor[name]) > 0
        assert min(case.wall[name]) > 0
    rows = [line for line in case.lines() if line.startswith(("| autopipe", "| torch"))]
    assert len(rows) == 2


@pytest.mark.slow
@pytest.mark.parametrize("system", ["plain", "gpipe", "interleaved"])
def test_a_peer_trains_tied_parameters_as_autopipe_does(tmp_path: Path, system: str) -> None:
    name = "interleaved" if system == "interleaved" else "1f1b"
    words = [*pipeline_words(2, 4, 8), "--schedule", name]
    profile = ["--microbatch-sizes", "2", "--arg", "blocks=2", "--arg", "width=32"]
    work = prepare(tmp_path, SAMPLES / "gpt.py", profile, {name: words})[name]
    ours = train(work, SAMPLES / "gpt.py", [*words, *profile], 4)
    (theirs,) = train_peers([{"system": system, "work": str(work), "steps": 4}], tmp_path)
    assert len(ours.losses) == len(theirs.losses) == 4
    same_losses(theirs, ours, 1e-4, system)
