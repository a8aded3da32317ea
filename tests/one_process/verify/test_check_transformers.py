"""``autopipe check`` on models of the transformers library as they are used: a config, a batch with labels."""

import json
import textwrap

import pytest
from click.testing import CliRunner
from support.slow import mostly_slow

from autopipe.cli.main import autopipe

pytest.importorskip("transformers")

TEXT = """
    ids = torch.randint(3, 99, (batch_size, 12), generator=generator)
    mask = torch.ones_like(ids)
    mask[::2, 9:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
"""
PICTURES = """
    classes = torch.randint(0, 2, (batch_size,), generator=generator)
    batch = {"pixel_values": torch.randn(batch_size, 3, 32, 32, generator=generator), "labels": classes}
"""
SIZES = "hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48"
MODELS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", "vocab_size=99, n_embd=32, n_layer=3, n_head=4, n_positions=32", TEXT),
    "llama": ("LlamaForCausalLM", "LlamaConfig", f"vocab_size=99, {SIZES}, num_key_value_heads=2", TEXT),
    "bert": ("BertForMaskedLM", "BertConfig", f"vocab_size=99, {SIZES}", TEXT),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        "vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0",
        TEXT,
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", f"{SIZES}, image_size=32, patch_size=8", PICTURES),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        f"vocab_size=99, {SIZES}, num_key_value_heads=2, num_local_experts=4, output_router_logits=True",
        TEXT,
    ),
}


def checked(name, folder, num_stages, batch):
    """Write a model file as a user would, and return the output of its check."""
    model, config, options, _ = MODELS[name]
    text = f"""
import torch, transformers
def build_model():
    return transformers.{model}(transformers.{config}({options}))
def data(batch_size=6):
    generator = torch.Generator().manual_seed(0){textwrap.dedent(batch).replace(chr(10), chr(10) + "    ")}
    return [batch] * 2
"""
    (folder / f"raw_{name}.py").write_text(text)
    done = CliRunner().invoke(autopipe, ["check", f"raw_{name}.py", "--gpus", str(num_stages), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


SOONER = ("gpt2",)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", mostly_slow(MODELS, SOONER))
def test_a_model_trains_in_two_and_three_stages_as_in_a_plain_loop(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for num_stages in (2, 3):
        assert checked(name, tmp_path, num_stages, MODELS[name][3])["equal"] is True
        plan = json.loads((tmp_path / ".autopipe" / "plan.json").read_text())
        assert len(plan["stages"]) == num_stages


@pytest.mark.filterwarnings("default")
def test_a_mask_of_ones_makes_a_model_round_otherwise_when_nobody_looks_and_that_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = checked("llama", tmp_path, 2, TEXT.replace("mask[::2, 9:] = 0", ""))
    assert report["equal"] is True
    assert report["bitwise"] or any("a mask of ones" in warning for warning in report["warnings"])
