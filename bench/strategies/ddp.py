"""DistributedDataParallel: a whole model on every rank, gradients averaged in buckets while backward runs."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from bench.core.errors import ImpossibleError
from bench.core.precision import Precision, get_torch_dtype
from bench.core.presentation import FactorLine, Presentation, TrainingOption, TrainingTerm
from bench.core.typed_config import OneOf, Within
from bench.core.units import MIB
from bench.strategies.base import Strategy, WrapContext
from bench.strategies.plan_inputs import ParameterSpec, PlanInputs, ShardingUnit
from bench.strategies.powersgd import MIN_POWERSGD_START_ITER, PowerSGDPlan
from bench.strategies.requirements import require_stored_reduce_dtype, require_unsharded
from bench.strategies.step_plan import (
    GRADIENT_MEMORY,
    GRADIENTS_HANDLED_ONE_BY_ONE,
    REDUCE_STREAM,
    REDUCTION_MEMORY,
    WORLD_GROUP,
    PlanDevice,
    ReplicatedPlan,
    StepPlan,
    name_unit_gradients,
)

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel


DEFAULT_BUCKET_CAP_MB = 25
"""Of DistributedDataParallel, as its documentation says; a name of its own only torch after 2.11 has for it."""

BUCKET_HOOK_SHARE = 0.15
"""What the host does for a bucket, in C++, over what it does for a unit of FSDP, in Python. Assumed: 0.12 ms."""

BUCKET_MB_RANGE = Within(1, 10**6)

POWERSGD_HOOK = "powersgd"

DDP_FIRST_STEADY_STEP = 3
"""Steps until one is like all later: in the second DDP makes its buckets again, in the order of the first's gradients,
while the old ones are there (where the graph is static in the third: `DDPStrategy.steps_before_steady`)."""

COMPRESSION_FORMATS = ("fp16", "bf16")
"""Hooks that compress gradients, and to what."""


def build_buffer_options() -> dict[str, Any]:
    """Argument of DDP by which buffers are not sent in every forward pass: they are constants, such as the frequencies
    of rotary embeddings. torch 2.13 has a new name for it."""
    from torch.nn.parallel import DistributedDataParallel

    parameters = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers": False}


@dataclass(frozen=True)
class BucketingStrategy(Strategy):
    """DistributedDataParallel, whatever becomes of a bucket of gradients that is full: subclasses say how it is reduced
    (`register_bucket_hook`), and their plan how long that takes (`DDPPlan.reduce_bucket`)."""

    bucket_cap_mb: Annotated[int | None, BUCKET_MB_RANGE]
    """Size of a gradient bucket in MiB: smaller overlaps earlier, larger sends more at once. null: torch's default, 25
    and the first one 1; a number holds for the first one, too."""
    gradient_as_bucket_view: bool
    """Gradients are views into the buckets, which saves one copy of them."""
    static_graph: bool | None
    """Promise that every step uses the same parameters in the same order. null: yes, unless micro-batches
    accumulate without communication, which DDP cannot combine with it."""

    def resolve(self, world_size: int, ranks_per_node: int, *, accumulates: bool) -> Strategy:
        """As every strategy, and `static_graph` as a value."""
        static_graph = not accumulates if self.static_graph is None else self.static_graph
        if static_graph and accumulates:
            raise ImpossibleError(
                "strategy.static_graph=true is not valid with gradient accumulation that does not communicate: "
                "choose false or null, or gradient_accumulation_sync=true."
            )
        strategy = dataclasses.replace(self, static_graph=static_graph)
        return super(BucketingStrategy, strategy).resolve(world_size, ranks_per_node, accumulates=accumulates)

    def check(self, world_size: int) -> None:
        """Any world size; nothing is sharded."""
        require_unsharded(self)

    @property
    def first_steady_step(self) -> int:
        """When the buckets are those of all later steps."""
        return DDP_FIRST_STEADY_STEP

    @property
    def steps_before_steady(self) -> int:
        """One more where the graph is static: DDP counts gradients in the first step, sees their order in the second,
        and makes its buckets again in the third."""
        return max(super().steps_before_steady, DDP_FIRST_STEADY_STEP if self.static_graph else 0)

    def wrap(self, model: nn.Module, context: WrapContext) -> nn.Module:
        """Give the model its weights and wrap it."""
        from torch.nn.parallel import DistributedDataParallel

        context.materializer.fill_model(model)
        wrapped = DistributedDataParallel(
            model,
            process_group=None if context.mesh is None else context.mesh.get_group(),
            device_ids=[context.device.index] if context.device.type == "cuda" else None,
            bucket_cap_mb=self.bucket_cap_mb,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
            init_sync=False,  # every rank has filled its copy with the same values
            **build_buffer_options(),
        )
        self.register_bucket_hook(wrapped, context)
        return wrapped

    def register_bucket_hook(self, wrapped: DistributedDataParallel, context: WrapContext) -> None:
        """Have DDP reduce a full bucket in another way than by an all-reduce of what is in it."""

    def find_communication_dtype(self, precision: Precision) -> torch.dtype:
        """The format that gradients are all-reduced in."""
        return precision.reduce_dtype

    def build_powersgd_plan(self, inputs: PlanInputs) -> PowerSGDPlan | None:
        """What compressing buckets to narrow factors keeps, sends and takes; None where they are not."""
        return None

    @contextlib.contextmanager
    def control_gradient_sync(self, wrapped: nn.Module, synchronize: bool) -> Iterator[None]:
        """Without synchronisation the gradients stay local until the next synchronised backward."""
        from torch.nn.parallel import DistributedDataParallel

        assert isinstance(wrapped, DistributedDataParallel)
        with contextlib.nullcontext() if synchronize else wrapped.no_sync():
            yield

    def plan(self, inputs: PlanInputs) -> StepPlan:
        """Buckets of gradients, all-reduced as they fill."""
        return DDPPlan(self, inputs)


@dataclass(frozen=True)
class DDPStrategy(BucketingStrategy):
    """DDP with the settings of a fair baseline."""

    presentation = Presentation(
        label="DDP",
        position=20,
        colour="#a44d1e",
        factor_line=FactorLine(offset_log2=-0.12),
        markers={"": "D"},
    )
    training_terms: ClassVar[tuple[TrainingTerm, ...]] = (
        TrainingTerm("DDP", ("strategy=ddp",), "a whole copy fits on each GPU"),
        TrainingTerm(
            "gradient compression", ("strategy=ddp strategy.communication_hook=bf16",), "DDP waits for the network"
        ),
    )
    training_options: ClassVar[tuple[TrainingOption, ...]] = (
        TrainingOption(
            "DDP", {"strategy": "ddp"}, leaves={"DDP": 1, "DDP across nodes": 1, "fewer bytes between nodes": 2}
        ),
        TrainingOption(
            "DDP with gradients compressed to bf16",
            {"strategy": "ddp", "strategy.communication_hook": "bf16"},
            "half the bytes; gradients are rounded",
            leaves={"fewer bytes between nodes": 3},
        ),
    )

    takes_float8 = True
    takes_communicating_models = True
    single_mixing_reason = (
        "since torch 2.13's DistributedDataParallel(mixed_precision=...) computes wrong gradients: its first steps "
        "reduce buckets that no gradient was put into (fsdp with strategy.sharding_factor=1 replicates as DDP does)"
    )

    communication_hook: Annotated[str, OneOf("none", *COMPRESSION_FORMATS, POWERSGD_HOOK)] = "none"
    """fp16 or bf16: gradients are compressed to half their size for the all-reduce. powersgd: matrices go as two narrow
    factors, which loses more, and keeps for the next step what it lost. none: they go in the precision's format of
    reductions."""
    matrix_approximation_rank: Annotated[int, Within(1, MIB)] = 1
    """Of powersgd: columns of the factors."""
    start_powerSGD_iter: Annotated[int, Within(MIN_POWERSGD_START_ITER, 10**6)] = MIN_POWERSGD_START_ITER  # noqa: N815 (torch's name)
    """Of powersgd: backward passes that are reduced in full before. With gradient_accumulation_sync=true a step has as
    many as micro-batches, otherwise one."""

    supported_finetunes = ("full", "lora", "qlora")
    takes_fp32_adapters = True

    def check(self, world_size: int) -> None:
        """As every bucketing strategy; knobs of a hook need that hook."""
        super().check(world_size)
        for name, default in (("matrix_approximation_rank", 1), ("start_powerSGD_iter", MIN_POWERSGD_START_ITER)):
            if self.communication_hook != POWERSGD_HOOK and getattr(self, name) != default:
                raise ImpossibleError(
                    f"strategy.{name}={getattr(self, name)} is not valid with strategy.communication_hook="
                    f"{self.communication_hook}, which it does not concern: choose communication_hook={POWERSGD_HOOK}."
                )

    @property
    def first_steady_step(self) -> int:
        """With powersgd what is kept from step to step appears in the first one that is compressed: after
        `start_powerSGD_iter` steps at the latest, each of which has a backward pass that is reduced, or several. What a
        bucket is compressed to is smaller from the third step on, when DDP has seen the order of gradients and makes
        buckets."""
        if self.communication_hook == POWERSGD_HOOK:
            return self.start_powerSGD_iter + 2
        return super().first_steady_step

    def check_precision(self, precision: Precision) -> None:
        """What is in 16 bits already is not compressed to as many."""
        if self.communication_hook != "none" and precision.parameter_itemsize <= 2:
            raise ImpossibleError(
                f"strategy.communication_hook={self.communication_hook} is not valid with precision={precision.name}, "
                "whose gradients have 16 bits already: choose none."
            )
        if self.communication_hook == POWERSGD_HOOK and precision.scales_loss:
            raise ImpossibleError(
                f"strategy.communication_hook=powersgd is not valid with precision={precision.name}, where a gradient "
                "that overflows would stay in what it keeps for the next step: choose bf16 or fp32, or none."
            )
        if self.communication_hook == POWERSGD_HOOK:
            require_stored_reduce_dtype("strategy.communication_hook=powersgd", precision)

    def describe_effective_strategy(self, world_size: int) -> str:
        return "ddp"

    def register_bucket_hook(self, wrapped: DistributedDataParallel, context: WrapContext) -> None:
        """The hook that was asked for, or what converts gradients to the precision's format of reductions."""
        from bench.strategies.powersgd_hook import register_powersgd_hook

        communication_dtype = self.find_communication_dtype(context.precision)
        if communication_dtype != context.precision.parameter_dtype:
            # torch refuses a hook whose annotations are strings.
            wrapped.register_comm_hook(communication_dtype, lambda dtype, bucket: all_reduce_in_dtype(dtype, bucket))
        elif self.communication_hook == POWERSGD_HOOK:
            register_powersgd_hook(wrapped, self.matrix_approximation_rank, self.start_powerSGD_iter)

    def find_communication_dtype(self, precision: Precision) -> torch.dtype:
        """The format that gradients are all-reduced in."""
        if self.communication_hook in COMPRESSION_FORMATS:
            return get_torch_dtype(self.communication_hook)
        return super().find_communication_dtype(precision)

    def build_powersgd_plan(self, inputs: PlanInputs) -> PowerSGDPlan | None:
        if self.communication_hook != POWERSGD_HOOK:
            return None
        return PowerSGDPlan(self.matrix_approximation_rank, inputs.parameter_itemsize)


