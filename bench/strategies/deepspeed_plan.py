"""What DeepSpeed's ZeRO stages 0 to 2 store and send, read in DeepSpeed 0.19.8."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from bench.strategies.plan import (
    ADDED,
    GATHER,
    GRADIENTS,
    PARAMETERS,
    REDUCE,
    REDUCED,
    STAY,
    TOLD,
    WORLD,
    Device,
    Parameter,
    Plan,
    Setting,
    Unit,
    WholePlan,
    gradients_of,
    hold_optimizer,
)

STAGE_0_BUCKET = 500_000_000
"""Elements that stage 0 reduces at a time (``MEMORY_OPT_ALLREDUCE_SIZE`` in deepspeed/runtime/engine.py)."""


class Stage0Plan(WholePlan):
    """Nothing is sharded: when backward is over, gradients are copied into one tensor, reduced and copied back."""

    _synchronize = True

    def begin_micro_batch(self, device: Device, *, synchronize: bool) -> None:
        """Remember whether gradients are reduced."""
        super().begin_micro_batch(device, synchronize=synchronize)
        self._synchronize = synchronize

    def after_step_backward(self, device: Device) -> None:
        """One bucket after the other; a bucket is full when it has more elements than it should."""
        if not self._synchronize:
            return
        filled = 0
        for number, numel in enumerate(self.updated):
            filled += numel
            if filled > STAGE_0_BUCKET or number == len(self.updated) - 1:
                reduce_flat(device, f"bucket {number}", filled * self.setting.parameter_bytes)
                device.wait(f"bucket {number}")
                device.release(f"bucket {number}")
                filled = 0


class Stage1And2Plan(Plan):
    """What the rank with most to hold at each moment holds: whole parameters, its part of fp32 parameters and states.

    ``deepspeed/runtime/zero/stage_1_and_2.py``: parameters lie one behind the other in a flat tensor, cut into equal
    partitions. A rank updates a copy of its own partition, then all partitions are gathered in place. Gradients are
    copied into a buffer of `bucket` elements, which is there from a backward's first gradient on. When it is full it
    is copied once more, unless all of it is one rank's, and all-reduced. Each rank then copies the gradients that its
    partition needs, of whole parameters, into a tensor of its own. In bf16 it is copied and converted to fp32 first,
    and what a rank keeps are fp32 gradients of its partition alone. Stage 2 does so during backward; stage 1 when
    backward is over, unless it overlaps.

    Parameters
    ----------
    setting: Setting
        The run.
    partitions_gradients: bool
        Stage 2: gradients are gone from other ranks as soon as they are reduced.
    overlaps: bool
        Reduction overlaps backward, with a second buffer.
    bucket: int
        Elements of the buffer.
    """

    def __init__(self, setting: Setting, *, partitions_gradients: bool, overlaps: bool, bucket: int) -> None:
        super().__init__(setting)
        self._partitions_gradients = partitions_gradients
        self._overlaps = overlaps
        self._bucket = bucket
        self._size = setting.precision.compute_dtype.itemsize
        self._reduce_size = setting.reduce_bytes
        self._staged = self._size
        self._casts = self._size != self._reduce_size
        self._order = in_order(setting.units)
        parameters = [parameter for _, parameter in self._order]
        unit = 2 * setting.world_size
        self._whole = -(-sum(parameter.numel for parameter in parameters) // unit) * unit
        self._partition = self._whole // setting.world_size
        self._ranks = dict(zip((name for name, _ in self._order), touched(parameters, self._partition), strict=True))
        self._touches = [0] * setting.world_size
        for name, parameter in self._order:
            for rank in self._ranks[name]:
                self._touches[rank] += parameter.numel
        self._kept = 0
        self._in_bucket: list[str] = []
        self._synchronize = True
        self._has_buffers = False
        self._micro_batches = 0
        self._filled = 0
        self._sent: list[str] = []

    @property
    def updated(self) -> Sequence[int]:
        """The partition, as one tensor."""
        return [self._partition]

    def begin(self, device: Device) -> None:
        """Parameters, a copy of this rank's partition, and its optimizer state."""
        masters = self._partition * self.setting.parameter_bytes
        device.hold("parameters", self._whole * self._size + masters, PARAMETERS)
        hold_optimizer(device, self.setting, self.updated)

    def begin_micro_batch(self, device: Device, *, synchronize: bool) -> None:
        """The buffers come with the first gradient."""
        self._synchronize = synchronize
        self._micro_batches += 1
        self._filled, self._sent, self._kept = 0, [], 0

    @property
    def _reduces_in_backward(self) -> bool:
        return self._partitions_gradients or (self._overlaps and self._synchronize and self.setting.micro_batches == 1)

    def before_backward(self, device: Device, unit: Unit) -> None:
        """Of the last block, before which the first gradients of all, the last layer norm's, are complete."""
        if not unit.is_root:
            self._hold_buffers(device)

    def _hold_buffers(self, device: Device) -> None:
        if not self._has_buffers:
            device.hold("buffers", (2 if self._overlaps else 1) * self._bucket * self._staged, REDUCED)
            self._has_buffers = True

    def gradient_bytes(self, parameter: Parameter) -> int:
        """In the format of the parameter."""
        return parameter.numel * self._size

    def gradients(self, unit: Unit) -> str:
        """Stage 2 copies each as soon as it is complete; stage 1 leaves them until backward is over."""
        if self._reduces_in_backward:
            return TOLD
        return STAY if self._micro_batches == 1 else ADDED

    def gradient(self, device: Device, unit: Unit, parameter: Parameter) -> None:
        """Into the buffer, which is sent before if there is no room."""
        self._hold_buffers(device)
        self._fill(device, parameter, gradient_of(unit, parameter))

    def after_step_backward(self, device: Device) -> None:
        """What is left in the buffer goes; this rank's gradients are what stays."""
        if not self._reduces_in_backward:
            if not self._synchronize:
                return
            for unit in self.setting.units:
                device.release(gradients_of(unit))
            for name, parameter in self._order:
                device.hold(name, parameter.numel * self._staged, GRADIENTS)
            for name, parameter in self._order:
                self._fill(device, parameter, name)
        self._reduce(device)
        for name in self._sent:
            device.wait(name)
        for name, _ in self._order:
            device.release(name)
        # The room is made once a step where gradients are added to it, else for every micro-batch.
        adds = not self._casts and self._partitions_gradients
        if self._micro_batches > 1 and adds:  # added to those of the micro-batches before
            device.copy("accumulated", 3 * self._kept * self._reduce_size)
            device.release("gradients of another micro-batch")
        device.release("buffers")
        self._has_buffers = False

    def _fill(self, device: Device, parameter: Parameter, own: str) -> None:
        if self._filled + parameter.numel > self._bucket:
            self._reduce(device)
        self._filled += parameter.numel
        self._in_bucket.append(own)
        if parameter.numel <= self._bucket:
            device.copy("into buffer", 2 * parameter.numel * self._staged)
            device.release(own)
        elif self._reduces_in_backward:  # too large for the buffer: reduced as it is
            device.hold(own, parameter.numel * self._staged, GRADIENTS)

    def _reduce(self, device: Device) -> None:
        if not self._filled:
            return
        name = f"bucket {len(self._sent)}"
        if self._overlaps and self._sent:
            device.wait(self._sent[-1])
        size = self._filled * self._reduce_size
        if self._casts:
            self._keep(device)
            device.hold("flat", self._filled * self._size, REDUCED)
            reduce_flat(device, name, size)
        elif self._is_of_one_rank():
            device.send(name, "all-reduce", size, WORLD, REDUCE, after="compute")
        else:
            reduce_flat(device, name, size)
        if not self._overlaps:
            device.wait(name)
        for each in (name, "flat"):
            device.release(each, after=REDUCE if self._overlaps else None)
        self._sent.append(name)
        self._filled = 0
        if not self._casts:
            self._keep(device)

    def _is_of_one_rank(self) -> bool:
        """Whether all that is in the buffer goes to one rank, so that it is reduced where it lies."""
        ranks = [self._ranks[name] for name in self._in_bucket]
        return min(each.start for each in ranks) == max(each.stop for each in ranks) - 1

    def _keep(self, device: Device) -> None:
        """A rank makes room for all its gradients when the first of them is reduced: hold as much as any rank does.

        Where they are reduced in another format than computed in, the room is that of its partition, to which those of
        all micro-batches are added.
        """
        if self._casts:
            self._in_bucket.clear()
            device.hold("gradients", self._partition * self._reduce_size, GRADIENTS)
            return
        ranks = {rank for name in self._in_bucket for rank in self._ranks[name]}
        self._in_bucket.clear()
        most = max(self._touches[rank] for rank in ranks)
        if most > self._kept:
            first = self._micro_batches == 1 or not self._partitions_gradients
            name = "gradients" if first else "gradients of another micro-batch"
            device.hold(name, most * self._size, GRADIENTS)
            self._kept = most

    def after_optimizer(self, device: Device) -> None:
        """Gather all partitions; gradients have gone before the update, but for one flat tensor of them."""
        self._gather_updated(device)

    def _gather_updated(self, device: Device) -> None:
        device.send("updated", "all-gather", self._whole * self._size, WORLD, GATHER, after="compute")
        device.wait("updated")
        device.release("gradients")
        self._micro_batches = 0


