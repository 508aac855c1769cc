"""Timetables of a pipeline: which stage each rank runs forward or backward with which micro-batch, in which order.

GPipe is "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (Huang et al. 2019,
arXiv:1811.06965), 1F1B and interleaved 1F1B are those of "Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM" (Narayanan et al. 2021, arXiv:2104.04473), as torch.distributed.pipelining carries them out. The
further ones, whose order torch alone knows, are breadth-first (Lamy-Poirier 2022, arXiv:2211.05953), zero-bubble and
its V-shaped form (Qi et al. 2023, arXiv:2401.10241), and DualPipeV, the V-shaped form of DualPipe (DeepSeek-AI 2024,
arXiv:2412.19437).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

GPIPE, ONE_F_ONE_B, INTERLEAVED = "gpipe", "1f1b", "interleaved_1f1b"
SCHEDULES = (GPIPE, ONE_F_ONE_B, INTERLEAVED)

LOOPED_BFS, ZERO_BUBBLE, ZERO_BUBBLE_V, DUAL_PIPE_V = (
    "looped_bfs",
    "interleaved_zero_bubble",
    "zbv_zero_bubble",
    "dualpipev",
)
ALL_SCHEDULES = (*SCHEDULES, LOOPED_BFS, ZERO_BUBBLE, ZERO_BUBBLE_V, DUAL_PIPE_V)
"""With those that only a mesh has."""

SINGLE_STAGE_SCHEDULES = (GPIPE, ONE_F_ONE_B)
"""One stage per rank."""

ALTERNATING_SCHEDULES = (ONE_F_ONE_B, INTERLEAVED, DUAL_PIPE_V)
"""In the middle of a step every forward pass is followed by a whole backward pass."""

V_SCHEDULES = (ZERO_BUBBLE_V, DUAL_PIPE_V)
"""Two stages per rank, the second ones in reverse order: the first rank has the first and the last stage."""

SPLIT_BACKWARD_SCHEDULES = (ZERO_BUBBLE, ZERO_BUBBLE_V, DUAL_PIPE_V)
"""Backward is split: gradients of a stage's inputs first, of its weights later."""

FORWARD, BACKWARD = "forward", "backward"
INPUT_BACKWARD, WEIGHT_BACKWARD = "backward of inputs", "backward of weights"
"""The two parts of a backward that is split."""


def repeats_recomputation(schedule: str | None, activation_checkpointing: str) -> bool:
    """Whether blocks are computed again more than once in a backward: where it is split, torch 2.13 does so for their
    inputs, then for each group of weights, and keeps all of it. What that needs is not predicted."""
    return schedule in SPLIT_BACKWARD_SCHEDULES and activation_checkpointing != "none"


