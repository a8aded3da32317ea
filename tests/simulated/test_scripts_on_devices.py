"""Scripts with their model on a GPU: in stages they print and save what they do with python on one GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.damage.registry import MARKS, VARIABLE
from support.script_runs import SCRIPTS, Ended, by_python, in_stages
from support.simulated.library import environment, needed
from support.slow import mostly_slow

MODES = (
    *("plain", "noise", "autocast", "autocast scaler", "fused scaler", "fused infinite scaler", "infinite scaler"),
    *("clipping", "clipping scaler", "evaluation", "dropout", "drawn from outputs", "moved"),
)
CASES = {
    **{mode: ("gpu/classes.py", (mode,)) for mode in MODES},
    "images": ("gpu/images_on_a_gpu.py", ()),
    "moved back": ("gpu/moved_back.py", ()),
}
PLACES = (
    *("optimizer first", "inside of a device", "empty", "empty on the host", "initialized there", "back and forth"),
    *("copied", "loaded", "loaded by assignment", "frozen", "trained by hand first", "of two", "numbers of the host"),
    "alias",
)
SOONER = {
    *((name, 2) for name in ("autocast scaler", "drawn from outputs", "moved back", "images")),
    ("dropout", 3),
}


def pair(
    script: Path, *words: str, folder: Path, stages: int = 2, new: bool = False, **variables: str
) -> tuple[Ended, Ended]:
    """Run a script with python on one simulated GPU, and in stages, on a GPU each.

    ``new``: by a new interpreter, whose files are those of python byte for byte: pickle looks at the identity of names.
    """
    needed()
    one = environment(SIMULATED_DEVICES="1", **variables)
    plain = by_python(script, *words, folder=folder / "plain", new=new, environment=one)
    several = environment(**variables)
    return plain, in_stages(script, *words, folder=folder / "staged", stages=stages, environment=several)


def same_files(folder: Path) -> bool:
    names = [{path.relative_to(folder / k) for path in (folder / k).rglob("*.pt")} for k in ("plain", "staged")]
    return names[0] == names[1] and all(
        (folder / "plain" / name).read_bytes() == (folder / "staged" / name).read_bytes() for name in names[0]
    )


@pytest.mark.parametrize(("name", "stages"), mostly_slow([(n, s) for n in CASES for s in (2, 3)], SOONER))
def test_a_script_prints_and_saves_what_it_does_on_one_gpu(name: str, stages: int, tmp_path: Path) -> None:
    script, words = CASES[name]
    plain, staged = pair(SCRIPTS / script, *words, folder=tmp_path, stages=stages, new=True)
    assert plain.code == 0, plain.errors
    assert staged.code == 0, staged.errors
    assert staged.output == plain.output
    assert f"{stages} stages: " in staged.errors
    assert same_files(tmp_path)


@pytest.mark.parametrize("mode", ["clipping scaler", pytest.param("dropout", marks=pytest.mark.slow)])
def test_replicas_print_and_save_what_one_gpu_does(mode: str, tmp_path: Path) -> None:
    script = SCRIPTS / "gpu/classes.py"
    plain, _ = pair(script, mode, folder=tmp_path, new=True)
    shutil.rmtree(tmp_path / "staged")
    options = ("--replicas", "2")
    staged = in_stages(script, mode, folder=tmp_path / "staged", stages=2, options=options, environment=environment())
    assert (plain.code, staged.code) == (0, 0), staged.errors
    assert staged.output == plain.output
    assert "2 replicas of 1 stage: " in staged.errors
    assert same_files(tmp_path)


SLOW = """
import sys, torch
from torch import nn
from autopipe.script.calls import planning

planning._GPU_RATES = 1e-6, 1e-6  # of a GPU so slow that parts are worth it
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(float(sys.argv[1])), nn.Linear(8, 3)).cuda()
optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
for step in range(3):
    optimizer.zero_grad()
    for _ in range(int(sys.argv[2])):
        loss = (net(torch.randn(16, 4, device="cuda")) - torch.ones(16, 3, device="cuda")).square().mean()
        loss.backward()
    optimizer.step()
    print(step, loss.item(), net[0].weight.sum().item())
