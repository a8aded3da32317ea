"""Training on a Ray cluster, with weights equal to a local run; without Ray, the variables that each rank would get."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts.launches import AUTOPIPE, STEPS, environment, free_port, weights

from autopipe.launch.ray_cluster import contracts
from autopipe.launch.remote.rank_environment import read_identity

with_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")


def test_each_rank_gets_the_variables_of_torchrun_for_its_node() -> None:
    results = [read_identity(variables) for variables in contracts(["a", "a", "b"], "10.0.0.1", 4321)]
    assert [(m.rank, m.local_rank, m.local_world_size) for m in results] == [(0, 0, 2), (1, 1, 2), (2, 0, 1)]
    assert {(m.world_size, m.address, m.port) for m in results} == {(3, "10.0.0.1", 4321)}


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed")
def test_without_ray_the_error_says_how_to_install_it(tmp_path: Path) -> None:
    command = [*AUTOPIPE, "train", "model.py", "--launcher", "ray", "--gpus", "2", "--device", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Ray is not installed" in done.stderr
    assert "autopipe-train[ray]" in done.stderr


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """Start a head node on this machine, and yield the environment in which commands find it."""
    port = free_port()
    ray = str(Path(sys.executable).with_name("ray"))
    quiet = {**environment(), "RAY_USAGE_STATS_ENABLED": "0"}
    start = [ray, "start", "--head", f"--port={port}", "--num-cpus=4", "--include-dashboard=false"]
    subprocess.run(start, env=quiet, check=True, capture_output=True, timeout=120)
    try:
        yield {**quiet, "RAY_ADDRESS": f"127.0.0.1:{port}"}
    finally:
        subprocess.run([ray, "stop", "--force"], env=quiet, check=False, capture_output=True, timeout=60)


@pytest.mark.hosts
@with_ray
def test_actors_train_to_equal_weights(cluster: dict[str, str], folder: Path) -> None:
    command = [*AUTOPIPE, "train", "--launcher", "ray", "--steps", STEPS, "--run-dir", "ray", "--json"]
    done = subprocess.run(command, cwd=folder, env=cluster, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == 2
    assert weights(folder / "ray") == weights(folder / "local")


@pytest.mark.hosts
@with_ray
def test_a_failure_of_a_rank_is_reported_with_its_message_and_exit_code(cluster: dict[str, str], folder: Path) -> None:
    (folder / "bad.py").write_text(
        "import model\n\ndef data(batch_size=8):\n    for n, item in enumerate(model.data(batch_size)):\n"
        "        if n == 3:\n            raise ValueError('no such sample')\n        yield item\n"
    )
    command = [*AUTOPIPE, "train", "model.py", "--data", "bad.py:data", "--launcher", "ray", "--steps", STEPS]
    done = subprocess.run(command, cwd=folder, env=cluster, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 3, done.stderr
    assert "no such sample" in done.stderr
    assert "bad.py:6" in done.stderr
