"""Further models of the other repositories: unmodified code, small enough for a test."""

import torch
import torch.nn.functional as F
from _repositories import definitions, repository

# model: its batches and its loss
MODELS = {
    "cifar_densenet": ("images_32", "torch.nn.functional:cross_entropy"),
    "cifar_dpn": ("images_32", "torch.nn.functional:cross_entropy"),
    "cifar_mobilenet": ("images_32", "torch.nn.functional:cross_entropy"),
    "cifar_pnasnet": ("images_32", "torch.nn.functional:cross_entropy"),
    "cifar_regnet": ("images_32", "torch.nn.functional:cross_entropy"),
    "cifar_resnext": ("images_32", "torch.nn.functional:cross_entropy"),
    "convnext_isotropic": ("images_32", "torch.nn.functional:cross_entropy"),
    "dcgan_g": ("noise", "mean_square"),
    "mnist": ("digits", "torch.nn.functional:nll_loss"),
    "gat": ("graph", "torch.nn.functional:nll_loss", "--num-microbatches 1"),
    "word_gru": ("words_hidden", "word_loss"),
    "translator": ("translations", "translator_loss"),
    "super_resolution": ("upscaling", "torch.nn.functional:mse_loss"),
    "dit": ("diffusion_steps", "torch.nn.functional:mse_loss"),
    "mamba": ("tokens", "token_loss"),
    "raschka_gpt": ("tokens", "token_loss"),
    "raschka_gqa": ("tokens", "token_loss"),
    "raschka_gpt_moe": ("tokens", "token_loss"),
    "raschka_qwen3_moe": ("tokens", "token_loss"),
    "smp_unet": ("masks", "torch.nn.functional:binary_cross_entropy_with_logits"),
    "smp_fpn": ("masks", "torch.nn.functional:binary_cross_entropy_with_logits"),
    "smp_manet": ("masks", "torch.nn.functional:binary_cross_entropy_with_logits"),
    "smp_pspnet": ("masks", "torch.nn.functional:binary_cross_entropy_with_logits"),
    "smp_upernet": ("masks", "torch.nn.functional:binary_cross_entropy_with_logits"),
    "ddpm": ("small_images", "output_is_loss"),
    "ddpm_learned": ("small_images", "output_is_loss"),
    "xt_decoder": ("tokens", "token_loss"),
    "xt_encoder_decoder": ("pairs", "output_is_loss"),
    "xt_non_autoregressive": ("token_rows", "first_output"),
    "dlrm_one_sparse": ("clicks", "torch.nn.functional:binary_cross_entropy"),
}
CIFAR = {"densenet": "densenet_cifar", "dpn": "DPN26", "pnasnet": "PNASNetA", "regnet": "RegNetX_200MF"}


def generator():
    return torch.Generator().manual_seed(0)


def images_32(batch_size):
    g = generator()
    for _ in range(4):
        yield torch.randn(batch_size, 3, 32, 32, generator=g), torch.randint(0, 10, (batch_size,), generator=g)


def small_images(batch_size):
    g = generator()
    for _ in range(4):
        yield {"img": torch.rand(batch_size, 3, 16, 16, generator=g)}


def digits(batch_size):
    g = generator()
    for _ in range(4):
        yield torch.randn(batch_size, 1, 28, 28, generator=g), torch.randint(0, 10, (batch_size,), generator=g)


def noise(batch_size):
    g = generator()
    for _ in range(4):
        yield torch.randn(batch_size, 20, 1, 1, generator=g), torch.rand(batch_size, 3, 64, 64, generator=g)


def graph(batch_size):
    g = generator()
    edges = (torch.rand(16, 16, generator=g) < 0.3).float() + torch.eye(16)
    for _ in range(4):
        yield (torch.randn(16, 12, generator=g), edges), torch.randint(0, 4, (16,), generator=g)


def tokens(batch_size):
    g = generator()
    for _ in range(4):
        ids = torch.randint(0, 64, (batch_size, 17), generator=g)
        yield ids[:, :-1], ids[:, 1:]


def token_rows(batch_size):
    g = generator()
    for _ in range(4):
        yield {"x": torch.randint(0, 63, (batch_size, 16), generator=g)}


