"""When, where and with what a calibration was made."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch

from bench.rank import environment


@dataclass(frozen=True)
class CalibrationProvenance:
    """What a reader must know to trust a calibration, or to repeat it. No part of any run's identity."""

    date: str
    host: str
    device: str
    """As it calls itself."""
    processes: str
    """Who communicated, in words."""
    versions: dict[str, str]
    commit: str

    @classmethod
    def from_environment(cls, device: torch.device, processes: str) -> CalibrationProvenance:
        """Of this process, here and now."""
        software, commit, device_report = (
            environment.describe_software(),
            environment.find_commit(),
            environment.describe_devices([device]),
        )
        versions = {
            "torch": software["torch"],
            "transformers": software["packages"]["transformers"],
            "CUDA": software["cuda"],
            "NCCL": software["nccl"],
            "driver": device_report.get("driver"),
            "Python": software["python"],
        }
        changed_suffix = ", changed since" if commit["git_clean"] is False else ""
        return cls(
            date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            host=environment.get_host_name(),
            device=str(device_report["name"]),
            processes=processes,
            versions={name: str(version) for name, version in versions.items() if version},
            commit=f"{commit['git_sha'] or 'unknown'}{changed_suffix}",
        )

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.date} on host {self.host} ({self.device}), {self.processes}; {versions}; commit {self.commit}"
