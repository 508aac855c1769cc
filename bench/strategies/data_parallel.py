"""torch.nn.DataParallel: one process, whose threads drive all GPUs of a machine. What DDP replaced.

Read in torch 2.13: ``torch/nn/parallel/{data_parallel,replicate,parallel_apply,scatter_gather,_functions,comm}.py``,
``torch/_utils.py`` and ``torch/csrc/{cuda/comm,utils/tensor_flatten}.cpp``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from bench.errors import ImpossibleError
from bench.precision import Precision
from bench.strategies.base import Job, Step, Strategy, require_replicas, require_stored_format
from bench.strategies.plan import (
    GATHER,
    GATHERED,
    GRADIENTS,
    PARAMETERS,
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

CHUNK_BYTES = 10 * 2**20
"""Parameters are sent, and gradients reduced, in chunks of about this size (``buffer_size`` in
torch/nn/parallel/comm.py), of whole tensors each."""


@dataclass(frozen=True)
class DataParallel(Strategy):
    """One process scatters the batch, copies the model to every GPU and gathers the outputs on the first: each step."""

    def check(self, world_size: int) -> None:
        """At least two GPUs, for with one nothing is copied."""
        require_replicas(self)
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
        """GPUs only."""
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
        require_stored_format("strategy=data_parallel", precision, ", or strategy ddp")

    def check_step(self, step: Step) -> None:
        """Gradients are reduced in every backward, and a compiled block is not copied."""
        if step.micro_batches > 1 and not step.synchronize_every_micro_batch:
            raise ImpossibleError(
                "gradient_accumulation_sync=false is not valid for strategy=data_parallel, which adds up the gradients "
                "of all GPUs in every backward: choose true, or strategy ddp."
            )
        if step.compile:
            raise ImpossibleError(
                "compile=true is not valid for strategy=data_parallel, whose copies of a compiled block would run the "
                "first GPU's: choose false, or strategy ddp."
            )

    def effective(self, world_size: int) -> str:
        """Always the same."""
        return "data_parallel"

    def devices_per_process(self, world_size: int) -> int:
        """All of them."""
        return world_size

    def batch_share(self, rank: int, world_size: int) -> tuple[int, int]:
        """The one process has the whole batch, and scatters it."""
        return 0, 1

    def wrap(self, model: nn.Module, job: Job) -> nn.Module:
        """Give the model its weights, on the first GPU, and wrap it."""
        job.materializer.model(model)
        return nn.DataParallel(in_autocast(model, job), device_ids=list(range(job.world_size)))

    def plan(self, setting: Setting) -> Plan:
        """What the first GPU does, which does most."""
        return FirstPlan(setting)

    def plan_beside_first(self, setting: Setting) -> Plan:
        """What each of the others does."""
        return OtherPlan(setting)


class InAutocast(nn.Module):
    """A model that enters autocast by itself: in whichever thread a copy of it runs.

    ``parallel_apply`` tells its threads whether autocast is on, but not to which format, which every thread keeps for
    itself: bf16 would become fp16, CUDA's default.
    """

    def __init__(self, model: nn.Module, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self._device, self._dtype = device, dtype

    def forward(self, **inputs: torch.Tensor) -> object:
        """The model's outputs."""
        with torch.autocast(self._device, self._dtype):
            return self.model(**inputs)


def in_autocast(model: nn.Module, job: Job) -> nn.Module:
    """The model, in a wrapper if its precision is mixed."""
    return InAutocast(model, job.device.type, job.precision.compute_dtype) if job.precision.mixed else model