def pairs(batch_size):
    g = generator()
    for _ in range(4):
        source, target = torch.randint(0, 64, (2, batch_size, 16), generator=g)
        yield {"src": source, "tgt": target, "mask": torch.ones(batch_size, 16, dtype=torch.bool)}


def words_hidden(batch_size):
    g = generator()
    for _ in range(4):
        ids = torch.randint(0, 50, (12, batch_size), generator=g)
        yield (ids[:-1], torch.zeros(2, batch_size, 32)), ids[1:]


def translations(batch_size):
    g = generator()
    for _ in range(4):
        source, target = torch.randint(2, 50, (2, 10, batch_size), generator=g)
        causal = torch.nn.Transformer.generate_square_subsequent_mask(9)
        padding = [torch.zeros(batch_size, length, dtype=torch.bool) for length in (10, 9)]
        inputs = (source, target[:-1], torch.zeros(10, 10), causal, *padding, padding[0])
        yield inputs, target[1:]


def upscaling(batch_size):
    g = generator()
    for _ in range(4):
        yield torch.rand(batch_size, 1, 8, 8, generator=g), torch.rand(batch_size, 1, 16, 16, generator=g)


def diffusion_steps(batch_size):
    g = generator()
    for _ in range(4):
        step, label = torch.randint(0, 10, (2, batch_size), generator=g)
        image = torch.randn(batch_size, 4, 8, 8, generator=g)
        yield (image, step, label), torch.randn(batch_size, 8, 8, 8, generator=g)


def masks(batch_size):
    g = generator()
    for _ in range(4):
        mask = torch.randint(0, 2, (batch_size, 1, 64, 64), generator=g).float()
        yield torch.rand(batch_size, 3, 64, 64, generator=g), mask


def clicks(batch_size):
    g = generator()
    for _ in range(4):
        sparse = [torch.randint(0, n, (batch_size,), generator=g) for n in (20, 30, 40)]
        offsets = [torch.arange(batch_size) for _ in range(3)]
        dense = torch.randn(batch_size, 4, generator=g)
        yield (dense, offsets, sparse), torch.randint(0, 2, (batch_size, 1), generator=g).float()


def mean_square(output, target):
    return F.mse_loss(output, target)


def token_loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def word_loss(output, target):
    return F.nll_loss(output[0].reshape(-1, 50), target.flatten())


def translator_loss(output, target):
    return F.cross_entropy(output.reshape(-1, 50), target.flatten())


def output_is_loss(output, target=None):
    return output


def first_output(output, target=None):
    return output[0]


def cifar(file, name=None):
    repository("pytorch-cifar")
    import importlib

    return getattr(importlib.import_module(f"models.{file}"), name or CIFAR[file])()


def cifar_densenet():
    return cifar("densenet")


def cifar_dpn():
    return cifar("dpn")


def cifar_mobilenet():
    return cifar("mobilenet", "MobileNet")


def cifar_pnasnet():
    return cifar("pnasnet")


def cifar_regnet():
    return cifar("regnet")


def cifar_resnext():
    return cifar("resnext", "ResNeXt29_2x64d")


def convnext_isotropic():
    repository("ConvNeXt")
    from models.convnext_isotropic import ConvNeXtIsotropic

    return ConvNeXtIsotropic(num_classes=10, depth=3, dim=32, drop_path_rate=0.2)


def dcgan_g():
    script = definitions("examples/dcgan/main.py", "dcgan_script", nz=20, ngf=8, ndf=8, nc=3, ngpu=1)
    return script.Generator(1)


def mnist():
    repository("examples/mnist")
    from main import Net

    return Net()


def gat():
    repository("examples/gat")
    from main import GAT

    return GAT(12, 16, 2, 4, concat=True, dropout=0.1)


def word_gru():
    repository("examples/word_language_model")
    from model import RNNModel

    return RNNModel("GRU", 50, 32, 32, 2, dropout=0.2)


def translator():
    repository("examples/language_translation")
    from src.model import Translator

    return Translator(2, 2, 32, 2, 50, 50, 64, 0.1)


