"""The operations of a model, against the formula of PaLM (arXiv:2204.02311, appendix B), and in a plan's stages."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from autopipe.cli.main import autopipe
from autopipe.ir import artifact
from autopipe.ir.profile import Profile
from autopipe.planning import PlanOptions, make_plan
from autopipe.planning.clusters import uniform_cluster

LLAMA = Path(__file__).parents[3] / "benchmarks/large_models/llama.py"
WIDTH, HIDDEN, BLOCKS, HEADS, SHARED, WORDS, TOKENS = 128, 352, 4, 4, 2, 32000, 2048


def by_hand(samples):
    """Return 6 operations per token and weight of a product, and 12 per token, block, token of the context and width.

    The embedding is looked up, and has no operations.
    """
    block = 2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH * SHARED // HEADS + 3 * WIDTH * HIDDEN
    weights = BLOCKS * block + WIDTH * WORDS
    return samples * TOKENS * (6 * weights + 12 * BLOCKS * TOKENS * WIDTH)


@pytest.fixture
def counted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(autopipe, ["profile", str(LLAMA), "--estimate", "--microbatch-sizes", "1,3", "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout), artifact.load(Profile, Path(".autopipe/profile.json"), renew="")


def test_the_operations_of_a_llama_equal_the_formula(counted):
    document, profile = counted
    assert [entry["model_flops"] for entry in document["measurements"]] == [by_hand(1), by_hand(3)]
    assert [measurement.model_flops for measurement in profile.measurements] == [by_hand(1), by_hand(3)]
    # the backward of attention repeats one of six products of 2 x tokens x tokens x width
    repeated = 2 * BLOCKS * TOKENS * TOKENS * WIDTH
    assert document["measurements"][0]["flops"] == by_hand(1) + repeated
    assert document["measurements"][0]["mfu"] is None

    assert profile.at(2).model_flops == by_hand(2), "interpolated"
    for stages in (1, 2, 4):
        options = PlanOptions(num_ranks=stages, batch_size=6, num_microbatches=3)
        plan = make_plan(profile, uniform_cluster(stages), options)
        assert sum(stage.flops for stage in plan.stages) == by_hand(plan.microbatch_size)
        assert plan.flops_per_sample == by_hand(1)
