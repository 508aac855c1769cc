"""What each part of an undivided model costs: seconds of its kernels, and what it keeps."""

from __future__ import annotations

from dataclasses import dataclass

from bench.config.run_config import RunConfig
from bench.prediction.cost import rank_speed
from bench.prediction.cost.rank_groups import list_layer_groups
from bench.prediction.predictor import build_segments
from bench.prediction.run_inputs import build_trace_key
from bench.prediction.simulation.parameter_layout import build_parameter_layout
from bench.prediction.trace.chunks import expand_to_full_depth
from bench.prediction.trace.trace import LOSS_PLACE


@dataclass(frozen=True)
class SegmentCosts:
    """Of one pass through a block, or through what is outside the blocks."""

    seconds: float
    """Of its kernels."""
    kept_bytes: float
    """That are there when it is over, beyond those at its beginning."""
    is_block_forward: bool


def list_segment_costs(config: RunConfig, batch_size: int) -> list[SegmentCosts]:
    """Of every pass of a run's micro-batches with so many sequences, at the model's true depth."""
    key = build_trace_key(config)
    segments = build_segments(key, batch_size, rank_speed.build_hashable_hardware(config), list_layer_groups(config))
    costs = {
        id(segment): SegmentCosts(
            sum(chunk.seconds for chunk in segment.chunks),
            sum(chunk.lasting_net_bytes for chunk in segment.chunks),
            segment.phase == "forward" and segment.place not in (None, LOSS_PLACE),
        )
        for segment in segments
    }
    block_counts = build_parameter_layout(config.trained_model, 1, config.precision.scales_loss).block_counts
    return [costs[id(segment)] for segment, _ in expand_to_full_depth(segments, block_counts, key.block_period)]
