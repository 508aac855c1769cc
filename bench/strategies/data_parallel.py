"""torch.nn.DataParallel: one process, whose threads drive all GPUs of a machine. What DDP replaced.

Read in torch 2.13: ``torch/nn/parallel/{data_parallel,replicate,parallel_apply,scatter_gather,_functions,comm}.py``,
``torch/_utils.py`` and ``torch/csrc/{cuda/comm,utils/tensor_flatten}.cpp``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.core.errors import ImpossibleError
from bench.core.precision import Precision
from bench.core.presentation import Presentation, TrainingTerm
from bench.core.units import MIB
from bench.optimizers import UpdatedTensor
from bench.strategies.base import StepSettings, Strategy, WrapContext
from bench.strategies.plan_inputs import ParameterSpec, PlanInputs, ShardingUnit
from bench.strategies.requirements import require_stored_reduce_dtype, require_unsharded
from bench.strategies.step_plan import (
    ALL_GATHER_MEMORY,
    ALL_GATHER_STREAM,
    GRADIENT_MEMORY,
    GRADIENTS_HANDLED_ONE_BY_ONE,
    PARAMETER_MEMORY,
    REDUCE_STREAM,
    REDUCTION_MEMORY,
    WORLD_GROUP,
    PlanDevice,
    ReplicatedPlan,
    StepPlan,
    name_unit_gradients,
)

if TYPE_CHECKING:
    from torch import nn


CHUNK_BYTES = 10 * MIB
"""Parameters are sent, and gradients reduced, in chunks of about this size (``buffer_size`` in
torch/nn/parallel/comm.py), of whole tensors each."""


@dataclass(frozen=True)
class DataParallelStrategy(Strategy):
    """One process scatters the batch, copies the model to every GPU and gathers the outputs on the first: each step."""

    presentation = Presentation(label="DataParallel", position=10, colour="#925b29", markers={"": "d"})
    training_terms = (
        TrainingTerm(
            "DataParallel",
            ("strategy=data_parallel",),
            "never for speed: one process feeds all GPUs, and the first holds more than the others",
        ),
    )

    def check(self, world_size: int) -> None:
        """At least two GPUs, for with one nothing is copied."""
        require_unsharded(self)
        if world_size < 2:
            raise ImpossibleError(
                f"gpus={world_size} is not valid for strategy=data_parallel, which spreads a batch over the GPUs of a "
                "machine: choose 2 or more, or strategy single."
            )

    def resolve(self, world_size: int, ranks_per_node: int, *, accumulates: bool) -> Strategy:
        """As every strategy; one process sees the GPUs of its own machine alone."""
        if world_size > ranks_per_node:
            raise ImpossibleError(
                f"gpus={world_size} is not valid for strategy=data_parallel with gpus_per_node={ranks_per_node}: its "
                f"one process drives the GPUs of one machine, so choose at most {ranks_per_node}, or strategy ddp."
            )
        return super().resolve(world_size, ranks_per_node, accumulates=accumulates)

    def check_device(self, device: str) -> None:
        if device == "cpu":
            raise ImpossibleError(
                "strategy=data_parallel is not valid on a CPU, where torch.nn.DataParallel copies nothing anywhere: "
                "choose 2 or more GPUs of one machine, or strategy ddp."
            )

    def check_precision(self, precision: Precision) -> None:
        """Copies of a module whose forward was replaced would compute with the weights of the first GPU; gradients are
        added up as they are stored."""
        if precision.scales_loss:
            raise ImpossibleError(
                f"precision={precision.name} is not valid for strategy=data_parallel, whose copies of the model know "
                "no layers that stay in fp32, which T5 needs: choose fp32, tf32 or bf16, or strategy ddp."
            )
        require_stored_reduce_dtype("strategy=data_parallel", precision, ", or strategy ddp")

    def check_step(self, settings: StepSettings) -> None:
        """Gradients are reduced in every backward, and a compiled block is not copied."""
        if settings.num_micro_batches > 1 and not settings.synchronize_every_micro_batch:
            raise ImpossibleError(
                "gradient_accumulation_sync=false is not valid for strategy=data_parallel, which adds up the gradients "
                "of all GPUs in every backward: choose true, or strategy ddp."
            )
        if settings.offloads_activations:
            raise ImpossibleError(
                f"activation_offload=true is not valid for strategy={self.name}, "
                "whose copies of a block would run the first GPU's: choose false."
            )
        if settings.has_chunked_loss:
            raise ImpossibleError(
                f"loss=chunked is not valid for strategy={self.name}, "
                "whose loss is computed on the first GPU from the logits of all: "
                "choose loss=whole."
            )
        if settings.compile:
            raise ImpossibleError(
                "compile=true is not valid for strategy=data_parallel, whose copies of a compiled block would run the "
                "first GPU's: choose false, or strategy ddp."
            )

    def describe_effective_strategy(self, world_size: int) -> str:
        return "data_parallel"

    def count_devices_per_process(self, world_size: int) -> int:
        return world_size

    def find_batch_share(self, rank: int, world_size: int) -> tuple[int, int]:
        """The one process has the whole batch, and scatters it."""
        return 0, 1

    def wrap(self, model: nn.Module, context: WrapContext) -> nn.Module:
        """Give the model its weights, on the first GPU, and wrap it."""
        from torch import nn

        from bench.strategies.autocast import wrap_in_autocast

        context.materializer.fill_model(model)
        return nn.DataParallel(wrap_in_autocast(model, context), device_ids=list(range(context.world_size)))

    def plan(self, inputs: PlanInputs) -> StepPlan:
        """What the first GPU does, which does most."""
        return FirstDevicePlan(inputs)

    def plan_other_devices(self, inputs: PlanInputs) -> StepPlan:
        """What each of the others does."""
        return OtherDevicePlan(inputs)


class FirstDevicePlan(ReplicatedPlan):
    """The first GPU: whole parameters and optimizer, all outputs, the loss, and the sum of all gradients.

    Of every micro-batch, in this order:

    * the parameters are broadcast, in chunks; nothing runs meanwhile. A chunk of several is copied into one tensor
      first, one that is a single parameter goes as it is;
    * every GPU runs forward; one Python thread each starts their kernels, and they take turns (see
      `bench.prediction.simulation.step`);
    * the outputs of all GPUs are copied into one tensor here; the own ones go when all are there;
    * the loss of the whole batch and the gradient of all outputs are computed here alone; the others get their parts of
      it while they wait, and the step cannot end sooner than they, so the wait is counted here as well;
    * gradients of all parameters are kept beside parameters until the last is complete, for autograd hands all of them
      to one function (``Broadcast.backward``); that adds up those of all GPUs, chunk by chunk, in new memory. Here
      a chunk of several is copied first, too; the copy goes when the next chunk's is there.

    Chunks are made in the order of the units. In torch's, which is the model's, what lies outside the blocks is before,
    between and behind them.
    """

    def allocate_persistent_state(self, device: PlanDevice) -> None:
        """As one process, without gradients that are kept: they are not those that backward computes."""
        super().allocate_persistent_state(device)
        if self.inputs.keep_gradients:
            for unit in self.inputs.units:
                device.free(name_unit_gradients(unit))
            device.allocate("sum", self._total_gradient_bytes, GRADIENT_MEMORY)

    def begin_micro_batch(self, device: PlanDevice, *, number: int, synchronize: bool) -> None:
        """The other GPUs get the parameters of this step."""
        super().begin_micro_batch(device, number=number, synchronize=synchronize)
        for number, chunk in enumerate(split_broadcast_chunks(list_parameter_bytes(self.inputs))):
            allocate_flat_chunk(device, "replica chunk", chunk)
            device.run_collective(
                f"replica {number}", "broadcast", sum(chunk), WORLD_GROUP, ALL_GATHER_STREAM, after="compute"
            )
            device.wait_for_event(f"replica {number}")
        device.free("replica chunk")

    def choose_gradient_handling(self, unit: ShardingUnit) -> str:
        """Told one by one: they stay until all are added up, whatever was added up before."""
        return GRADIENTS_HANDLED_ONE_BY_ONE

    def after_gradient(self, device: PlanDevice, unit: ShardingUnit, parameter: ParameterSpec) -> None:
        """It waits for all others."""
        device.allocate(f"own {unit.index} {parameter.name}", self.compute_gradient_bytes(parameter), GRADIENT_MEMORY)

    def after_forward(self, device: PlanDevice, unit: ShardingUnit) -> None:
        """When the model has run: the outputs of all GPUs, and then no longer the own ones beside them."""
        if not unit.is_root:
            return
        num_other_devices = self.inputs.world_size - 1
        gathered_bytes = self.inputs.world_size * self.inputs.outputs_bytes
        name = f"outputs {self._micro_batch}"
        device.allocate(name, gathered_bytes, ALL_GATHER_MEMORY)
        device.run_collective(name, "gather", gathered_bytes, WORLD_GROUP, ALL_GATHER_STREAM, after="compute")
        device.wait_for_event(name)
        device.allocate(name, num_other_devices * self.inputs.logits_bytes, ALL_GATHER_MEMORY)
        device.free(f"outputs {self._micro_batch - 1}")

    def before_backward(self, device: PlanDevice, unit: ShardingUnit) -> None:
        """The gradient of the outputs goes to where each part of it belongs."""
        if unit.is_root:
            scattered_bytes = self.inputs.world_size * self.inputs.logits_bytes
            device.run_collective(
                "outputs' gradient", "scatter", scattered_bytes, WORLD_GROUP, ALL_GATHER_STREAM, after="compute"
            )
            device.wait_for_event("outputs' gradient")

    def after_micro_batch_backward(self, device: PlanDevice) -> None:
        """The gradients of all GPUs are added up here; the second micro-batch's sum is added to the first's."""
        is_first_sum = self._micro_batch == 0 and not self.inputs.keep_gradients
        name = "sum" if is_first_sum else "further sum"
        summed_bytes = 0
        for number, chunk in flatten_reduce_chunks(device, self.inputs):
            summed_bytes += sum(chunk)
            device.allocate(name, summed_bytes, GRADIENT_MEMORY)
            device.run_collective(
                f"gradients {number}", "reduce", sum(chunk), WORLD_GROUP, REDUCE_STREAM, after="compute"
            )
            device.wait_for_event(f"gradients {number}")
        for unit in self.inputs.units:
            for parameter in unit.parameters:
                device.free(f"own {unit.index} {parameter.name}")
        if not is_first_sum:
            device.copy_within_device(name, 3 * self._total_gradient_bytes)
            device.free(name)

    def after_backward(self, device: PlanDevice, unit: ShardingUnit) -> None:
        """What all devices have computed is added later, as one."""

    def after_optimizer_step(self, device: PlanDevice) -> None:
        """Gradients go; the outputs are replaced in the next step."""
        device.free(f"outputs {self._micro_batch}")
        super().after_optimizer_step(device)
        if not self.inputs.keep_gradients:
            device.free("sum")

    @property
    def _total_gradient_bytes(self) -> int:
        return self.total_gradient_numel * self.inputs.parameter_itemsize


class OtherDevicePlan(StepPlan):
    """Each GPU but the first: a copy of the parameters from forward to the end of backward, and their gradients.

    Neither optimizer nor loss; of the outputs its own part.
    """

    def allocate_persistent_state(self, device: PlanDevice) -> None:
        """Between steps there is nothing."""

    def begin_micro_batch(self, device: PlanDevice, *, number: int, synchronize: bool) -> None:
        """The copy arrives; the last micro-batch's is gone."""
        super().begin_micro_batch(device, number=number, synchronize=synchronize)
        device.allocate("parameters", sum(list_parameter_bytes(self.inputs)), PARAMETER_MEMORY)

    def compute_gradient_bytes(self, parameter: ParameterSpec) -> int:
        """In the format of the parameter."""
        return parameter.numel * self.inputs.parameter_itemsize

    def after_gradient(self, device: PlanDevice, unit: ShardingUnit, parameter: ParameterSpec) -> None:
        """It waits for all others."""
        device.allocate(f"own {unit.index} {parameter.name}", self.compute_gradient_bytes(parameter), GRADIENT_MEMORY)

    def after_micro_batch_backward(self, device: PlanDevice) -> None:
        """Chunks are copied to be reduced, as on the first; then the parameters' copy and the gradients go."""
        for _ in flatten_reduce_chunks(device, self.inputs):
            pass
        for unit in self.inputs.units:
            for parameter in unit.parameters:
                device.free(f"own {unit.index} {parameter.name}")
        device.free("parameters")

    @property
    def updated_tensors(self) -> Sequence[UpdatedTensor]:
        return ()

    def after_optimizer_step(self, device: PlanDevice) -> None:
        """Nothing is left."""


