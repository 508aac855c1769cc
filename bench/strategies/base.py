"""What every strategy says and does: which world sizes it takes, how it wraps a model, when it communicates."""

from __future__ import annotations

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from bench.core.errors import ImpossibleError, invalid_value_error
from bench.core.precision import AUTOCAST_MIXING, Precision
from bench.core.presentation import Presentation, TrainingOption, TrainingTerm
from bench.models import Family
from bench.optimizers.updated_tensor import WHOLE_TENSORS
from bench.strategies.pipeline.schedule import Timetable
from bench.strategies.pipeline.step_plans import StagePlan, StageUnits
from bench.strategies.plan_inputs import PlanInputs
from bench.strategies.requirements import parse_rank_count
from bench.strategies.step_plan import REPLICA_GROUP, SHARD_GROUP, TENSOR_GROUP, WORLD_GROUP, GroupDim, StepPlan

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from bench.models.materialize import Materializer
    from bench.strategies.stepper import Stepper
    from bench.strategies.tensor_parallel.split import TensorParallelSplit

BuildOptimizer = Callable[[Iterable["nn.Parameter"]], "torch.optim.Optimizer"]
"""The optimizer that was asked for, over some parameters."""


@dataclass(frozen=True)
class WrapContext:
    """What a strategy needs to know of the run it wraps a model for."""

    family: Family
    precision: Precision
    device: torch.device
    world_size: int
    materializer: Materializer
    is_rehearsed: bool = False
    """Only the first rank is there, and its shards stand for those of the others."""
    build_optimizer: BuildOptimizer | None = None
    """For frameworks that must be given model and build_optimizer together; others get it in
    `Strategy.build_optimizer`."""
    num_micro_batches: int = 1
    """Micro-batches whose gradients make one step."""
    gradient_clip_norm: float | None = None
    """For frameworks that clip gradients themselves; others do it in `Strategy.clip_gradients`."""
    mesh: DeviceMesh | None = None
    """For data parallelism within a larger mesh: the part of it that is its own, of dimensions replicas and shards."""


@dataclass(frozen=True)
class StepSettings:
    """How a step is carried out, as far as a framework that carries it out itself may object."""

    num_micro_batches: int
    synchronize_every_micro_batch: bool
    keep_gradients: bool
    """Gradients are filled with zeros after a step, not freed."""
    compile: bool
    precision: Precision
    has_chunked_loss: bool = False
    """The loss is computed where the head is, in chunks."""
    offloads_activations: bool = False
    """Blocks offload what they keep for backward."""
    finetune: str = "full"


