"""Models of denoising-diffusion-pytorch and diffusers: unmodified code, each small enough for a test."""

import torch
import torch.nn.functional as F
from _repositories import repository

# model: its batches and its loss
MODELS = {
    "ddpm_1d": ("ddpm_1d_batches", "ddpm_1d_loss"),
    "elucidated": ("elucidated_batches", "ddpm_1d_loss"),
    "karras_unet": ("karras_unet_batches", "torch.nn.functional:mse_loss"),
    "simple_uvit": ("simple_uvit_batches", "ddpm_1d_loss"),
    "vparam": ("simple_uvit_batches", "ddpm_1d_loss"),
    "diffusers_unet2d": ("diffusers_unet2d_batches", "diffusers_unet2d_loss"),
    "diffusers_vae": ("diffusers_vae_batches", "diffusers_unet2d_loss"),
}


def ddpm_1d_batches(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield {"img": torch.rand(batch_size, 4, 16, generator=g)}


def elucidated_batches(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield {"images": torch.rand(batch_size, 3, 16, 16, generator=g)}


def karras_unet_batches(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        x = {
            "x": torch.rand(batch_size, 4, 16, 16, generator=g),
            "time": torch.rand(batch_size, generator=g),
            "class_labels": torch.randint(0, 10, (batch_size,), generator=g),
        }
        yield (x, torch.rand(batch_size, 4, 16, 16, generator=g))


def simple_uvit_batches(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield {"img": torch.rand(batch_size, 3, 16, 16, generator=g)}


def diffusers_unet2d_batches(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        yield (
            {
                "sample": torch.rand(batch_size, 3, 16, 16, generator=g),
                "timestep": torch.randint(0, 100, (batch_size,), generator=g),
            },
            torch.rand(batch_size, 3, 16, 16, generator=g),
        )


def diffusers_vae_batches(batch_size):
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        x = torch.rand(batch_size, 3, 16, 16, generator=g)
        yield ({"sample": x, "sample_posterior": True}, x)


def ddpm_1d_loss(output, target=None):
    return output


def diffusers_unet2d_loss(output, target):
    return F.mse_loss(output.sample, target)


def ddpm_1d():
    repository("denoising-diffusion-pytorch")
    from denoising_diffusion_pytorch import GaussianDiffusion1D, Unet1D

    return GaussianDiffusion1D(Unet1D(dim=16, dim_mults=(1, 2), channels=4), seq_length=16, timesteps=100)


def elucidated():
    repository("denoising-diffusion-pytorch")
    from denoising_diffusion_pytorch import ElucidatedDiffusion, Unet

    return ElucidatedDiffusion(
        Unet(dim=16, dim_mults=(1, 2), flash_attn=False, learned_sinusoidal_cond=True), image_size=16
    )


def karras_unet():
    repository("denoising-diffusion-pytorch")
    from denoising_diffusion_pytorch.karras_unet import KarrasUnet

    return KarrasUnet(
        image_size=16,
        dim=16,
        dim_max=32,
        num_downsamples=2,
        num_blocks_per_stage=1,
        attn_res=(8,),
        attn_dim_head=16,
        fourier_dim=8,
        num_classes=10,
    )


def simple_uvit():
    repository("denoising-diffusion-pytorch")
    from denoising_diffusion_pytorch.simple_diffusion import GaussianDiffusion, UViT

    return GaussianDiffusion(
        UViT(dim=16, dim_mults=(1, 2), vit_depth=2, attn_heads=2, attn_dim_head=8), image_size=16, num_sample_steps=10
    )


def vparam():
    repository("denoising-diffusion-pytorch")
    from denoising_diffusion_pytorch import Unet
    from denoising_diffusion_pytorch.v_param_continuous_time_gaussian_diffusion import (
        VParamContinuousTimeGaussianDiffusion,
    )

    return VParamContinuousTimeGaussianDiffusion(
        Unet(dim=16, dim_mults=(1, 2), random_fourier_features=True), image_size=16, num_sample_steps=10
    )


def diffusers_unet2d():
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


def diffusers_vae():
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        sample_size=16,
    )
