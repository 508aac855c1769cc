"""DistributedDataParallel: a whole model on every rank, gradients averaged in buckets while backward runs."""

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _DEFAULT_BUCKET_CAP_MB

from bench.errors import ImpossibleError
from bench.precision import Precision
from bench.strategies import powersgd
from bench.strategies.base import Job, Strategy, require_replicas, require_stored_format
from bench.strategies.plan import (
    GRADIENTS,
    REDUCE,
    REDUCED,
    TOLD,
    WORLD,
    Device,
    Parameter,
    Plan,
    Setting,
    Unit,
    WholePlan,
    gradients_of,
)
from bench.strategies.powersgd import FIRST_START, Compression
from bench.typed import OneOf, Within

MIB = 2**20

BUCKET_MB = Within(1, 10**6)

POWERSGD = "powersgd"

SETTLING_STEPS = 3
"""Steps until one is like all later: in the second DDP makes its buckets again, in the order of the first's gradients,
while the old ones are there (where the graph is static in the third: `DDP.steps_before_steady`)."""

COMPRESSED = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""Hooks that compress gradients, and to what."""


@dataclass(frozen=True)
class DDP(Strategy):
    """DDP with the settings of a fair baseline."""

    takes_float8 = True
    other_mixing = (
        "since torch 2.13's DistributedDataParallel(mixed_precision=...) computes wrong gradients: its first steps "
        "reduce buckets that no gradient was put into (fsdp with strategy.sharding_factor=1 replicates as DDP does)"
    )

    bucket_cap_mb: Annotated[int | None, BUCKET_MB]
    """Size of a gradient bucket in MiB: smaller overlaps earlier, larger sends more at once. null: torch's default, 25
    and the first one 1; a number holds for the first one, too."""
    gradient_as_bucket_view: bool
    """Gradients are views into the buckets, which saves one copy of them."""
    static_graph: bool | None
    """Promise that every step uses the same parameters in the same order. null: yes, unless micro-batches
    accumulate without communication, which DDP cannot combine with it."""
    communication_hook: Annotated[str, OneOf("none", *COMPRESSED, POWERSGD)] = "none"
    """fp16 or bf16: gradients are compressed to half their size for the all-reduce. powersgd: matrices go as two narrow
    factors, which loses more, and keeps for the next step what it lost. none: they go in the precision's format of
    reductions."""
    matrix_approximation_rank: Annotated[int, Within(1, 2**20)] = 1
    """Of powersgd: columns of the factors."""
    start_powerSGD_iter: Annotated[int, Within(FIRST_START, 10**6)] = FIRST_START  # noqa: N815 (torch's name)
    """Of powersgd: backward passes that are reduced in full before. With gradient_accumulation_sync=true a step has as
    many as micro-batches, otherwise one."""

    finetunes = ("full", "lora", "qlora")

    def resolve(self, world_size: int, ranks_per_node: int, *, accumulates: bool) -> Strategy:
        """As every strategy, and `static_graph` as a value."""
        static_graph = not accumulates if self.static_graph is None else self.static_graph
        if static_graph and accumulates:
            raise ImpossibleError(
                "strategy.static_graph=true is not valid with gradient accumulation that does not communicate: "
                "choose false or null, or gradient_accumulation_sync=true."
            )
        chosen = dataclasses.replace(self, static_graph=static_graph)
        return super(DDP, chosen).resolve(world_size, ranks_per_node, accumulates=accumulates)

    def check(self, world_size: int) -> None:
        """Any world size; nothing is sharded."""
        require_replicas(self)
        for name, usual in (("matrix_approximation_rank", 1), ("start_powerSGD_iter", FIRST_START)):
            if self.communication_hook != POWERSGD and getattr(self, name) != usual:
                raise ImpossibleError(
                    f"strategy.{name}={getattr(self, name)} is not valid with strategy.communication_hook="
                    f"{self.communication_hook}, which it does not concern: choose communication_hook={POWERSGD}."
                )

    @property
    def settling_steps(self) -> int:
        """With powersgd what is kept from step to step appears in the first one that is compressed: after
        `start_powerSGD_iter` steps at the latest, each of which has a backward pass that is reduced, or several. What a
        bucket is compressed to is smaller from the third step on, when DDP has seen the order of gradients and makes
        buckets."""
        if self.communication_hook == POWERSGD:
            return self.start_powerSGD_iter + 2
        return SETTLING_STEPS

    @property
    def steps_before_steady(self) -> int:
        """One more where the graph is static: DDP counts gradients in the first step, sees their order in the second,
        and makes its buckets again in the third."""
        return max(super().steps_before_steady, SETTLING_STEPS if self.static_graph else 0)

    def check_precision(self, precision: Precision) -> None:
        """What is in 16 bits already is not compressed to as many."""
        if self.communication_hook != "none" and precision.parameter_dtype.itemsize <= 2:
            raise ImpossibleError(
                f"strategy.communication_hook={self.communication_hook} is not valid with precision={precision.name}, "
                "whose gradients have 16 bits already: choose none."
            )
        if self.communication_hook == POWERSGD and precision.scales_loss:
            raise ImpossibleError(
                f"strategy.communication_hook=powersgd is not valid with precision={precision.name}, where a gradient "
                "that overflows would stay in what it keeps for the next step: choose bf16 or fp32, or none."
            )
        if self.communication_hook == POWERSGD:
            require_stored_format("strategy.communication_hook=powersgd", precision)

    def effective(self, world_size: int) -> str:
        """Always the same."""
        return "ddp"

    def wrap(self, model: nn.Module, job: Job) -> nn.Module:
        """Give the model its weights and wrap it."""
        job.materializer.model(model)
        wrapped = DistributedDataParallel(
            model,
            process_group=None if job.mesh is None else job.mesh.get_group(),
            device_ids=[job.device.index] if job.device.type == "cuda" else None,
            bucket_cap_mb=self.bucket_cap_mb,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
            init_sync=False,  # every rank has filled its copy with the same values
        )
        sent = self.sent_dtype(job.precision)
        if sent != job.precision.parameter_dtype:
            wrapped.register_comm_hook(sent, all_reduce_in_dtype)
        elif self.communication_hook == POWERSGD:
            powersgd.register(wrapped, self.matrix_approximation_rank, self.start_powerSGD_iter)
        return wrapped

    def sent_dtype(self, precision: Precision) -> torch.dtype:
        """The format that gradients are all-reduced in."""
        return COMPRESSED.get(self.communication_hook, precision.reduce_dtype)

    @contextlib.contextmanager
    def accumulate(self, wrapped: nn.Module, synchronize: bool) -> Iterator[None]:
        """Without synchronisation the gradients stay local until the next synchronised backward."""
        assert isinstance(wrapped, DistributedDataParallel)
        with contextlib.nullcontext() if synchronize else wrapped.no_sync():
            yield

    def plan(self, setting: Setting) -> Plan:
        """Buckets of gradients, all-reduced as they fill."""
        return DDPPlan(self, setting)


class DDPPlan(WholePlan):
    """Gradients are copied into buckets in the order they are computed; a full bucket is sent while backward goes on.

    The buckets are there from construction on. Gradients are views of them, or are kept beside them. DDP makes the
    first bucket smaller than the others only where nobody says how large buckets are (``_BucketCapacityConfig`` in
    torch/nn/parallel/distributed.py of torch 2.13).
    """

    def __init__(self, strategy: DDP, setting: Setting) -> None:
        super().__init__(setting)
        self._first_capacity, self._capacity = bucket_capacities(strategy.bucket_cap_mb)
        self._views = strategy.gradient_as_bucket_view
        sent = strategy.sent_dtype(setting.precision)
        self._recast = sent != setting.precision.parameter_dtype
        self._sent_bytes = sent.itemsize
        self._synchronize = True
        self._filled = 0.0
        self._sent: list[str] = []
        self._members: list[Parameter] = []
        self._compression = (
            Compression(strategy.matrix_approximation_rank, setting.parameter_bytes)
            if strategy.communication_hook == POWERSGD
            else None
        )

    def begin(self, device: Device) -> None:
        """Parameters, optimizer state and buckets."""
        super().begin(device)
        if self._views:  # gradients that are kept are kept in the buckets
            for unit in self.setting.units:
                device.release(gradients_of(unit))
        if self._compression is not None:
            self._compression.begin(device, [each for unit in self.setting.units for each in unit.trained])
        device.hold("buckets", self.numel * self.setting.parameter_bytes, GRADIENTS if self._views else REDUCED)

    def begin_micro_batch(self, device: Device, *, synchronize: bool) -> None:
        """Buckets fill from the start."""
        super().begin_micro_batch(device, synchronize=synchronize)
        self._synchronize, self._filled, self._sent, self._members = synchronize, 0.0, [], []

    def gradients(self, unit: Unit) -> str:
        """Each is copied as soon as it is complete."""
        return TOLD

    def gradient(self, device: Device, unit: Unit, parameter: Parameter) -> None:
        """Into its bucket; a bucket that has reached its size is sent, while autograd still has this gradient.

        Without communication nothing is copied: a gradient of its own is kept until a micro-batch communicates.
        """
        size, own = self.gradient_bytes(parameter), f"{gradients_of(unit)} {parameter.name}"
        if self._synchronize:
            device.copy("into bucket", 2 * size)
            if self._views:
                device.release(own)
            self._filled += size
            self._members.append(parameter)
            if self._filled >= (self._capacity if self._sent else self._first_capacity):
                self._send(device)
        if not self.setting.keep_gradients and not (self._views and self._synchronize):
            device.hold(own, size, GRADIENTS)

    def after_step_backward(self, device: Device) -> None:
        """The last bucket goes as it is, with the last gradient; the optimizer waits for all.

        Autograd has that gradient until the hook is back, beside what DDP keeps of it: a copy in the bucket, or what it
        was added to. Where it is neither, it is what DDP keeps.
        """
        if self._filled:
            if self._views or self._micro_batches > 1 or self.setting.keep_gradients:
                device.hold("last gradient", self.gradient_bytes(self._members[-1]), GRADIENTS)
            self._send(device)
            device.release("last gradient")
        for name in self._sent:
            device.wait(name)

    def after_optimizer(self, device: Device) -> None:
        """Gradients are set to None; buckets stay."""
        super().after_optimizer(device)
        for unit in self.setting.units:
            for parameter in unit.parameters:
                device.release(f"{gradients_of(unit)} {parameter.name}")

    def _send(self, device: Device) -> None:
        name = f"bucket {len(self._sent)}"
        size = self._filled
        if self._compression is not None:
            self._sent.append(self._compression.send(device, name, self._members))
            self._members, self._filled = [], 0.0
            return
        if self._recast:
            size = size / self.setting.parameter_bytes * self._sent_bytes
            device.hold(name, size, REDUCED)
            device.copy(name, 2 * (size + self._filled))  # to the format it is sent in, and back
        device.hooks()
        device.send(name, "all-reduce", size, WORLD, REDUCE, after="compute")
        device.release(name, after=REDUCE)
        self._sent.append(name)
        self._members, self._filled = [], 0.0


def bucket_capacities(bucket_cap_mb: int | None) -> tuple[int, int]:
    """Bytes from which on the first bucket, and any other, is sent (null: torch's default)."""
    capacity = (_DEFAULT_BUCKET_CAP_MB if bucket_cap_mb is None else bucket_cap_mb) * MIB
    return (dist._DEFAULT_FIRST_BUCKET_BYTES if bucket_cap_mb is None else capacity), capacity


def all_reduce_in_dtype(dtype: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Communication hook that averages a bucket in `dtype`, wider or narrower than the gradients."""
    gradients = bucket.buffer()
    sent = gradients.to(dtype).div_(dist.get_world_size())
    work = dist.all_reduce(sent, async_op=True)
    if gradients.device.type == "cpu":  # nothing to hide behind, and a gloo thread would release `sent` unseen
        work.wait()

    def write_back(_: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        gradients.copy_(sent)
        return gradients

    return work.get_future().then(write_back)
