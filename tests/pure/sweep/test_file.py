"""``sweep.toml``: what it may contain, and errors that name the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopipe.errors import RunError
from autopipe.sweep.file import SweepFile, parse_devices, read_sweep
from autopipe.sweep.halving import Halving
from autopipe.sweep.structures import structures_of


def read(folder: Path, text: str) -> SweepFile:
    for name in ("gpt.py", "llama.py"):
        (folder / name).write_text("")
    (folder / "sweep.toml").write_text(text)
    return read_sweep(folder / "sweep.toml")


EVERYTHING = """
devices = [0, 2]
lease = "1.5s"
metric = "evaluation"
[defaults]
steps = 2000
batch-size = 32
precision = "bf16"
[[job]]
target = "gpt.py"
grid = { lr = [1e-3, 3e-4], "arg.width" = [256, 512] }
[[job]]
name = "llama"
target = "llama.py:build"
gpus = 2
epochs = 3
eval-every = 10
arg.layers = 4
"""


def test_every_combination_of_a_grid_is_a_job_with_the_defaults(tmp_path: Path) -> None:
    sweep = read(tmp_path, EVERYTHING.replace("epochs = 3", "steps = 700"))
    assert (sweep.devices, sweep.lease_seconds, sweep.metric, sweep.halving) == ((0, 2), 1.5, "evaluation", None)
    assert [job.name for job in sweep.jobs] == [
        "gpt-lr=0.001,arg.width=256",
        "gpt-lr=0.001,arg.width=512",
        "gpt-lr=0.0003,arg.width=256",
        "gpt-lr=0.0003,arg.width=512",
        "llama",
    ]
    first, last = sweep.jobs[0], sweep.jobs[-1]
    assert first.target == str(tmp_path / "gpt.py")
    assert first.folder == "0001-lr=0.001,arg.width=256"
    assert first.given() == {
        **{"steps": 2000, "batch_size": 32, "precision": "bf16", "lr": 0.001},
        "arg": {"width": 256},
    }
    assert last.target == f"{tmp_path / 'llama.py'}:build"
    assert (last.folder, last.devices, last.given()["arg"], last.options["steps"]) == (
        "0005-llama",
        2,
        {"layers": 4},
        700,
    )


def test_an_option_of_a_job_replaces_one_of_the_defaults_that_it_excludes(tmp_path: Path) -> None:
    last = read(tmp_path, EVERYTHING).jobs[-1]
    assert last.options["epochs"] == 3 and "steps" not in last.options


def test_a_list_gives_one_job_a_table(tmp_path: Path) -> None:
    sweep = read(tmp_path, '[[job]]\ntarget = "gpt.py"\nlr = 1.0\nlist = [{ lr = 0.1 }, { arg = { width = 8 } }]')
    assert [job.name for job in sweep.jobs] == ["gpt-lr=0.1", "gpt-arg.width=8"]
    assert [job.given() for job in sweep.jobs] == [{"lr": 0.1}, {"lr": 1.0, "arg": {"width": 8}}]


def test_learning_rate_and_seed_do_not_change_a_structure(tmp_path: Path) -> None:
    job = '[[job]]\ntarget = "gpt.py"\ngrid = '
    sweep = read(tmp_path, job + '{ lr = [0.1, 0.2], seed = [1, 2], clip-grad-norm = [1, 2], "arg.width" = [8, 16] }')
    structures = structures_of(sweep.jobs)
    assert [len(structure.jobs) for structure in structures] == [8, 8]
    assert {job.options["arg.width"] for job in structures[0].jobs} == {8}
    # the gradient norm changes the comparison with plain training, and not the plan
    assert [len(jobs) for jobs in structures[0].comparisons().values()] == [4, 4]


def test_halving(tmp_path: Path) -> None:
    text = '[[job]]\ntarget = "gpt.py"\nsteps = 700\n[stop]\nat = [200, 600]\nkeep = 0.25'
    assert read(tmp_path, text).halving == Halving((200, 600), 0.25)


JOB = '[[job]]\ntarget = "gpt.py"\n'
WRONG = {
    "lr": ("[defaults]\nlr = -1\n" + JOB, "defaults.lr", "lr must be a finite number of at least 0, got -1"),
    "steps": (JOB + "steps = 1.5", "job[0].steps", "steps must be a whole number of at least 1, got 1.5"),
    "in a grid": (JOB + "grid = { lr = [0.1, 'x'] }", "job[0].grid.lr[1]", "got 'x'"),
    "in a list": (JOB + "list = [{ lr = 0.1 }, { steps = 0 }]", "job[0].list[1].steps", "at least 1, got 0"),
    "choice": (JOB + "precision = 'bf61'", "job[0].precision", "Did you mean 'bf16'?"),
    "schedule": (JOB + "schedule = '1f1c'", "job[0].schedule", "Did you mean '1f1b'?"),
    "bytes": (JOB + "gpu-memory = '24Gib'", "job[0].gpu-memory", "Gib"),
    "option": (JOB + "batch-sise = 2", "job[0].batch-sise", "Did you mean 'batch_size'?"),
    "key": ("leese = 3\n" + JOB, "leese", "Did you mean 'lease'?"),
    "key of stop": (JOB + "[stop]\nat = [2]\nkep = 0.5", "stop.kep", "Did you mean 'keep'?"),
    "option of the sweep": (JOB + "resume = true", "job[0].resume", "autopipe sweep --resume"),
    "launcher": ("[defaults]\nlauncher = 'slurm'\n" + JOB, "defaults.launcher", "on this machine"),
    "no job": ("lease = 3", "job", "there is no job"),
    "no target": ("[[job]]\nlr = 1", "job[0].target", "target is missing"),
    "no file": ("[[job]]\ntarget = 'gtp.py'", "job[0].target", "there is no file"),
    "no file of a hook": (JOB + "data = 'd.py:f'", "job[0].data", "there is no file"),
    "no cluster": (JOB + "cluster = 'c.toml'", "job[0].cluster", "there is no"),
    "names": (JOB + JOB, "job[1].name", "two jobs are called 'gpt': job[0] and job[1]"),
    "values twice": (JOB + "grid = { lr = [1, 1] }", "job[0].name", "two jobs are called 'gpt-lr=1'"),
    "name": (JOB + "name = 3", "job[0].name", "a name must be a text"),
    "empty grid": (JOB + "grid = {}", "job[0].grid", "the grid is empty"),
    "no values": (JOB + "grid = { lr = 0.1 }", "job[0].grid.lr", "a list of values"),
    "both": (JOB + "grid = { lr = [1] }\nlist = [{}]", "job[0]", "grid and list exclude each other"),
    "excluded": (JOB + "steps = 1\nepochs = 1", "job[0]", "steps and epochs exclude each other"),
    "excluded in a grid": (JOB + "steps = 1\ngrid = { epochs = [1] }", "job[0]", "steps and epochs exclude each other"),
    "lease": ("lease = '3 parsecs'\n" + JOB, "lease", "parsecs"),
    "no lease": ("lease = 0\n" + JOB, "lease", "longer than 0 seconds"),
    "metric": ("metric = 'los'\n" + JOB, "metric", "Did you mean 'loss'?"),
    "devices": ("devices = [0, 0]\n" + JOB, "devices", "different devices"),
    "jobs per device": ("jobs-per-device = 0\n" + JOB, "jobs-per-device", "neither auto nor a number of jobs"),
    "order of steps": (JOB + "[stop]\nat = [3, 2]", "stop.at", "ascending"),
    "share": (JOB + "[stop]\nat = [3]\nkeep = 1.0", "stop.keep", "below 1, got 1.0"),
    "late": (JOB + "steps = 3\n[stop]\nat = [3]", "stop.at", "has 3 steps, and would be compared at 3"),
    "no steps": (JOB + "[stop]\nat = [3]", "job[0].steps", "has no steps"),
    "never evaluated": ("metric = 'evaluation'\n" + JOB, "job[0].eval-every", "never evaluated"),
    "not TOML": ("a = [", "", "not a TOML file"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_error_names_the_key(case: str, tmp_path: Path) -> None:
    text, place, what = WRONG[case]
    with pytest.raises(RunError) as caught:
        read(tmp_path, text)
    path = str(tmp_path / "sweep.toml")
    assert caught.value.where == (f"{path}: {place}" if place else path)
    assert what in caught.value.what or what in caught.value.remedy


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot be read: No such file"):
        read_sweep(tmp_path / "none.toml")


def test_devices_are_a_number_or_indices() -> None:
    assert [parse_devices(value) for value in ("auto", 2, "2", "0,1", [3], "1, 0")] == [
        None,
        2,
        2,
        (0, 1),
        (3,),
        (1, 0),
    ]
    for wrong in (0, -1, "", "a", "0,,1", [], [True], [-1], 1.5, "1,1"):
        with pytest.raises(ValueError, match="neither auto, a number of devices"):
            parse_devices(wrong)
