"""One process, no communication: what every other strategy must agree with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.core.errors import ImpossibleError
from bench.core.presentation import Presentation, TrainingOption, TrainingTerm
from bench.strategies.base import Strategy, WrapContext
from bench.strategies.plan_inputs import PlanInputs
from bench.strategies.requirements import require_unsharded
from bench.strategies.step_plan import ReplicatedPlan, StepPlan

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class SingleProcessStrategy(Strategy):
    """Plain training on one device."""

    presentation = Presentation(label="Single", position=0, colour="#676767", markers={"": "*"})
    training_terms = (TrainingTerm("one GPU", ("strategy=single",), "the model fits, and one is fast enough"),)
    training_options = (TrainingOption("one process", {"strategy": "single"}, leaves={"plain training": 1}),)

    supported_finetunes = ("full", "lora", "qlora")
    takes_fp32_adapters = True
    takes_float8 = True
    takes_communicating_models = True

    def check(self, world_size: int) -> None:
        require_unsharded(self)
        if world_size != 1:
            raise ImpossibleError(
                f"gpus={world_size} is not valid for strategy=single: choose 1, or strategy ddp, fsdp or fsdp1."
            )

    def describe_effective_strategy(self, world_size: int) -> str:
        return "single"

    def wrap(self, model: nn.Module, context: WrapContext) -> nn.Module:
        """Give the model its weights."""
        context.materializer.fill_model(model)
        return model

    def plan(self, inputs: PlanInputs) -> StepPlan:
        """Everything is here, nothing is sent."""
        return ReplicatedPlan(inputs)
