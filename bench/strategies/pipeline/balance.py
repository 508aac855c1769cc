"""Which stages of a pipeline compute equally long, where the last one has the head over the vocabulary as well."""

from __future__ import annotations

import functools

from bench.models import Family
from bench.strategies.pipeline.schedule import ONE_F_ONE_B, Timetable


@functools.lru_cache(maxsize=256)
def find_balance(family: Family, sequence_length: int, num_stages: int, min_gain: float = 0.0) -> int:
    """`Timetable.last_stage_less_blocks` with which the stage that computes longest computes least, by the FLOPs of a
    forward pass; 0 where that is no more than a share `min_gain` less than with as many blocks in each."""
    num_blocks = family.num_blocks or 1
    flops = family.count_flops_per_sequence(sequence_length)
    head_blocks = flops.outside_blocks * num_blocks / (flops.blocks_linear + flops.blocks_attention)
    longest: dict[int, float] = {}
    for less_blocks in range(num_blocks):
        timetable = Timetable(ONE_F_ONE_B, num_stages, 1, num_stages, last_stage_less_blocks=less_blocks)
        counts = [len(blocks) for blocks in timetable.split_blocks(num_blocks)]
        if counts[-1] == 0:
            break
        longest[less_blocks] = max(*counts, counts[-1] + head_blocks)
    best = min(longest, key=longest.__getitem__, default=0)
    return best if longest and longest[best] < (1 - min_gain) * longest[0] else 0
