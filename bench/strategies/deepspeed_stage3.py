"""What DeepSpeed's ZeRO stage 3 stores and sends, read in DeepSpeed 0.19.8.

``deepspeed/runtime/zero/stage3.py``, ``partitioned_param_coordinator.py`` and ``partition_parameters.py``: each
parameter is cut into equal partitions, one per rank. From the second step on the order in which modules use parameters
is known: what comes next is gathered ahead, and a parameter that is used again soon is kept. The library does so module
by module; here it is said block by block, in the order of the model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.strategies.deepspeed_plan import gradient_of
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
    hold_optimizer,
)

MOST_REDUCTIONS = 3
"""Reductions the processor lets be unfinished before it starts another one (``max_param_reduce_events``, and one)."""

NORM_BYTES = 8
"""Per element of a gradient, while DeepSpeed takes its norm: in fp64, one parameter's after the other."""


@dataclass(frozen=True)
class Knobs:
    """Numbers of elements, as in the strategy, and whether gradients are reduced beside the computation."""

    bucket: int
    prefetch: int
    persistent: int
    live: int
    reuse: int
    overlaps: bool


@dataclass
class _Gathered:
    """Parameters that were asked for together: they arrive in one buffer, and are copied out of it together."""

    name: str
    waiting: set[str] = field(default_factory=set)
    """Those whose first use is still to come: the buffer stays until then."""


