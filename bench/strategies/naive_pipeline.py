"""Naive ("vertical") model parallelism: layers on different ranks, of which one computes while all others wait."""

from __future__ import annotations

from dataclasses import dataclass

from bench.core.presentation import Presentation, TrainingTerm
from bench.strategies.pipeline.schedule import GPIPE, Timetable
from bench.strategies.pipeline.staged import PipelinedStrategy, format_data_parallel_suffix


@dataclass(frozen=True)
class NaivePipelineStrategy(PipelinedStrategy):
    """A pipeline whose share of the batch goes through the stages in one piece: P stages are idle (P - 1) / P of the
    step."""

    presentation = Presentation(
        label="Naive pipeline",
        position=110,
        colour="#878787",
        kinds={"+ddp": ("+ DDP", "#929292"), "+fsdp": ("+ FSDP2", "#676767")},
        markers={"": "P", "+ddp": "^", "+fsdp": "p"},
    )
    training_terms = (
        TrainingTerm(
            "naive (vertical) model parallelism",
            ("strategy=naive_pipeline",),
            "to see idle GPUs; a pipeline is faster",
            divides=("layers",),
        ),
    )

    @property
    def timetable(self) -> Timetable:
        return Timetable(GPIPE, self.ranks_per_copy, 1, 1)

    def describe_effective_strategy(self, world_size: int) -> str:
        """Its name, and how copies of the model are kept together."""
        data_parallel_suffix = format_data_parallel_suffix(self.data_parallel)
        return f"{self.name}/{data_parallel_suffix}" if data_parallel_suffix else self.name
