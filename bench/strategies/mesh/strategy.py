"""Every kind of parallelism in one mesh: the strategy, its knobs, and what they come to."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from bench.core.precision import AUTOCAST_MIXING, PARAMETER_MIXING, Precision
from bench.core.presentation import Presentation, TrainingTerm
from bench.core.typed_config import OneOf, Within
from bench.models import Family
from bench.optimizers.updated_tensor import DIVIDED_DTENSORS, DTENSORS, PARTS, WHOLE_TENSORS
from bench.strategies.base import BuildOptimizer, StepSettings, Strategy, WrapContext
from bench.strategies.ddp import DDP_FIRST_STEADY_STEP
from bench.strategies.mesh import checks, knobs
from bench.strategies.mesh.layout import (
    CONTEXT,
    DEFAULT_ORDER,
    EXPERT,
    PIPELINE,
    REPLICAS,
    REPLICATING_DIMS,
    SHARDS,
    SHORT_NAMES,
    TENSOR,
    MeshLayout,
    RankMesh,
    find_rank,
    parse_order,
    resolve_degrees,
)
from bench.strategies.mesh.plans import (
    count_mesh_process_groups,
    list_mesh_group_dims,
    plan_mesh_stages,
    plan_mesh_step,
)
from bench.strategies.mesh.split import MeshSplit, build_mesh_loss, overlap_products
from bench.strategies.pipeline.schedule import ALL_SCHEDULES, DUAL_PIPE_V, Timetable
from bench.strategies.pipeline.schedule_checks import choose_virtual_stages
from bench.strategies.pipeline.step_plans import StagePlan, StageUnits
from bench.strategies.plan_inputs import PlanInputs
from bench.strategies.requirements import require_no_dropout, require_sharding_factor
from bench.strategies.step_plan import PIPELINE_GROUP, GroupDim, StepPlan
from bench.strategies.stepper import Stepper
from bench.strategies.tensor_parallel.split import TensorParallelSplit, list_local_parameters
from bench.strategies.zero1 import DIVIDED_OPTIMIZER_MODULE, build_divided_optimizer

if TYPE_CHECKING:
    import torch
    from torch import nn

    from bench.strategies.mesh.model import DividedModel, MeshStepper

DEGREE_RANGE = Within(1, 2**17)

NO_SCHEDULE = "none"
"""Of a model that is not cut into stages."""


@dataclass(frozen=True)
class MeshStrategy(Strategy):
    """Tensor, pipeline, context, expert and data parallelism, each of any degree.

    Ranks of the dimensions replicas, shards and expert read different sequences; those of tensor, pipeline and context
    share theirs. Parameters other than experts are replicated, or sharded by FSDP, over shards, expert and context
    together; experts over shards and context alone, each expert-parallel rank having others.
    """

    presentation = Presentation(label="Mesh", position=120, colour="#5f5fab", markers={"": "h"})
    training_terms = (
        TrainingTerm(
            "3D parallelism, expert and context parallelism",
            ("strategy=mesh",),
            "models or sequences are too large for one kind of parallelism alone",
            divides=("every layer", "layers", "sequences", "experts"),
        ),
    )
    supported_finetunes = ("full", "lora")
    takes_float8 = True

    tensor: Annotated[int | None, DEGREE_RANGE]
    """Ranks that every layer is split over. null: 1."""
    pipeline: Annotated[int | None, DEGREE_RANGE]
    """Ranks that the layers of one copy are spread over. null: 1."""
    context: Annotated[int | None, DEGREE_RANGE]
    """Ranks that every sequence is divided over. null: 1."""
    expert: Annotated[int | None, DEGREE_RANGE]
    """Ranks that the experts of every layer are spread over, each of which reads sequences of its own. null: 1."""
    expert_tensor_parallel: bool
    """With tensor: its ranks divide the width of each expert; else the experts of every layer are spread over expert x
    tensor ranks, each of which sends its part of the sequences, and the degree `expert` may be 1."""
    replicas: Annotated[int | None, DEGREE_RANGE]
    """Copies of what is sharded or, with ddp and zero1, of the model. null: what the other degrees leave with ddp and
    zero1; 1 with fsdp."""
    shards: Annotated[int | None, DEGREE_RANGE]
    """Ranks that FSDP shards over, beside those of expert and context. null: what the other degrees leave with fsdp; 1
    with ddp and zero1."""
    order: str
    """Dimensions of the mesh, outermost first, with hyphens: ranks of the last one have consecutive numbers."""
    data: Annotated[str, OneOf(knobs.FSDP_KIND, knobs.DDP_KIND, knobs.ZERO1_KIND, knobs.NO_DATA_PARALLEL)]
    """fsdp (FSDP2, hybrid where there are replicas), ddp, or zero1; none, whatever was asked for, where no other rank
    computes gradients of the same parameters."""
    reshard_after_forward: bool | None
    """With fsdp: free gathered parameters after forward (ZeRO-3) or keep them until backward is done (ZeRO-2). null:
    true, but false within a pipeline, which would gather them for every micro-batch."""
    schedule: Annotated[str, OneOf(*ALL_SCHEDULES, NO_SCHEDULE)]
    """Of the pipeline, as torch.distributed.pipelining carries it out; none, whatever was asked for, without one."""
    micro_batches: Annotated[int | None, Within(1, 1024)]
    """Parts that a pipeline's share of the batch is split into. null: as many as it has ranks (dualpipev: stages).
    Without a pipeline a number of them is predicted alone, of ranks that have fewer sequences at a time than they are:
    null is all at once, and `gradient_accumulation` more of the same."""
    virtual_stages: Annotated[int | None, Within(1, 512)]
    """Stages per rank. null: 1 for gpipe and 1f1b, else 2."""
    first_stage_less_blocks: Annotated[int, Within(0, 512)]
    """Blocks that the first stage has less than others, for its embeddings."""
    last_stage_less_blocks: Annotated[int, Within(0, 512)]
    """Blocks that the last stage has less than others, for its head over the vocabulary."""
    context_form: Annotated[str, OneOf(*knobs.CONTEXT_FORMS, "none")]
    """How attention reaches beyond a rank's part of the sequence: ring, all_gather (of keys and values) or all_to_all
    (whole sequences of a part of the heads); none, whatever was asked for, without context parallelism."""
    sequence_parallel: bool
    """With tensor: divide what is between the layers over the sequence (Korthikanti et al. 2022, arXiv:2205.05198)."""
    loss_parallel: bool
    """With tensor: compute the loss on logits that are divided over the vocabulary; else they are gathered."""
    async_tensor_parallel: bool
    """With tensor, on GPUs: gathers and products overlap."""
    overlap_kernels: Annotated[str, OneOf(*knobs.OVERLAP_KERNELS)]
    """What overlaps them: torch (with compile=true its compiler, by symmetric memory), or transformer_engine
    (Megatron's, which is predicted only)."""
    overlap_experts: bool
    """Where tokens are sent to experts, in a schedule whose passes alternate: those of a forward pass go beside the
    computation of the backward pass behind it, and the other way round, as Megatron's overlap_moe_expert_parallel_comm
    does. Predicted only."""
    token_dispatcher: Annotated[str, OneOf(*knobs.TOKEN_DISPATCHERS)]
    """How tokens go to experts: all_to_all (NCCL's, each copy of a token straight to its expert's rank), or deepep (as
    DeepEP and HybridEP do: once to every node that has one of its experts, and on within it), which is predicted
    only."""
    ranks_per_batch: Annotated[int | None, DEGREE_RANGE]
    """Ranks that read `batch_size_per_gpu` sequences together, a divisor of tensor x pipeline x context, whose ranks
    share theirs: 8 is an eighth of a sequence per GPU at batch 1. null: 1."""

    single_mixing_reason = "which does it as its data parallelism does"

    @property
    def supported_mixings(self) -> tuple[str, ...]:  # type: ignore[override]
        return (PARAMETER_MIXING,) if self.data == knobs.FSDP_KIND else (AUTOCAST_MIXING,)

    def resolve(self, world_size: int, ranks_per_node: int, *, accumulates: bool) -> Strategy:
        """Every degree as a number, and knobs of what is not there at one value."""
        order = parse_order(self.order)
        requested = {name: getattr(self, name) for name in DEFAULT_ORDER}
        degrees = resolve_degrees(requested, SHARDS if self.data == knobs.FSDP_KIND else REPLICAS, world_size)
        layout = MeshLayout(tuple((name, degrees[name]) for name in order))
        data = self.data if layout.get_degree(*REPLICATING_DIMS) > 1 else knobs.NO_DATA_PARALLEL
        spread = (TENSOR, PIPELINE, EXPERT) + ((SHARDS, CONTEXT) if data == knobs.FSDP_KIND else ())
        factor = layout.get_degree(*spread)
        require_sharding_factor(self, "auto", factor, world_size, "the degrees spread a copy")
        has_pipeline, has_tensor = degrees[PIPELINE] > 1 or self.micro_batches is not None, degrees[TENSOR] > 1
        virtual_stages = self.virtual_stages or choose_virtual_stages(self.schedule)
        default_micro_batches = degrees[PIPELINE] * (virtual_stages if self.schedule == DUAL_PIPE_V else 1)
        reshards = not has_pipeline if self.reshard_after_forward is None else self.reshard_after_forward
        strategy = dataclasses.replace(
            self,
            sharding_factor=factor,
            data=data,
            reshard_after_forward=reshards if data == knobs.FSDP_KIND else None,
            schedule=self.schedule if has_pipeline else NO_SCHEDULE,
            micro_batches=(self.micro_batches or default_micro_batches) if has_pipeline else None,
            virtual_stages=virtual_stages if has_pipeline else None,
            first_stage_less_blocks=self.first_stage_less_blocks if degrees[PIPELINE] > 1 else 0,
            last_stage_less_blocks=self.last_stage_less_blocks if degrees[PIPELINE] > 1 else 0,
            context_form=self.context_form if degrees[CONTEXT] > 1 else "none",
            expert_tensor_parallel=self.expert_tensor_parallel or not has_tensor,
            sequence_parallel=self.sequence_parallel and has_tensor,
            loss_parallel=self.loss_parallel and has_tensor,
            overlap_kernels=self.overlap_kernels if self.async_tensor_parallel else knobs.TORCH,
            ranks_per_batch=self.num_ranks_per_batch,
            **degrees,  # type: ignore[arg-type]
        )
        return super(MeshStrategy, strategy).resolve(world_size, ranks_per_node, accumulates=accumulates)

    @functools.cached_property
    def layout(self) -> MeshLayout:
        """Of the resolved strategy."""
        degrees = tuple((name, getattr(self, name)) for name in parse_order(self.order))
        return MeshLayout(degrees, self.expert_tensor_parallel)

    @property
    def overlaps_experts(self) -> bool:  # type: ignore[override]
        return self.overlap_experts

    @property
    def merges_tokens_per_node(self) -> bool:  # type: ignore[override]
        return self.token_dispatcher == knobs.DEEPEP

    @property
    def num_ranks_per_batch(self) -> int:
        return self.ranks_per_batch or 1

    @property
    def timetable(self) -> Timetable | None:
        """Which stages each rank runs; None where neither the model is cut into stages nor its batch into parts."""
        if self.micro_batches is None:
            return None
        assert self.virtual_stages is not None
        return Timetable(
            self.schedule,
            self.layout.get_degree(PIPELINE),
            self.virtual_stages,
            self.micro_batches,
            self.first_stage_less_blocks,
            self.last_stage_less_blocks,
        )

    def check(self, world_size: int) -> None:
        """What knobs can be asked for together."""
        checks.check_knobs(self)

    def check_mode(self, mode: str) -> None:
        checks.check_mode(self, mode)

    def check_model(self, family: Family, batch_size_per_gpu: int, sequence_length: int) -> None:
        """Every dimension must find something to divide."""
        checks.check_model(self, family, batch_size_per_gpu, sequence_length)

    def check_device(self, device: str) -> None:
        checks.check_device(self, device)

    def check_precision(self, precision: Precision) -> None:
        checks.check_precision(self, precision)

    def check_optimizer(self, name: str, implementation: str) -> None:
        checks.check_optimizer(self, name, implementation)

    def check_step(self, settings: StepSettings) -> None:
        checks.check_step(self, settings)

    def check_finetune(self, quantised_bits: int | None, adapter_dropout: float) -> None:
        if self.layout.get_degree(TENSOR) > 1:
            require_no_dropout("finetune.dropout", adapter_dropout, f"strategy.tensor={self.tensor}")

    @property
    def updated_tensor_kind(self) -> str:
        is_divided = self.layout.get_degree(TENSOR, EXPERT) > 1
        if self.data == knobs.FSDP_KIND:
            return DIVIDED_DTENSORS if is_divided else DTENSORS
        return PARTS if is_divided else WHOLE_TENSORS

    @property
    def first_steady_step(self) -> int:
        is_ddp = self.data in (knobs.DDP_KIND, knobs.ZERO1_KIND)
        return DDP_FIRST_STEADY_STEP if is_ddp else super().first_steady_step

    def build_tensor_parallel_split(self) -> TensorParallelSplit | None:
        """How layers, sequences and experts are divided; None where each rank has whole ones."""
        tensor, context, expert = (self.layout.get_degree(name) for name in (TENSOR, CONTEXT, EXPERT))
        keeps_dtensors = self.data == knobs.FSDP_KIND
        if tensor == context == expert == 1:
            return None
        return MeshSplit(
            tensor,
            self.sequence_parallel,
            keeps_dtensors,
            context,
            self.context_form,
            expert,
            self.expert_tensor_parallel,
            self.loss_parallel,
            self.overlap_kernels if self.async_tensor_parallel else None,
        )

    @property
    def shards_fp32_layers_separately(self) -> bool:  # type: ignore[override]
        return self.data == knobs.FSDP_KIND

    @property
    def shards_experts_separately(self) -> bool:
        return self.data == knobs.FSDP_KIND and self.layout.get_degree(EXPERT) > 1

    def find_rehearsed_rank(self, requested: int | str | None, world_size: int) -> int:
        """Of a stage, or of coordinates, too."""
        if isinstance(requested, str) and ":" in requested:
            rank = find_rank(self.layout, self.timetable, requested)
            if rank is not None:
                return rank
        return super().find_rehearsed_rank(requested, world_size)

    def describe_rehearsed_ranks(self, world_size: int) -> str:
        num_stages = 1 if self.timetable is None else self.timetable.num_stages
        degrees = ", ".join(f"{name}:0 to {degree - 1}" for name, degree in self.layout.degrees if degree > 1)
        return (
            f"{super().describe_rehearsed_ranks(world_size)}, stage:0 to {num_stages - 1}, or coordinates with hyphens "
            f"between them ({degrees or 'there are none'})"
        )

    def label_stage(self, stage: int) -> str:
        """With the first rank that has it."""
        assert self.timetable is not None
        (dim,) = list_mesh_group_dims(self.layout, PIPELINE_GROUP)
        return f"stage {stage} on rank {self.timetable.find_rank_of_stage(stage) * dim.stride}"

    def list_group_dims(self, group_name: str, world_size: int) -> Sequence[GroupDim]:
        return list_mesh_group_dims(self.layout, group_name)

    def count_process_groups(self, world_size: int) -> int:
        return count_mesh_process_groups(self.layout, self.data)

    def plan(self, inputs: PlanInputs) -> StepPlan:
        return plan_mesh_step(self, inputs)

    def plan_stages(self, stages: Sequence[StageUnits], inputs: PlanInputs) -> StagePlan:
        return plan_mesh_stages(self, stages, inputs)

    def find_batch_share(self, rank: int, world_size: int) -> tuple[int, int]:
        return self.layout.find_batch_share(rank)

    @property
    def batch_size_multiple(self) -> int:
        """So many that every micro-batch has as many sequences."""
        return checks.find_batch_size_multiple(self)

    def compute_state_bytes_per_parameter(
        self, precision: Precision, states_per_parameter: float, world_size: int
    ) -> float:
        """As every strategy; ZeRO-1 has one copy of the optimizer's states."""
        if self.data != knobs.ZERO1_KIND:
            return super().compute_state_bytes_per_parameter(precision, states_per_parameter, world_size)
        copies = world_size / self.resolved_sharding_factor
        return precision.parameter_itemsize * (2 * copies + states_per_parameter)

    def describe_effective_strategy(self, world_size: int) -> str:
        """The dimensions of several ranks, outermost first, with the schedule and the forms: ``mesh/pp2-fsdp2-tp2``."""
        replicas = {knobs.FSDP_KIND: "replicas", knobs.ZERO1_KIND: "zero1x"}.get(self.data, self.data)
        names = SHORT_NAMES | {SHARDS: knobs.FSDP_KIND, REPLICAS: replicas}
        dims = [f"{names[name]}{degree}" for name, degree in self.layout.degrees if degree > 1]
        suffixes = [
            *([self.schedule] if self.schedule != NO_SCHEDULE else []),
            *([self.context_form] if self.context_form != "none" else []),
            *(["sequence"] if self.sequence_parallel else []),
            *([] if self.expert_tensor_parallel else ["whole_experts"]),
            *(["overlapped_experts"] if self.overlap_experts else []),
            *([self.token_dispatcher] if self.merges_tokens_per_node else []),
        ]
        return f"{self.name}/{'+'.join(['-'.join(dims) or 'one', *suffixes])}"

    def wrap(self, model: nn.Module, context: WrapContext) -> nn.Module:
        """Divide the model, then shard or replicate what each rank has of it."""
        from bench.strategies.mesh.model import divide_model

        mesh = RankMesh(self.layout, context.device)
        if self.async_tensor_parallel:
            overlap_products(mesh)
        divided = divide_model(
            model,
            context,
            mesh,
            data=self.data,
            timetable=self.timetable,
            context_form=self.context_form,
            sequence_parallel=self.sequence_parallel,
            loss_parallel=self.loss_parallel,
            reshard_after_forward=bool(self.reshard_after_forward),
            uses_autocast=self.uses_autocast(context.precision),
        )
        divided.module.__dict__["divided_model"] = divided
        return divided.module

    def build_loss(self, family: Family) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        return build_mesh_loss(family, self.layout.get_degree(CONTEXT), is_parallel=self.loss_parallel)

    def list_preload_modules(self, device: str) -> tuple[str, ...]:
        from bench.strategies.pipeline.model import TORCH_STAGES_MODULE

        optimizer_modules = (DIVIDED_OPTIMIZER_MODULE,) if self.data == knobs.ZERO1_KIND else ()
        stage_modules = (TORCH_STAGES_MODULE,) if self.layout.get_degree(PIPELINE) > 1 else ()
        return (*optimizer_modules, *stage_modules)

    def build_optimizer(self, module: nn.Module, build: BuildOptimizer) -> torch.optim.Optimizer:
        """One group of parameters per mesh: torch's kernels over many tensors take DTensors of one mesh only. With
        zero1 this rank's part."""
        from torch.distributed.tensor import DTensor

        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if self.data == knobs.ZERO1_KIND:
            mesh = module.__dict__["divided_model"].mesh.get_mesh(*REPLICATING_DIMS)
            return build_divided_optimizer(parameters, build, mesh.get_group())
        parameters_by_mesh: dict[Any, list[nn.Parameter]] = {}
        for parameter in parameters:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            parameters_by_mesh.setdefault(mesh, []).append(parameter)
        return build([{"params": group} for group in parameters_by_mesh.values()])  # type: ignore[misc]

    def build_stepper(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, keep_gradients: bool
    ) -> Stepper:
        """Takes this rank's part of every sequence; a schedule carries out forward and backward of a pipeline."""
        from bench.strategies.mesh.model import MeshPipelineStepper, MeshStepper
        from bench.strategies.pipeline.model import PipelinedModel

        divided: DividedModel = module.__dict__["divided_model"]
        stepper: MeshStepper
        if isinstance(module, PipelinedModel):
            stepper = MeshPipelineStepper(module, optimizer, scaler, keep_gradients)
        else:
            stepper = MeshStepper(optimizer, scaler, keep_gradients)
        stepper.divided_model = divided
        return stepper

    def build_grad_scaler(self, device: torch.device) -> torch.amp.GradScaler:
        from bench.strategies.mesh.model import MeshGradScaler

        return MeshGradScaler(device.type)

    def clip_gradients(self, module: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        """By the norm of all ranks' parts: of what stages share, and of what ranks have copies of, one counts."""
        import torch.distributed as dist
        from torch.distributed.tensor import DTensor

        from bench.strategies.global_norm import clip_by_global_norm, count_parts
        from bench.strategies.pipeline.model import PipelinedModel

        tied_parameters = module.tied_parameters if isinstance(module, PipelinedModel) else ()
        num_tied = {id(copy): tied.num_stages for tied in tied_parameters for copy in tied.copies}
        num_ranks = dist.get_world_size() // self.layout.get_degree(PIPELINE)

        def count_copies(parameter: nn.Parameter, spec: Any) -> float:
            parts = count_parts(parameter if isinstance(parameter, DTensor) else spec)
            return num_tied.get(id(parameter), 1) * num_ranks / parts

        clip_by_global_norm(
            ((parameter, count_copies(parameter, spec)) for parameter, spec in list_local_parameters(module)), max_norm
        )

    @contextlib.contextmanager
    def control_gradient_sync(self, wrapped: nn.Module, synchronize: bool) -> Iterator[None]:
        """Without synchronisation gradients stay as the data parallelism has them."""
        from bench.strategies.gradient_sync import control_data_parallel_sync

        with control_data_parallel_sync(wrapped, synchronize):
            yield
