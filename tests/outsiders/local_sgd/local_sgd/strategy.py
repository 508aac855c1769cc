"""Post-local SGD (Lin et al. 2018, arXiv:1808.07217): ranks train by themselves and average parameters now and then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from bench.core.errors import ImpossibleError
from bench.core.precision import Precision
from bench.core.presentation import Presentation, TrainingOption, TrainingTerm
from bench.core.typed_config import Within
from bench.strategies import Strategy, WrapContext
from bench.strategies.base import BuildOptimizer
from bench.strategies.ddp import BucketingStrategy, DDPPlan
from bench.strategies.plan_inputs import ParameterSpec, PlanInputs
from bench.strategies.requirements import require_stored_reduce_dtype
from bench.strategies.step_plan import PARAMETER_MEMORY, REDUCE_STREAM, WORLD_GROUP, PlanDevice, StepPlan


@dataclass(frozen=True)
class LocalSGDStrategy(BucketingStrategy):
    """DDP for some steps; then no gradients are exchanged, and parameters are averaged every `period` steps."""

    presentation = Presentation(label="Local SGD", position=25, colour="#117733")
    training_terms = (
        TrainingTerm(
            "local SGD", ("strategy=local_sgd",), "DDP waits for the network, and rare averaging trains as well"
        ),
    )
    training_options = (
        TrainingOption(
            "local SGD",
            {"strategy": "local_sgd"},
            "parameters cross the network once in several steps; another algorithm than DDP's",
            leaves={"fewer bytes between nodes": 4},
        ),
    )
    trains_as_one_process = False

    period: Annotated[int, Within(2, 10**6)]
    """Steps from one averaging to the next."""
    start_local_step: Annotated[int, Within(0, 10**6)]
    """Steps of plain DDP before."""

    def resolve(self, world_size: int, ranks_per_node: int, *, accumulates: bool) -> Strategy:
        """As DDP; with accumulation torch's hook would count micro-batches as steps."""
        if world_size == 1:
            raise ImpossibleError(
                "gpus=1 is not valid for strategy=local_sgd, which has nothing to average: choose 2 or more."
            )
        return super().resolve(world_size, ranks_per_node, accumulates=accumulates)

    @property
    def step_period(self) -> int:
        """Averaging is part of one of so many steps."""
        return self.period

    @property
    def first_steady_step(self) -> int:
        """After the first averaging, when all parameters lie in one buffer."""
        return max(super().first_steady_step, self.start_local_step + 2)

    def check_precision(self, precision: Precision) -> None:
        """torch's hook sends gradients as they are."""
        require_stored_reduce_dtype(f"strategy={self.name}", precision)

    def describe_effective_strategy(self, world_size: int) -> str:
        """Always the same."""
        return "local_sgd"

    def register_bucket_hook(self, wrapped: DistributedDataParallel, context: WrapContext) -> None:
        """torch's, which exchanges nothing after the start."""
        state = PostLocalSGDState(None, None, self.start_local_step, post_local_gradient_allreduce=False)
        wrapped.register_comm_hook(state, post_localSGD_hook)

    def build_optimizer(self, module: nn.Module, build: BuildOptimizer) -> torch.optim.Optimizer:
        """The optimizer, which averages after its step."""
        averager = PeriodicModelAverager(self.period, warmup_steps=self.start_local_step)
        return PostLocalSGDOptimizer(super().build_optimizer(module, build), averager)

    def plan(self, inputs: PlanInputs) -> StepPlan:
        """A step that averages."""
        return LocalSGDPlan(self, inputs, averages=True)

    def plan_period(self, inputs: PlanInputs) -> Sequence[tuple[int, StepPlan]]:
        """Steps that do not average, and one that does."""
        return [(self.period - 1, LocalSGDPlan(self, inputs, averages=False)), (1, self.plan(inputs))]


class LocalSGDPlan(DDPPlan):
    """DDP's, in which nothing is sent; at the end of some steps the parameters are copied into one buffer, divided,
    all-reduced, and from then on are parts of it."""

    def __init__(self, strategy: LocalSGDStrategy, inputs: PlanInputs, *, averages: bool) -> None:
        super().__init__(strategy, inputs)
        self._averages = averages

    def reduce_bucket(
        self, device: PlanDevice, name: str, size: float, parameters: Sequence[ParameterSpec]
    ) -> Sequence[str]:
        """Nothing is sent."""
        device.run_hooks()
        return []

    def after_optimizer_step(self, device: PlanDevice) -> None:
        """Averaging, while gradients are still there."""
        if self._averages:
            size = sum(self.updated_numels) * self.inputs.parameter_itemsize
            device.allocate("averaged", size, PARAMETER_MEMORY)
            device.copy_within_device("collect parameters", 2 * size)
            device.copy_within_device("divide by the number of ranks", 2 * size)
            device.run_collective("average", "all-reduce", size, WORLD_GROUP, REDUCE_STREAM, after="compute")
            device.wait_for_event("average")
            device.free("averaged")  # that is, what the parameters were before
        super().after_optimizer_step(device)
