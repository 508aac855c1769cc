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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bench.models import Batch, Family
from bench.models.stages import Stage, cut
from bench.precision import Precision
from bench.strategies.base import Job
from bench.strategies.pipeline_plan import tied
from bench.strategies.pipeline_schedule import BACKWARD, FORWARD, GPIPE, INTERLEAVED, ONE_F_ONE_B, Timetable
from bench.strategies.stepper import Passes, Spans, Stepper
from bench.strategies.stopwatch import Stopwatch

PIPELINE, DATA = "pipeline", "data"
"""Dimensions of the mesh, stages outermost."""

SCHEDULE_CLASSES: dict[str, Any] = {
    GPIPE: ScheduleGPipe,
    ONE_F_ONE_B: Schedule1F1B,
    INTERLEAVED: ScheduleInterleaved1F1B,
}


@dataclass(frozen=True)
class Tie:
    """A parameter that several stages have a copy of, as far as this rank has copies."""

    copies: list[nn.Parameter]
    group: dist.ProcessGroup | None
    """The ranks of this pipeline that have others; None where there are none."""

    def sum_gradients(self) -> None:
        """Give every copy the sum of all copies' gradients, so that all are updated alike."""
        gradients = [local(copy.grad) for copy in self.copies if copy.grad is not None]
        total = gradients[0]
        for other in gradients[1:]:
            total += other
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        for other in gradients[1:]:
            other.copy_(total)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class PipelinedModel(nn.Module):
    """The stages of one rank, wrapped and filled."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        ties: Sequence[Tie],
        job: Job,
        timetable: Timetable,
        group: dist.ProcessGroup,
        handed_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages.values())
        self.indices = list(stages)
        self.ties = ties
        self.family: Family = job.family
        self.device = job.device
        self.timetable = timetable
        self.group = group
        self.handed_dtype = handed_dtype
        """Of what stages hand over."""


def build_pipeline(
    model: nn.Module, job: Job, timetable: Timetable, data_parallel: str, *, uses_autocast: bool
) -> PipelinedModel:
    """Cut the model, which is on meta, and wrap and fill the stages of this rank. All ranks call this together."""
    copies = job.world_size // timetable.ranks
    mesh = init_device_mesh(job.device.type, (timetable.ranks, copies), mesh_dim_names=(PIPELINE, DATA))
    assert job.family.num_blocks is not None
    stages = [job.family.stage(model, blocks) for blocks in cut(job.family.num_blocks, timetable.num_stages)]
    names = [job.materializer.names(stage) for stage in stages]
    group = mesh[PIPELINE].get_group()
    rank = mesh.get_local_rank(PIPELINE)
    wrapped: dict[int, nn.Module] = {}
    filled: dict[tuple[int, str], nn.Parameter] = {}
    for index in timetable.stages_of(rank):
        stage = stages[index]
        paths = [path for path, _ in stage.named_parameters()]
        materializer = job.materializer.of_part(stage)
        if data_parallel == "fsdp":
            _shard(stage, mesh[DATA], job.precision)
        materializer.model(stage)
        for path, name in zip(paths, names[index], strict=True):
            filled[index, name] = stage.get_parameter(path)
        wrapped[index] = _replicated(stage, mesh[DATA], job.device) if data_parallel == "ddp" else stage
    ties = _ties(names, filled, timetable, mesh, rank)
    # Point-to-point communication of a few ranks must not be the first that a group is used for.
    dist.all_reduce(torch.zeros(1, device=job.device), group=group)
    dtype = job.precision.parameter_dtype if uses_autocast else job.precision.compute_dtype
    return PipelinedModel(wrapped, ties, job, timetable, group, dtype)


def _shard(stage: Stage, mesh: DeviceMesh, precision: Precision) -> None:
    """Shard each block, then what is left. Whole parameters stay until the step's last backward is over: they would be
    gathered twice for every micro-batch otherwise."""
    policy = MixedPrecisionPolicy(
        param_dtype=precision.compute_dtype if precision.mixed else None, reduce_dtype=precision.reduce_dtype
    )
    for block in (block for blocks in stage.block_lists for block in blocks):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(stage, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def _replicated(stage: nn.Module, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    return DistributedDataParallel(
        stage,
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=mesh.get_group(),
        gradient_as_bucket_view=True,
        init_sync=False,  # every rank has filled its copy with the same values
    )


def _ties(
    names: Sequence[Sequence[str]],
    filled: Mapping[tuple[int, str], nn.Parameter],
    timetable: Timetable,
    mesh: DeviceMesh,
    rank: int,
) -> list[Tie]:
    """All ranks make all groups, in the same order."""
    found = []
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    for name, stages in tied(names).items():
        ranks = tuple(sorted({stage % timetable.ranks for stage in stages}))
        if len(ranks) > 1 and ranks not in groups:
            groups[ranks] = _own_group(ranks, mesh)
        if rank in ranks:
            copies = [filled[stage, name] for stage in stages if stage % timetable.ranks == rank]
            found.append(Tie(copies, groups.get(ranks)))
    return found


def _own_group(ranks: tuple[int, ...], mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The group of these stages' ranks in every copy of the pipeline; this rank's own of them."""
    own = None
    for copy in mesh.mesh[list(ranks)].T.tolist():
        group = dist.new_group(copy)
        if dist.get_rank() in copy:
            own = group
    return own