class PipelineAction(NamedTuple):
    """What a rank computes next."""

    kind: str
    """forward, backward, or one of the two parts of a backward that is split."""
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class Timetable:
    """A schedule for so many ranks, stages and micro-batches."""

    schedule: str
    ranks: int
    virtual_stages: int
    """Stages per rank."""
    micro_batches: int
    first_stage_less_blocks: int = 0
    """Blocks that the first stage has less than others, since it has the embeddings as well."""
    last_stage_less_blocks: int = 0
    """The same of the last stage, which has the head over the vocabulary and the loss."""

    @property
    def num_stages(self) -> int:
        """Of one copy of the model."""
        return self.ranks * self.virtual_stages

    def split_blocks(self, num_blocks: int) -> list[range]:
        """The blocks of each stage, as many in each but for those that the first and last one have less.

        Blocks that are left over go to the stages in the middle first, then to the first one and to the last one.
        """
        less_blocks = [0] * self.num_stages
        less_blocks[0] += self.first_stage_less_blocks
        less_blocks[-1] += self.last_stage_less_blocks
        blocks_per_stage, num_left_over = divmod(num_blocks + sum(less_blocks), self.num_stages)
        stages_by_load = [*range(1, self.num_stages - 1), 0, self.num_stages - 1]
        counts = [
            blocks_per_stage + (stage in stages_by_load[:num_left_over]) - less_blocks[stage]
            for stage in range(self.num_stages)
        ]
        bounds = itertools.accumulate(counts, initial=0)
        return [range(start, end) for start, end in itertools.pairwise(bounds)]

    def find_stages_of_rank(self, rank: int) -> range:
        """The stages that run on a rank: stage s on rank s modulo `ranks`, or there and back again in a V."""
        if self.schedule in V_SCHEDULES:
            last_stage = self.num_stages - 1
            return range(rank, self.num_stages - rank, last_stage - 2 * rank)
        return range(rank, self.num_stages, self.ranks)

    def find_rank_of_stage(self, stage: int) -> int:
        """The rank that runs a stage."""
        if self.schedule in V_SCHEDULES:
            return min(stage, self.num_stages - 1 - stage)
        return stage % self.ranks

    @property
    def round_length(self) -> int:
        """Micro-batches that go through one of a rank's stages before it turns to the next: all, if it has only one."""
        return self.micro_batches // self._num_rounds

    @property
    def has_equal_rounds(self) -> bool:
        """Whether all micro-batches go through in rounds of that length, none left over: torch refuses others."""
        return self.micro_batches % self._num_rounds == 0

    @property
    def _num_rounds(self) -> int:
        return 1 if self.virtual_stages == 1 else max(1, self.micro_batches // self.ranks)

    def list_actions(self, rank: int) -> tuple[PipelineAction, ...]:
        """Everything a rank computes in a step, in its order."""
        return _list_actions(self, rank)

    def count_warm_up_forwards(self, rank: int) -> int:
        """Forward passes before the first backward."""
        if self.schedule == GPIPE:
            return self.micro_batches
        if self.schedule == ONE_F_ONE_B:
            return self.ranks - rank
        return (self.virtual_stages - 1) * self.round_length + 2 * (self.ranks - 1 - rank)

    def iterate_forward_actions(self, rank: int) -> Iterator[PipelineAction]:
        return self._iterate_rounds(FORWARD, self.find_stages_of_rank(rank))

    def iterate_backward_actions(self, rank: int) -> Iterator[PipelineAction]:
        return self._iterate_rounds(BACKWARD, self.find_stages_of_rank(rank)[::-1])

    def _iterate_rounds(self, kind: str, stages: range) -> Iterator[PipelineAction]:
        for start in range(0, self.micro_batches, self.round_length):
            for stage in stages:
                for micro_batch in range(start, start + self.round_length):
                    yield PipelineAction(kind, stage, micro_batch)


@functools.lru_cache(maxsize=128)
def _list_actions(timetable: Timetable, rank: int) -> tuple[PipelineAction, ...]:
    if timetable.schedule not in SCHEDULES:
        from bench.strategies.pipeline.torch_orders import list_torch_actions

        return list_torch_actions(timetable, rank)
    forward, backward = timetable.iterate_forward_actions(rank), timetable.iterate_backward_actions(rank)
    total_count = timetable.virtual_stages * timetable.micro_batches
    warm_up_count = min(total_count, timetable.count_warm_up_forwards(rank))
    actions = [next(forward) for _ in range(warm_up_count)]
    for _ in range(total_count - warm_up_count):
        # Where one forward goes ahead of each backward, the steady state of 1F1B begins with the backward.
        pair = [next(backward), next(forward)] if timetable.schedule == ONE_F_ONE_B else [next(forward), next(backward)]
        actions += pair
    return (*actions, *backward)


def compute_bubble_share(timetable: Timetable) -> float:
    """Share of a step in which a rank computes nothing, where all stages take the same time and sending takes none.

    (P - 1) / (v m) of the time that is computed (Narayanan et al. 2021, section 2.2), as a share of the whole: with one
    stage per rank (P - 1) / (m + P - 1).
    """
    idle_ratio = (timetable.ranks - 1) / (timetable.virtual_stages * timetable.micro_batches)
    return idle_ratio / (1 + idle_ratio)
