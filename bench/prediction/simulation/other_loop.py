"""Memory of a step as another software's loop has it: what it holds of the logits, and what is beside its state."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.prediction.simulation.simulated_rank import RankSpeed, SimulatedRank
from bench.prediction.trace.chunks import Chunk, SegmentAtBatch
from bench.prediction.trace.trace import LOSS_PLACE

RECEIVED_NAME, SENT_NAME, HELD_LOGITS_NAME = "received", "sent", "logits"
"""Under which a pipeline's rank holds what its schedule keeps of all micro-batches."""


@dataclass(frozen=True)
class LossMemory:
    """What other software holds of the logits. This suite holds them until backward is over."""

    bytes_per_logit: float | None = None
    """At most, logits included, until backward of the loss is over: then their gradient alone is there, which takes
    their place. None: what this suite's loss holds, but for the logits, which are let go before backward."""


class RankBesideState(SimulatedRank):
    """A rank whose parameters, gradients and optimizer state take nothing: its peak is that of all else, in forward and
    backward. Software that keeps as much state all the time needs both together.

    Of what a pipeline's stages exchange it has one micro-batch to receive in, and nothing that was sent (Megatron's
    ``deallocate_pipeline_outputs``); torch's schedules have a buffer for each micro-batch, and hold what they sent.
    """

    def __init__(self, state_parts: Iterable[str], micro_batches: int) -> None:
        super().__init__(RankSpeed())
        self.state_bytes = dict.fromkeys(state_parts, 0.0)
        """What was allocated of each part that is left out."""
        self._shares = {RECEIVED_NAME: 1 / micro_batches, SENT_NAME: 0.0, HELD_LOGITS_NAME: 0.0}

    def hold(self, name: str, size: float, part: str, stream: str) -> None:
        super().hold(name, self._find_own(name, size, part), part, stream)

    def grow_allocation(self, name: str, size: float, part: str) -> None:
        super().grow_allocation(name, self._find_own(name, size, part), part)

    def _find_own(self, name: str, size: float, part: str) -> float:
        if part not in self.state_bytes:
            return size * self._shares.get(name, 1.0)
        self.state_bytes[part] += size
        return 0.0

    def note_peak(self, extra_bytes: float, lasting_bytes: float, gradient_bytes: float = 0.0) -> None:
        if self.phase != "optimizer":
            super().note_peak(extra_bytes - gradient_bytes, lasting_bytes)


def replace_loss_memory(
    segments: Sequence[SegmentAtBatch], loss: LossMemory, num_logits: float, logits_bytes: float
) -> tuple[SegmentAtBatch, ...]:
    """The segments of a step, or of a pipeline's last stage, with the memory of another loss.

    Parameters
    ----------
    num_logits: float
        Of a micro-batch.
    logits_bytes: float
        Bytes of them, which the end of each micro-batch frees.
    """
    replaced: list[SegmentAtBatch] = []
    for _, group in itertools.groupby(segments, lambda segment: (segment.micro_batch, segment.phase == "optimizer")):
        own_segments = list(group)
        positions = [index for index, segment in enumerate(own_segments) if segment.place == LOSS_PLACE]
        if positions:
            gradient_bytes = sum(own_segments[index].net_bytes for index in positions)
            backward = next(index for index in positions if own_segments[index].phase == "backward")
            if loss.bytes_per_logit is None:
                own_segments[backward] = _put_before(own_segments[backward], -logits_bytes)
            else:
                added_bytes = loss.bytes_per_logit * num_logits - logits_bytes
                for index in positions:
                    own_segments[index] = _replace_memory(own_segments[index], 0.0)
                own_segments[positions[0]] = _replace_memory(own_segments[positions[0]], added_bytes)
                left_bytes = gradient_bytes - logits_bytes - added_bytes
                own_segments[backward] = _replace_memory(own_segments[backward], left_bytes)
            own_segments[-1] = _put_before(own_segments[-1], logits_bytes)  # so that freeing them changes nothing
        replaced += own_segments
    return tuple(replaced)


def _put_before(segment: SegmentAtBatch, added_bytes: float) -> SegmentAtBatch:
    """The segment after a change of memory. What it makes itself comes later."""
    change = Chunk(added_bytes, added_bytes, added_bytes, added_bytes, 0.0, 0, None)
    return dataclasses.replace(segment, chunks=(change, *segment.chunks))


def _replace_memory(segment: SegmentAtBatch, added_bytes: float) -> SegmentAtBatch:
    """The segment with one change of memory at its beginning, and no other."""
    still_chunks = tuple(
        dataclasses.replace(
            chunk, peak_bytes=0.0, lasting_bytes_at_peak=0.0, net_bytes=0.0, lasting_net_bytes=0.0, pieces=()
        )
        for chunk in segment.chunks
    )
    return _put_before(dataclasses.replace(segment, chunks=still_chunks), added_bytes)
