"""Stages and schedules of torch's that carry out a timetable, and say when they compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from bench.strategies.pipeline.schedule import BACKWARD, FORWARD, Timetable
from bench.strategies.pipeline.stage_timer import StageTimer
from bench.strategies.pipeline.torch_orders import find_torch_schedule
from bench.strategies.stepper import StepEngine


class TimedPipelineStage(PipelineStage):
    """A stage that says when it computes."""

    engine: StepEngine
    stage_timer: StageTimer

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """One micro-batch forward, its input being there."""
        self.engine.enter_phase(FORWARD)
        with self.stage_timer.record_span(), self.engine.autocast():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """One micro-batch backward, its gradients being there."""
        self.engine.enter_phase(BACKWARD)
        with self.stage_timer.record_span():
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """What is left of it where a schedule splits backward: the gradients of the weights."""
        with self.stage_timer.record_span():
            return super().backward_weight_one_chunk(*args, **kwargs)

    def _validate_fwd_outputs(self, outputs: tuple[torch.Tensor, ...]) -> None:
        """Nothing: torch 2.11 compares outputs with the examples, and of the last stage's, which goes nowhere, there is
        none."""


def build_torch_schedule(
    timetable: Timetable,
    stages: Sequence[PipelineStage],
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Any:
    """torch's schedule that runs the stages of this rank as a timetable says.

    Parameters
    ----------
    loss: callable
        A micro-batch's share of the loss, of its logits and labels.
    """
    schedule_class = find_torch_schedule(timetable.schedule)
    return schedule_class(
        stages if issubclass(schedule_class, PipelineScheduleMulti) else stages[0],
        timetable.micro_batches,
        loss_fn=loss,
        scale_grads=False,
    )
