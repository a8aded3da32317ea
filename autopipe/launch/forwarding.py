"""Which environment variables of this process the ranks on other hosts receive."""

from __future__ import annotations

from collections.abc import Mapping

_PREFIXES = (
    "AUTOPIPE_", "CUDA_", "CUBLAS_", "FI_", "GLOO_", "HF_", "MKL_", "NCCL_", "NVIDIA_TF32_", "OMP_", "PYTORCH_",
    "TORCH_", "UCX_", "LD_LIBRARY_PATH", "PYTHONHASHSEED", "PYTHONPATH",
)  # fmt: skip
# those that name parts of one host, and parts of a name that mark a secret
_OF_A_HOST = ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
_SECRET = ("TOKEN", "SECRET", "PASSWORD", "KEY")


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of numerics, libraries and network among ``environment``: no secrets, and no GPUs."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_PREFIXES) and name not in _OF_A_HOST and not any(word in name for word in _SECRET)
    }
