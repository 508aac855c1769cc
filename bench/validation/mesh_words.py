"""Layouts of several kinds of parallelism as people print them: overrides of ``strategy=mesh``, and micro-batches.

Batches of such rows are micro-batches of one copy of the model, whose ranks share its sequences (``ranks_per_batch``
where that is no whole number for each). Of pipelines, whose micro-batches no schedule may have so many of (2,048
sequences on 384 GPUs), time and memory are those of two runs with other numbers of micro-batches, continued in a
straight line: a schedule takes a constant time, and so much per micro-batch.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.prediction.prediction import PredictedRange, Prediction, TimePrediction
from bench.strategies.mesh.layout import share_sequences
from bench.validation.overrides import NotExpressibleError, Overrides

DEGREE_PATTERNS = {
    "tensor": r"\b(?:tp|tensor(?:[ -]parallel(?:ism)?)?|mp|model[ -]parallel(?:ism)?)[ =:_-]{0,2}(\d+)",
    "pipeline": r"(?:\b|(?<=\d))(?:pp|pipeline(?:[ -]parallel(?:ism)?)?)[ =:_-]{0,2}(\d+)",
    "context": r"(?:\b|(?<=\d))(?:cp|context(?:[ -]parallel(?:ism)?)?|ulysses|ring)[ =:_-]{0,2}(\d+)",
    "expert": r"(?:\b|(?<=\d))(?:ep|expert(?:[ -]parallel(?:ism)?)?)[ =:_-]{0,2}(\d+)",
}
"""Degrees of parallelism within a copy of the model, as they are printed: TP8 PP6, ``tp 2, pp 4``, tp1pp2."""

ASYNC_PATTERN = r"async[ -]?tp"
"""Tensor parallelism whose products overlap with its communication."""

ASYNC_SETTINGS = {"strategy.async_tensor_parallel": "true", "compile": "true"}

WHOLE_EXPERTS_PATTERN = r"\b(?:etp|expert[ -]tensor(?:[ -]parallel(?:ism)?)?)[ =:_-]{0,2}1\b"
"""Expert tensor parallelism of 1: the degree of expert parallelism counts tensor-parallel ranks, too."""

UNKNOWN_DEGREE_PATTERN = r"\+ ?(tp|pp|ep|cp|mp)\b(?! ?\d)"
"""Named without a degree."""

MAX_EXACT_MICRO_BATCHES = 64
"""From here on the schedule of fewer is simulated."""

VIRTUAL_STAGES_PATTERN = r"\bvp[ =:_-]{0,2}(\d+)"
COPIES_PATTERN = r"\bdp[ =:_-]{0,2}(\d+)"

OVERLAPPED_OPTIMIZER_PATTERN = r"distributed optimizer\b.*overlap"

REDUCING_TO_OWNERS = (
    (OVERLAPPED_OPTIMIZER_PATTERN, "Megatron's distributed optimizer, whose communication overlaps,"),
    (r"deepspeed.*zero[ -]?1", "DeepSpeed's ZeRO-1"),
)
"""Optimizers that reduce each part of the gradients to the rank that owns it, and gather the parameters, once a step:
Megatron's with ``--overlap-grad-reduce --overlap-param-gather``, and DeepSpeed's (``average_tensor`` of
https://github.com/deepspeedai/DeepSpeed/blob/97f8a9eb6688fa36dbe548e02eecdc55acc821a7/deepspeed/runtime/zero/stage_1_and_2.py).
torch's ZeroRedundancyOptimizer gets gradients that DDP reduced for all."""

DATA_PATTERNS = (
    (r"fsdp(?! ?[=:]? ?(?:0|false))|zero[ -]?[23]", "fsdp"),
    (r"zero[ -]?1|distributed optim", "zero1"),
)
"""What copies of the model do, first match first; else each has all (``ddp``)."""


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of a published step, and those of the runs that stand for it."""

    size: int
    """Sequences of one, in one copy of the model."""
    count: int
    """Of one copy, in a step."""
    simulated: tuple[int, ...]
    """Their number in one run, or in two."""
    sequences_per_gpu: float
    """Of the published step."""
    are_steps: bool = False
    """Whether each is a pass of its own that FSDP gathers parameters for, not one of a schedule's."""

    def list_settings(self, ranks_per_copy: int) -> list[dict[str, str]]:
        """Overrides of each run."""
        field = "gradient_accumulation" if self.are_steps else "strategy.micro_batches"
        settings = []
        for count in self.simulated:
            batch, ranks = share_sequences(self.size * (1 if self.are_steps else count), ranks_per_copy)
            settings.append(
                {"batch_size_per_gpu": str(batch), field: str(count), "strategy.ranks_per_batch": str(ranks)}
            )
        return settings


def read_degrees(text: str) -> dict[str, int]:
    """Degrees of parallelism within a copy of the model: tensor, pipeline, context, expert; 1 where none is printed, or
    0."""
    words = text.lower()
    return {
        name: max([1, *(int(number) for number in re.findall(pattern, words))])
        for name, pattern in DEGREE_PATTERNS.items()
    }


def build_mesh_overrides(degrees: Mapping[str, int], text: str, gpus: int) -> Overrides | None:
    """The strategy that divides a copy of the model so, None where nothing does. All layouts of a mesh go through here.

    Raises
    ------
    NotExpressibleError
        If no strategy does.
    """
    divided = {name: degree for name, degree in degrees.items() if degree > 1}
    if not divided:
        stated = [name for name, pattern in DEGREE_PATTERNS.items() if re.search(pattern, text.lower())]
        match = re.search(UNKNOWN_DEGREE_PATTERN, text.lower())
        if match and not stated:
            raise NotExpressibleError(f"the degree of {match[1].upper()} is not stated")
        is_reduced_to_owners = re.search(OVERLAPPED_OPTIMIZER_PATTERN, text.lower()) and "lora" not in text.lower()
        return build_layout_overrides(degrees, text.lower(), gpus) if is_reduced_to_owners and gpus > 1 else None
    words = text.lower()
    if set(divided) == {"tensor"} and re.search(ASYNC_PATTERN, words):
        settings = {"strategy": "mesh", "strategy.tensor": str(divided["tensor"])}
        settings["strategy.data"] = "fsdp" if "fsdp" in words else "ddp"
        return Overrides(settings | ASYNC_SETTINGS)
    if set(divided) == {"tensor"} and "fsdp" in words:
        return Overrides({"strategy": "tensor_parallel", "strategy.degree": str(divided["tensor"])})
    if set(divided) == {"tensor"} and not re.search(r"zero|distributed optim|megatron", words):
        settings = {"strategy": "tensor_parallel", "strategy.degree": str(divided["tensor"])}
        return Overrides({**settings, "strategy.data_parallel": "ddp"})
    return build_layout_overrides(degrees, words, gpus)


def build_layout_overrides(degrees: Mapping[str, int], words: str, gpus: int) -> Overrides:
    """The mesh that degrees of tensor, pipeline, context and expert parallelism make with what else is divided.

    Raises
    ------
    NotExpressibleError
        If the degrees do not come to the number of GPUs.
    """
    settings = {"strategy": "mesh"} | {
        f"strategy.{name}": str(degree) for name, degree in degrees.items() if degree > 1
    }
    ranks_per_copy = math.prod(degree for name, degree in degrees.items() if name != "expert")
    copies = re.search(COPIES_PATTERN, words)
    if gpus % ranks_per_copy or (copies and int(copies[1]) * ranks_per_copy != gpus):
        raise NotExpressibleError(f"the degrees of {words.strip()} do not come to {gpus} GPUs")
    data = next((value for pattern, value in DATA_PATTERNS if re.search(pattern, words)), "ddp")
    assumptions = []
    if degrees["tensor"] > 1 and degrees["expert"] > 1:
        has_whole_experts = re.search(WHOLE_EXPERTS_PATTERN, words) is not None
        if has_whole_experts or gpus % (ranks_per_copy * degrees["expert"]):
            settings |= _spread_whole_experts(degrees)
        if not has_whole_experts and "strategy.expert_tensor_parallel" in settings:
            assumptions.append("experts are whole on tensor-parallel ranks, without which there were too few ranks")
    time_settings = {}
    optimizer = next((name for pattern, name in REDUCING_TO_OWNERS if re.search(pattern, words)), None)
    if data == "zero1" and optimizer is not None and gpus > ranks_per_copy:
        time_settings = {"strategy.data": "fsdp", "strategy.reshard_after_forward": "false"}
        assumptions.append(
            f"{optimizer} takes the time of FSDP2, which gathers parameters and reduces gradients once a step in a "
            "schedule"
        )
    if data == "zero1" and gpus == degrees["tensor"] * degrees["pipeline"]:
        data = "ddp"
    settings["strategy.data"] = data
    if data == "zero1" and degrees["expert"] > 1:  # states of the optimizer are not divided beside experts, but by FSDP
        settings |= time_settings or {"strategy.data": "ddp"}
        if not time_settings:
            assumptions.append("states of the optimizer are not divided beside expert parallelism")
    if match := re.search(r"zero[ -]?([23])", words):
        assumptions.append(f"ZeRO-{match[1]} beside tensor parallelism is predicted as FSDP2")
        if match[1] == "2":
            settings["strategy.reshard_after_forward"] = "false"
    if re.search(ASYNC_PATTERN, words):
        settings |= ASYNC_SETTINGS
    virtual = re.search(VIRTUAL_STAGES_PATTERN, words)
    if virtual and int(virtual[1]) > 1 and degrees["pipeline"] > 1:
        settings |= {"strategy.schedule": "interleaved_1f1b", "strategy.virtual_stages": virtual[1]}
    return Overrides(settings, assumptions, time_settings)


def _spread_whole_experts(degrees: Mapping[str, int]) -> dict[str, str]:
    """What a degree of expert parallelism that counts tensor-parallel ranks is as the suite has it."""
    if degrees["expert"] % degrees["tensor"]:
        raise NotExpressibleError("whole experts on some of the tensor-parallel ranks")
    return {
        "strategy.expert": str(degrees["expert"] // degrees["tensor"]),
        "strategy.expert_tensor_parallel": "false",
    }


def choose_layout_words(sharding: str, layout: str) -> str:
    """What a row says of its layout, and its source; degrees that the source is known to mean win."""
    return layout if read_degrees(layout) != read_degrees("") else f"{sharding} {layout}".strip()


def count_ranks_per_copy(settings: Mapping[str, str]) -> int:
    """Ranks that share the sequences of a copy of the model."""
    return math.prod(int(settings.get(f"strategy.{name}", 1)) for name in ("tensor", "pipeline", "context"))


def divide_batch(settings: Mapping[str, str], batch: int, degree: int) -> dict[str, str]:
    """Overrides where `degree` ranks share layers and `batch` sequences: a mesh, if that is no whole number each."""
    batch_per_gpu, ranks_per_batch = share_sequences(batch, degree)
    divided = {**settings, "batch_size_per_gpu": str(batch_per_gpu)}
    if ranks_per_batch == 1:
        return divided
    if divided["strategy"] == "tensor_parallel":
        divided |= {"strategy": "mesh", "strategy.tensor": divided.pop("strategy.degree")}
        divided["strategy.data"] = divided.pop("strategy.data_parallel", "fsdp")
    return {**divided, "strategy.ranks_per_batch": str(ranks_per_batch)}


def plan_micro_batches(settings: Mapping[str, str], size: int, count: int) -> MicroBatches:
    """The runs that stand for `count` micro-batches of `size` sequences in every copy of the model."""
    pipeline = int(settings.get("strategy.pipeline", 1))
    sequences_per_gpu = size * count / count_ranks_per_copy(settings)
    are_steps = pipeline == 1 and settings.get("strategy.data") == "fsdp"
    if pipeline == 1 and count <= MAX_EXACT_MICRO_BATCHES:
        return MicroBatches(size, count, (count,), sequences_per_gpu, are_steps)
    few = max(2, pipeline)
    return MicroBatches(size, count, (few, 2 * few), sequences_per_gpu, are_steps)


def continue_prediction(predictions: tuple[Prediction, ...], micro_batches: MicroBatches) -> Prediction:
    """The time of the published number of micro-batches; memory is that of the first run (see `read_as_published`)."""
    first = predictions[0]
    if len(predictions) == 1 or first.time is None:
        return first
    other_time = predictions[1].time
    assert other_time is not None
    start, end = micro_batches.simulated
    share = (micro_batches.count - start) / (end - start)
    return dataclasses.replace(first, time=_continue_time(first.time, other_time, share))


def _continue_time(time: TimePrediction, other: TimePrediction, share: float) -> TimePrediction:
    def move(value: Any, other_value: Any) -> Any:
        if isinstance(value, PredictedRange):
            return PredictedRange(*(move(getattr(value, name), getattr(other_value, name)) for name in RANGE_FIELDS))
        return value + share * (other_value - value)

    return dataclasses.replace(time, **{name: move(getattr(time, name), getattr(other, name)) for name in TIME_FIELDS})


RANGE_FIELDS = ("value", "low", "high")
TIME_FIELDS = (*("step_s", "compute_s", "exposed_communication_s", "optimizer_s", "bubble_s", "communication_s"),)
