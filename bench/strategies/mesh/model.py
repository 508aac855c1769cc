"""A model divided over the mesh: layers, experts and sequences first, then stages, then data parallelism around."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from bench.models import Batch
from bench.strategies.base import WrapContext
from bench.strategies.ddp import build_buffer_options
from bench.strategies.mesh.context import ContextSplit
from bench.strategies.mesh.experts import arrange_expert_parameter
from bench.strategies.mesh.knobs import FSDP_KIND, NO_DATA_PARALLEL
from bench.strategies.mesh.layout import CONTEXT, EXPERT, PIPELINE, REPLICATING_DIMS, SHARDS, TENSOR, RankMesh
from bench.strategies.mesh.split import DividedLayers, divide_layers, divide_loss
from bench.strategies.pipeline.model import PipelinedModel, PipelineStepper, build_tied_parameters
from bench.strategies.pipeline.schedule import Timetable
from bench.strategies.stepper import StepEngine, Stepper
from bench.strategies.tensor_parallel.split import localize_parameters


@dataclass(frozen=True)
class DividedModel:
    """What the ranks of a mesh do to one model beside running it."""

    module: nn.Module
    mesh: RankMesh
    context: ContextSplit | None
    expert_parameters: Sequence[nn.Parameter]
    """That are replicated over fewer ranks than DDP's others, so that DDP leaves them alone."""
    loss_parallel: bool

    def select_tokens(self, micro_batches: Sequence[Batch]) -> Sequence[Batch]:
        """This rank's part of every sequence."""
        if self.context is None:
            return micro_batches
        return [self.context.select_tokens(batch) for batch in micro_batches]

    def average_expert_gradients(self) -> None:
        """All-reduce them one by one when backward is over, among the ranks that have the same experts."""
        expert_mesh = self.mesh.get_mesh(*(name for name in REPLICATING_DIMS if name != EXPERT))
        if expert_mesh is None:
            return
        for parameter in self.expert_parameters:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=expert_mesh.get_group())
                parameter.grad /= expert_mesh.size()


def divide_model(
    model: nn.Module,
    context: WrapContext,
    mesh: RankMesh,
    *,
    data: str,
    timetable: Timetable | None,
    context_form: str | None,
    sequence_parallel: bool,
    loss_parallel: bool,
    reshard_after_forward: bool,
    uses_autocast: bool,
) -> DividedModel:
    """Divide a model that is on meta, and wrap and fill this rank's part of it. All ranks call this together."""
    divided = divide_layers(model, context.family, mesh, context_form=context_form, sequence_parallel=sequence_parallel)
    context.materializer.note_replaced_parameters(model)
    degree = mesh.layout.get_degree(TENSOR)
    width_parts = degree if mesh.layout.expert_tensor_parallel else 1
    context.materializer.arrange_parameter = lambda name, whole: arrange_expert_parameter(
        name, divided.division.arrange_parameter(name, whole, degree), width_parts
    )
    wrapper = _PartWrapper(context, mesh, data, divided.expert_ids, reshard_after_forward, uses_autocast)
    module: nn.Module
    if timetable is None:
        _, module = wrapper.wrap_part(model, context.family.find_block_lists(model), [])
    else:
        module = _build_stages(model, context, divided, wrapper, timetable)
    return DividedModel(module, mesh, divided.context, wrapper.expert_parameters, loss_parallel)


def _build_stages(
    model: nn.Module, context: WrapContext, divided: DividedLayers, wrapper: _PartWrapper, timetable: Timetable
) -> PipelinedModel:
    """The stages of this rank. What they hand over is divided as it is between their layers."""
    family, mesh = context.family, divided.mesh
    assert family.num_blocks is not None
    stages = [family.build_stage(model, blocks) for blocks in timetable.split_blocks(family.num_blocks)]
    parameter_names = [context.materializer.list_parameter_names(stage) for stage in stages]
    pipeline_mesh = mesh.get_mesh(PIPELINE)
    assert pipeline_mesh is not None
    wrapped_stages: dict[int, nn.Module] = {}
    filled_parameters: dict[tuple[int, str], nn.Parameter] = {}
    for index in timetable.find_stages_of_rank(pipeline_mesh.get_local_rank()):
        stage = stages[index]
        divided.prepare_stage(stage, is_first=index == 0)
        parameters, wrapped_stages[index] = wrapper.wrap_part(stage, stage.block_lists, parameter_names[index])
        filled_parameters |= {(index, name): parameter for name, parameter in parameters.items()}
    tied_parameters = build_tied_parameters(
        parameter_names, filled_parameters, timetable, mesh.list_ranks_by_stage(), pipeline_mesh.get_local_rank()
    )
    # Point-to-point communication of a few ranks must not be the first that a group is used for.
    dist.all_reduce(torch.zeros(1, device=context.device), group=pipeline_mesh.get_group())
    precision = context.precision
    dtype = precision.parameter_dtype if wrapper.uses_autocast else precision.compute_dtype
    sequence_parts = mesh.layout.get_degree(TENSOR) if divided.sequence_splits else 1
    group = pipeline_mesh.get_group()
    return PipelinedModel(wrapped_stages, tied_parameters, context, timetable, group, dtype, sequence_parts)


