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

from bench.optimizers import UpdatedTensor
from bench.strategies.deepspeed.stages_0_to_2 import name_parameter_gradient
from bench.strategies.plan_inputs import ParameterSpec, PlanInputs, ShardingUnit
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
    StepPlan,
    allocate_optimizer_state,
)

MAX_UNFINISHED_REDUCTIONS = 3
"""Reductions the processor lets be unfinished before it starts another one (``max_param_reduce_events``, and one)."""

NORM_ITEMSIZE = 8
"""Per element of a gradient, while DeepSpeed takes its norm: in fp64, one parameter's after the other."""


@dataclass(frozen=True)
class Stage3Knobs:
    """Numbers of elements, as in the strategy, and whether gradients are reduced beside the computation."""

    bucket_numel: int
    prefetch_numel: int
    persistence_threshold: int
    max_live_numel: int
    max_reuse_numel: int
    sub_group_numel: int
    overlaps_reduction: bool


@dataclass
class _PendingAllGather:
    """Parameters that were asked for together: they arrive in one buffer, and are copied out of it together."""

    name: str
    waiting_parameters: set[str] = field(default_factory=set)
    """Those whose first use is still to come: the buffer stays until then."""


class DeepSpeedStage3Plan(StepPlan):
    """What rank 0 holds: its partitions, persistent parameters, and what is gathered.

    Gradients go into a buffer of `bucket_numel` elements, which is there all the time; when it is full, partitions are
    put one behind the other in a further one, reduced and scattered. A rank's partitions of all gradients lie in a
    tensor of their own, in fp32, which is there all the time, too, and is copied for the optimizer, once a step, one
    group of partitions after the other.
    """

    updates_tensors_apart = True

    def __init__(self, inputs: PlanInputs, knobs: Stage3Knobs) -> None:
        super().__init__(inputs)
        self._knobs = knobs
        self._compute_itemsize = inputs.precision.compute_itemsize
        self._reduce_itemsize = inputs.reduce_itemsize
        self._parameters = {
            _build_parameter_key(unit, parameter): parameter for unit in inputs.units for parameter in unit.parameters
        }
        self._partition_numels = {
            name: self._compute_partition_numel(parameter) for name, parameter in self._parameters.items()
        }
        self._parameter_uses = _list_parameter_uses(inputs.units)
        self._numel_per_use = [sum(self._parameters[name].numel for name in use) for use in self._parameter_uses]
        self._use_index = 0
        self._prefetch_queue: deque[tuple[int, str]] = deque()
        self._unsharded_parameters: set[str] = set()
        self._pending_all_gathers: dict[str, _PendingAllGather] = {}
        self._all_gather_count = 0
        self._bucket_names: list[str] = []
        self._pending_events: list[str] = []

    def _compute_partition_numel(self, parameter: ParameterSpec) -> int:
        return -(-parameter.numel // self.inputs.world_size)

    def _is_persistent(self, name: str) -> bool:
        return self._parameters[name].numel < self._knobs.persistence_threshold

    @property
    def norm_groups(self) -> Sequence[str]:
        """All ranks, each with its partition of the gradients."""
        return (WORLD_GROUP,)

    @property
    def updated_tensors(self) -> Sequence[UpdatedTensor]:
        """Partitions of what is trained, as tensors of so many elements that one is full."""
        group_numels = [0]
        for parameter in self.inputs.trained_parameters:
            if group_numels[-1] >= self._knobs.sub_group_numel:
                group_numels.append(0)
            group_numels[-1] += self._compute_partition_numel(parameter)
        return [UpdatedTensor((numel,)) for numel in group_numels]

    def allocate_persistent_state(self, device: PlanDevice) -> None:
        """Partitions, a copy in fp32 to update, states, gradients' partitions, the bucket and scales."""
        own_numel = sum(self.updated_numels)
        stored_numel = sum(self._partition_numels.values())
        stored_bytes = stored_numel * self._compute_itemsize + self.inputs.scale_bytes
        device.allocate("parameters", stored_bytes + own_numel * 4, PARAMETER_MEMORY)
        allocate_optimizer_state(device, self.inputs, self.updated_tensors)
        device.allocate("gradient partitions", own_numel * 4, GRADIENT_MEMORY)
        self._allocate_buffers(device)

    def _allocate_buffers(self, device: PlanDevice) -> None:
        """The bucket, and what is always whole."""
        device.allocate("bucket", self._knobs.bucket_numel * self._reduce_itemsize, REDUCTION_MEMORY)
        persistent_numel = sum(self._parameters[name].numel for name in self._parameters if self._is_persistent(name))
        device.allocate("persistent", persistent_numel * self._compute_itemsize, PARAMETER_MEMORY)

    def begin_micro_batch(self, device: PlanDevice, *, number: int, synchronize: bool) -> None:
        """From the start of the order again."""
        super().begin_micro_batch(device, number=number, synchronize=synchronize)
        self._use_index = 0
        self._prefetch_queue = deque((index, name) for index, use in enumerate(self._parameter_uses) for name in use)

    def before_forward(self, device: PlanDevice, unit: ShardingUnit) -> None:
        """Gather what the unit needs and is not there yet, and what follows; first what follows the model's beginning,
        a module that has no parameters of its own."""
        if unit.is_root:
            self._prefetch_parameters(device)
        self._fetch_parameters(device)

    def after_forward(self, device: PlanDevice, unit: ShardingUnit) -> None:
        """Free what is not used again soon. The last layer and the last norm follow the last block."""
        if unit.is_root:
            return
        self._free_used_parameters(device)
        if unit is self.inputs.units[-1]:
            self._fetch_parameters(device)
            self._free_used_parameters(device)

    def before_backward(self, device: PlanDevice, unit: ShardingUnit) -> None:
        self._fetch_parameters(device)

    def after_backward(self, device: PlanDevice, unit: ShardingUnit) -> None:
        """As in forward; the embedding's gradient comes last of all."""
        if unit.is_root:
            return
        self._free_used_parameters(device)
        if unit.index == 0:
            self._fetch_parameters(device)

    def _fetch_parameters(self, device: PlanDevice) -> None:
        if self._use_index >= len(self._parameter_uses):
            return
        device.run_hooks()
        used_names = self._parameter_uses[self._use_index]
        self._start_all_gather(device, [name for name in used_names if self._needs_all_gather(name)])
        for name in used_names:
            self._wait_for_all_gather(device, name)
        while self._prefetch_queue and self._prefetch_queue[0][0] <= self._use_index:
            self._prefetch_queue.popleft()
        self._prefetch_parameters(device)
        self._use_index += 1

    def _prefetch_parameters(self, device: PlanDevice) -> None:
        """What is used next, until as many elements are on their way as may be."""
        prefetched_names: list[str] = []
        max_prefetched_numel = min(self._knobs.max_live_numel - self._count_live_numel(), self._knobs.prefetch_numel)
        while (
            self._prefetch_queue
            and sum(self._parameters[name].numel for name in prefetched_names) < max_prefetched_numel
        ):
            _, name = self._prefetch_queue.popleft()
            if self._needs_all_gather(name) and name not in prefetched_names:
                prefetched_names.append(name)
        self._start_all_gather(device, prefetched_names)

    def _needs_all_gather(self, name: str) -> bool:
        return (
            not self._is_persistent(name)
            and name not in self._unsharded_parameters
            and name not in self._pending_all_gathers
        )

    def _count_live_numel(self) -> int:
        return sum(self._parameters[name].numel for name in (*self._unsharded_parameters, *self._pending_all_gathers))

    def _start_all_gather(self, device: PlanDevice, names: Sequence[str]) -> None:
        if not names or self.inputs.world_size == 1:
            self._unsharded_parameters.update(names)
            return
        self._all_gather_count += 1
        all_gather = _PendingAllGather(f"gathered {self._all_gather_count}", set(names))
        all_gather_bytes = (
            sum(self._partition_numels[name] for name in names) * self.inputs.world_size * self._compute_itemsize
        )
        device.allocate(all_gather.name, all_gather_bytes, ALL_GATHER_MEMORY)
        device.run_collective(all_gather.name, "all-gather", all_gather_bytes, WORLD_GROUP, ALL_GATHER_STREAM)
        self._pending_all_gathers |= dict.fromkeys(names, all_gather)

    def _wait_for_all_gather(self, device: PlanDevice, name: str) -> None:
        """Wait for all that came with a parameter, and copy it out: one alone is used where it arrived."""
        all_gather = self._pending_all_gathers.pop(name, None)
        if all_gather is None:
            return
        if name not in self._unsharded_parameters:
            device.wait_for_event(all_gather.name)
            is_single = len(all_gather.waiting_parameters) == 1
            for waiting_name in all_gather.waiting_parameters:
                self._unsharded_parameters.add(waiting_name)
                if not is_single:
                    device.allocate(
                        f"whole {waiting_name}",
                        self._parameters[waiting_name].numel * self._compute_itemsize,
                        ALL_GATHER_MEMORY,
                    )
            if is_single:
                device.free(all_gather.name)
                device.allocate(
                    f"whole {name}",
                    self._partition_numels[name] * self.inputs.world_size * self._compute_itemsize,
                    ALL_GATHER_MEMORY,
                )
            else:
                device.copy_within_device(
                    "copy out",
                    2
                    * sum(self._parameters[waiting_name].numel for waiting_name in all_gather.waiting_parameters)
                    * self._compute_itemsize,
                )
        all_gather.waiting_parameters.discard(name)
        if not all_gather.waiting_parameters:
            device.free(all_gather.name)

    def _free_used_parameters(self, device: PlanDevice) -> None:
        """What was used last is freed, unless it is used again within so many elements."""
        traversed_numel, needed_soon = 0, set[str]()
        for index in range(self._use_index, len(self._parameter_uses)):
            if traversed_numel >= self._knobs.max_reuse_numel:
                break
            needed_soon.update(self._parameter_uses[index])
            traversed_numel += self._numel_per_use[index]
        for name in self._parameter_uses[self._use_index - 1]:
            if name in self._unsharded_parameters and name not in needed_soon:
                self._unsharded_parameters.discard(name)
                device.free(f"whole {name}")

    def compute_gradient_bytes(self, parameter: ParameterSpec) -> int:
        """In the format that is computed in."""
        return parameter.numel * self._compute_itemsize

    def choose_gradient_handling(self, unit: ShardingUnit) -> str:
        """Each is copied into the bucket as it is complete."""
        return GRADIENTS_HANDLED_ONE_BY_ONE

    def after_gradient(self, device: PlanDevice, unit: ShardingUnit, parameter: ParameterSpec) -> None:
        """Into the bucket, which is reduced before if there is no room; what is larger waits beside it."""
        filled_numel = sum(self._parameters[name].numel for name in self._bucket_names)
        if self._bucket_names and filled_numel + parameter.numel > self._knobs.bucket_numel:
            self._reduce_gradients(device)
            filled_numel = 0
        self._bucket_names.append(_build_parameter_key(unit, parameter))
        if filled_numel + parameter.numel > self._knobs.bucket_numel:
            device.allocate(
                name_parameter_gradient(unit, parameter), self.compute_gradient_bytes(parameter), GRADIENT_MEMORY
            )
            self._oversized_gradient = name_parameter_gradient(unit, parameter)
        else:
            device.copy_within_device("into bucket", parameter.numel * (self._compute_itemsize + self._reduce_itemsize))

    _oversized_gradient: str | None = None

    def _reduce_gradients(self, device: PlanDevice) -> None:
        """Put partitions in order in a buffer, reduce and scatter it, copy this rank's where they stay.

        All of it is allocated for the stream that reduces, which uses it again at once.
        """
        if not self._bucket_names:
            return
        device.limit_all_gathers(MAX_UNFINISHED_REDUCTIONS)
        padded_numel = sum(self._partition_numels[name] for name in self._bucket_names) * self.inputs.world_size
        reduce_bytes = padded_numel * self._reduce_itemsize
        name = f"reduced {len(self._pending_events)}"
        is_in_place = len(self._bucket_names) == 1 and padded_numel == self._parameters[self._bucket_names[0]].numel
        if (
            self._oversized_gradient is not None and self._compute_itemsize != self._reduce_itemsize
        ):  # in the bucket they are wide already
            device.allocate(
                "cast", self._parameters[self._bucket_names[-1]].numel * self._reduce_itemsize, REDUCTION_MEMORY
            )
        if not is_in_place:
            device.allocate(name, reduce_bytes, REDUCTION_MEMORY)
            device.copy_within_device(name, 2 * reduce_bytes)
        device.run_collective(name, "reduce-scatter", reduce_bytes, WORLD_GROUP, REDUCE_STREAM, after="compute")
        if not self._knobs.overlaps_reduction:
            device.wait_for_event(name)
        self._keep_gradient_partitions(device)
        device.note_late_free(after=REDUCE_STREAM)
        device.free(name)
        device.free("cast")
        if self._oversized_gradient is not None:
            device.free(self._oversized_gradient, after=REDUCE_STREAM)
            self._oversized_gradient = None
        self._pending_events.append(name)
        self._bucket_names.clear()

    def _keep_gradient_partitions(self, device: PlanDevice) -> None:
        """Of what was just scattered: they are copied where they stay, on the device."""

    def after_micro_batch_backward(self, device: PlanDevice) -> None:
        """Parameters are freed; then what is left goes, and a step's gradients are copied for the optimizer."""
        for all_gather in self._pending_all_gathers.values():
            device.free(all_gather.name)
        for name in self._unsharded_parameters:
            device.free(f"whole {name}")
        self._pending_all_gathers.clear()
        self._unsharded_parameters.clear()
        self._reduce_gradients(device)
        for name in self._pending_events:
            device.wait_for_event(name)
        self._pending_events.clear()
        if self._is_last:
            self._prepare_update(device)

    @property
    def _is_last(self) -> bool:
        """Whether the micro-batch is the step's last."""
        return self._micro_batch == self.inputs.num_micro_batches - 1

    def _prepare_update(self, device: PlanDevice) -> None:
        device.allocate("norm", NORM_ITEMSIZE * max(self._partition_numels.values()), GRADIENT_MEMORY)
        device.free("norm")
        device.allocate("flat gradients", max(self.updated_numels) * 4, GRADIENT_MEMORY)

    def after_optimizer_step(self, device: PlanDevice) -> None:
        """The copy of the gradients is gone; persistent parameters are gathered, whose partitions have changed."""
        device.free("flat gradients")
        persistent_names = [name for name in self._parameters if self._is_persistent(name)]
        if persistent_names and self.inputs.world_size > 1:
            all_gather_bytes = (
                sum(self._partition_numels[name] for name in persistent_names)
                * self.inputs.world_size
                * self._compute_itemsize
            )
            device.run_collective(
                "persistent", "all-gather", all_gather_bytes, WORLD_GROUP, ALL_GATHER_STREAM, after="compute"
            )
            device.wait_for_event("persistent")


def _build_parameter_key(unit: ShardingUnit, parameter: ParameterSpec) -> str:
    return f"{unit.index} {parameter.name}"


def _list_parameter_uses(units: Sequence[ShardingUnit]) -> list[list[str]]:
    """Parameters in the order they are used, use by use: forward, then backward.

    Embeddings come first; the last norm and the embedding once more, as the last layer, after the blocks.
    """
    root, *blocks = units
    first_use = [_build_parameter_key(root, parameter) for parameter in root.parameters if len(parameter.shape) > 1]
    last_use = [_build_parameter_key(root, parameter) for parameter in root.parameters]
    forward_uses = [
        first_use,
        *([_build_parameter_key(unit, parameter) for parameter in unit.parameters] for unit in blocks),
        last_use,
    ]
    return [*forward_uses, *reversed(forward_uses)]