def super_resolution():
    repository("examples/super_resolution")
    from model import Net

    return Net(2)


def dit():
    repository("DiT")
    from models import DiT

    return DiT(input_size=8, patch_size=2, hidden_size=32, depth=3, num_heads=2, num_classes=10)


def mamba():
    repository("mamba-minimal")
    from model import Mamba, ModelArgs

    return Mamba(ModelArgs(d_model=32, n_layer=3, vocab_size=64))


def gpt_config(**changes):
    config = {"vocab_size": 64, "context_length": 32, "emb_dim": 32, "n_heads": 4, "n_layers": 3, "drop_rate": 0.1}
    return {**config, "qkv_bias": False, **changes}


def raschka_gpt():
    repository("LLMs-from-scratch/pkg")
    from llms_from_scratch.ch04 import GPTModel

    return GPTModel(gpt_config())


def raschka_gqa():
    repository("LLMs-from-scratch/ch04/04_gqa")
    from gpt_with_kv_gqa import GPTModel

    return GPTModel(gpt_config(n_kv_groups=2))


def raschka_gpt_moe():
    repository("LLMs-from-scratch/ch04/07_moe")
    from gpt_with_kv_moe import GPTModel

    return GPTModel(gpt_config(hidden_dim=64, num_experts=4, num_experts_per_tok=2))


def raschka_qwen3_moe():
    repository("LLMs-from-scratch/pkg")
    from llms_from_scratch.qwen3 import Qwen3Model

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "hidden_dim": 64}
    attention = {"head_dim": 8, "qk_norm": True, "n_kv_groups": 2, "rope_base": 1e6, "dtype": torch.float32}
    return Qwen3Model(gpt_config(**experts, **attention))


def smp_unet():
    return segmentation("Unet")


def smp_fpn():
    return segmentation("FPN")


def smp_manet():
    return segmentation("MAnet")


def smp_pspnet():
    return segmentation("PSPNet")


def smp_upernet():
    return segmentation("UPerNet")


def segmentation(name):
    repository("segmentation_models.pytorch")
    import segmentation_models_pytorch

    return getattr(segmentation_models_pytorch, name)("resnet18", encoder_weights=None)


def ddpm():
    repository("denoising-diffusion-pytorch")
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    return GaussianDiffusion(Unet(dim=16, dim_mults=(1, 2), flash_attn=False), image_size=16, timesteps=100)


def ddpm_learned():
    repository("denoising-diffusion-pytorch")
    from denoising_diffusion_pytorch import LearnedGaussianDiffusion, Unet

    net = Unet(dim=16, dim_mults=(1, 2), out_dim=6, flash_attn=False)
    return LearnedGaussianDiffusion(net, image_size=16, timesteps=100)


def xt_decoder():
    repository("x-transformers")
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=3, heads=2, attn_dim_head=16, rotary_pos_emb=True, use_rmsnorm=True, ff_swish=True)
    return TransformerWrapper(num_tokens=64, max_seq_len=16, attn_layers=layers)


def xt_encoder_decoder():
    repository("x-transformers")
    from x_transformers import XTransformer

    sides = {"num_tokens": 64, "depth": 2, "heads": 2, "max_seq_len": 16}
    options = {f"{side}_{key}": value for side in ("enc", "dec") for key, value in sides.items()}
    return XTransformer(dim=32, **options)


def xt_non_autoregressive():
    repository("x-transformers")
    from x_transformers import Encoder, TransformerWrapper
    from x_transformers.nonautoregressive_wrapper import NonAutoregressiveWrapper

    layers = Encoder(dim=32, depth=3, heads=2, attn_dim_head=16)
    return NonAutoregressiveWrapper(TransformerWrapper(num_tokens=64, max_seq_len=16, attn_layers=layers), mask_id=63)


def dlrm_one_sparse():
    repository("dlrm")
    import numpy as np
    from dlrm_s_pytorch import DLRM_Net

    sizes = np.array([20, 30, 40]), np.array([4, 16, 8]), np.array([14, 16, 1])
    return DLRM_Net(8, *sizes, arch_interaction_op="dot", sigmoid_bot=-1, sigmoid_top=1)
