"""What DeepSpeed's ZeRO stages 1 to 3 keep outside of the device and move to and fro, read in DeepSpeed 0.19.8.

``deepspeed/runtime/zero/stage_1_and_2.py``, ``stage3.py`` and ``partition_parameters.py``. The optimizer is torch's
own, on tensors in the machine's memory, as this suite asks for. ZeRO-Offload's paper counts 16 bytes per parameter of a
partition there and sends 2 bytes out and 2 back: DeepSpeed also keeps what it sends from and receives in, and as
gradients are reduced in fp32 here, 4 bytes go out. What torch rounds page-locked memory up to is not counted.

No GPU has run this. A CPU, where runs with offloading are refused, has one memory for both: tests compare their sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from bench.strategies.deepspeed.stage_3 import NORM_ITEMSIZE, DeepSpeedStage3Plan, Stage3Knobs
from bench.strategies.deepspeed.stages_0_to_2 import DeepSpeedStage1And2Plan, name_parameter_gradient
from bench.strategies.plan_inputs import ParameterSpec, PlanInputs, ShardingUnit
from bench.strategies.step_plan import (
    ALL_GATHER_MEMORY,
    ALL_GATHER_STREAM,
    GRADIENT_MEMORY,
    GRADIENTS_HANDLED_ONE_BY_ONE,
    PARAMETER_MEMORY,
    REDUCE_STREAM,
    REDUCTION_MEMORY,
    REPLICA_STREAM,
    PlanDevice,
    allocate_optimizer_state,
    compute_optimizer_bytes,
)

MAX_NORM_NUMEL = 250_000_000
"""Elements of a gradient in fp64 at a time in stage 3 (``_constant_buffered_norm2``)."""


class DeepSpeedOffloadStage1And2Plan(DeepSpeedStage1And2Plan):
    """Stages 1 and 2: the device has the whole parameters, the host the partition to update, its gradients and states.

    A rank's gradients leave the device when their bucket is reduced: the processor looks at every parameter's for what
    is not finite, so it waits. As partitions follow one another in the flat tensor, ranks send one after the other,
    each while the others wait for it in the next reduction: of every bucket the largest part that is one rank's counts.
    Between micro-batches fp32 gradients are on the host, too, as whole parameters: they come back to be added to and
    leave again. In bf16 they are added up on the device. The updated partition is rounded on the host and comes back
    before all are gathered.
    """

    updates_on_host = True

    def __init__(self, inputs: PlanInputs, *, partitions_gradients: bool, overlaps: bool, bucket_numel: int) -> None:
        super().__init__(
            inputs, partitions_gradients=partitions_gradients, overlaps=overlaps, bucket_numel=bucket_numel
        )
        self._device_itemsize = self._compute_itemsize
        self._largest_numel = max(parameter.numel for _, parameter in self._named_parameters)
        self._accumulates_on_device = self._casts_gradients
        self._numel_of_parameter = {name: parameter.numel for name, parameter in self._named_parameters}
        self._numel_per_rank: dict[str, dict[int, int]] = {}
        start = 0
        for name, parameter in self._named_parameters:
            end = start + parameter.numel
            self._numel_per_rank[name] = {
                rank: min(end, (rank + 1) * self._partition_numel) - max(start, rank * self._partition_numel)
                for rank in self._ranks_of_parameter[name]
            }
            start = end

    @property
    def host_bytes(self) -> float:
        """Partition, states and gradients in fp32, the partition as it is sent back, room for the largest gradient."""
        kept_bytes = (
            self._partition_numel * (4 + 4 + self._device_itemsize) + self._largest_numel * self._device_itemsize
        )
        if self._accumulates_on_host:
            kept_bytes += max(self._touched_numel_per_rank) * self._device_itemsize
        return kept_bytes + compute_optimizer_bytes(self.inputs, self.updated_tensors)

    @property
    def _accumulates_on_host(self) -> bool:
        return self._partitions_gradients and not self._accumulates_on_device and self.inputs.num_micro_batches > 1

    @property
    def host_copy_bytes(self) -> float:
        """The updated partition, rounded into what is sent."""
        return self._partition_numel * (4 + self._device_itemsize)

    def allocate_persistent_state(self, device: PlanDevice) -> None:
        """Parameters, and room for the largest gradient that comes back."""
        device.allocate("parameters", self._padded_numel * self._device_itemsize, PARAMETER_MEMORY)
        device.allocate("room for a gradient", self._largest_numel * self._device_itemsize, REDUCTION_MEMORY)

    def _add_to_bucket(self, device: PlanDevice, parameter: ParameterSpec, gradient_name: str) -> None:
        super()._add_to_bucket(device, parameter, gradient_name)
        if parameter.numel > self._bucket_numel:  # reduced in a copy of its own
            device.allocate("copied gradient", parameter.numel * self._buffer_itemsize, GRADIENT_MEMORY)
            device.free("copied gradient")

    def _reduce_gradients(self, device: PlanDevice) -> None:
        bucket_gradients = tuple(self._bucket_gradients)
        super()._reduce_gradients(device)
        if bucket_gradients:
            self._copy_gradients_to_host(device, bucket_gradients)

    def _allocate_kept_gradients(self, device: PlanDevice) -> None:
        """Nothing on the device, unless gradients are added up there."""
        self._bucket_gradients.clear()
        if self._accumulates_on_device:
            device.allocate("gradients", self._partition_numel * self._reduce_itemsize, GRADIENT_MEMORY)

    def _copy_gradients_to_host(self, device: PlanDevice, bucket_gradients: Iterable[str]) -> None:
        """Of what was just reduced, what goes to the host, or comes from there to be added to."""
        owned_numel: Counter[int] = Counter()
        touched_numel: Counter[int] = Counter()
        for name in bucket_gradients:
            for rank, part_numel in self._numel_per_rank[name].items():
                owned_numel[rank] += part_numel
                touched_numel[rank] += self._numel_of_parameter[name]
        touched_bytes = max(touched_numel.values()) * self._device_itemsize
        if self._accumulates_on_host:
            if self._micro_batch > 0:
                self._copy_and_wait(device, "gradient back", touched_bytes)
                device.copy_within_device("accumulated", 3 * touched_bytes)
            self._copy_and_wait(device, "gradient of a micro-batch out", touched_bytes)
        if not self._partitions_gradients or self._micro_batch == self.inputs.num_micro_batches - 1:
            largest_part_numel = max(
                part_numel for name in bucket_gradients for part_numel in self._numel_per_rank[name].values()
            )
            device.allocate("norm", NORM_ITEMSIZE * largest_part_numel, GRADIENT_MEMORY)
            self._copy_and_wait(device, "gradient out", max(owned_numel.values()) * 4)
            device.free("norm")

    def _copy_and_wait(self, device: PlanDevice, name: str, size: float) -> None:
        device.copy_host_device(
            name, size, REPLICA_STREAM, after=REDUCE_STREAM if self._overlaps_reduction else "compute"
        )
        device.wait_for_event(name)
        device.note_late_free()
        device.limit_all_gathers(1)

    def after_optimizer_step(self, device: PlanDevice) -> None:
        """The updated partition comes to the device; all are gathered."""
        device.copy_host_device(
            "updated partition", self._partition_numel * self._device_itemsize, REPLICA_STREAM, after="compute"
        )
        device.wait_for_event("updated partition")
        self._all_gather_updated(device)


class DeepSpeedOffloadBf16Stage1Plan(DeepSpeedOffloadStage1And2Plan):
    """Stage 1 in bf16: every gradient is converted to fp32 as it is complete, and is added to and reduced as that."""

    def __init__(self, inputs: PlanInputs, *, overlaps: bool, bucket_numel: int) -> None:
        super().__init__(inputs, partitions_gradients=False, overlaps=overlaps, bucket_numel=bucket_numel)
        self._buffer_itemsize = self._reduce_itemsize
        self._casts_gradients = False

    def choose_gradient_handling(self, unit: ShardingUnit) -> str:
        return GRADIENTS_HANDLED_ONE_BY_ONE

    def after_gradient(self, device: PlanDevice, unit: ShardingUnit, parameter: ParameterSpec) -> None:
        """In fp32, added to that of the micro-batches before."""
        narrow_bytes, wide_bytes = self.compute_gradient_bytes(parameter), parameter.numel * self._reduce_itemsize
        device.allocate("narrow gradient", narrow_bytes, GRADIENT_MEMORY)
        if self._micro_batch == 0:
            device.allocate(name_parameter_gradient(unit, parameter), wide_bytes, GRADIENT_MEMORY)
        device.copy_within_device("widened", narrow_bytes + (wide_bytes if self._micro_batch == 0 else 2 * wide_bytes))
        device.free("narrow gradient")
        if self._reduces_in_backward:
            super().after_gradient(device, unit, parameter)

    def _is_of_one_rank(self) -> bool:
        """A rank's own parameters are taken one by one."""
        return len(self._bucket_gradients) == 1 and super()._is_of_one_rank()


