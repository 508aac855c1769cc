"""What strategies have in common that spread a model's layers over ranks: stages, copies of them, refusals."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import nn

from bench.errors import ImpossibleError, bad_value
from bench.models import Family
from bench.precision import AUTOCAST, PARAMETERS, Precision
from bench.strategies.base import Job, Step, Strategy, divisors, ranks_asked_for, require_factor, require_stored_format
from bench.strategies.ddp import SETTLING_STEPS
from bench.strategies.pipeline_model import PipelinedModel, PipelineStepper, build_pipeline
from bench.strategies.pipeline_plan import AlonePlan, RankPlan, ReplicatedPlan, ShardedStagePlan, StageUnits
from bench.strategies.pipeline_schedule import Timetable
from bench.strategies.plan import Setting
from bench.strategies.stepper import Stepper
from bench.typed import OneOf

BY_STAGES = "stages"
"""The sharding factor that follows from the number of stages."""

DATA_PARALLEL = ("ddp", "fsdp")
ALONE = "none"


@dataclass(frozen=True)
class StagedStrategy(Strategy):
    """The layers of one copy of the model are spread over several ranks, each of which hands on what it computed.

    The world is a mesh of stages by copies, the stages outermost as in Megatron-LM: the ranks of one stage follow each
    other, and reduce gradients among themselves. All ranks of one copy work on the same sequences.

    A rank that is rehearsed alone has the first stage (interleaved: the first of each round): other stages may need
    more memory, the last one above all, which has the logits. A prediction is of the rank that needs most.
    """

    stages: int | str
    """Ranks that the layers of one copy are spread over: a whole number, ``node`` for as many as one machine has,
    ``full`` for all."""
    data_parallel: Annotated[str | None, OneOf(*DATA_PARALLEL, ALONE)]
    """What reduces gradients among copies: ddp or fsdp, which also shards each stage among them. null: ddp, or none
    where there is one copy."""

    @property
    @abstractmethod
    def timetable(self) -> Timetable:
        """Of the resolved strategy."""

    other_mixing = "which does it as its data parallelism does"

    @property
    def mixings(self) -> tuple[str, ...]:  # type: ignore[override]
        """FSDP casts parameters itself."""
        return (PARAMETERS,) if self.data_parallel == "fsdp" else (AUTOCAST,)

    @property
    def ranks(self) -> int:
        """Ranks of one copy, of a resolved strategy."""
        assert isinstance(self.stages, int), "resolve the strategy first"
        return self.stages

    def ranks_of_a_copy(self, world_size: int, ranks_per_node: int) -> int:
        """`stages` as a number, of which there must be at least 2."""
        return ranks_asked_for("strategy.stages", self.stages, world_size, ranks_per_node, least=2)

    def resolve(self, world_size: int, ranks_per_node: int, *, accumulates: bool) -> Strategy:
        """As every strategy; the sharding factor follows from the stages, and from FSDP."""
        stages = self.ranks_of_a_copy(world_size, ranks_per_node)
        copies = world_size // stages
        if self.data_parallel not in (None, ALONE):
            if copies == 1:
                raise ImpossibleError(
                    f"strategy.data_parallel={self.data_parallel} is not valid with strategy.stages={stages} on "
                    f"gpus={world_size}, which is one copy of the model: choose null, or fewer stages."
                )
        elif self.data_parallel == ALONE and copies > 1:
            raise bad_value(
                "strategy.data_parallel", ALONE, f"ddp or fsdp for {copies} copies of the model", ImpossibleError
            )
        data_parallel = self.data_parallel or (ALONE if copies == 1 else "ddp")
        factor = world_size if data_parallel == "fsdp" else stages
        because = "strategy.stages and strategy.data_parallel spread a copy"
        require_factor(self, BY_STAGES, factor, world_size, because)
        chosen = dataclasses.replace(self, stages=stages, data_parallel=data_parallel, sharding_factor=factor)
        return super(StagedStrategy, chosen).resolve(world_size, ranks_per_node, accumulates=accumulates)

    def batch_share(self, rank: int, world_size: int) -> tuple[int, int]:
        """One share per copy of the model."""
        copies = world_size // self.ranks
        return rank % copies, copies

    @property
    def batch_unit(self) -> int:
        """So many that every micro-batch has as many sequences."""
        return self.timetable.micro_batches // math.gcd(self.timetable.micro_batches, self.ranks)

    def check_model(self, family: Family, batch_size_per_gpu: int, sequence_length: int) -> None:
        """The family must say how to cut, and there must be a block and a sequence for everyone."""
        if family.num_blocks is None:
            raise ImpossibleError(
                f"strategy={self.name} is not valid for model.family={family.family}, which does not say how it is cut "
                "into stages: choose a model of family t5 or gpt, or give the family a `stage`."
            )
        timetable = self.timetable
        if timetable.num_stages > family.num_blocks:
            raise ImpossibleError(
                f"strategy={self.name} with {timetable.num_stages} stages is not valid for model={family.name}, which "
                f"has {family.num_blocks} blocks: choose strategy.stages and virtual stages whose product is at most "
                f"{family.num_blocks}."
            )
        sequences = self.ranks * batch_size_per_gpu
        if sequences % timetable.micro_batches:
            raise bad_value(
                "strategy.micro_batches",
                timetable.micro_batches,
                f"a divisor of the {sequences} sequences that one copy of the model reads (batch_size_per_gpu="
                f"{batch_size_per_gpu} on each of {self.ranks} ranks): "
                f"{', '.join(map(str, divisors(sequences)))}",
                ImpossibleError,
            )

    def check_precision(self, precision: Precision) -> None:
        """Losses are not scaled; DDP reduces gradients as they are stored."""
        if precision.scales_loss:
            raise ImpossibleError(
                f"precision={precision.name} is not valid for strategy={self.name}: each stage would look for overflow "
                "in its own gradients alone, and skip other steps than its neighbours: choose bf16."
            )
        if self.data_parallel == "ddp":
            require_stored_format(f"strategy={self.name} with strategy.data_parallel=ddp", precision, ", or fsdp")

    def check_optimizer(self, name: str, implementation: str) -> None:
        """torch 2.13 has no fused SGD on the DTensors of FSDP."""
        if self.data_parallel == "fsdp" and (name, implementation) == ("sgd", "fused"):
            raise ImpossibleError(
                "optimizer.implementation=fused is not valid for optimizer=sgd with strategy.data_parallel=fsdp, whose "
                "parameters are DTensors: choose foreach or for_loop, or ddp."
            )

    @property
    def settling_steps(self) -> int:
        """As DDP's, if stages are in it."""
        return SETTLING_STEPS if self.data_parallel == "ddp" else super().settling_steps

    def check_step(self, step: Step) -> None:
        """Micro-batches of the schedule accumulate gradients; there are none beside them."""
        if step.micro_batches > 1:
            raise ImpossibleError(
                f"gradient_accumulation={step.micro_batches} is not valid for strategy={self.name}, whose micro-batches"
                " accumulate gradients already: choose 1, and a larger batch_size_per_gpu."
            )

    def rank_plan(self, stages: Sequence[StageUnits], setting: Setting) -> RankPlan:
        """Whole stages, with buckets, or shards of them."""
        if self.data_parallel == "fsdp":
            return ShardedStagePlan(stages, setting, setting.world_size // self.ranks)
        return (ReplicatedPlan if self.data_parallel == "ddp" else AlonePlan)(stages, setting)

    def wrap(self, model: nn.Module, job: Job) -> nn.Module:
        """The stages of this rank."""
        assert self.data_parallel is not None
        return build_pipeline(
            model, job, self.timetable, self.data_parallel, uses_autocast=self.uses_autocast(job.precision)
        )

    def stepper(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, keep_gradients: bool
    ) -> Stepper:
        """The schedule carries out forward and backward."""
        assert isinstance(module, PipelinedModel)
        return PipelineStepper(module, optimizer, scaler, keep_gradients)


def beside(data_parallel: str | None) -> str:
    """What is added to a strategy's name where there are copies of the model: ``+ddp``."""
    return f"+{data_parallel}" if data_parallel in DATA_PARALLEL else ""
