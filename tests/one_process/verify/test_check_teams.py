"""``autopipe check`` of transformers in teams: alone, and with stages and replicas. Most of each model is sharded."""

import itertools
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.models.transformers import MODELS, toy_of
from support.samples import SAMPLES
from support.slow import mostly_slow

from autopipe.cli.main import autopipe
from autopipe.ir import artifact
from autopipe.ir.profile import Profile
from autopipe.planning.search_space import Space

FILE = """
import torch
from support.models.transformers import MODELS, toy_of

toy = toy_of("{name}")


def build_model():
    return toy._build()


def data(batch_size=8):
    step = 0
    while True:
        step += 1
        yield toy._batch(batch_size, torch.Generator().manual_seed(step))
"""
OPTIONS = ["--device", "cpu", "--batch-size", "8", "--microbatch-sizes", "2,4", "--json"]
# two ranks of two stages each, on two replicas, of two members
ALL = ["--gpus", "8", "--num-microbatches", "4", "--schedule", "interleaved", "--stages-per-rank", "2"]
LAYOUTS = {
    "teams": ["--gpus", "2", "--num-microbatches", "4"],
    "all": [*ALL, "--replicas", "auto"],
    "positions": [*ALL, "--replicas", "auto", "--sequence-parallel"],
}
NAMES = [*MODELS, "gpt", "hf_llama"]
# with every change, all models of transformers in the layout that has everything, and one of autopipe's in another
SOONER = {*((name, "all") for name in MODELS), ("gpt", "positions")}


@pytest.mark.parametrize(("name", "layout"), mostly_slow(itertools.product(NAMES, LAYOUTS), SOONER))
@pytest.mark.filterwarnings("default")
def test_a_transformer_in_teams_equals_plain_training(
    name: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    if layout == "positions" and name.startswith("ViT"):
        pytest.skip("its 17 positions cannot be divided, which test_teams refuses")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"{name.lower()}.py"
    path.write_text(FILE.replace("{name}", name) if name in MODELS else (SAMPLES / f"{name}.py").read_text())
    arguments = ["--arg", "dropout=0.1", "--arg", "blocks=4"] if name == "gpt" else []
    if layout != "teams":  # whatever is the fastest on this machine
        monkeypatch.setattr(Space, "choices", lambda self, _: tuple(o for o in self.replicated if o.replicas == 2))
    done = CliRunner().invoke(
        autopipe, ["check", path.name, "--tensor-parallel", "2", *LAYOUTS[layout], *OPTIONS, *arguments]
    )
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["equal"] and not report["bitwise"]
    assert report["max_relative_error"] < 1e-5
    plan = json.loads(Path(".autopipe/plan.json").read_text())
    assert plan["team"] == 2
    assert plan["workload"].get("sequence", False) == (layout == "positions")
    assert {len(stage["ranks"]) for stage in plan["stages"]} == {1 if layout == "teams" else 2}
    if name in MODELS:
        graph = artifact.load(Profile, Path(".autopipe/profile.json"), renew="").graph
        own = sum(spec.num_bytes({}) for spec in graph.parameters.values())
        whole = sum(parameter.nbytes for parameter in toy_of(name).build_model().parameters())
        assert 2 * (whole - own) / whole > 0.8  # of the bytes of the parameters