@dataclass(frozen=True)
class Strategy(ABC):
    """A strategy and its knobs. Subclasses add knobs as fields: each is on the row."""

    name: str
    """File under bench/strategies, or module path, that defines the subclass."""
    sharding_factor: int | str
    """Ranks one copy of the model (of ZeRO-1: of its optimizer state) is spread over: a divisor of the world size,
    `node` for the ranks of one machine, or `full` for the world size."""

    presentation: ClassVar[Presentation] = Presentation()
    """How reports call and colour it: written with literals alone (`bench.core.presentation`)."""

    training_terms: ClassVar[tuple[TrainingTerm, ...]] = ()
    """Its names in the field, as ``bench.advise names`` lists them."""

    training_options: ClassVar[tuple[TrainingOption, ...]] = ()
    """Ways to train with it, each with the leaves of the decision tree that name it."""

    trains_as_one_process: ClassVar[bool] = True
    """Whether its losses are those of one process with the whole batch, but for rounding."""

    supported_finetunes: ClassVar[tuple[str, ...]] = ("full",)
    takes_fp32_adapters: ClassVar[bool] = False
    """Whether what is trained may have another format than the frozen weights beside it."""
    """What of a model the strategy can train: full, lora (frozen weights beside others), qlora (quantised ones)."""

    supported_mixings: ClassVar[tuple[str, ...]] = (AUTOCAST_MIXING,)
    """Ways of mixed precision that the strategy has, of `bench.core.precision.MIXING_MODES`: its users' usual one
    first."""

    single_mixing_reason: ClassVar[str] = "which computes with parameters as they are stored"
    """Why the strategy has no other way of mixed precision than its usual one, as a relative clause."""

    min_sharding_factor: ClassVar[int] = 1
    """The least that `sharding_factor` may be, on as many GPUs at least."""

    has_autocast_cache = True
    """Whether autocast keeps what it casts of parameters until the forward pass is over: not of views of others."""

    shards_fp32_layers_separately = False
    shards_trained_layers_separately = False
    """Whether layers that stay in fp32 in fp16 runs are sharded by themselves, where autocast does not see to them."""

    @property
    def shards_experts_separately(self) -> bool:
        """Whether the resolved strategy shards the experts of a layer by themselves."""
        return False

    overlaps_experts = False
    """Whether tokens go to experts and back beside the computation of another micro-batch."""

    merges_tokens_per_node = False
    """Whether a token goes to a node once, however many of its experts are there."""

    takes_float8 = False
    """Whether it was shown to train a model whose linear layers compute in FP8."""

    takes_communicating_models = False
    """Whether it was shown to train a model that itself exchanges something among all ranks, whose buffers differ from
    rank to rank (`Family.communicates`)."""

    def uses_autocast(self, precision: Precision) -> bool:
        """Whether mixed precision is autocast's (else the strategy casts parameters itself)."""
        return (precision.mixing or self.supported_mixings[0]) == AUTOCAST_MIXING

    def describe_mixed_precision(self, precision: Precision) -> str:
        """Who makes computation narrower than stored parameters, for the row."""
        return AUTOCAST_MIXING if self.uses_autocast(precision) else "fsdp policy"

    def resolve(self, world_size: int, ranks_per_node: int, *, accumulates: bool) -> Strategy:
        """The same strategy with every knob that depends on the run as a value, the sharding factor as a number.

        Parameters
        ----------
        accumulates: bool
            Whether micro-batches accumulate gradients without communication.

        Raises
        ------
        ImpossibleError
            If the strategy cannot run at this world size with this factor.
        """
        factor = parse_rank_count("strategy.sharding_factor", self.sharding_factor, world_size, ranks_per_node)
        resolved = dataclasses.replace(self, sharding_factor=factor)
        resolved.check(world_size)
        return resolved

    @property
    def num_ranks_per_batch(self) -> int:
        """Ranks that read ``batch_size_per_gpu`` sequences together: 1, but where several share theirs and have fewer
        than one each."""
        return 1

    @property
    def timetable(self) -> Timetable | None:
        """In which order a rank runs the stages of a pipeline; None where every rank runs the whole model."""
        return None

    @property
    def resolved_sharding_factor(self) -> int:
        """The sharding factor of a resolved strategy."""
        assert isinstance(self.sharding_factor, int), "resolve the strategy first"
        return self.sharding_factor

    @property
    def num_parameter_shards(self) -> int:
        """Ranks that the parameters of a copy of the model are spread over, of the resolved strategy."""
        return self.resolved_sharding_factor

    def count_divided_ranks(self, world_size: int) -> int:
        """Ranks that a copy of what the resolved strategy divides is spread over."""
        return self.resolved_sharding_factor

    @property
    def offloaded_state(self) -> str:
        """What is kept in the memory of the machine around the devices, in words; empty for nothing."""
        return ""

    @property
    def has_offloaded_state(self) -> bool:
        return bool(self.offloaded_state)

    @property
    def has_host_collectives(self) -> bool:
        """Whether ranks exchange tensors that lie in the memory of the machine around their devices, too."""
        return False

    def build_tensor_parallel_split(self) -> TensorParallelSplit | None:
        """Over how many ranks every layer of the resolved strategy's model is split; None where layers are whole."""
        return None

    def find_rehearsed_rank(self, requested: int | str | None, world_size: int) -> int:
        """The rank that ``rehearse.rank`` means to the resolved strategy.

        Raises
        ------
        UsageError
            If there is none.
        """
        if requested is None:
            return 0
        with contextlib.suppress(ValueError):
            rank = int(requested)
            if 0 <= rank < world_size:
                return rank
        raise invalid_value_error("rehearse.rank", requested, self.describe_rehearsed_ranks(world_size))

    def describe_rehearsed_ranks(self, world_size: int) -> str:
        """What ``rehearse.rank`` can be, in words."""
        return f"null, or a number from 0 to {world_size - 1}"

    def label_stage(self, stage: int) -> str:
        """What a stage of the resolved strategy's pipeline is called where its memory is told."""
        return f"stage {stage}"

    def list_group_dims(self, group_name: str, world_size: int) -> Sequence[GroupDim]:
        """Where the ranks of one of a plan's groups are, of the resolved strategy.

        Ranks that share layers are neighbours, shards of what they have so many ranks apart; replicas are F ranks
        apart.
        """
        factor, split = self.resolved_sharding_factor, self.build_tensor_parallel_split()
        split_degree = 1 if split is None else split.degree
        return {
            TENSOR_GROUP: [GroupDim(split_degree, 1)],
            SHARD_GROUP: [GroupDim(factor // split_degree, split_degree)],
            REPLICA_GROUP: [GroupDim(world_size // factor, factor)],
            WORLD_GROUP: [GroupDim(world_size // split_degree, split_degree)],
        }[group_name]

    def count_process_groups(self, world_size: int) -> int:
        """Of the resolved strategy: each has a communicator."""
        num_groups = 0 if world_size == 1 else 1 if self.resolved_sharding_factor in (1, world_size) else 3
        return num_groups + (self.build_tensor_parallel_split() is not None)

    def find_batch_share(self, rank: int, world_size: int) -> tuple[int, int]:
        """Which share of the global batch a rank of the resolved strategy works on, and how many shares there are.

        As many as ranks, unless several ranks work on the same sequences, each with its part of the model: these
        have one share, which is as large as theirs would be together, so that the global batch is the same.
        """
        return rank, world_size

    def compute_state_bytes_per_parameter(
        self, precision: Precision, states_per_parameter: float, world_size: int
    ) -> float:
        """Least bytes that all ranks of the resolved strategy together have when a backward is over, per parameter:
        itself, its gradient and so many states of the optimizer."""
        return precision.parameter_itemsize * (2 + states_per_parameter) * world_size / self.resolved_sharding_factor

    @property
    def first_steady_step(self) -> int:
        """Steps of the resolved strategy until one is like all later: optimizer state appears in the first."""
        return 2

    @property
    def steps_before_steady(self) -> int:
        """Steps of the resolved strategy that are not like the later ones. They are taken before any is timed, and
        before memory counts, however few warm-up steps are asked for."""
        return self.first_steady_step - 1

    @property
    def step_period(self) -> int:
        """Steps of the resolved strategy that repeat: 1 where all are alike. Speed is measured over whole periods, and
        predicted as the mean over one."""
        return 1

    def count_devices_per_process(self, world_size: int) -> int:
        """Devices that one process of the resolved strategy drives: 1, unless a single process drives them all."""
        return 1

    def plan_other_devices(self, inputs: PlanInputs) -> StepPlan | None:
        """What the devices after the first do, where one process drives several and the first does most: else None."""
        return None

    @property
    def batch_size_multiple(self) -> int:
        """What the batch size per GPU of the resolved strategy must be a multiple of."""
        return 1

    def check(self, world_size: int) -> None:
        """Raise `ImpossibleError` where the resolved strategy makes no sense at this world size."""

    def check_model(self, family: Family, batch_size_per_gpu: int, sequence_length: int) -> None:
        """Raise `ImpossibleError` where the resolved strategy cannot train this model on such batches."""

    def check_device(self, device: str) -> None:
        """Raise `ImpossibleError` where a knob needs a device this is not (cpu, cuda or rocm)."""

    def check_precision(self, precision: Precision) -> None:
        """Raise `ImpossibleError` where the strategy cannot train in this precision."""

    @property
    def updated_tensor_kind(self) -> str:
        """What the resolved strategy hands its optimizer, of `bench.optimizers.updated_tensor`."""
        return WHOLE_TENSORS

    def check_optimizer(self, name: str, implementation: str) -> None:
        """Raise `ImpossibleError` where the strategy's parameters cannot be updated that way."""

    def check_finetune(self, quantised_bits: int | None, adapter_dropout: float) -> None:
        """Raise `ImpossibleError` where the resolved strategy cannot train a part of a model in a way that it supports:
        beside weights of so few bits, with adapters that take elements of their input as zero."""

    def check_mode(self, mode: str) -> None:
        """Raise `ImpossibleError` where there are no rows of this mode: measure, rehearse or predict."""

    def check_step(self, settings: StepSettings) -> None:
        """Raise `ImpossibleError` where the strategy cannot carry out a step like this."""

    def check_installed(self) -> None:
        """Raise `ImpossibleError` where a library that only this strategy needs is missing on this machine."""

    def list_preload_modules(self, device: str) -> tuple[str, ...]:
        """Modules that take long to import, for ranks to find there when they are forked: such as touch no device."""
        return ()

    @abstractmethod
    def describe_effective_strategy(self, world_size: int) -> str:
        """What the strategy comes to at this world size, for the row: ``name/kind``."""

    @abstractmethod
    def wrap(self, model: nn.Module, context: WrapContext) -> nn.Module:
        """Wrap the model, which is on meta with its blocks prepared, and give it its weights."""

    def build_optimizer(self, module: nn.Module, build: BuildOptimizer) -> torch.optim.Optimizer:
        """The optimizer of this rank, over what `wrap` made of the model."""
        return build(module.parameters())

    def build_loss(self, family: Family) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """The loss of logits and labels on this rank, of which the mean over ranks is that of the batch."""
        return family.compute_loss

    def build_stepper(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, keep_gradients: bool
    ) -> Stepper:
        """How gradients are computed and applied: by plain PyTorch, unless a framework does it its own way."""
        from bench.strategies.stepper import Stepper

        return Stepper(optimizer, scaler, keep_gradients)

    def clip_gradients(self, module: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        """Scale the gradients of what `wrap` made of the model so that the norm of all of them, on all ranks, is at
        most `max_norm`."""
        import torch

        torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)

    def plan(self, inputs: PlanInputs) -> StepPlan:
        """What the strategy stores and sends, and when: what a prediction is made from.

        Raises
        ------
        ImpossibleError
            If nobody has stated it.
        """
        raise ImpossibleError(
            f"strategy={self.name} states no plan, so it cannot be predicted: choose mode=measure, or give it a `plan`."
        )

    def plan_period(self, inputs: PlanInputs) -> Sequence[tuple[int, StepPlan]]:
        """The different steps of one period, each with how many of the period's steps are like it.

        Raises
        ------
        ImpossibleError
            If nobody has stated it.
        """
        return [(1, self.plan(inputs))]

    def plan_stages(self, stages: Sequence[StageUnits], inputs: PlanInputs) -> StagePlan:
        """What a rank of a pipeline holds and reduces for its stages: the plan of strategies that have a timetable.

        Raises
        ------
        ImpossibleError
            If nobody has stated it.
        """
        raise ImpossibleError(
            f"strategy={self.name} states no plan of stages, so it cannot be predicted as a pipeline: choose "
            "mode=measure, or give it a `plan_stages`."
        )

    def casts_outputs_to_fp32(self, precision: Precision) -> bool:
        """Whether the model's outputs are converted to fp32 as they leave it: by frameworks, before any loss."""
        return False

    @contextlib.contextmanager
    def control_gradient_sync(self, wrapped: nn.Module, synchronize: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch: reduce its gradients now (`synchronize`) or later."""
        yield

    def build_grad_scaler(self, device: torch.device) -> torch.amp.GradScaler:
        """The loss scaler for fp16 that knows where this strategy keeps its gradients."""
        import torch

        return torch.amp.GradScaler(device.type)
