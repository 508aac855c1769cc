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

from bench.strategies.deepspeed_plan import Stage1And2Plan, gradient_of
from bench.strategies.deepspeed_stage3 import NORM_BYTES, Knobs, Stage3Plan
from bench.strategies.plan import (
    GATHER,
    GATHERED,
    GRADIENTS,
    PARAMETERS,
    REDUCE,
    REDUCED,
    REPLICATE,
    TOLD,
    Device,
    Parameter,
    Setting,
    Unit,
    hold_optimizer,
    optimizer_bytes,
)

NORM_AT_ONCE = 250_000_000
"""Elements of a gradient in fp64 at a time in stage 3 (``_constant_buffered_norm2``)."""


class OffloadedStage1And2Plan(Stage1And2Plan):
    """Stages 1 and 2: the device has the whole parameters, the host the partition to update, its gradients and states.

    A rank's gradients leave the device when their bucket is reduced: the processor looks at every parameter's for what
    is not finite, so it waits. As partitions follow one another in the flat tensor, ranks send one after the other,
    each while the others wait for it in the next reduction: of every bucket the largest part that is one rank's counts.
    Between micro-batches fp32 gradients are on the host, too, as whole parameters: they come back to be added to and
    leave again. In bf16 they are added up on the device. The updated partition is rounded on the host and comes back
    before all are gathered.
    """

    updates_on_host = True

    def __init__(self, setting: Setting, *, partitions_gradients: bool, overlaps: bool, bucket: int) -> None:
        super().__init__(setting, partitions_gradients=partitions_gradients, overlaps=overlaps, bucket=bucket)
        self._computed = self._size
        self._largest = max(parameter.numel for _, parameter in self._order)
        self._adds_on_device = self._casts
        self._whole_numel = {name: parameter.numel for name, parameter in self._order}
        self._parts: dict[str, dict[int, int]] = {}
        start = 0
        for name, parameter in self._order:
            end = start + parameter.numel
            self._parts[name] = {
                rank: min(end, (rank + 1) * self._partition) - max(start, rank * self._partition)
                for rank in self._ranks[name]
            }
            start = end

    @property
    def host_bytes(self) -> float:
        """Partition, states and gradients in fp32, the partition as it is sent back, room for the largest gradient."""
        kept = self._partition * (4 + 4 + self._computed) + self._largest * self._computed
        if self._accumulates:
            kept += max(self._touches) * self._computed
        return kept + optimizer_bytes(self.setting, self.updated)

    @property
    def _accumulates(self) -> bool:
        return self._partitions_gradients and not self._adds_on_device and self.setting.micro_batches > 1

    @property
    def copied_on_host(self) -> float:
        """The updated partition, rounded into what is sent."""
        return self._partition * (4 + self._computed)

    def begin(self, device: Device) -> None:
        """Parameters, and room for the largest gradient that comes back."""
        device.hold("parameters", self._whole * self._computed, PARAMETERS)
        device.hold("room for a gradient", self._largest * self._computed, REDUCED)

    def _fill(self, device: Device, parameter: Parameter, own: str) -> None:
        super()._fill(device, parameter, own)
        if parameter.numel > self._bucket:  # reduced in a copy of its own
            device.hold("copied gradient", parameter.numel * self._staged, GRADIENTS)
            device.release("copied gradient")

    def _reduce(self, device: Device) -> None:
        bucket = tuple(self._in_bucket)
        super()._reduce(device)
        if bucket:
            self._carry(device, bucket)

    def _keep(self, device: Device) -> None:
        """Nothing on the device, unless gradients are added up there."""
        self._in_bucket.clear()
        if self._adds_on_device:
            device.hold("gradients", self._partition * self._reduce_size, GRADIENTS)

    def _carry(self, device: Device, bucket: Iterable[str]) -> None:
        """Of what was just reduced, what goes to the host, or comes from there to be added to."""
        numel: Counter[int] = Counter()
        touched: Counter[int] = Counter()
        for name in bucket:
            for rank, part in self._parts[name].items():
                numel[rank] += part
                touched[rank] += self._whole_numel[name]
        whole = max(touched.values()) * self._computed
        if self._accumulates:
            if self._micro_batches > 1:
                self._move(device, "gradient back", whole)
                device.copy("accumulated", 3 * whole)
            self._move(device, "gradient of a micro-batch out", whole)
        if not self._partitions_gradients or self._micro_batches == self.setting.micro_batches:
            largest = max(part for name in bucket for part in self._parts[name].values())
            device.hold("norm", NORM_BYTES * largest, GRADIENTS)
            self._move(device, "gradient out", max(numel.values()) * 4)
            device.release("norm")

    def _move(self, device: Device, name: str, size: float) -> None:
        device.transfer(name, size, REPLICATE, after=REDUCE if self._overlaps else "compute")
        device.wait(name)
        device.note_release()
        device.throttle(1)

    def after_optimizer(self, device: Device) -> None:
        """The updated partition comes to the device; all are gathered."""
        device.transfer("updated partition", self._partition * self._computed, REPLICATE, after="compute")
        device.wait("updated partition")
        self._gather_updated(device)


