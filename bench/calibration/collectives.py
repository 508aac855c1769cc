"""Time collectives among real processes: all-gather, reduce-scatter and all-reduce, over message sizes and groups.

As nccl-tests does (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md), several collectives in a row
are timed together where one is short, and a repetition takes as long as its slowest rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bench.calibration.sample import COLLECTIVE, Sample
from bench.errors import UsageError
from bench.simulate.network import ALL_GATHER, ALL_REDUCE, COLLECTIVES, REDUCE_SCATTER

SMALLEST_BYTES = 2**10
LARGEST_BYTES = {"cpu": 2**26, "cuda": 2**30}
GROWTH = 4
"""From one message size to the next."""

REFERENCE_BYTES = 2**20
"""Of the all-reduce that is timed once more at the end, to see whether the machine is still the same."""

STRETCH_S = 4e-3
"""Collectives in a row are timed together until they take so long."""

BUDGET_S, QUICK_BUDGET_S = 0.5, 0.06
"""Time for the repetitions of one collective at one size."""

REPETITIONS, QUICK_REPETITIONS = (8, 100), (5, 20)
"""At least and at most."""

LARGEST_SUM = 1e30
"""To which sums of sums may grow within a stretch, in fp32."""

HEAD_START_S = 1e-4
"""For each launch: by so much the host runs ahead of a GPU, so that it does not wait for launches."""

GPU_HZ = 2e9
"""No slower does a GPU count the cycles it is told to wait: more only make the head start shorter."""


@dataclass(frozen=True)
class Shape:
    """One way to divide the ranks into groups that communicate at the same time."""

    words: str
    groups: tuple[tuple[int, ...], ...]
    ranks_per_node: int
    """Of each group."""

    @property
    def ranks(self) -> int:
        """Of each group."""
        return len(self.groups[0])


def group_shapes(ranks: int, ranks_per_node: int) -> list[Shape]:
    """The groups that strategies communicate in: a node, everybody, one rank of each node, half a node."""
    nodes, everybody = ranks // ranks_per_node, range(ranks)
    shapes = []
    if nodes > 1:
        shapes.append(Shape("all ranks", (tuple(everybody),), ranks_per_node))
    if nodes > 1 and ranks_per_node > 1:
        shapes.append(Shape("one rank per node", (tuple(everybody[::ranks_per_node]),), 1))
    if ranks_per_node > 1:
        shapes.append(Shape("the ranks of a node", _divided(ranks, ranks_per_node), ranks_per_node))
    if ranks_per_node >= 4 and ranks_per_node % 2 == 0:
        half = ranks_per_node // 2
        shapes.append(Shape("half the ranks of a node", _divided(ranks, half), half))
    return shapes


def _divided(ranks: int, each: int) -> tuple[tuple[int, ...], ...]:
    """Neighbours, `each` to a group."""
    return tuple(tuple(range(first, first + each)) for first in range(0, ranks, each))


def message_sizes(device: str, *, quick: bool) -> list[int]:
    """Bytes of the whole message, from a kibibyte up."""
    largest = LARGEST_BYTES[device] // (GROWTH if quick else 1)
    steps = round(math.log(largest / SMALLEST_BYTES, GROWTH))
    return [SMALLEST_BYTES * GROWTH**step for step in range(0, steps + 1, 2 if quick else 1)]


def measure_collectives(
    device: torch.device, host: str, *, quick: bool, progress: Callable[[str], None]
) -> list[Sample]:
    """Time every collective in every group shape at every size; all ranks call this alike, and all get the samples.

    Parameters
    ----------
    device: torch.device
        The rank's own, which the default process group communicates from.
    host: str
        Name of the machine the rank is on: ranks on one machine are a node.
    quick: bool
        Fewer sizes and repetitions.
    progress: callable
        Told in a few words what is timed next.

    Raises
    ------
    UsageError
        If nodes have different numbers of ranks, or ranks are not numbered node by node.
    """
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, host)
    shapes = group_shapes(len(hosts), ranks_per_node(hosts))
    largest = max(message_sizes(device.type, quick=quick), default=0)
    bench = _Bench(device, largest, quick)
    samples = []
    for shape in shapes:
        progress(f"collectives of {shape.ranks} ranks, {shape.words}")
        group = bench.group(shape)
        for kind in COLLECTIVES:
            samples += [bench.sample(kind, size, shape, group) for size in message_sizes(device.type, quick=quick)]
        if shape is shapes[0]:
            first = group
    if shapes:
        samples.append(bench.sample(ALL_REDUCE, REFERENCE_BYTES, shapes[0], first))
    return samples


def ranks_per_node(hosts: list[str]) -> int:
    """Ranks on each machine, for the machine that each rank is on.

    Raises
    ------
    UsageError
        If they are not alike, node by node.
    """
    each = hosts.count(hosts[0])
    if (
        hosts != [hosts[first] for first in range(0, len(hosts), each) for _ in range(each)]
        or len(set(hosts)) != len(hosts) // each
    ):
        raise UsageError(
            f"ranks are on {', '.join(hosts)}: start equally many on every node, numbered node by node "
            "(srun --ntasks-per-node=N, torchrun --nproc-per-node=N)."
        )
    return each


class _Bench:
    """Buffers of one rank, and how collectives on them are timed."""

    def __init__(self, device: torch.device, largest_bytes: int, quick: bool) -> None:
        self._device = device
        self._whole = torch.randn(largest_bytes // 4, device=device)
        self._fresh = self._whole.clone()
        self._part = torch.randn(largest_bytes // 8, device=device)
        self._budget_s = QUICK_BUDGET_S if quick else BUDGET_S
        self._repetitions = QUICK_REPETITIONS if quick else REPETITIONS

    def group(self, shape: Shape) -> dist.ProcessGroup | None:
        """This rank's group of a shape, None if it is in none. All ranks open all groups, in one order."""
        mine = None
        for members in shape.groups:
            group = dist.new_group(list(members))
            if dist.get_rank() in members:
                mine = group
        return mine

    def sample(self, kind: str, size_bytes: int, shape: Shape, group: dist.ProcessGroup | None) -> Sample:
        """Time one collective; the time of each repetition is that of its slowest rank."""
        elements = max(1, size_bytes // 4 // shape.ranks) * shape.ranks
        whole, part = self._whole[:elements], self._part[: elements // shape.ranks]
        call = _call(kind, whole, part, group)
        at_most = int(math.log(LARGEST_SUM) / math.log(shape.ranks)) if kind == ALL_REDUCE else 1000

        def stretch(calls: int) -> float:
            if kind == ALL_REDUCE:
                whole.copy_(self._fresh[:elements])
            return self._timed(call, calls)

        for _ in range(2):
            stretch(1)
        pilot = self._slowest([stretch(1) for _ in range(3)])
        once = min(pilot)
        calls = max(1, min(at_most, math.ceil(STRETCH_S / once)))
        least, most = self._repetitions
        repetitions = max(least, min(most, int(self._budget_s / (calls * once))))
        seconds = self._slowest([stretch(calls) / calls for _ in range(repetitions)])
        return Sample(
            kind=COLLECTIVE,
            name=kind,
            format="bytes",
            dims=(elements,),
            flops=0.0,
            bytes_moved=4.0 * elements,
            seconds=tuple(seconds),
            ranks=shape.ranks,
            ranks_per_node=shape.ranks_per_node,
        )

    def _timed(self, call: Callable[[], object], calls: int) -> float:
        """Seconds of some calls in a row on this rank."""
        if self._device.type == "cpu":
            start = time.perf_counter()
            for _ in range(calls):
                call()
            return time.perf_counter() - start
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(calls * HEAD_START_S * GPU_HZ))
        call()  # waits for the rank that woke last
        before.record()
        for _ in range(calls):
            call()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) / 1000

    def _slowest(self, seconds: list[float]) -> list[float]:
        """Times of all ranks to those of the slowest, which nobody of those outside a group is."""
        times = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        return [float(each) for each in times]


def _call(kind: str, whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup | None) -> Callable[[], object]:
    """One collective on these tensors; nothing, for a rank outside the group."""
    if group is None:
        return lambda: None
    # Renamed in torch 2.13.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return {
        ALL_GATHER: lambda: gather(whole, part, group=group),
        REDUCE_SCATTER: lambda: scatter(part, whole, group=group),
        ALL_REDUCE: lambda: dist.all_reduce(whole, group=group),
    }[kind]
