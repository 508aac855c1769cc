"""Naive ("vertical") model parallelism: layers on different ranks, of which one computes while all others wait."""

from __future__ import annotations

from dataclasses import dataclass

from bench.strategies.pipeline_schedule import GPIPE, Timetable
from bench.strategies.staged import StagedStrategy, beside


@dataclass(frozen=True)
class NaivePipeline(StagedStrategy):
    """A pipeline whose share of the batch goes through the stages in one piece: P stages are idle (P - 1) / P of the
    step."""

    @property
    def timetable(self) -> Timetable:
        """One micro-batch."""
        return Timetable(GPIPE, self.ranks, 1, 1)

    def effective(self, world_size: int) -> str:
        """Its name, and how copies of the model are kept together."""
        copies = beside(self.data_parallel)
        return f"{self.name}/{copies}" if copies else self.name