class FirstPlan(WholePlan):
    """The first GPU: whole parameters and optimizer, all outputs, the loss, and the sum of all gradients.

    Of every micro-batch, in this order:

    * the parameters are broadcast, in chunks; nothing runs meanwhile. A chunk of several is copied into one tensor
      first, one that is a single parameter goes as it is;
    * every GPU runs forward; one Python thread each starts their kernels, and they take turns (see
      `bench.simulate.one_process`);
    * the outputs of all GPUs are copied into one tensor here; the own ones go when all are there;
    * the loss of the whole batch and the gradient of all outputs are computed here alone; the others get their parts of
      it while they wait, and the step cannot end sooner than they, so the wait is counted here as well;
    * gradients of all parameters are kept beside parameters until the last is complete, for autograd hands all of them
      to one function (``Broadcast.backward``); that adds up those of all GPUs, chunk by chunk, in new memory. Here
      a chunk of several is copied first, too; the copy goes when the next chunk's is there.

    Chunks are made in the order of the units. In torch's, which is the model's, what lies outside the blocks is before,
    between and behind them.
    """

    def begin(self, device: Device) -> None:
        """As one process, without gradients that are kept: they are not those that backward computes."""
        super().begin(device)
        if self.setting.keep_gradients:
            for unit in self.setting.units:
                device.release(gradients_of(unit))
            device.hold("sum", self._bytes, GRADIENTS)

    def begin_micro_batch(self, device: Device, *, synchronize: bool) -> None:
        """The other GPUs get the parameters of this step."""
        super().begin_micro_batch(device, synchronize=synchronize)
        for number, chunk in enumerate(sent_together(sizes_of(self.setting))):
            flatten(device, "replica chunk", chunk)
            device.send(f"replica {number}", "broadcast", sum(chunk), WORLD, GATHER, after="compute")
            device.wait(f"replica {number}")
        device.release("replica chunk")

    def gradients(self, unit: Unit) -> str:
        """Told one by one: they stay until all are added up, whatever was added up before."""
        return TOLD

    def gradient(self, device: Device, unit: Unit, parameter: Parameter) -> None:
        """It waits for all others."""
        device.hold(f"own {unit.index} {parameter.name}", self.gradient_bytes(parameter), GRADIENTS)

    def after_forward(self, device: Device, unit: Unit) -> None:
        """When the model has run: the outputs of all GPUs, and then no longer the own ones beside them."""
        if not unit.is_root:
            return
        others = self.setting.world_size - 1
        whole = self.setting.world_size * self.setting.outputs_bytes
        name = f"outputs {self._micro_batches}"
        device.hold(name, whole, GATHERED)
        device.send(name, "gather", whole, WORLD, GATHER, after="compute")
        device.wait(name)
        device.hold(name, others * self.setting.logits_bytes, GATHERED)
        device.release(f"outputs {self._micro_batches - 1}")

    def before_backward(self, device: Device, unit: Unit) -> None:
        """The gradient of the outputs goes to where each part of it belongs."""
        if unit.is_root:
            whole = self.setting.world_size * self.setting.logits_bytes
            device.send("outputs' gradient", "scatter", whole, WORLD, GATHER, after="compute")
            device.wait("outputs' gradient")

    def after_step_backward(self, device: Device) -> None:
        """The gradients of all GPUs are added up here; the second micro-batch's sum is added to the first's."""
        first = self._micro_batches == 1 and not self.setting.keep_gradients
        name = "sum" if first else "further sum"
        added = 0
        for number, chunk in reduced(device, self.setting):
            added += sum(chunk)
            device.hold(name, added, GRADIENTS)
            device.send(f"gradients {number}", "reduce", sum(chunk), WORLD, REDUCE, after="compute")
            device.wait(f"gradients {number}")
        for unit in self.setting.units:
            for parameter in unit.parameters:
                device.release(f"own {unit.index} {parameter.name}")
        if not first:
            device.copy(name, 3 * self._bytes)
            device.release(name)

    def after_optimizer(self, device: Device) -> None:
        """Gradients go; the outputs are replaced in the next step."""
        device.release(f"outputs {self._micro_batches}")
        super().after_optimizer(device)
        if not self.setting.keep_gradients:
            device.release("sum")

    @property
    def _bytes(self) -> int:
        return self.numel * self.setting.parameter_bytes


class OtherPlan(Plan):
    """Each GPU but the first: a copy of the parameters from forward to the end of backward, and their gradients.

    Neither optimizer nor loss; of the outputs its own part.
    """

    def begin(self, device: Device) -> None:
        """Between steps there is nothing."""

    def begin_micro_batch(self, device: Device, *, synchronize: bool) -> None:
        """The copy arrives; the last micro-batch's is gone."""
        device.hold("parameters", sum(sizes_of(self.setting)), PARAMETERS)

    def gradient_bytes(self, parameter: Parameter) -> int:
        """In the format of the parameter."""
        return parameter.numel * self.setting.parameter_bytes

    def gradient(self, device: Device, unit: Unit, parameter: Parameter) -> None:
        """It waits for all others."""
        device.hold(f"own {unit.index} {parameter.name}", self.gradient_bytes(parameter), GRADIENTS)

    def after_step_backward(self, device: Device) -> None:
        """Chunks are copied to be reduced, as on the first; then the parameters' copy and the gradients go."""
        for _ in reduced(device, self.setting):
            pass
        for unit in self.setting.units:
            for parameter in unit.parameters:
                device.release(f"own {unit.index} {parameter.name}")
        device.release("parameters")

    @property
    def updated(self) -> Sequence[int]:
        """Nothing is updated here."""
        return ()

    def after_optimizer(self, device: Device) -> None:
        """Nothing is left."""


def sizes_of(setting: Setting) -> list[int]:
    """Bytes of each parameter, and of its gradient."""
    return [parameter.numel * setting.parameter_bytes for unit in setting.units for parameter in unit.parameters]


def sent_together(sizes: Sequence[int]) -> list[list[int]]:
    """Sizes of parameters by chunk: one is full when it has come to `CHUNK_BYTES`, with however large a last tensor.

    As ``take_tensors`` in torch/csrc/utils/tensor_flatten.cpp does.
    """
    chunks: list[list[int]] = []
    for size in sizes:
        if not chunks or sum(chunks[-1]) >= CHUNK_BYTES:
            chunks.append([])
        chunks[-1].append(size)
    return chunks


def reduced_together(sizes: Sequence[int]) -> list[list[int]]:
    """Sizes of gradients by chunk: one has at most `CHUNK_BYTES`, or is a single larger tensor.

    As ``_take_tensors`` in torch/_utils.py does.
    """
    chunks: list[list[int]] = []
    for size in sizes:
        if not chunks or sum(chunks[-1]) + size > CHUNK_BYTES:
            chunks.append([])
        chunks[-1].append(size)
    return chunks


def flatten(device: Device, name: str, chunk: Sequence[int]) -> None:
    """Copy tensors into one that is held under a name; a single tensor is its own, and nothing is."""
    size = sum(chunk) if len(chunk) > 1 else 0
    device.hold(name, size, REDUCED)
    if size:
        device.copy(name, 2 * size)


def reduced(device: Device, setting: Setting) -> Iterator[tuple[int, Sequence[int]]]:
    """The chunks of gradients, each ready to be reduced, with their numbers."""
    number = -1
    for number, chunk in enumerate(reduced_together(sizes_of(setting))):
        flatten(device, f"gradients chunk {number}", chunk)
        device.release(f"gradients chunk {number - 1}")
        yield number, chunk
    device.release(f"gradients chunk {number}")
