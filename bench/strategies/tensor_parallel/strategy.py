"""Tensor parallelism: every layer split over neighbouring ranks, alone or with FSDP2 or DDP among such groups."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from bench.core.errors import ImpossibleError, invalid_value_error
from bench.core.precision import AUTOCAST_MIXING, PARAMETER_MIXING, Precision
from bench.core.presentation import NODE_GPUS_PLACEHOLDER, Presentation, TrainingOption, TrainingTerm
from bench.core.typed_config import OneOf
from bench.models import Family
from bench.models.base import list_dividing_families
from bench.optimizers.updated_tensor import DIVIDED_DTENSORS, PARTS
from bench.strategies.base import BuildOptimizer, StepSettings, Strategy, WrapContext
from bench.strategies.ddp import BUCKET_MB_RANGE, DDPStrategy
from bench.strategies.fsdp.strategy import FSDP2Strategy
from bench.strategies.plan_inputs import PlanInputs
from bench.strategies.requirements import parse_rank_count, require_no_dropout, require_stored_reduce_dtype
from bench.strategies.step_plan import ReplicatedPlan, StepPlan
from bench.strategies.tensor_parallel.split import TensorParallelSplit, list_local_parameters, localize_parameters

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


FSDP_KIND, DDP_KIND, NO_DATA_PARALLEL = "fsdp", "ddp", "none"

REPLICATE_DIM, SHARD_DIM, TENSOR_DIM = "replicate", "shard", "tensor"
"""Dimensions of the mesh, from the one whose ranks are farthest apart to that of neighbours."""


@dataclass(frozen=True)
class TensorParallelStrategy(Strategy):
    """Megatron's split of attention and feed-forward layers (Shoeybi et al. 2019, arXiv:1909.08053), by torch's styles.

    Ranks whose numbers are neighbours share layers and sequences. The vocabulary is divided, too: each rank computes
    its part of the logits, and the loss is computed without ever putting them together.
    """

    presentation = Presentation(label="Tensor parallel", position=90, colour="#7f4fc9", markers={"": "*"})
    training_terms = (
        TrainingTerm(
            "tensor parallelism",
            ("strategy=tensor_parallel",),
            "the largest layer does not fit; fast links in the node",
            divides=("every layer", "activations"),
        ),
    )
    training_options = (
        TrainingOption(
            "tensor parallelism within the node",
            {"strategy": "tensor_parallel", "strategy.degree": NODE_GPUS_PLACEHOLDER},
            "every layer is cut, so the largest may be larger than a GPU; needs fast links and changes to the model",
            leaves={
                "tensor parallelism": 1,
                "shard within the node": 3,
                "shard over all nodes": 4,
                "keep traffic within nodes": 3,
            },
        ),
    )

    supported_finetunes = ("full", "lora")
    takes_float8 = True

    degree: int | str
    """Ranks a layer is split over: a whole number, `node` for the ranks of one machine, `full` for all."""
    sequence_parallel: bool
    """Divide what lies between the layers over the sequence (Korthikanti et al. 2022, arXiv:2205.05198)."""
    data_parallel: Annotated[str, OneOf(FSDP_KIND, DDP_KIND, NO_DATA_PARALLEL)]
    """Among groups that share layers: fsdp or ddp; none, whatever was asked for, where there is one group alone."""
    reshard_after_forward: bool | None
    """With fsdp: free gathered parameters after forward (ZeRO-3, also if null), or keep them until backward is done
    (ZeRO-2)."""
    mesh_2d: bool | None = None
    """With fsdp: replicas are a dimension of its mesh even where there is one. null: only where there are several."""
    bucket_cap_mb: Annotated[int | None, BUCKET_MB_RANGE] = None
    """With ddp: size of a gradient bucket in MiB. null: torch's default, 25 and the first one 1."""

    single_mixing_reason = "which does it as its data parallelism does"

    @property
    def supported_mixings(self) -> tuple[str, ...]:  # type: ignore[override]
        """FSDP casts parameters by its policy. Without it autocast does, and what layer norms hand out is fp32: the
        gathers of sequence parallelism are then twice as large."""
        return (PARAMETER_MIXING,) if self.data_parallel == FSDP_KIND else (AUTOCAST_MIXING,)

    def resolve(self, world_size: int, ranks_per_node: int, *, accumulates: bool) -> Strategy:
        """As every strategy, with degree and data parallelism as they come to at this world size."""
        degree = parse_rank_count("strategy.degree", self.degree, world_size, ranks_per_node, min_ranks=2)
        data_parallel = self.data_parallel if degree < world_size else NO_DATA_PARALLEL
        if degree < world_size and data_parallel == NO_DATA_PARALLEL:
            valid = f"fsdp or ddp with strategy.degree={degree} of gpus={world_size}"
            raise invalid_value_error("strategy.data_parallel", NO_DATA_PARALLEL, valid, ImpossibleError)
        reshards = self.reshard_after_forward
        knobs_of_other_kind = {DDP_KIND: ("reshard_after_forward", "mesh_2d"), FSDP_KIND: ("bucket_cap_mb",)}
        for knob in knobs_of_other_kind.get(self.data_parallel, ()):
            if getattr(self, knob) is not None:
                valid = f"null with strategy.data_parallel={self.data_parallel}"
                raise invalid_value_error(f"strategy.{knob}", getattr(self, knob), valid, ImpossibleError)
        factor: int | str = self.sharding_factor
        if factor == "auto":
            factor = world_size if data_parallel == FSDP_KIND else degree
        strategy = dataclasses.replace(
            self,
            degree=degree,
            data_parallel=data_parallel,
            sharding_factor=factor,
            reshard_after_forward=None if data_parallel != FSDP_KIND else True if reshards is None else reshards,
            bucket_cap_mb=self.bucket_cap_mb if data_parallel == DDP_KIND else None,
        )
        resolved = super(TensorParallelStrategy, strategy).resolve(world_size, ranks_per_node, accumulates=accumulates)
        assert isinstance(resolved, TensorParallelStrategy)
        mesh_2d = bool(self.mesh_2d) or resolved.resolved_sharding_factor < world_size
        return dataclasses.replace(resolved, mesh_2d=mesh_2d if data_parallel == FSDP_KIND else None)

    def check(self, world_size: int) -> None:
        """A copy of the model is spread over whole groups, and DDP spreads it no further."""
        degree = self.build_tensor_parallel_split().degree
        if self.resolved_sharding_factor % degree:
            raise ImpossibleError(
                f"strategy.sharding_factor={self.resolved_sharding_factor} is not valid with strategy.degree={degree}, "
                "since a copy of "
                f"the model is spread over whole groups of that many ranks: choose auto or a multiple of {degree}."
            )
        if self.data_parallel != FSDP_KIND and self.resolved_sharding_factor != degree:
            raise ImpossibleError(
                f"strategy.sharding_factor={self.resolved_sharding_factor} is not valid with strategy.degree={degree} "
                "and "
                f"strategy.data_parallel={self.data_parallel}, which shards nothing further: choose auto or {degree}, "
                "or strategy.data_parallel=fsdp."
            )

    def check_model(self, family: Family, batch_size_per_gpu: int, sequence_length: int) -> None:
        """The degree divides whatever the family says must be divided evenly."""
        degree = self.build_tensor_parallel_split().degree
        if not family.can_divide_layers:
            raise ImpossibleError(
                f"model.family={family.family} is not valid for strategy={self.name}, which must know how layers are "
                f"divided: choose a model of family {', '.join(list_dividing_families())}."
            )
        require_no_dropout("model.dropout", getattr(family, "dropout", 0.0), f"strategy={self.name}")
        sizes = family.list_divided_sizes(sequence_length, sequence_parallel=self.sequence_parallel)
        for name, size in sizes.items():
            if size % degree:
                common = math.gcd(*sizes.values())
                valid_degrees = [str(number) for number in range(2, common + 1) if common % number == 0]
                raise ImpossibleError(
                    f"strategy.degree={degree} is not valid with {name}={size}, which it must divide: choose "
                    f"{', '.join(valid_degrees) or 'another strategy: no degree divides all that is split'}."
                )

    def check_precision(self, precision: Precision) -> None:
        """Nothing that would have to be agreed upon among the ranks of a layer and is not."""
        if precision.scales_loss:
            raise ImpossibleError(
                f"precision={precision.name} is not valid for strategy={self.name}: ranks that share layers would have "
                "to agree on the loss scale and on the steps that are left out, which torch's gradient scaler does not "
                "see to. Choose bf16 or fp32."
            )
        if self.data_parallel == DDP_KIND:
            require_stored_reduce_dtype(f"strategy={self.name} with strategy.data_parallel=ddp", precision, ", or fsdp")

    @property
    def updated_tensor_kind(self) -> str:
        return DIVIDED_DTENSORS if self.data_parallel == FSDP_KIND else PARTS

    def check_finetune(self, quantised_bits: int | None, adapter_dropout: float) -> None:
        require_no_dropout("finetune.dropout", adapter_dropout, f"strategy={self.name}")

    def check_optimizer(self, name: str, implementation: str) -> None:
        """With fsdp parameters are DTensors, as FSDP2's are."""
        if self.data_parallel == FSDP_KIND:
            self._build_fsdp_strategy().check_optimizer(name, implementation)

    @property
    def first_steady_step(self) -> int:
        return (
            self._build_ddp_strategy().first_steady_step
            if self.data_parallel == DDP_KIND
            else super().first_steady_step
        )

    def check_step(self, settings: StepSettings) -> None:
        """Blocks are not compiled: torch 2.13 compiled a small GPT's, but not a small T5's within two minutes."""
        if settings.offloads_activations:
            raise ImpossibleError(
                f"activation_offload=true is not valid for strategy={self.name}, "
                "whose blocks keep parts that wait for other ranks: choose false."
            )
        if settings.has_chunked_loss:
            raise ImpossibleError(
                f"loss=chunked is not valid for strategy={self.name}, "
                "whose head and loss are divided over the vocabulary: "
                "choose loss=whole."
            )

    def build_tensor_parallel_split(self) -> TensorParallelSplit:
        """How layers are split, of a resolved strategy."""
        assert isinstance(self.degree, int), "resolve the strategy first"
        return TensorParallelSplit(self.degree, self.sequence_parallel, keeps_dtensors=self.data_parallel == FSDP_KIND)

    def find_batch_share(self, rank: int, world_size: int) -> tuple[int, int]:
        return (
            rank // self.build_tensor_parallel_split().degree,
            world_size // self.build_tensor_parallel_split().degree,
        )

    def describe_effective_strategy(self, world_size: int) -> str:
        """Degree x groups, and what goes on among the groups."""
        degree = self.build_tensor_parallel_split().degree
        sequence_suffix = "+sequence" if self.sequence_parallel else ""
        if self.data_parallel == NO_DATA_PARALLEL:
            return f"{self.name}/{degree}{sequence_suffix}"
        return (
            f"{self.name}/{degree}x{world_size // degree}{sequence_suffix}+{self._describe_data_parallel(world_size)}"
        )

    def _describe_data_parallel(self, world_size: int) -> str:
        if self.data_parallel == DDP_KIND:
            return DDP_KIND
        zero2_suffix = "" if self.reshard_after_forward else "_grad_op"
        return (
            f"{FSDP_KIND}{zero2_suffix}"
            if self.resolved_sharding_factor == world_size
            else f"{FSDP_KIND}_hybrid{zero2_suffix}"
        )

    def wrap(self, model: nn.Module, context: WrapContext) -> nn.Module:
        """Split the layers, then shard or replicate what each rank has of them."""
        mesh = self._build_mesh(context)
        layer_division = self.build_tensor_parallel_split().divide_model(context.family, model, mesh[TENSOR_DIM])
        degree = self.build_tensor_parallel_split().degree
        context.materializer.arrange_parameter = lambda name, whole: layer_division.arrange_parameter(
            name, whole, degree
        )
        if self.data_parallel == FSDP_KIND:
            # T5's position biases leave their block as views, to which nobody adds in place.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
            data_mesh = mesh[REPLICATE_DIM, SHARD_DIM] if self.mesh_2d else mesh[SHARD_DIM]
            return self._build_fsdp_strategy().wrap(model, dataclasses.replace(context, mesh=data_mesh))
        context.materializer.fill_model(model)
        localize_parameters(model)
        if self.data_parallel == NO_DATA_PARALLEL:
            return model
        return self._build_ddp_strategy().wrap(model, dataclasses.replace(context, mesh=mesh[REPLICATE_DIM]))

    def _build_fsdp_strategy(self) -> FSDP2Strategy:
        """What shards each rank's part of the model further."""
        return FSDP2Strategy(
            name=FSDP_KIND,
            sharding_factor=self.resolved_sharding_factor // self.build_tensor_parallel_split().degree,
            reshard_after_forward=self.reshard_after_forward is not False,
            forward_prefetch=False,
            blocks_per_unit=1,
            cpu_offload=False,
            backward_prefetch=True,
            mesh_2d=bool(self.mesh_2d),
        )

    def _build_ddp_strategy(self) -> DDPStrategy:
        """What averages the gradients of each rank's part of the model."""
        return DDPStrategy(
            name=DDP_KIND,
            sharding_factor=1,
            bucket_cap_mb=self.bucket_cap_mb,
            gradient_as_bucket_view=True,
            static_graph=False,
        )

    def _build_mesh(self, context: WrapContext) -> DeviceMesh:
        from torch.distributed.device_mesh import init_device_mesh

        shape = (
            context.world_size // self.resolved_sharding_factor,
            self.resolved_sharding_factor // self.build_tensor_parallel_split().degree,
            self.build_tensor_parallel_split().degree,
        )
        return init_device_mesh(context.device.type, shape, mesh_dim_names=(REPLICATE_DIM, SHARD_DIM, TENSOR_DIM))

    def build_optimizer(self, module: nn.Module, build: BuildOptimizer) -> torch.optim.Optimizer:
        """One group of parameters per mesh: torch's kernels over many tensors take DTensors of one mesh only."""
        from torch.distributed.tensor import DTensor

        parameters_by_mesh: dict[Any, list[nn.Parameter]] = {}
        for parameter in module.parameters():
            parameters_by_mesh.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(
                parameter
            )
        return build([{"params": parameters} for parameters in parameters_by_mesh.values()])  # type: ignore[misc]

    def clip_gradients(self, module: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        """By the norm of all ranks' parts: torch's own function adds up neither plain parts nor DTensors of different
        meshes."""
        import torch.distributed as dist
        from torch.distributed.tensor import DTensor

        from bench.strategies.global_norm import clip_by_global_norm, count_parts

        world_size = dist.get_world_size()
        clip_by_global_norm(
            (
                (parameter, world_size / count_parts(parameter if isinstance(parameter, DTensor) else spec))
                for parameter, spec in list_local_parameters(module)
            ),
            max_norm,
        )

    def plan(self, inputs: PlanInputs) -> StepPlan:
        """That of the data parallelism, over what each rank has of the layers."""
        if self.data_parallel == FSDP_KIND:
            num_groups = inputs.world_size // self.build_tensor_parallel_split().degree
            return self._build_fsdp_strategy().plan(dataclasses.replace(inputs, world_size=num_groups))
        return self._build_ddp_strategy().plan(inputs) if self.data_parallel == DDP_KIND else ReplicatedPlan(inputs)

    @contextlib.contextmanager
    def control_gradient_sync(self, wrapped: nn.Module, synchronize: bool) -> Iterator[None]:
        """The loss is computed on divided logits; without synchronisation gradients stay as the data parallelism has
        them."""
        from torch.distributed.tensor.parallel import loss_parallel

        from bench.strategies.gradient_sync import control_data_parallel_sync

        with loss_parallel(), control_data_parallel_sync(wrapped, synchronize):
            yield