class _PartWrapper:
    """Wraps and fills the whole model, or stages of it."""

    def __init__(
        self,
        context: WrapContext,
        mesh: RankMesh,
        data: str,
        expert_ids: set[int],
        reshard_after_forward: bool,
        uses_autocast: bool,
    ) -> None:
        self._context = context
        self._mesh = mesh
        self._data = data
        self._expert_ids = expert_ids if mesh.layout.get_degree(EXPERT) > 1 else set()
        self._reshard_after_forward = reshard_after_forward
        self.uses_autocast = uses_autocast
        self.expert_parameters: list[nn.Parameter] = []

    def wrap_part(
        self, part: nn.Module, block_lists: Sequence[nn.ModuleList], names: Sequence[str]
    ) -> tuple[Mapping[str, nn.Parameter], nn.Module]:
        """A part of the model, ready to run, and its parameters by their names in the whole model.

        Parameters
        ----------
        names: sequence of str
            Of the part's parameters, in their order; empty for those of the whole model, which nobody asks for.
        """
        paths = [path for path, _ in part.named_parameters()]
        materializer = self._context.materializer
        materializer = materializer.build_for_part(part) if names else materializer
        if self._data == FSDP_KIND:
            self._shard(part, block_lists)
        materializer.fill_model(part)
        if self._data != FSDP_KIND:
            localize_parameters(part)
        by_path = {_strip_parametrization(path): parameter for path, parameter in part.named_parameters()}
        parameters = {name: by_path[path] for path, name in zip(paths, names, strict=True)} if names else {}
        replicas = self._mesh.get_mesh(*REPLICATING_DIMS)
        if self._data in (FSDP_KIND, NO_DATA_PARALLEL) or replicas is None:
            return parameters, part
        return parameters, self._replicate(part, replicas.get_group())

    def _shard(self, part: nn.Module, block_lists: Sequence[nn.ModuleList]) -> None:
        """Shard what holds experts over the ranks that have the same ones; blocks, and what is left, over all that
        compute gradients of them."""
        precision, family = self._context.precision, self._context.family
        casts = precision.is_mixed and not self.uses_autocast
        fp32_modules = list(family.find_fp32_modules(part)) if precision.scales_loss and casts else []
        options: dict[str, Any] = {"reshard_after_forward": self._reshard_after_forward}
        policy = MixedPrecisionPolicy(
            param_dtype=precision.compute_dtype if casts else None,
            reduce_dtype=precision.reduce_dtype,
            cast_forward_inputs=not fp32_modules,
        )
        # Experts cast what they multiply. FSDP2 would cast the router's weights too, but before torch 2.13 not where a
        # checkpointed block is computed again.
        expert_policy = dataclasses.replace(policy, cast_forward_inputs=False)
        mesh = self._mesh.get_fsdp_mesh(SHARDS, EXPERT, CONTEXT)
        expert_mesh = self._mesh.get_fsdp_mesh(SHARDS, CONTEXT)
        num_shards = expert_mesh.size(expert_mesh.ndim - 1)
        for module in part.modules():
            if id(module) in self._expert_ids:
                fully_shard(
                    module,
                    mesh=expert_mesh,
                    mp_policy=expert_policy,
                    shard_placement_fn=lambda parameter: Shard(_choose_dimension(parameter, num_shards)),
                    **options,
                )
        for layer in fp32_modules:
            fully_shard(
                layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=precision.reduce_dtype), **options
            )
        for block in (block for blocks in block_lists for block in blocks):
            fully_shard(block, mesh=mesh, mp_policy=policy, **options)
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=False)

    def _replicate(self, part: nn.Module, group: dist.ProcessGroup) -> nn.Module:
        """In DDP, which leaves experts alone that other ranks have than have the rest."""
        expert_names = []
        for path, module in part.named_modules():
            if id(module) in self._expert_ids:
                for name, parameter in module.named_parameters():
                    expert_names.append(f"{path}.{name}")
                    self.expert_parameters.append(parameter)
        if expert_names:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(part, expert_names)
        device = self._context.device
        return DistributedDataParallel(
            part,
            device_ids=[device.index] if device.type == "cuda" else None,
            process_group=group,
            gradient_as_bucket_view=True,
            init_sync=False,  # every rank has filled its copy with the same values
            **build_buffer_options(),
        )


def _choose_dimension(parameter: nn.Parameter, num_shards: int) -> int:
    """The first dimension of a rank's experts that the ranks of FSDP divide evenly; else the first."""
    shape = parameter._local_tensor.shape if isinstance(parameter, DTensor) else parameter.shape
    return next((dim for dim, size in enumerate(shape) if size % num_shards == 0), 0)


def _strip_parametrization(path: str) -> str:
    return path.replace("parametrizations.", "").removesuffix(".original")


# --- A step on a mesh.


class MeshStepper(Stepper):
    """Steps of one rank, with its part of every sequence."""

    divided_model: DividedModel

    def step(self, engine: StepEngine, micro_batches: Sequence[Batch]) -> torch.Tensor | None:
        """As without a mesh, on this rank's tokens."""
        with divide_loss(is_parallel=self.divided_model.loss_parallel):
            return super().step(engine, self.divided_model.select_tokens(micro_batches))

    def update(self) -> None:
        """After the gradients of experts, which DDP left alone, are averaged."""
        self.divided_model.average_expert_gradients()
        super().update()


class MeshPipelineStepper(MeshStepper, PipelineStepper):
    """The same, carried out by a schedule."""


class MeshGradScaler(torch.amp.GradScaler):
    """A loss scaler that all ranks agree with: a step is left out on all where gradients overflow on one."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.scale(torch.ones((), device=device))  # ranks without a loss have a scale, too

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """What torch's does, on each rank's parts of gradients, whichever mesh they are DTensors of."""
        gradients: dict[torch.dtype, list[torch.Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient = parameter.grad
                    local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
                    gradients.setdefault(local.dtype, []).append(local)
        for same_dtype in gradients.values():
            torch._amp_foreach_non_finite_check_and_unscale_(same_dtype, found_inf, inv_scale)
        dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)
        return {found_inf.device: found_inf}