class Stage3Plan(Plan):
    """What rank 0 holds: its partitions, persistent parameters, and what is gathered.

    Gradients go into a buffer of `bucket` elements, which is there all the time; when it is full, partitions are put
    one behind the other in a further one, reduced and scattered. A rank's partitions of all gradients lie in a tensor
    of their own, in fp32, which is there all the time, too, and is copied for the optimizer, once a step.
    """

    def __init__(self, setting: Setting, knobs: Knobs) -> None:
        super().__init__(setting)
        self._knobs = knobs
        self._size = setting.precision.compute_dtype.itemsize
        self._reduce_size = setting.reduce_bytes
        self._parameters = {
            _name(unit, parameter): parameter for unit in setting.units for parameter in unit.parameters
        }
        self._partitions = {name: self._partition(parameter) for name, parameter in self._parameters.items()}
        self._uses = _uses(setting.units)
        self._numel = [sum(self._parameters[name].numel for name in use) for use in self._uses]
        self._micro_batch = 0
        self._use = 0
        self._queue: deque[tuple[int, str]] = deque()
        self._whole: set[str] = set()
        self._gathers: dict[str, _Gathered] = {}
        self._count = 0
        self._filled: list[str] = []
        self._sent: list[str] = []

    def _partition(self, parameter: Parameter) -> int:
        return -(-parameter.numel // self.setting.world_size)

    def _is_persistent(self, name: str) -> bool:
        return self._parameters[name].numel < self._knobs.persistent

    @property
    def updated(self) -> Sequence[int]:
        """All partitions, as one tensor."""
        return [sum(self._partitions.values())]

    def begin(self, device: Device) -> None:
        """Partitions, a copy of them in fp32 to update, states, gradients' partitions and the bucket."""
        (own,) = self.updated
        device.hold("parameters", own * (self._size + 4), PARAMETERS)
        hold_optimizer(device, self.setting, self.updated)
        device.hold("gradient partitions", own * 4, GRADIENTS)
        self._hold_buffers(device)

    def _hold_buffers(self, device: Device) -> None:
        """The bucket, and what is always whole."""
        device.hold("bucket", self._knobs.bucket * self._reduce_size, REDUCED)
        persistent = sum(self._parameters[name].numel for name in self._parameters if self._is_persistent(name))
        device.hold("persistent", persistent * self._size, PARAMETERS)

    def begin_micro_batch(self, device: Device, *, synchronize: bool) -> None:
        """From the start of the order again."""
        self._micro_batch += 1
        self._use = 0
        self._queue = deque((index, name) for index, use in enumerate(self._uses) for name in use)

    def before_forward(self, device: Device, unit: Unit) -> None:
        """Gather what the unit needs and is not there yet, and what follows; first what follows the model's beginning,
        a module that has no parameters of its own."""
        if unit.is_root:
            self._fetch_ahead(device)
        self._fetch(device)

    def after_forward(self, device: Device, unit: Unit) -> None:
        """Free what is not used again soon. The last layer and the last norm follow the last block."""
        if unit.is_root:
            return
        self._release(device)
        if unit is self.setting.units[-1]:
            self._fetch(device)
            self._release(device)

    def before_backward(self, device: Device, unit: Unit) -> None:
        """As in forward."""
        self._fetch(device)

    def after_backward(self, device: Device, unit: Unit) -> None:
        """As in forward; the embedding's gradient comes last of all."""
        if unit.is_root:
            return
        self._release(device)
        if unit.index == 0:
            self._fetch(device)

    def _fetch(self, device: Device) -> None:
        if self._use >= len(self._uses):
            return
        device.hooks()
        use = self._uses[self._use]
        self._gather(device, [name for name in use if self._is_away(name)])
        for name in use:
            self._await(device, name)
        while self._queue and self._queue[0][0] <= self._use:
            self._queue.popleft()
        self._fetch_ahead(device)
        self._use += 1

    def _fetch_ahead(self, device: Device) -> None:
        """What is used next, until as many elements are on their way as may be."""
        ahead: list[str] = []
        room = min(self._knobs.live - self._live(), self._knobs.prefetch)
        while self._queue and sum(self._parameters[name].numel for name in ahead) < room:
            _, name = self._queue.popleft()
            if self._is_away(name) and name not in ahead:
                ahead.append(name)
        self._gather(device, ahead)

    def _is_away(self, name: str) -> bool:
        return not self._is_persistent(name) and name not in self._whole and name not in self._gathers

    def _live(self) -> int:
        return sum(self._parameters[name].numel for name in (*self._whole, *self._gathers))

    def _gather(self, device: Device, names: Sequence[str]) -> None:
        if not names or self.setting.world_size == 1:
            self._whole.update(names)
            return
        self._count += 1
        gathered = _Gathered(f"gathered {self._count}", set(names))
        size = sum(self._partitions[name] for name in names) * self.setting.world_size * self._size
        device.hold(gathered.name, size, GATHERED)
        device.send(gathered.name, "all-gather", size, WORLD, GATHER)
        self._gathers |= dict.fromkeys(names, gathered)

    def _await(self, device: Device, name: str) -> None:
        """Wait for all that came with a parameter, and copy it out: one alone is used where it arrived."""
        gathered = self._gathers.pop(name, None)
        if gathered is None:
            return
        if name not in self._whole:
            device.wait(gathered.name)
            alone = len(gathered.waiting) == 1
            for each in gathered.waiting:
                self._whole.add(each)
                if not alone:
                    device.hold(f"whole {each}", self._parameters[each].numel * self._size, GATHERED)
            if alone:
                device.release(gathered.name)
                device.hold(f"whole {name}", self._partitions[name] * self.setting.world_size * self._size, GATHERED)
            else:
                device.copy("copy out", 2 * sum(self._parameters[each].numel for each in gathered.waiting) * self._size)
        gathered.waiting.discard(name)
        if not gathered.waiting:
            device.release(gathered.name)

    def _release(self, device: Device) -> None:
        """What was used last is freed, unless it is used again within so many elements."""
        traversed, soon = 0, set[str]()
        for index in range(self._use, len(self._uses)):
            if traversed >= self._knobs.reuse:
                break
            soon.update(self._uses[index])
            traversed += self._numel[index]
        for name in self._uses[self._use - 1]:
            if name in self._whole and name not in soon:
                self._whole.discard(name)
                device.release(f"whole {name}")

    def gradient_bytes(self, parameter: Parameter) -> int:
        """In the format that is computed in."""
        return parameter.numel * self._size

    def gradients(self, unit: Unit) -> str:
        """Each is copied into the bucket as it is complete."""
        return TOLD

    def gradient(self, device: Device, unit: Unit, parameter: Parameter) -> None:
        """Into the bucket, which is reduced before if there is no room; what is larger waits beside it."""
        filled = sum(self._parameters[name].numel for name in self._filled)
        if self._filled and filled + parameter.numel > self._knobs.bucket:
            self._reduce(device)
            filled = 0
        self._filled.append(_name(unit, parameter))
        if filled + parameter.numel > self._knobs.bucket:
            device.hold(gradient_of(unit, parameter), self.gradient_bytes(parameter), GRADIENTS)
            self._large = gradient_of(unit, parameter)
        else:
            device.copy("into bucket", parameter.numel * (self._size + self._reduce_size))

    _large: str | None = None

    def _reduce(self, device: Device) -> None:
        """Put partitions in order in a buffer, reduce and scatter it, copy this rank's where they stay.

        All of it is allocated for the stream that reduces, which uses it again at once.
        """
        if not self._filled:
            return
        device.throttle(MOST_REDUCTIONS)
        padded = sum(self._partitions[name] for name in self._filled) * self.setting.world_size
        whole = padded * self._reduce_size
        name = f"reduced {len(self._sent)}"
        in_place = len(self._filled) == 1 and padded == self._parameters[self._filled[0]].numel
        if self._large is not None and self._size != self._reduce_size:  # in the bucket they are wide already
            device.hold("cast", self._parameters[self._filled[-1]].numel * self._reduce_size, REDUCED)
        if not in_place:
            device.hold(name, whole, REDUCED)
            device.copy(name, 2 * whole)
        device.send(name, "reduce-scatter", whole, WORLD, REDUCE, after="compute")
        if not self._knobs.overlaps:
            device.wait(name)
        self._keep_partitions(device)
        device.note_release(after=REDUCE)
        device.release(name)
        device.release("cast")
        if self._large is not None:
            device.release(self._large, after=REDUCE)
            self._large = None
        self._sent.append(name)
        self._filled.clear()

    def _keep_partitions(self, device: Device) -> None:
        """Of what was just scattered: they are copied where they stay, on the device."""

    def after_step_backward(self, device: Device) -> None:
        """Parameters are freed; then what is left goes, and a step's gradients are copied for the optimizer."""
        for gathered in self._gathers.values():
            device.release(gathered.name)
        for name in self._whole:
            device.release(f"whole {name}")
        self._gathers.clear()
        self._whole.clear()
        self._reduce(device)
        for name in self._sent:
            device.wait(name)
        self._sent.clear()
        if self._is_last:
            self._prepare_update(device)

    @property
    def _is_last(self) -> bool:
        """Whether the micro-batch is the step's last."""
        return self._micro_batch == self.setting.micro_batches

    def _prepare_update(self, device: Device) -> None:
        (own,) = self.updated
        device.hold("norm", NORM_BYTES * max(self._partitions.values()), GRADIENTS)
        device.release("norm")
        device.hold("flat gradients", own * 4, GRADIENTS)

    def after_optimizer(self, device: Device) -> None:
        """The copy of the gradients is gone; persistent parameters are gathered, whose partitions have changed."""
        self._micro_batch = 0
        device.release("flat gradients")
        persistent = [name for name in self._parameters if self._is_persistent(name)]
        if persistent and self.setting.world_size > 1:
            size = sum(self._partitions[name] for name in persistent) * self.setting.world_size * self._size
            device.send("persistent", "all-gather", size, WORLD, GATHER, after="compute")
            device.wait("persistent")


def _name(unit: Unit, parameter: Parameter) -> str:
    return f"{unit.index} {parameter.name}"


def _uses(units: Sequence[Unit]) -> list[list[str]]:
    """Parameters in the order they are used, use by use: forward, then backward.

    Embeddings come first; the last norm and the embedding once more, as the last layer, after the blocks.
    """
    root, *blocks = units
    first = [_name(root, parameter) for parameter in root.parameters if len(parameter.shape) > 1]
    last = [_name(root, parameter) for parameter in root.parameters]
    forward = [first, *([_name(unit, parameter) for parameter in unit.parameters] for unit in blocks), last]
    return [*forward, *reversed(forward)]
