"""One rank of a pipeline: its stages, what it shares with other stages, and the schedule that runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bench.core.precision import Precision
from bench.models import Batch, Family
from bench.models.pipeline_stage import PipelineStageModule
from bench.strategies.base import WrapContext
from bench.strategies.ddp import build_buffer_options
from bench.strategies.global_norm import clip_by_global_norm
from bench.strategies.pipeline.schedule import FORWARD, Timetable
from bench.strategies.pipeline.stage_timer import StageTimer
from bench.strategies.pipeline.step_plans import find_tied_parameters
from bench.strategies.stepper import StepEngine, Stepper, TimeSpans

TORCH_STAGES_MODULE = "bench.strategies.pipeline.torch_stages"
"""Imported where stages are built: it brings torch's compiler along, which takes half a second."""

PIPELINE_DIM, DATA_PARALLEL_DIM = "pipeline", "data"
"""Dimensions of the mesh, stages outermost."""


@dataclass(frozen=True)
class TiedParameter:
    """A parameter that several stages have a copy of, as far as this rank has copies."""

    copies: list[nn.Parameter]
    group: dist.ProcessGroup | None
    """The ranks of this pipeline that have others; None where there are none."""
    num_stages: int
    """That have one, on this rank and on others."""

    def sum_gradients(self) -> None:
        """Give every copy the sum of all copies' gradients, so that all are updated alike."""
        gradients = [to_local_tensor(copy.grad) for copy in self.copies if copy.grad is not None]
        total = gradients[0]
        for other in gradients[1:]:
            total += other
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        for other in gradients[1:]:
            other.copy_(total)