def list_parameter_bytes(inputs: PlanInputs) -> list[int]:
    """Bytes of each parameter, and of its gradient."""
    return [parameter.numel * inputs.parameter_itemsize for unit in inputs.units for parameter in unit.parameters]


def split_broadcast_chunks(sizes: Sequence[int]) -> list[list[int]]:
    """Sizes of parameters by chunk: one is full when it has come to `CHUNK_BYTES`, with however large a last tensor.

    As ``take_tensors`` in torch/csrc/utils/tensor_flatten.cpp does.
    """
    chunks: list[list[int]] = []
    for size in sizes:
        if not chunks or sum(chunks[-1]) >= CHUNK_BYTES:
            chunks.append([])
        chunks[-1].append(size)
    return chunks


def split_reduce_chunks(sizes: Sequence[int]) -> list[list[int]]:
    """Sizes of gradients by chunk: one has at most `CHUNK_BYTES`, or is a single larger tensor.

    As ``_take_tensors`` in torch/_utils.py does.
    """
    chunks: list[list[int]] = []
    for size in sizes:
        if not chunks or sum(chunks[-1]) + size > CHUNK_BYTES:
            chunks.append([])
        chunks[-1].append(size)
    return chunks


def allocate_flat_chunk(device: PlanDevice, name: str, chunk: Sequence[int]) -> None:
    """Copy tensors into one that is held under a name; a single tensor is its own, and nothing is."""
    size = sum(chunk) if len(chunk) > 1 else 0
    device.allocate(name, size, REDUCTION_MEMORY)
    if size:
        device.copy_within_device(name, 2 * size)


def flatten_reduce_chunks(device: PlanDevice, inputs: PlanInputs) -> Iterator[tuple[int, Sequence[int]]]:
    """The chunks of gradients, each ready to be reduced, with their numbers."""
    number = -1
    for number, chunk in enumerate(split_reduce_chunks(list_parameter_bytes(inputs))):
        allocate_flat_chunk(device, f"gradients chunk {number}", chunk)
        device.free(f"gradients chunk {number - 1}")
        yield number, chunk
    device.free(f"gradients chunk {number}")