class WatchedStage(PipelineStage):
    """A stage that says when it computes."""

    engine: Passes
    stopwatch: Stopwatch

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """One micro-batch forward, its input being there."""
        self.engine.enter_phase(FORWARD)
        with self.stopwatch.running(), self.engine.autocast():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """One micro-batch backward, its gradients being there."""
        self.engine.enter_phase(BACKWARD)
        with self.stopwatch.running():
            return super().backward_one_chunk(*args, **kwargs)


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
        self._stopwatch = Stopwatch(model.device)

    def step(self, engine: Passes, micro_batches: Sequence[Batch]) -> torch.Tensor | None:
        """The schedule over the share of the batch, the sums of tied gradients, and the update."""
        (batch,) = micro_batches
        if self._schedule is None:
            self._schedule = self._build(engine, batch)
        engine.enter_phase(FORWARD)
        self._stopwatch.begin_step()
        losses: list[torch.Tensor] = []
        self._schedule.step(target=batch.labels, losses=losses, return_outputs=False, **batch.inputs)
        for tie in self._model.ties:
            tie.sum_gradients()
        losses = [loss.detach() for loss in losses]  # without their graphs
        engine.enter_phase("optimizer")
        self.update()
        return torch.stack(losses).sum() if losses else None

    def update(self) -> None:
        """As everywhere."""
        with self._stopwatch.running():
            super().update()

    def start_timed_steps(self) -> None:
        """Start the stopwatch."""
        self._stopwatch.start()

    def busy(self) -> list[Spans]:
        """Of each stage's computation, and of the optimizer."""
        return self._stopwatch.stop()

    def _build(self, engine: Passes, batch: Batch) -> Any:
        model, timetable = self._model, self._model.timetable
        sequences = batch.labels.shape[0] // timetable.micro_batches
        blocks = cut(model.family.num_blocks or 0, timetable.num_stages)
        length = batch.inputs["input_ids"].shape[1]

        def examples(stage: int) -> tuple[torch.Tensor, ...]:
            """What a stage is handed, without data."""
            if stage == 0:
                return ()
            shapes = model.family.handed_over(blocks[stage].start, length)
            make: dict[str, Any] = {"dtype": model.handed_dtype, "device": "meta", "requires_grad": True}
            return tuple(torch.empty(sequences, *shape, **make) for shape in shapes)

        stages = []
        for index, module in zip(model.indices, model.stages, strict=True):
            is_last = index == timetable.num_stages - 1
            logits = (torch.empty(0, device="meta"),)
            stage = WatchedStage(
                module,
                index,
                timetable.num_stages,
                model.device,
                input_args=examples(index),
                output_args=logits if is_last else examples(index + 1),
                group=model.group,
            )
            stage.engine, stage.stopwatch = engine, self._stopwatch
            stages.append(stage)
        schedule = SCHEDULE_CLASSES[timetable.schedule]
        return schedule(
            stages if timetable.schedule == INTERLEAVED else stages[0],
            timetable.micro_batches,
            loss_fn=self._share_of(engine.loss, timetable.micro_batches),
            scale_grads=False,
        )

    def _share_of(
        self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], micro_batches: int
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        def share(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            with self._stopwatch.running():
                return loss(logits, labels) / micro_batches

        return share