"""
CUT = "each training batch is cut into 8 parts of 2: "
AUTO = ("--num-microbatches", "auto")


@pytest.mark.parametrize(
    ("words", "options", "line", "is_cut"),
    [
        (("0", "1"), AUTO, "not bit-equal to python: gradients are sums over parts", True),
        (("0", "1"), (*AUTO, "--replicas", "auto"), "gradients are sums over replicas and parts", True),
        (("0", "2"), AUTO, "batches stay whole: the script accumulates gradients", True),
        (("0.1", "1"), AUTO, "batches stay whole: each part would draw random numbers", False),
        (("0", "1"), (), "or --num-microbatches auto", False),
        (("0", "2"), ("--replicas", "2"), "overlap from the script's accumulation", False),
    ],
)
def test_batches_on_a_gpu_are_cut_where_only_sums_change(
    words: tuple[str, ...], options: tuple[str, ...], line: str, is_cut: bool, tmp_path: Path
) -> None:
    needed()
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    plain = by_python(script, *words, folder=tmp_path, environment=environment(SIMULATED_DEVICES="1"))
    staged = in_stages(script, *words, folder=tmp_path, options=options, environment=environment())
    assert (plain.code, staged.code) == (0, 0), plain.errors + staged.errors
    assert line in staged.errors
    assert (CUT in staged.errors) == is_cut
    if not is_cut:
        assert staged.output == plain.output
    numbers = [[float(word) for word in ended.output.split()] for ended in (plain, staged)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-4)


def on_gpu(folder: Path) -> Path:
    """Return copies of the scripts whose tensors are created on the GPU, and read through the host."""
    copies = folder / "scripts"
    shutil.copytree(SCRIPTS, copies)
    for path in copies.rglob("*.py"):
        text = path.read_text().replace("import torch\n", "import torch; torch.set_default_device('cuda')\n", 1)
        path.write_text(text.replace(".numpy()", ".cpu().numpy()"))
    return copies


WAYS = tuple(f"ways/ways_{kind}.py" for kind in ("parameters", "gradients", "optimizers", "outputs"))
FORWARDS = tuple(f"forwards/{kind}.py" for kind in ("reads", "reads_objects", "reads_data", "keeps", "effects"))
EXAMPLES = ("language.py", "masked.py", "several_calls.py", "attributes.py", "tied_over_stages.py", "unfreezing.py")


@pytest.mark.parametrize("file", [*WAYS, *(pytest.param(name, marks=pytest.mark.slow) for name in EXAMPLES)])
def test_a_table_of_ways_gives_the_numbers_of_one_gpu(file: str, tmp_path: Path) -> None:
    plain, staged = pair(on_gpu(tmp_path) / file, folder=tmp_path, new=file in EXAMPLES)
    assert plain.code == 0, plain.errors
    assert staged.code == 0, staged.errors
    assert staged.output == plain.output
    assert len(plain.output.splitlines()) >= (80 if file in WAYS else 3)
    assert same_files(tmp_path)


@pytest.mark.parametrize("file", mostly_slow(FORWARDS, {"forwards/reads_data.py", "forwards/keeps.py"}))
def test_a_forward_gives_the_numbers_of_one_gpu_or_is_refused(file: str, tmp_path: Path) -> None:
    plain, staged = pair(on_gpu(tmp_path) / file, folder=tmp_path)
    assert plain.code == 0, plain.errors
    expected, actual = (blocks(ended.output) for ended in (plain, staged))
    assert len(expected) >= 8
    refused = {name for name in expected if f"\n{name}: refused: autopipe run: " in f"\n{staged.errors}"}
    assert expected.keys() - refused == actual.keys() - refused, staged.errors[-2000:]
    assert file == "forwards/effects.py" or len(actual.keys() - refused) >= 4
    for name in actual.keys() - refused:
        assert actual[name] == expected[name], name


def blocks(text: str) -> dict[str, list[str]]:
    """Return the indented lines after each name."""
    result: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("  "):
            result[list(result)[-1]].append(line)
        elif line != "forward":  # which a forward prints
            result[line] = []
    return result


def test_what_is_refused_on_a_gpu_names_its_line_and_changes_nothing(tmp_path: Path) -> None:
    needed()
    script = on_gpu(tmp_path) / "ways/refused_ways.py"
    plain = by_python(script, "--plain", folder=tmp_path, environment=environment(SIMULATED_DEVICES="1"))
    staged = in_stages(script, folder=tmp_path, environment=environment())
    assert staged.output == plain.output
    kinds = [line.rpartition(": ")[2] for line in staged.errors.splitlines() if line.count(": ") == 1]
    assert kinds.count("refused") >= 30
    assert "ran" not in kinds


def test_gpus_that_draw_other_numbers_are_refused(tmp_path: Path) -> None:
    needed()
    several = environment(SIMULATED_MULTIPROCESSORS="132,2")
    staged = in_stages(SCRIPTS / "gpu/classes.py", "dropout", folder=tmp_path, environment=several)
    assert staged.code == 1
    assert "the model draws random numbers, which differ on rank 1: " in staged.errors
    assert staged.output == ""


@pytest.mark.parametrize("place", mostly_slow(PLACES, {"empty", "initialized there", "back and forth", "alias"}))
def test_a_model_comes_to_the_gpu_in_any_way(place: str, tmp_path: Path) -> None:
    plain, staged = pair(SCRIPTS / "gpu/placed.py", place, folder=tmp_path, new=True)
    assert plain.code == 0, plain.errors
    assert staged.code == 0, staged.errors
    assert staged.output == plain.output
    assert same_files(tmp_path)


LIMIT = 3_660_000
"""Bytes: two thirds of what one process needs for the script."""


def test_a_model_larger_than_a_gpu_trains_on_two(tmp_path: Path) -> None:
    script = SCRIPTS / "gpu/larger_than_a_gpu.py"
    plain, staged = pair(script, folder=tmp_path, new=True, SIMULATED_LIMIT=str(LIMIT))
    assert plain.code != 0
    assert "OutOfMemoryError" in plain.errors
    assert staged.code == 0, staged.errors
    whole = by_python(script, folder=tmp_path / "plain", new=True, environment=environment(SIMULATED_DEVICES="1"))
    *lines, peak = whole.output.splitlines()
    assert int(peak.removeprefix("peak ")) >= 1.5 * LIMIT
    assert staged.output.splitlines() == [*lines, "memory 0"]
    assert same_files(tmp_path)


@pytest.mark.parametrize("what", mostly_slow(["wrapped", "wrapped, moved", "distributed, moved"], {"wrapped, moved"}))
def test_a_wrapper_for_one_gpu_only_calls_its_model(what: str, tmp_path: Path) -> None:
    needed()
    one = environment(SIMULATED_DEVICES="1")  # where a wrapper asks for collectives, which do not exist
    plain = by_python(SCRIPTS / "wrapped.py", "alone", "cuda", folder=tmp_path, environment=one)
    staged = in_stages(SCRIPTS / "wrapped.py", what, "cuda", folder=tmp_path, environment=environment())
    assert staged.code == 0, staged.errors
    assert staged.output == plain.output


DAMAGES = {
    "autocast_of_gpu_lost": "autocast scaler",
    "generator_of_gpu_lost": "dropout",
    "generator_does_not_advance": "dropout",
    "rank_stays_on_host": "plain",
    "place_is_lost": "plain",
    "model_is_not_parked": "larger",
    "alias_is_lost": "initialized there",
}
WITH = {
    "larger": ("gpu/larger_than_a_gpu.py", {"SIMULATED_LIMIT": str(LIMIT)}),
    "initialized there": ("gpu/placed.py", {}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_without_one_of_the_parts_the_numbers_differ_or_the_run_fails(damage: str, tmp_path: Path) -> None:
    needed()
    (tmp_path / "marks").mkdir()
    words = DAMAGES[damage]
    name, more = WITH.get(words, ("gpu/classes.py", {}))
    variables = {VARIABLE: damage, MARKS: str(tmp_path / "marks"), **more}
    plain = by_python(SCRIPTS / name, words, folder=tmp_path, environment=environment(SIMULATED_DEVICES="1"))
    staged = in_stages(SCRIPTS / name, words, folder=tmp_path, environment=environment(**variables))
    assert (tmp_path / "marks" / damage).exists()
    assert staged.code != 0 or staged.output != plain.output
