"""Timetables of a pipeline: which stage each rank runs forward or backward with which micro-batch, in which order.

GPipe is "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (Huang et al. 2019,
arXiv:1811.06965), 1F1B and interleaved 1F1B are those of "Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM" (Narayanan et al. 2021, arXiv:2104.04473), as torch.distributed.pipelining carries them out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

GPIPE, ONE_F_ONE_B, INTERLEAVED = "gpipe", "1f1b", "interleaved_1f1b"
SCHEDULES = (GPIPE, ONE_F_ONE_B, INTERLEAVED)

FORWARD, BACKWARD = "forward", "backward"


class Action(NamedTuple):
    """What a rank computes next."""

    kind: str
    """forward or backward."""
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class Timetable:
    """A schedule for so many ranks, stages and micro-batches."""

    schedule: str
    ranks: int
    virtual_stages: int
    """Stages per rank: stage s runs on rank s modulo `ranks`."""
    micro_batches: int

    @property
    def num_stages(self) -> int:
        """Of one copy of the model."""
        return self.ranks * self.virtual_stages

    def stages_of(self, rank: int) -> range:
        """The stages that run on a rank."""
        return range(rank, self.num_stages, self.ranks)

    @property
    def round_length(self) -> int:
        """Micro-batches that go through one of a rank's stages before it turns to the next: all, if it has only one."""
        return self.micro_batches // self._rounds

    @property
    def has_equal_rounds(self) -> bool:
        """Whether all micro-batches go through in rounds of that length, none left over: torch refuses others."""
        return self.micro_batches % self._rounds == 0

    @property
    def _rounds(self) -> int:
        return 1 if self.virtual_stages == 1 else max(1, self.micro_batches // self.ranks)

    def actions(self, rank: int) -> list[Action]:
        """Everything a rank computes in a step, in its order."""
        forward, backward = self._forward(rank), self._backward(rank)
        count = self.virtual_stages * self.micro_batches
        ahead = min(count, self.warm_up(rank))
        found = [next(forward) for _ in range(ahead)]
        for _ in range(count - ahead):
            # Where one forward goes ahead of each backward, the steady state of 1F1B begins with the backward.
            pair = [next(backward), next(forward)] if self.schedule == ONE_F_ONE_B else [next(forward), next(backward)]
            found += pair
        return found + list(backward)

    def warm_up(self, rank: int) -> int:
        """Forward passes before the first backward."""
        if self.schedule == GPIPE:
            return self.micro_batches
        if self.schedule == ONE_F_ONE_B:
            return self.ranks - rank
        return (self.virtual_stages - 1) * self.round_length + 2 * (self.ranks - 1 - rank)

    def _forward(self, rank: int) -> Iterator[Action]:
        return self._in_rounds(FORWARD, self.stages_of(rank))

    def _backward(self, rank: int) -> Iterator[Action]:
        return self._in_rounds(BACKWARD, self.stages_of(rank)[::-1])

    def _in_rounds(self, kind: str, stages: range) -> Iterator[Action]:
        for start in range(0, self.micro_batches, self.round_length):
            for stage in stages:
                for micro_batch in range(start, start + self.round_length):
                    yield Action(kind, stage, micro_batch)


def bubble_share(timetable: Timetable) -> float:
    """Share of a step in which a rank computes nothing, where all stages take the same time and sending takes none.

    (P - 1) / (v m) of the time that is computed (Narayanan et al. 2021, section 2.2), as a share of the whole: with one
    stage per rank (P - 1) / (m + P - 1).
    """
    idle = (timetable.ranks - 1) / (timetable.virtual_stages * timetable.micro_batches)
    return idle / (1 + idle)
