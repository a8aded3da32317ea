"""The environment that ranks on other hosts receive."""

from __future__ import annotations

import pytest

from autopipe.launch.forwarding import forwarded


@pytest.mark.parametrize(
    "name",
    [
        "AUTOPIPE_SHARED_GPU", "CUDA_LAUNCH_BLOCKING", "FI_PROVIDER", "GLOO_SOCKET_IFNAME", "HF_HOME", "NCCL_DEBUG",
        "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "PYTHONPATH", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_LOGS", "UCX_TLS",
    ],
)  # fmt: skip
def test_settings_of_libraries_and_networks_are_forwarded(name):
    assert forwarded({name: "value"}) == {name: "value"}


@pytest.mark.parametrize(
    "name", ["HOME", "PATH", "CUDA_VISIBLE_DEVICES", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "TORCH_API_KEY", "LD_PRELOAD"]
)
def test_secrets_and_what_belongs_to_a_host_stay(name):
    assert forwarded({name: "value"}) == {}