class Bf16Stage1Plan(Plan):
    """Stage 1 in bf16, which DeepSpeed's BF16_Optimizer carries out (``deepspeed/runtime/bf16_optimizer.py``).

    Every rank holds all gradients in fp32, all the time; what backward completes is added to them and gone. After the
    last micro-batch they are reduced as in stage 0; each rank updates its partition in fp32, and all are gathered.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._size = setting.precision.compute_dtype.itemsize
        unit = 2 * setting.world_size
        self._whole = -(-sum(p.numel for each in setting.units for p in each.parameters) // unit) * unit
        self._synchronize = True

    @property
    def updated(self) -> Sequence[int]:
        """The partition, as one tensor."""
        return [self._whole // self.setting.world_size]

    def begin(self, device: Device) -> None:
        """Parameters, all gradients, and this rank's partition with its states."""
        masters = self.updated[0] * self.setting.parameter_bytes
        device.hold("parameters", self._whole * self._size + masters, PARAMETERS)
        device.hold("gradients", self._whole * self.setting.reduce_bytes, GRADIENTS)
        hold_optimizer(device, self.setting, self.updated)

    def begin_micro_batch(self, device: Device, *, synchronize: bool) -> None:
        """Remember whether gradients are reduced."""
        self._synchronize = synchronize

    def gradient_bytes(self, parameter: Parameter) -> int:
        """In the format that is computed in."""
        return parameter.numel * self._size

    def gradients(self, unit: Unit) -> str:
        """Added to those in fp32 as they are complete."""
        return TOLD

    def gradient(self, device: Device, unit: Unit, parameter: Parameter) -> None:
        """Read, and read and written."""
        device.copy("accumulated", parameter.numel * (self._size + 2 * self.setting.reduce_bytes))

    def after_step_backward(self, device: Device) -> None:
        """All in one tensor, unless they are more than a bucket of stage 0."""
        left = self._whole if self._synchronize else 0
        while left > 0:
            numel = min(left, STAGE_0_BUCKET)
            reduce_flat(device, f"bucket {left}", numel * self.setting.reduce_bytes)
            device.wait(f"bucket {left}")
            device.release(f"bucket {left}")
            left -= numel

    def after_optimizer(self, device: Device) -> None:
        """Gather all partitions; gradients are set to zero."""
        device.send("updated", "all-gather", self._whole * self._size, WORLD, GATHER, after="compute")
        device.wait("updated")
        device.copy("zeros", self._whole * self.setting.reduce_bytes)