def to_local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class PipelinedModel(nn.Module):
    """The stages of one rank, wrapped and filled."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        tied_parameters: Sequence[TiedParameter],
        context: WrapContext,
        timetable: Timetable,
        group: dist.ProcessGroup,
        stage_output_dtype: torch.dtype,
        sequence_parts: int = 1,
    ) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages.values())
        self.stage_indices = list(stages)
        self.tied_parameters = tied_parameters
        self.family: Family = context.family
        self.device = context.device
        self.timetable = timetable
        self.group = group
        self.stage_output_dtype = stage_output_dtype
        """Of what stages hand over."""
        self.sequence_parts = sequence_parts
        """Ranks that have a part each of the hidden states of a sequence that stages hand over."""

    def clip_gradients(self, max_norm: float) -> None:
        """By the norm over all stages: of what several stages share, and of what copies of a stage share, one counts.
        Gradients of what is shared are summed already."""
        num_tied = {id(copy): tied.num_stages for tied in self.tied_parameters for copy in tied.copies}
        num_copies = dist.get_world_size() // self.timetable.ranks
        clip_by_global_norm(
            (
                (parameter, num_tied.get(id(parameter), 1) * (1 if isinstance(parameter, DTensor) else num_copies))
                for parameter in self.parameters()
            ),
            max_norm,
        )


def build_pipelined_model(
    model: nn.Module, context: WrapContext, timetable: Timetable, data_parallel: str, *, uses_autocast: bool
) -> PipelinedModel:
    """Cut the model, which is on meta, and wrap and fill the stages of this rank. All ranks call this together."""
    num_copies = context.world_size // timetable.ranks
    mesh = init_device_mesh(
        context.device.type, (timetable.ranks, num_copies), mesh_dim_names=(PIPELINE_DIM, DATA_PARALLEL_DIM)
    )
    assert context.family.num_blocks is not None
    stages = [context.family.build_stage(model, blocks) for blocks in timetable.split_blocks(context.family.num_blocks)]
    parameter_names = [context.materializer.list_parameter_names(stage) for stage in stages]
    group = mesh[PIPELINE_DIM].get_group()
    rank = mesh.get_local_rank(PIPELINE_DIM)
    wrapped_stages: dict[int, nn.Module] = {}
    filled_parameters: dict[tuple[int, str], nn.Parameter] = {}
    for index in timetable.find_stages_of_rank(rank):
        stage = stages[index]
        paths = [path for path, _ in stage.named_parameters()]
        materializer = context.materializer.build_for_part(stage)
        if data_parallel == "fsdp":
            _shard_stage(stage, mesh[DATA_PARALLEL_DIM], context.precision)
        materializer.fill_model(stage)
        for path, name in zip(paths, parameter_names[index], strict=True):
            filled_parameters[index, name] = stage.get_parameter(path)
        wrapped_stages[index] = (
            _wrap_in_ddp(stage, mesh[DATA_PARALLEL_DIM], context.device) if data_parallel == "ddp" else stage
        )
    tied_parameters = build_tied_parameters(parameter_names, filled_parameters, timetable, mesh.mesh, rank)
    # Point-to-point communication of a few ranks must not be the first that a group is used for.
    dist.all_reduce(torch.zeros(1, device=context.device), group=group)
    dtype = context.precision.parameter_dtype if uses_autocast else context.precision.compute_dtype
    return PipelinedModel(wrapped_stages, tied_parameters, context, timetable, group, dtype)


def _shard_stage(stage: PipelineStageModule, mesh: DeviceMesh, precision: Precision) -> None:
    """Shard each block, then what is left. Whole parameters stay until the step's last backward is over: they would be
    gathered twice for every micro-batch otherwise."""
    policy = MixedPrecisionPolicy(
        param_dtype=precision.compute_dtype if precision.is_mixed else None, reduce_dtype=precision.reduce_dtype
    )
    for block in (block for blocks in stage.block_lists for block in blocks):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(stage, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def _wrap_in_ddp(stage: nn.Module, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    return DistributedDataParallel(
        stage,
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=mesh.get_group(),
        gradient_as_bucket_view=True,
        init_sync=False,  # every rank has filled its copy with the same values
        **build_buffer_options(),
    )


def build_tied_parameters(
    parameter_names: Sequence[Sequence[str]],
    filled_parameters: Mapping[tuple[int, str], nn.Parameter],
    timetable: Timetable,
    ranks_by_stage: torch.Tensor,
    rank: int,
) -> list[TiedParameter]:
    """The trained parameters that several stages have. All ranks make all groups, in the same order.

    Parameters
    ----------
    parameter_names: sequence of sequence of str
        Of every stage.
    filled_parameters: mapping
        Those of this rank, by stage and name.
    ranks_by_stage: torch.Tensor
        Global ranks; shape (ranks of a pipeline, pipelines).
    rank: int
        This rank's number within its pipeline.
    """
    tied_parameters = []
    groups_by_ranks: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    for name, stages in find_tied_parameters(parameter_names).items():
        ranks = tuple(sorted({timetable.find_rank_of_stage(stage) for stage in stages}))
        if len(ranks) > 1 and ranks not in groups_by_ranks:
            groups_by_ranks[ranks] = _create_own_group(ranks, ranks_by_stage)
        if rank in ranks:
            own_stages = timetable.find_stages_of_rank(rank)
            copies = [filled_parameters[stage, name] for stage in stages if stage in own_stages]
            if copies[0].requires_grad:
                tied_parameters.append(TiedParameter(copies, groups_by_ranks.get(ranks), len(stages)))
    return tied_parameters


def _create_own_group(ranks: tuple[int, ...], ranks_by_stage: torch.Tensor) -> dist.ProcessGroup | None:
    """The group of these stages' ranks in every copy of the pipeline; this rank's own of them."""
    own_group = None
    for copy_ranks in ranks_by_stage[list(ranks)].T.tolist():
        group = dist.new_group(copy_ranks)
        if dist.get_rank() in copy_ranks:
            own_group = group
    return own_group


class PipelineStepper(Stepper):
    """Has a schedule carry out all micro-batches of a step."""

    def __init__(
        self,
        model: PipelinedModel,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        keep_gradients: bool,
    ) -> None:
        super().__init__(optimizer, scaler, keep_gradients)
        self._model = model
        self._schedule: Any = None
        self._stage_timer = StageTimer(model.device)

    def step(self, engine: StepEngine, micro_batches: Sequence[Batch]) -> torch.Tensor | None:
        """The schedule over the share of the batch, the sums of tied gradients, and the update."""
        (batch,) = micro_batches
        if self._schedule is None:
            self._schedule = self._build_schedule(engine, batch)
        engine.enter_phase(FORWARD)
        self._stage_timer.begin_step()
        losses: list[torch.Tensor] = []
        self._schedule.step(target=batch.labels, losses=losses, return_outputs=False, **batch.inputs)
        for tied_parameter in self._model.tied_parameters:
            tied_parameter.sum_gradients()
        losses = [loss.detach() / self.scaler.get_scale() for loss in losses]  # without their graphs
        engine.enter_phase("optimizer")
        self.update()
        return torch.stack(losses).sum() if losses else None

    def update(self) -> None:
        with self._stage_timer.record_span():
            super().update()

    def start_timed_steps(self) -> None:
        self._stage_timer.start()

    def collect_busy_spans(self) -> list[TimeSpans]:
        """Of each stage's computation, and of the optimizer."""
        return self._stage_timer.stop()

    def _build_schedule(self, engine: StepEngine, batch: Batch) -> Any:
        from bench.strategies.pipeline.torch_stages import TimedPipelineStage, build_torch_schedule

        model, timetable = self._model, self._model.timetable
        sequences = batch.labels.shape[0] // timetable.micro_batches
        blocks = timetable.split_blocks(model.family.num_blocks or 0)
        length = batch.inputs["input_ids"].shape[1] // model.sequence_parts

        def build_example_tensors(stage_index: int) -> tuple[torch.Tensor, ...]:
            """What a stage is handed, without data."""
            if stage_index == 0:
                return ()
            shapes = model.family.find_stage_input_shapes(blocks[stage_index].start, length)
            tensor_options: dict[str, Any] = {
                "dtype": model.stage_output_dtype,
                "device": "meta",
                "requires_grad": True,
            }
            return tuple(torch.empty(sequences, *shape, **tensor_options) for shape in shapes)

        stages = []
        for index, module in zip(model.stage_indices, model.stages, strict=True):
            is_last = index == timetable.num_stages - 1
            example_logits = (torch.empty(0, device="meta"),)
            stage = TimedPipelineStage(
                module,
                index,
                timetable.num_stages,
                model.device,
                input_args=build_example_tensors(index),
                output_args=example_logits if is_last else build_example_tensors(index + 1),
                group=model.group,
            )
            stage.engine, stage.stage_timer = engine, self._stage_timer
            stages.append(stage)
        return build_torch_schedule(timetable, stages, self._build_loss_share(engine.loss, timetable.micro_batches))

    def _build_loss_share(
        self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], micro_batches: int
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        def compute_loss_share(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            with self._stage_timer.record_span():
                return self.scaler.scale(loss(logits, labels) / micro_batches)

        return compute_loss_share
