"""What strategies have in common that spread a model's layers over ranks: stages, copies of them, refusals."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from bench.core.errors import ImpossibleError, invalid_value_error
from bench.core.precision import AUTOCAST_MIXING, PARAMETER_MIXING, Precision
from bench.core.typed_config import OneOf
from bench.models import Family
from bench.optimizers.updated_tensor import DTENSORS, WHOLE_TENSORS
from bench.strategies.base import StepSettings, Strategy, WrapContext
from bench.strategies.ddp import DDP_FIRST_STEADY_STEP
from bench.strategies.pipeline.schedule import Timetable
from bench.strategies.pipeline.schedule_checks import check_stage_blocks
from bench.strategies.pipeline.sharded_stage_plan import ShardedStagePlan
from bench.strategies.pipeline.step_plans import (
    ReplicatedStagePlan,
    SingleCopyStagePlan,
    StagePlan,
    StageUnits,
)
from bench.strategies.plan_inputs import PlanInputs
from bench.strategies.requirements import (
    list_divisors,
    parse_rank_count,
    require_sharding_factor,
    require_stored_reduce_dtype,
)
from bench.strategies.step_plan import DATA_GROUP, PIPELINE_GROUP, GroupDim
from bench.strategies.stepper import Stepper

if TYPE_CHECKING:
    import torch
    from torch import nn


SHARDING_FACTOR_BY_STAGES = "stages"
"""The sharding factor that follows from the number of stages."""

DATA_PARALLEL_KINDS = ("ddp", "fsdp")
NO_DATA_PARALLEL = "none"


@dataclass(frozen=True)
class PipelinedStrategy(Strategy):
    """The layers of one copy of the model are spread over several ranks, each of which hands on what it computed.

    The world is a mesh of stages by copies, the stages outermost as in Megatron-LM: the ranks of one stage follow each
    other, and reduce gradients among themselves. All ranks of one copy work on the same sequences.

    A rank that is rehearsed alone has the first stage (interleaved: the first of each round): other stages may need
    more memory, the last one above all, which has the logits. A prediction is of the rank that needs most.
    """

    stages: int | str
    """Ranks that the layers of one copy are spread over: a whole number, ``node`` for as many as one machine has,
    ``full`` for all."""
    data_parallel: Annotated[str | None, OneOf(*DATA_PARALLEL_KINDS, NO_DATA_PARALLEL)]
    """What reduces gradients among copies: ddp or fsdp, which also shards each stage among them. null: ddp, or none
    where there is one copy."""

    @property
    @abstractmethod
    def timetable(self) -> Timetable:
        """Of the resolved strategy."""

    supported_finetunes = ("full", "lora")
    single_mixing_reason = "which does it as its data parallelism does"

    @property
    def supported_mixings(self) -> tuple[str, ...]:  # type: ignore[override]
        return (PARAMETER_MIXING,) if self.data_parallel == "fsdp" else (AUTOCAST_MIXING,)

    @property
    def ranks_per_copy(self) -> int:
        """Ranks of one copy, of a resolved strategy."""
        assert isinstance(self.stages, int), "resolve the strategy first"
        return self.stages

    def parse_ranks_per_copy(self, world_size: int, ranks_per_node: int) -> int:
        """`stages` as a number, of which there must be at least 2."""
        return parse_rank_count("strategy.stages", self.stages, world_size, ranks_per_node, min_ranks=2)

    def resolve(self, world_size: int, ranks_per_node: int, *, accumulates: bool) -> Strategy:
        """As every strategy; the sharding factor follows from the stages, and from FSDP."""
        stages = self.parse_ranks_per_copy(world_size, ranks_per_node)
        num_copies = world_size // stages
        if self.data_parallel not in (None, NO_DATA_PARALLEL):
            if num_copies == 1:
                raise ImpossibleError(
                    f"strategy.data_parallel={self.data_parallel} is not valid with strategy.stages={stages} on "
                    f"gpus={world_size}, which is one copy of the model: choose null, or fewer stages."
                )
        elif self.data_parallel == NO_DATA_PARALLEL and num_copies > 1:
            raise invalid_value_error(
                "strategy.data_parallel",
                NO_DATA_PARALLEL,
                f"ddp or fsdp for {num_copies} copies of the model",
                ImpossibleError,
            )
        data_parallel = self.data_parallel or (NO_DATA_PARALLEL if num_copies == 1 else "ddp")
        factor = world_size if data_parallel == "fsdp" else stages
        reason = "strategy.stages and strategy.data_parallel spread a copy"
        require_sharding_factor(self, SHARDING_FACTOR_BY_STAGES, factor, world_size, reason)
        strategy = dataclasses.replace(self, stages=stages, data_parallel=data_parallel, sharding_factor=factor)
        return super(PipelinedStrategy, strategy).resolve(world_size, ranks_per_node, accumulates=accumulates)

    def list_group_dims(self, group_name: str, world_size: int) -> Sequence[GroupDim]:
        """Copies of a stage are neighbours."""
        num_copies = world_size // self.ranks_per_copy
        if group_name == PIPELINE_GROUP:
            return [GroupDim(self.ranks_per_copy, num_copies)]
        return (
            [GroupDim(num_copies, 1)] if group_name == DATA_GROUP else super().list_group_dims(group_name, world_size)
        )

    def find_batch_share(self, rank: int, world_size: int) -> tuple[int, int]:
        """One share per copy of the model."""
        num_copies = world_size // self.ranks_per_copy
        return rank % num_copies, num_copies

    @property
    def batch_size_multiple(self) -> int:
        """So many that every micro-batch has as many sequences."""
        return self.timetable.micro_batches // math.gcd(self.timetable.micro_batches, self.ranks_per_copy)

    def check_model(self, family: Family, batch_size_per_gpu: int, sequence_length: int) -> None:
        """The family must say how to cut, and there must be a block and a sequence for everyone."""
        if family.num_blocks is None:
            raise ImpossibleError(
                f"strategy={self.name} is not valid for model.family={family.family}, which does not say how it is cut "
                "into stages: choose a model of family t5, gpt, llama or moe, or give the family a `build_stage`."
            )
        timetable = self.timetable
        if timetable.num_stages > family.num_blocks:
            raise ImpossibleError(
                f"strategy={self.name} with {timetable.num_stages} stages is not valid for model={family.name}, which "
                f"has {family.num_blocks} blocks: choose strategy.stages and virtual stages whose product is at most "
                f"{family.num_blocks}."
            )
        check_stage_blocks(timetable, family.num_blocks)
        sequences = self.ranks_per_copy * batch_size_per_gpu
        if sequences % timetable.micro_batches:
            raise invalid_value_error(
                "strategy.micro_batches",
                timetable.micro_batches,
                f"a divisor of the {sequences} sequences that one copy of the model reads (batch_size_per_gpu="
                f"{batch_size_per_gpu} on each of {self.ranks_per_copy} ranks): "
                f"{', '.join(map(str, list_divisors(sequences)))}",
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
            require_stored_reduce_dtype(f"strategy={self.name} with strategy.data_parallel=ddp", precision, ", or fsdp")

    @property
    def updated_tensor_kind(self) -> str:
        return DTENSORS if self.data_parallel == "fsdp" else WHOLE_TENSORS

    def check_optimizer(self, name: str, implementation: str) -> None:
        """torch 2.13 has no fused SGD on the DTensors of FSDP."""
        if self.data_parallel == "fsdp" and (name, implementation) == ("sgd", "fused"):
            raise ImpossibleError(
                "optimizer.implementation=fused is not valid for optimizer=sgd with strategy.data_parallel=fsdp, whose "
                "parameters are DTensors: choose foreach or for_loop, or ddp."
            )

    @property
    def first_steady_step(self) -> int:
        """As DDP's, if stages are in it."""
        return DDP_FIRST_STEADY_STEP if self.data_parallel == "ddp" else super().first_steady_step

    def check_step(self, settings: StepSettings) -> None:
        """Micro-batches of the schedule accumulate gradients; there are none beside them."""
        if settings.offloads_activations:
            raise ImpossibleError(
                f"activation_offload=true is not valid for strategy={self.name}, "
                "whose stages hold several micro-batches at once: choose false."
            )
        if settings.has_chunked_loss:
            raise ImpossibleError(
                f"loss=chunked is not valid for strategy={self.name}, "
                "whose schedules compute the loss from the last stage's logits: "
                "choose loss=whole."
            )
        if settings.num_micro_batches > 1:
            raise ImpossibleError(
                f"gradient_accumulation={settings.num_micro_batches} is not valid for strategy={self.name}, whose "
                "micro-batches"
                " accumulate gradients already: choose 1, and a larger batch_size_per_gpu."
            )

    def list_preload_modules(self, device: str) -> tuple[str, ...]:
        from bench.strategies.pipeline.model import TORCH_STAGES_MODULE

        return (TORCH_STAGES_MODULE,)

    def plan_stages(self, stages: Sequence[StageUnits], inputs: PlanInputs) -> StagePlan:
        """Whole stages, with buckets, or shards of them."""
        if self.data_parallel == "fsdp":
            return ShardedStagePlan(stages, inputs, inputs.world_size // self.ranks_per_copy, shard_group=DATA_GROUP)
        return (ReplicatedStagePlan if self.data_parallel == "ddp" else SingleCopyStagePlan)(stages, inputs)

    def wrap(self, model: nn.Module, context: WrapContext) -> nn.Module:
        """The stages of this rank."""
        from bench.strategies.pipeline.model import build_pipelined_model

        assert self.data_parallel is not None
        return build_pipelined_model(
            model, context, self.timetable, self.data_parallel, uses_autocast=self.uses_autocast(context.precision)
        )

    def clip_gradients(self, module: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        from bench.strategies.pipeline.model import PipelinedModel

        assert isinstance(module, PipelinedModel)
        module.clip_gradients(max_norm)

    def build_stepper(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, keep_gradients: bool
    ) -> Stepper:
        """The schedule carries out forward and backward."""
        from bench.strategies.pipeline.model import PipelinedModel, PipelineStepper

        assert isinstance(module, PipelinedModel)
        return PipelineStepper(module, optimizer, scaler, keep_gradients)


def format_data_parallel_suffix(data_parallel: str | None) -> str:
    """What is added to a strategy's name where there are copies of the model: ``+ddp``."""
    return f"+{data_parallel}" if data_parallel in DATA_PARALLEL_KINDS else ""