class OffloadedBf16Stage1Plan(OffloadedStage1And2Plan):
    """Stage 1 in bf16: every gradient is converted to fp32 as it is complete, and is added to and reduced as that."""

    def __init__(self, setting: Setting, *, overlaps: bool, bucket: int) -> None:
        super().__init__(setting, partitions_gradients=False, overlaps=overlaps, bucket=bucket)
        self._staged = self._reduce_size
        self._casts = False

    def gradients(self, unit: Unit) -> str:
        """Converted one by one."""
        return TOLD

    def gradient(self, device: Device, unit: Unit, parameter: Parameter) -> None:
        """In fp32, added to that of the micro-batches before."""
        narrow, wide = self.gradient_bytes(parameter), parameter.numel * self._reduce_size
        device.hold("narrow gradient", narrow, GRADIENTS)
        if self._micro_batches == 1:
            device.hold(gradient_of(unit, parameter), wide, GRADIENTS)
        device.copy("widened", narrow + (wide if self._micro_batches == 1 else 2 * wide))
        device.release("narrow gradient")
        if self._reduces_in_backward:
            super().gradient(device, unit, parameter)

    def _is_of_one_rank(self) -> bool:
        """A rank's own parameters are taken one by one."""
        return len(self._in_bucket) == 1 and super()._is_of_one_rank()


class OffloadedStage3Plan(Stage3Plan):
    """Stage 3: the optimizer, the parameters or both are in the machine's memory.

    With the optimizer there, a rank's partitions of gradients leave the device in fp32, come back to be looked at or
    added to, and leave once more for the optimizer in a step's last micro-batch. With the parameters there, what is
    gathered comes to the device first, each time.

    Parameters
    ----------
    setting: Setting
        The run.
    knobs: Knobs
        As without offloading.
    optimizer, parameters: bool
        What is offloaded.
    """

    def __init__(self, setting: Setting, knobs: Knobs, *, optimizer: bool, parameters: bool) -> None:
        super().__init__(setting, knobs)
        self.updates_on_host = optimizer
        self._offloads_parameters = parameters

    @property
    def _own(self) -> int:
        (own,) = self.updated
        return own

    @property
    def host_bytes(self) -> float:
        """In fp32 the partition, its states, gradients as they are reduced and as the optimizer has them."""
        kept = self._own * self._size if self._offloads_parameters else 0.0
        if self.updates_on_host:
            kept += self._own * (4 + 4 + 4) + optimizer_bytes(self.setting, self.updated)
        return kept

    @property
    def copied_on_host(self) -> float:
        """Updated parameters as they are rounded, which the host does whatever way they go, or copied on the host."""
        stay = self.updates_on_host and self._offloads_parameters
        return self._own * (4 + self._size) if stay or self._size != 4 else 0.0

    def begin(self, device: Device) -> None:
        """What is not offloaded, and the buffers, which are on the device."""
        parameters = 0 if self._offloads_parameters else self._own * self._size
        if not self.updates_on_host:
            parameters += self._own * 4
            hold_optimizer(device, self.setting, self.updated)
            device.hold("gradient partitions", self._own * 4, GRADIENTS)
        device.hold("parameters", parameters, PARAMETERS)
        self._hold_buffers(device)

    def _gather(self, device: Device, names: Sequence[str]) -> None:
        """Offloaded partitions come to the device first: those of a single rank are what is computed with."""
        if not names or not self._offloads_parameters:
            super()._gather(device, names)
            return
        size = sum(self._partitions[name] for name in names) * self._size
        if self.setting.world_size == 1:
            for name in names:
                device.hold(f"whole {name}", self._parameters[name].numel * self._size, GATHERED)
        else:
            device.hold("upload", size, GATHERED)
        device.transfer("upload", size, GATHER)
        if self.setting.world_size == 1:
            device.wait("upload")
        super()._gather(device, names)
        device.release("upload")

    def _keep_partitions(self, device: Device) -> None:
        """On the host. What is looked at, or added to, lies beside what was scattered: one parameter's at a time."""
        if not self.updates_on_host:
            return
        partitions = [self._partitions[name] for name in self._filled]
        normed = NORM_BYTES * min(max(partitions), NORM_AT_ONCE) if self._is_last else 0
        device.hold("gradient on its way", 4 * max(partitions) + normed, GRADIENTS)
        after = REDUCE if self._knobs.overlaps else "compute"
        for name in ("gradient out", "gradient back", *(["gradient out for the optimizer"] if self._is_last else [])):
            device.transfer(name, 4 * sum(partitions), REDUCE, after=after)
            self._sent.append(name)
        if not self._knobs.overlaps:
            device.wait(self._sent[-1])
        device.release("gradient on its way")

    def _prepare_update(self, device: Device) -> None:
        """The host has its gradients by now."""
        if not self.updates_on_host:
            super()._prepare_update(device)

    def after_optimizer(self, device: Device) -> None:
        """Updated parameters go where parameters are. Those that come to the device are rounded before."""
        if self.updates_on_host != self._offloads_parameters:
            size = self._own * (4 if self._offloads_parameters else self._size)
            device.transfer("updated partition", size, GATHER, after="compute")
            device.wait("updated partition")
        super().after_optimizer(device)
