"""One process, no communication: what every other strategy must agree with."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from bench.errors import ImpossibleError
from bench.strategies.base import Job, Strategy, require_replicas
from bench.strategies.plan import Plan, Setting, WholePlan


@dataclass(frozen=True)
class Single(Strategy):
    """Plain training on one device."""

    finetunes = ("full", "lora", "qlora")
    takes_float8 = True

    def check(self, world_size: int) -> None:
        """One rank only."""
        require_replicas(self)
        if world_size != 1:
            raise ImpossibleError(
                f"gpus={world_size} is not valid for strategy=single: choose 1, or strategy ddp, fsdp or fsdp1."
            )

    def effective(self, world_size: int) -> str:
        """Always the same."""
        return "single"

    def wrap(self, model: nn.Module, job: Job) -> nn.Module:
        """Give the model its weights."""
        job.materializer.model(model)
        return model

    def plan(self, setting: Setting) -> Plan:
        """Everything is here, nothing is sent."""
        return WholePlan(setting)
