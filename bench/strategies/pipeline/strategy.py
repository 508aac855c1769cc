"""Pipeline parallelism: stages of layers on different ranks, kept busy by micro-batches (torch's pipelining)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated

from bench.core.presentation import (
    GPU_MICRO_BATCHES_PLACEHOLDER,
    GPUS_PLACEHOLDER,
    NODE_MICRO_BATCHES_PLACEHOLDER,
    NODES_PLACEHOLDER,
    Presentation,
    TrainingOption,
    TrainingTerm,
)
from bench.core.typed_config import OneOf, Within
from bench.strategies.base import Strategy
from bench.strategies.pipeline.schedule import SCHEDULES, Timetable
from bench.strategies.pipeline.schedule_checks import check_schedule, choose_virtual_stages
from bench.strategies.pipeline.staged import PipelinedStrategy, format_data_parallel_suffix


@dataclass(frozen=True)
class PipelineStrategy(PipelinedStrategy):
    """A pipeline's share of the batch is split into micro-batches, which follow each other through the stages.

    An idle share of a step remains, the bubble: the more micro-batches, the smaller.
    """

    takes_float8 = True

    presentation = Presentation(
        label="Pipeline",
        position=100,
        kinds={  # a hue per schedule, lighter with DDP among the copies, darker with FSDP
            "gpipe": ("GPipe", "#983eb7"),
            "gpipe+ddp": ("GPipe + DDP", "#b07cc6"),
            "gpipe+fsdp": ("GPipe + FSDP2", "#8a3bb5"),
            "1f1b": ("1F1B", "#cb0060"),
            "1f1b+ddp": ("1F1B + DDP", "#d96a9e"),
            "1f1b+fsdp": ("1F1B + FSDP2", "#b8326f"),
            "interleaved_1f1b": ("interleaved 1F1B", "#1b7837"),
            "interleaved_1f1b+ddp": ("interleaved 1F1B + DDP", "#57a16f"),
            "interleaved_1f1b+fsdp": ("interleaved 1F1B + FSDP2", "#2d7d46"),
        },
        markers={
            "gpipe": "o",
            "gpipe+ddp": "v",
            "gpipe+fsdp": "s",
            "1f1b": "^",
            "1f1b+ddp": "P",
            "1f1b+fsdp": "D",
            "interleaved_1f1b": "p",
            "interleaved_1f1b+ddp": ">",
            "interleaved_1f1b+fsdp": "h",
        },
    )
    training_terms = (
        TrainingTerm(
            "pipeline parallelism",
            ("strategy=pipeline",),
            "a copy does not fit, links are slow, every layer fits",
            divides=("layers",),
        ),
    )
    training_options = (
        TrainingOption(
            "pipeline parallelism",
            {
                "strategy": "pipeline",
                "strategy.stages": GPUS_PLACEHOLDER,
                "strategy.micro_batches": GPU_MICRO_BATCHES_PLACEHOLDER,
            },
            "sends activations only; idle at the start and end of a step; a layer must fit on one GPU",
            leaves={"shard within the node": 4, "pipeline within the node": 1},
        ),
        TrainingOption(
            "pipeline parallelism, a stage per node",
            {
                "strategy": "pipeline",
                "strategy.stages": NODES_PLACEHOLDER,
                "strategy.micro_batches": NODE_MICRO_BATCHES_PLACEHOLDER,
            },
            "sends activations only between nodes; idle at the start and end of a step",
            leaves={"shard over all nodes": 5, "keep traffic within nodes": 2},
        ),
    )

    micro_batches: Annotated[int | None, Within(1, 1024)]
    """Parts that a pipeline's share of the batch (stages x batch_size_per_gpu sequences) is split into. null: as many
    as ranks in the pipeline, each of batch_size_per_gpu sequences."""
    schedule: Annotated[str, OneOf(*SCHEDULES)]
    """gpipe (all forward, then all backward), 1f1b (one forward, one backward) or interleaved_1f1b."""
    virtual_stages: Annotated[int | None, Within(1, 512)]
    """Stages per rank. null: 2 for interleaved_1f1b, else 1."""
    first_stage_less_blocks: Annotated[int, Within(0, 512)]
    """Blocks that the first stage has less than others, for its embeddings."""
    last_stage_less_blocks: Annotated[int, Within(0, 512)]
    """Blocks that the last stage has less than others, for its head over the vocabulary."""

    def resolve(self, world_size: int, ranks_per_node: int, *, accumulates: bool) -> Strategy:
        """As every strategy with stages, and micro-batches and virtual stages as numbers."""
        virtual_stages = choose_virtual_stages(self.schedule) if self.virtual_stages is None else self.virtual_stages
        stages = self.parse_ranks_per_copy(world_size, ranks_per_node)
        micro_batches = stages if self.micro_batches is None else self.micro_batches
        strategy = dataclasses.replace(self, virtual_stages=virtual_stages, micro_batches=micro_batches)
        return super(PipelineStrategy, strategy).resolve(world_size, ranks_per_node, accumulates=accumulates)

    @property
    def timetable(self) -> Timetable:
        assert self.micro_batches is not None
        assert self.virtual_stages is not None
        return Timetable(
            self.schedule,
            self.ranks_per_copy,
            self.virtual_stages,
            self.micro_batches,
            self.first_stage_less_blocks,
            self.last_stage_less_blocks,
        )

    def check(self, world_size: int) -> None:
        """What the schedules can be asked for."""
        check_schedule(self.timetable)

    def describe_effective_strategy(self, world_size: int) -> str:
        """The schedule, and how copies of the model are kept together."""
        return f"{self.name}/{self.schedule}{format_data_parallel_suffix(self.data_parallel)}"
