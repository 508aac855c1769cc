"""Lower bounds of what the predictor says of a layout, in a thousandth of its time: nothing of the layout is traced.

Why each holds, against the predictor (`LayoutBounder` has a line for each):

* Computing. All ranks together carry out every kernel of every sequence, and a kernel takes at least a t-th of its time
  for a t-th of its work: what is lost to rounding up tiles and waves only grows as work shrinks. So a rank computes at
  least as long as an even share of the undivided model's kernels takes, at the batch size where that is least.
* Tensor parallelism. Every block gathers and scatters its activations around attention and feed-forward, forward and
  backward, and computation waits for it.
* Pipelines. Before the last rank begins, and after it is done, a micro-batch passes through all other ranks:
  (P - 1) / (v m) of what is computed (Narayanan et al. 2021, arXiv:2104.04473, section 2.2). Schedules that split
  backward fill what follows; the forward passes before remain, a fourth of a chunk's time at least. With one stage per
  rank the rank with most blocks decides.
* Data parallelism. Stages reduce shards of gradients after the last backward; ZeRO-1 broadcasts what each rank has
  updated; FSDP without a pipeline gathers every parameter for each micro-batch, once, or twice where it reshards: if
  that takes longer than all else, the step takes as long.
* Memory. Parameters, gradients and states of the optimizer are all there when backward is over. Before, as the
  backward of a later micro-batch begins, gradients of earlier ones are there, under FSDP whole ones unless they are
  reduced after every micro-batch, and gathered parameters where they are not resharded. What blocks keep for backward
  is divided by no more than tensor x context, and kept of as many micro-batches as the schedule's own order has in
  flight. Stages have a buffer for what they exchange of each micro-batch, and schedules other than 1F1B hold what they
  have sent until the step is over.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from bench.advice.layouts.layouts import Layout, LayoutQuestion
from bench.config.run_config import RunConfig
from bench.prediction.cost.collectives import (
    ALL_GATHER,
    BROADCAST,
    REDUCE_SCATTER,
    CollectiveGroup,
    compute_collective_seconds,
)
from bench.prediction.run_inputs import build_trace_key
from bench.prediction.segment_costs import list_segment_costs
from bench.prediction.simulation.parameter_layout import build_parameter_layout
from bench.prediction.trace.kernels import FloatArray, IntArray
from bench.prediction.trace.scaled_trace import list_traced_batch_sizes
from bench.prediction.trace.trace_cache import load_scaled_trace
from bench.strategies.mesh.knobs import FSDP_KIND, ZERO1_KIND
from bench.strategies.pipeline.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_BACKWARD,
    ONE_F_ONE_B,
    SPLIT_BACKWARD_SCHEDULES,
    WEIGHT_BACKWARD,
    Timetable,
)

REFERENCE_BATCHES = (2, 8, 32)
"""Sequences in one pass of the undivided model, of which the cheapest per sequence is the bound's."""

ROUNDING_SHARE = 0.97
"""Of the undivided model's time, what a bound counts on: a product may by chance fill its waves better when it is
divided."""

FORWARD_SHARE = 0.25
"""Of a micro-batch's computing, its forward pass: a third without recomputation, a fourth with all of it."""

LAYER_HALVES = {"gpt": 2, "mingpt": 2, "llama": 2, "mpt": 2, "t5": 2}
"""Parts of a block that tensor parallelism gathers for and scatters after: attention and feed-forward. Of other
families, such as mixtures, attention alone."""


@dataclass(frozen=True)
class ReferenceCosts:
    """Of the undivided model in one mode of checkpointing, per sequence."""

    seconds: float
    """Of its kernels, forward and backward."""
    kept_bytes: float
    """That blocks keep until backward."""
    logits_bytes: float


@dataclass(frozen=True)
class LayoutBounds:
    """Least that the predictor can say."""

    step_s: float
    memory_bytes: float