class DeepSpeedOffloadStage3Plan(DeepSpeedStage3Plan):
    """Stage 3: the optimizer, the parameters or both are in the machine's memory.

    With the optimizer there, a rank's partitions of gradients leave the device in fp32, come back to be looked at or
    added to, and leave once more for the optimizer in a step's last micro-batch. With the parameters there, what is
    gathered comes to the device first, each time.

    Parameters
    ----------
    inputs: Setting
        The run.
    knobs: Stage3Knobs
        As without offloading.
    offloads_optimizer, offloads_parameters: bool
        What is offloaded.
    """

    def __init__(
        self, inputs: PlanInputs, knobs: Stage3Knobs, *, offloads_optimizer: bool, offloads_parameters: bool
    ) -> None:
        super().__init__(inputs, knobs)
        self.updates_on_host = offloads_optimizer
        self._offloads_parameters = offloads_parameters

    @property
    def _own_numel(self) -> int:
        return sum(self.updated_numels)

    @property
    def host_bytes(self) -> float:
        """In fp32 the partition, its states, gradients as they are reduced and as the optimizer has them."""
        kept_bytes = self._own_numel * self._compute_itemsize if self._offloads_parameters else 0.0
        if self.updates_on_host:
            kept_bytes += self._own_numel * (4 + 4 + 4) + compute_optimizer_bytes(self.inputs, self.updated_tensors)
        return kept_bytes

    @property
    def host_copy_bytes(self) -> float:
        """Updated parameters as they are rounded, which the host does whatever way they go, or copied on the host."""
        stays_on_host = self.updates_on_host and self._offloads_parameters
        return self._own_numel * (4 + self._compute_itemsize) if stays_on_host or self._compute_itemsize != 4 else 0.0

    def allocate_persistent_state(self, device: PlanDevice) -> None:
        """What is not offloaded, and the buffers, which are on the device."""
        parameter_bytes = 0 if self._offloads_parameters else self._own_numel * self._compute_itemsize
        if not self.updates_on_host:
            parameter_bytes += self._own_numel * 4
            allocate_optimizer_state(device, self.inputs, self.updated_tensors)
            device.allocate("gradient partitions", self._own_numel * 4, GRADIENT_MEMORY)
        device.allocate("parameters", parameter_bytes, PARAMETER_MEMORY)
        self._allocate_buffers(device)

    def _start_all_gather(self, device: PlanDevice, names: Sequence[str]) -> None:
        """Offloaded partitions come to the device first: those of a single rank are what is computed with."""
        if not names or not self._offloads_parameters:
            super()._start_all_gather(device, names)
            return
        upload_bytes = sum(self._partition_numels[name] for name in names) * self._compute_itemsize
        if self.inputs.world_size == 1:
            for name in names:
                device.allocate(
                    f"whole {name}", self._parameters[name].numel * self._compute_itemsize, ALL_GATHER_MEMORY
                )
        else:
            device.allocate("upload", upload_bytes, ALL_GATHER_MEMORY)
        device.copy_host_device("upload", upload_bytes, ALL_GATHER_STREAM)
        if self.inputs.world_size == 1:
            device.wait_for_event("upload")
        super()._start_all_gather(device, names)
        device.free("upload")

    def _keep_gradient_partitions(self, device: PlanDevice) -> None:
        """On the host. What is looked at, or added to, lies beside what was scattered: one parameter's at a time."""
        if not self.updates_on_host:
            return
        partition_numels = [self._partition_numels[name] for name in self._bucket_names]
        norm_bytes = NORM_ITEMSIZE * min(max(partition_numels), MAX_NORM_NUMEL) if self._is_last else 0
        device.allocate("gradient on its way", 4 * max(partition_numels) + norm_bytes, GRADIENT_MEMORY)
        after = REDUCE_STREAM if self._knobs.overlaps_reduction else "compute"
        for name in ("gradient out", "gradient back", *(["gradient out for the optimizer"] if self._is_last else [])):
            device.copy_host_device(name, 4 * sum(partition_numels), REDUCE_STREAM, after=after)
            self._pending_events.append(name)
        if not self._knobs.overlaps_reduction:
            device.wait_for_event(self._pending_events[-1])
        device.free("gradient on its way")

    def _prepare_update(self, device: PlanDevice) -> None:
        """The host has its gradients by now."""
        if not self.updates_on_host:
            super()._prepare_update(device)

    def after_optimizer_step(self, device: PlanDevice) -> None:
        """Updated parameters go where parameters are. Those that come to the device are rounded before."""
        if self.updates_on_host != self._offloads_parameters:
            upload_bytes = self._own_numel * (4 if self._offloads_parameters else self._compute_itemsize)
            device.copy_host_device("updated partition", upload_bytes, ALL_GATHER_STREAM, after="compute")
            device.wait_for_event("updated partition")
        super().after_optimizer_step(device)