class DDPPlan(ReplicatedPlan):
    """Gradients are copied into buckets in the order they are computed; a full bucket is sent while backward goes on.

    The buckets are there from construction on. Gradients are views of them, or are kept beside them. DDP makes the
    first bucket smaller than the others only where nobody says how large buckets are (``_BucketCapacityConfig`` in
    torch/nn/parallel/distributed.py of torch 2.13).
    """

    def __init__(self, strategy: BucketingStrategy, inputs: PlanInputs) -> None:
        super().__init__(inputs)
        self._first_bucket_bytes, self._bucket_bytes = find_bucket_capacities(strategy.bucket_cap_mb)
        self._has_bucket_views = strategy.gradient_as_bucket_view
        communication_dtype = strategy.find_communication_dtype(inputs.precision)
        self._casts_for_reduction = communication_dtype != inputs.precision.parameter_dtype
        self._communication_itemsize = communication_dtype.itemsize
        self._synchronize = True
        self._bucket_count = 0
        self._bucket_filled_bytes = 0.0
        self._pending_events: list[str] = []
        self._bucket_parameters: list[ParameterSpec] = []
        self._powersgd_plan = strategy.build_powersgd_plan(inputs)

    @property
    def early_sizes(self) -> Sequence[float]:
        """Buckets are made anew in the order in which the first step's gradients came, before the old ones are freed
        (https://github.com/pytorch/pytorch/pull/44326). Seen in results/measured/h200: of five runs with DDP or ZeRO-1
        four of GPT and DHEN held exactly one copy of the gradients more before the timed steps than in them."""
        if not self._has_bucket_views:
            return ()
        num_buckets = max(1, round(self.buckets_bytes / self._bucket_bytes))
        return [self.buckets_bytes / num_buckets] * num_buckets

    @property
    def buckets_bytes(self) -> float:
        return self.total_gradient_numel * self.inputs.parameter_itemsize

    def allocate_persistent_state(self, device: PlanDevice) -> None:
        """Parameters, optimizer state and buckets."""
        super().allocate_persistent_state(device)
        if self._has_bucket_views:  # gradients that are kept are kept in the buckets
            for unit in self.inputs.units:
                device.free(name_unit_gradients(unit))
        if self._powersgd_plan is not None:
            self._powersgd_plan.allocate_persistent_state(
                device, [parameter for unit in self.inputs.units for parameter in unit.trained_parameters]
            )
        device.allocate(
            "buckets",
            self.buckets_bytes,
            GRADIENT_MEMORY if self._has_bucket_views else REDUCTION_MEMORY,
        )

    def begin_micro_batch(self, device: PlanDevice, *, number: int, synchronize: bool) -> None:
        """Buckets fill from the start."""
        super().begin_micro_batch(device, number=number, synchronize=synchronize)
        self._synchronize, self._bucket_count = synchronize, 0
        self._bucket_filled_bytes, self._pending_events, self._bucket_parameters = 0.0, [], []

    def choose_gradient_handling(self, unit: ShardingUnit) -> str:
        """Each is copied as soon as it is complete."""
        return GRADIENTS_HANDLED_ONE_BY_ONE

    def after_gradient(self, device: PlanDevice, unit: ShardingUnit, parameter: ParameterSpec) -> None:
        """Into its bucket; a bucket that has reached its size is sent, while autograd still has this gradient.

        Without communication nothing is copied: a gradient of its own is kept until a micro-batch communicates.
        """
        size, gradient_name = self.compute_gradient_bytes(parameter), f"{name_unit_gradients(unit)} {parameter.name}"
        if self._synchronize:
            device.copy_within_device("into bucket", 2 * size)
            if self._has_bucket_views:
                device.free(gradient_name)
            self._bucket_filled_bytes += size
            self._bucket_parameters.append(parameter)
            if self._bucket_filled_bytes >= (self._bucket_bytes if self._bucket_count else self._first_bucket_bytes):
                self._end_bucket(device)
        if not self.inputs.keep_gradients and not (self._has_bucket_views and self._synchronize):
            device.allocate(gradient_name, size, GRADIENT_MEMORY)

    def after_micro_batch_backward(self, device: PlanDevice) -> None:
        """The last bucket goes as it is, with the last gradient; the optimizer waits for all.

        Autograd has that gradient until the hook is back, beside what DDP keeps of it: a copy in the bucket, or what it
        was added to. Where it is neither, it is what DDP keeps.
        """
        if self._bucket_filled_bytes:
            if self._has_bucket_views or self._micro_batch > 0 or self.inputs.keep_gradients:
                device.allocate(
                    "last gradient", self.compute_gradient_bytes(self._bucket_parameters[-1]), GRADIENT_MEMORY
                )
            self._end_bucket(device)
            device.free("last gradient")
        for name in self._pending_events:
            device.wait_for_event(name)

    def after_optimizer_step(self, device: PlanDevice) -> None:
        """Gradients are set to None; buckets stay."""
        super().after_optimizer_step(device)
        for unit in self.inputs.units:
            for parameter in unit.parameters:
                device.free(f"{name_unit_gradients(unit)} {parameter.name}")

    def _end_bucket(self, device: PlanDevice) -> None:
        name, size, parameters = f"bucket {self._bucket_count}", self._bucket_filled_bytes, self._bucket_parameters
        self._pending_events += self.reduce_bucket(device, name, size, parameters)
        self._bucket_count += 1
        self._bucket_parameters, self._bucket_filled_bytes = [], 0.0

    def reduce_bucket(
        self, device: PlanDevice, name: str, size: float, parameters: Sequence[ParameterSpec]
    ) -> Sequence[str]:
        """A bucket is full: an all-reduce, in the format that is sent.

        Parameters
        ----------
        size: float
            Bytes of the gradients in it.

        Returns
        -------
        sequence of str
            Names of the events that the optimizer waits for.
        """
        if self._powersgd_plan is not None:
            return [self._powersgd_plan.all_reduce_bucket(device, name, parameters)]
        sent_bytes = size
        if self._casts_for_reduction:
            sent_bytes = size / self.inputs.parameter_itemsize * self._communication_itemsize
            device.allocate(name, sent_bytes, REDUCTION_MEMORY)
            device.copy_within_device(name, 2 * (sent_bytes + size))  # to the format it is sent in, and back
        device.run_hooks(BUCKET_HOOK_SHARE)
        device.run_collective(name, "all-reduce", sent_bytes, WORLD_GROUP, REDUCE_STREAM, after="compute")
        device.free(name, after=REDUCE_STREAM)
        return [name]


def find_bucket_capacities(bucket_cap_mb: int | None) -> tuple[int, int]:
    """Bytes from which on the first bucket, and any other, is sent (null: torch's default)."""
    import torch.distributed as dist

    bucket_bytes = (DEFAULT_BUCKET_CAP_MB if bucket_cap_mb is None else bucket_cap_mb) * MIB
    return (dist._DEFAULT_FIRST_BUCKET_BYTES if bucket_cap_mb is None else bucket_bytes), bucket_bytes


def all_reduce_in_dtype(dtype: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Communication hook that averages a bucket in `dtype`, wider or narrower than the gradients."""
    import torch.distributed as dist

    gradients = bucket.buffer()
    cast_gradients = gradients.to(dtype).div_(dist.get_world_size())
    work = dist.all_reduce(cast_gradients, async_op=True)
    if (
        gradients.device.type == "cpu"
    ):  # nothing to hide behind, and a gloo thread would release `cast_gradients` unseen
        work.wait()

    def write_back(_: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        gradients.copy_(cast_gradients)
        return gradients

    return work.get_future().then(write_back)