def reduce_flat(device: Device, name: str, size: float) -> None:
    """Copy gradients into one tensor, all-reduce it, copy the result back."""
    device.hold(name, size, REDUCED)
    device.copy(name, 4 * size)
    device.send(name, "all-reduce", size, WORLD, REDUCE, after="compute")


def in_order(units: Sequence[Unit]) -> list[tuple[str, Parameter]]:
    """Parameters as they lie in the flat tensor, each with the name of its gradient.

    Embeddings, the blocks in order, and the norms that follow them (a T5's encoder's too, which lies in the middle).
    """
    found = [(unit, parameter) for unit in units for parameter in unit.parameters]
    found.sort(key=lambda pair: pair[0].is_root and len(pair[1].shape) < 2)
    return [(gradient_of(unit, parameter), parameter) for unit, parameter in found]


def gradient_of(unit: Unit, parameter: Parameter) -> str:
    """The name under which a parameter's own gradient is held."""
    return f"gradient {unit.index} {parameter.name}"


def touched(parameters: Sequence[Parameter], partition: int) -> list[range]:
    """The ranks in whose partitions of the flat tensor, of so many elements, each parameter lies, if only in part."""
    ends = accumulate(parameter.numel for parameter in parameters)
    return [
        range((end - parameter.numel) // partition, (end - 1) // partition + 1)
        for parameter, end in zip(parameters, ends, strict=True)
    ]