class LayoutBounder:
    """Bounds of all layouts of one question.

    Parameters
    ----------
    reference_by_mode: dict
        The undivided model's run in each mode of checkpointing, with FSDP.
    """

    def __init__(self, question: LayoutQuestion, reference_by_mode: dict[str, RunConfig]) -> None:
        self.question = question
        self.config = next(iter(reference_by_mode.values()))
        self.references = {mode: compute_reference_costs(config) for mode, config in reference_by_mode.items()}
        self._num_parameters, self._num_trained = _count_parameters(self.config)

    def compute(self, layout: Layout) -> LayoutBounds:
        return LayoutBounds(self.compute_step_bound_s(layout), self.compute_memory_bound(layout))

    def compute_step_bound_s(self, layout: Layout, computed_s: float | None = None) -> float:
        """Seconds of a step, at least.

        Parameters
        ----------
        computed_s: float or None
            What a rank computes in a step, where the predictor has said it of a pipeline of the same `trace_group`.
        """
        shared_s = self.question.global_sequences * self.references[layout.checkpointing].seconds / self.question.gpus
        busy_s = shared_s * ROUNDING_SHARE if computed_s is None else computed_s
        busy_s += layout.micro_batches * self._compute_exchange_s(layout)
        num_blocks = self.question.model.num_blocks or 1
        if layout.virtual_stages == 1 and layout.last_stage_less_blocks == 0:
            blocks_of_largest_stage = -(-num_blocks // layout.pipeline)
            stages_share = blocks_of_largest_stage * layout.pipeline / num_blocks
        else:
            stages_share = 1.0
        idle_share = (layout.pipeline - 1) / (layout.virtual_stages * layout.micro_batches)
        if layout.schedule in SPLIT_BACKWARD_SCHEDULES:
            idle_share *= FORWARD_SHARE
        step_s = busy_s * (BLOCK_SHARE * (stages_share - 1) + 1 + BLOCK_SHARE * idle_share)
        gathered_s, late_s = self._compute_data_parallel_s(layout)
        return max(step_s, gathered_s) + late_s

    def compute_memory_bound(self, layout: Layout) -> float:
        """Bytes that a rank has allocated at its peak, at least: when a backward begins, or when the last is over."""
        precision, states = self.config.precision, self.config.optimizer.states_per_parameter
        itemsize, (parameters, trained) = precision.parameter_itemsize, self._divide_parameters(layout)
        shards = layout.shards * layout.context * (layout.expert if self._counts_all_experts(layout) else 1)
        is_sharded = layout.data == FSDP_KIND
        state_shards = layout.copies * layout.context if layout.data == ZERO1_KIND else shards if is_sharded else 1
        lasting = itemsize * (parameters / (shards if is_sharded else 1) + trained * states / state_shards)
        gradients = trained * itemsize / (shards if is_sharded else 1)
        early_gradients, gathered = (gradients if layout.micro_batches > 1 else 0.0), 0.0
        if is_sharded and shards > 1 and not self._has_experts:
            if layout.micro_batches > 1 and not layout.synchronizes:  # whole until the last micro-batch, as reduced
                early_gradients = BLOCK_SHARE * trained * precision.reduce_itemsize
            if not layout.reshards:
                gathered = BLOCK_SHARE * parameters * precision.compute_itemsize
        return lasting + max(gradients, gathered + self._compute_passing_bytes(layout, early_gradients))

    def _compute_passing_bytes(self, layout: Layout, gradients: float) -> float:
        """Most, at any time before the last backward, of what blocks keep and stages exchange, with logits where a rank
        has all blocks, and of gradients, once a micro-batch has been through backward."""
        reference, divided = self.references[layout.checkpointing], layout.tensor * layout.context
        kept = KEPT_SHARE * layout.micro_batch * reference.kept_bytes / divided
        if layout.pipeline == 1:
            return gradients + kept + KEPT_SHARE * layout.micro_batch * reference.logits_bytes / divided
        assert layout.schedule is not None
        num_blocks = self.question.model.num_blocks or 1
        timetable = (layout.schedule, layout.pipeline, layout.virtual_stages, layout.micro_batches)
        stages = Timetable(*timetable, last_stage_less_blocks=layout.last_stage_less_blocks).split_blocks(num_blocks)
        kept_by_stage = kept * min(map(len, stages)) / num_blocks
        boundary = self._compute_boundary_bytes(layout)
        return max(
            float((kept_by_stage * held.passes + boundary * held.sent + gradients * held.gradients).max())
            + boundary * held.received
            for held in list_held(*timetable)
        )

    def _compute_boundary_bytes(self, layout: Layout) -> float:
        """Of a micro-batch between two blocks, on one rank."""
        (length, width), *_ = self.question.model.find_stage_input_shapes(
            0, self.question.sequence_length // (layout.context * layout.tensor)
        )
        return layout.micro_batch * length * width * self.config.precision.compute_itemsize

    @property
    def _has_experts(self) -> bool:
        return bool(getattr(self.question.model, "num_experts", 0))

    def _counts_all_experts(self, layout: Layout) -> bool:
        """FSDP shards all else over ranks of expert parallelism, too, and each of these has a part of the experts."""
        return layout.data == FSDP_KIND

    def _divide_parameters(self, layout: Layout) -> tuple[float, float]:
        """All and trained ones of the stage that a rank has on average, before data parallelism divides them; experts
        as if all were."""
        spread = 1 if self._counts_all_experts(layout) else layout.expert
        parts = layout.tensor * layout.pipeline * spread
        return self._num_parameters / parts, self._num_trained / parts

    def _compute_exchange_s(self, layout: Layout) -> float:
        """Seconds that a rank waits for tensor parallelism in one micro-batch."""
        if layout.tensor == 1:
            return 0.0
        model = self.question.model
        size = self._compute_boundary_bytes(layout)
        halves = LAYER_HALVES.get(model.family, 1)
        exchanges = 2 * halves * (model.num_blocks or 1) / layout.pipeline
        if self._num_trained < self._num_parameters:  # nothing goes back beyond the first adapter
            exchanges = max(0.0, exchanges - 1)
        group = CollectiveGroup(layout.tensor, layout.tensor, self._count_groups_in_node(layout.tensor))
        return exchanges * sum(self._time(kind, size, group) for kind in (ALL_GATHER, REDUCE_SCATTER))

    def _compute_data_parallel_s(self, layout: Layout) -> tuple[float, float]:
        """Seconds of gathers that computing may hide, and of what comes when it is over."""
        if self._has_experts:
            return 0.0, 0.0
        precision, (parameters, trained) = self.config.precision, self._divide_parameters(layout)
        ranks = layout.shards * layout.context if layout.data == FSDP_KIND else layout.copies * layout.context
        group = self._find_group(layout.tensor, ranks)
        if layout.data == ZERO1_KIND:
            return 0.0, self._time(BROADCAST, trained * precision.parameter_itemsize, group)
        if layout.data != FSDP_KIND or ranks == 1:
            return 0.0, 0.0
        if layout.pipeline > 1:
            return 0.0, self._time(REDUCE_SCATTER, trained * precision.reduce_itemsize, group)
        passes = 2 if layout.reshards else 1
        gather_s = self._time(ALL_GATHER, parameters * precision.compute_itemsize, group)
        return BLOCK_SHARE * passes * layout.micro_batches * gather_s, 0.0

    def _find_group(self, stride: int, ranks: int) -> CollectiveGroup:
        """Ranks so many apart."""
        in_node = max(1, min(ranks, self._node // stride))
        return CollectiveGroup(ranks, in_node, max(1, self._node // in_node))

    @property
    def _node(self) -> int:
        return min(self.question.gpus, self.question.gpus_per_node)

    def _count_groups_in_node(self, ranks: int) -> int:
        return max(1, self._node // ranks)

    def _time(self, kind: str, size: float, group: CollectiveGroup) -> float:
        assert self.config.hardware.speeds is not None
        return compute_collective_seconds(kind, size, group, self.config.hardware.speeds.links)


BLOCK_SHARE = 0.9
"""Of what is computed, stored and gathered, the part within blocks, which stages divide evenly: heads and embeddings
are on one of them."""

KEPT_SHARE = 0.9
"""Of what blocks keep, what a layout keeps at least: operators that are divided may save one tensor less."""


def _count_parameters(config: RunConfig) -> tuple[int, int]:
    """Of the model as it is trained: all of them, and those that have gradients."""
    if config.finetune.name == "full":
        return config.model.num_parameters, config.model.num_parameters
    layout = build_parameter_layout(config.trained_model, 1, scales_loss=False)
    specs = [spec for unit in layout.units for spec in unit.parameters]
    return sum(spec.numel for spec in specs), sum(spec.numel for spec in specs if spec.is_trained)


def compute_reference_costs(config: RunConfig) -> ReferenceCosts:
    """Kernels and kept activations of a run of the undivided model."""
    seconds, kept_bytes = [], []
    for batch in REFERENCE_BATCHES:
        costs = list_segment_costs(config, batch)
        seconds.append(sum(cost.seconds for cost in costs) / batch)
        kept_bytes.append(sum(cost.kept_bytes for cost in costs if cost.is_block_forward) / batch)
    batch = REFERENCE_BATCHES[0]
    traced_sizes = list_traced_batch_sizes(batch, is_compiled=config.has_compiled_parts)
    traced = load_scaled_trace(build_trace_key(config), traced_sizes)
    logits_bytes = traced.logits_bytes[0] + traced.compute_batch_weight(batch) * traced.logits_bytes[1]
    return ReferenceCosts(min(seconds), min(kept_bytes), logits_bytes / batch)


@dataclass(frozen=True)
class HeldByRank:
    """What one rank of a pipeline holds in the course of a step."""

    passes: IntArray
    """After each forward and backward: passes through its stages whose backward is still to come; shape (actions,)."""
    sent: IntArray
    """Activations and gradients that were sent and are held until the step is over; shape (actions,)."""
    gradients: FloatArray
    """Share of its stages that have gradients of some micro-batches and wait for others; shape (actions,)."""
    received: int
    """Buffers of what its stages exchange, one for each micro-batch and neighbour, there all the time."""


@functools.lru_cache(maxsize=4096)
def list_held(schedule: str, ranks: int, virtual_stages: int, micro_batches: int) -> tuple[HeldByRank, ...]:
    """Of the first rank, one in the middle and the last.

    torch's schedules, all but 1F1B, hold all that they made and sent until the step is over
    (`bench.prediction.pipeline.predictor`).
    """
    timetable = Timetable(schedule, ranks, virtual_stages, micro_batches)
    last_stage = timetable.num_stages - 1

    def count_neighbours(stage: int) -> int:
        return (stage > 0) + (stage < last_stage)

    held = []
    for rank in sorted({0, ranks // 2, ranks - 1}):
        stages = timetable.find_stages_of_rank(rank)
        passes, sent, gradients = [0], [0], [0.0]
        num_backwards = dict.fromkeys(stages, 0)
        for action in timetable.list_actions(rank):
            ends = action.kind in (BACKWARD, WEIGHT_BACKWARD)
            passes.append(passes[-1] + (action.kind == FORWARD) - ends)
            num_backwards[action.stage] += ends
            gradients.append(sum(0 < count < micro_batches for count in num_backwards.values()) / len(stages))
            is_kept = schedule != ONE_F_ONE_B and action.kind in (BACKWARD, INPUT_BACKWARD)
            sent.append(sent[-1] + (count_neighbours(action.stage) if is_kept else 0))
        received = micro_batches * sum(map(count_neighbours, stages))
        held.append(HeldByRank(np.array(passes), np.array(sent), np.array(gradients), received))
    return tuple(held)
