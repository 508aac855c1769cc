"""The example profiles under slurm/: complete, read by Hydra as they are meant, and with shell lines that are shell."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parents[2]

PROFILES = sorted((ROOT / "slurm").glob("*.yaml"))

FIELDS = [
    *("name", "launcher", "hardware", "gpus_per_node", "partition", "account", "qos", "constraint", "reservation"),
    *("nodelist", "exclude", "time_limit_min", "gpu_request", "gpu_type", "cpus_per_gpu", "memory_gb_per_gpu"),
    *("exclusive", "parallelism", "requeue", "sbatch", "srun", "setup", "python", "comment", "wckey"),
    *("check", "exclude_bad", "start_timeout_s"),
]


def read(path: Path) -> dict[str, Any]:
    """A profile with its interpolations resolved, as a configuration has it: ``${...}`` is Hydra's, not the shell's."""
    profile = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    assert isinstance(profile, dict)
    return {str(field): value for field, value in profile.items()}


def test_there_is_one_for_each_kind_of_network() -> None:
    assert [path.stem for path in PROFILES] == ["a100_infiniband", "ethernet", "h100_efa"]


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_fields(path: Path) -> None:
    profile = read(path)
    assert list(profile) == FIELDS
    assert (profile["name"], profile["launcher"]) == (path.stem, "slurm")
    assert (ROOT / "conf" / "hardware" / f"{profile['hardware']}.yaml").exists()
    assert profile["gpu_request"] in ("gpus-per-node", "gres", "none")
    for field in ("sbatch", "srun", "setup"):
        assert all(isinstance(item, str) for item in profile[field]), field


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_setup_is_shell(path: Path) -> None:
    setup = "\n".join(read(path)["setup"])
    subprocess.run(["bash", "-n", "-c", setup], check=True)
    result = subprocess.run(
        ["bash", "-c", f"{setup}\nenv"], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True
    )
    assert result.stderr.count("\n") <= 1, "ulimit alone may complain"
    networks = {"a100_infiniband": "IB", "h100_efa": "AWS Libfabric", "ethernet": "Socket"}
    assert f"NCCL_NET={networks[path.stem]}" in result.stdout.splitlines()
