"""Predictions as other software would have run them: exchanges of stages, receive buffers, states and losses.

What is known to be different is converted, as TFLOPS that count recomputation are. A prediction is of torch's pieces,
which receive every micro-batch of a step in a buffer of its own (`bench.prediction.pipeline.predictor`), and keep
gradients twice in a pipeline under DDP. Megatron and DeepSpeed receive one after the other, and keep parameters in 16
bit, gradients once, and a copy of parameters in fp32 beside the optimizer's state. DeepSpeed's pipeline computes
nothing while it sends or receives (``deepspeed/runtime/pipe/engine.py``), where torch's goes on. What a loss holds of
the logits is another thing in each (`bench.prediction.simulation.other_loop`).
"""

from __future__ import annotations

import dataclasses
import functools
import math

from bench.config.run_config import RunConfig
from bench.prediction.cost.collectives import ALL_GATHER, compute_collective_seconds, compute_send_seconds
from bench.prediction.cost.rank_groups import build_collective_group
from bench.prediction.intervals import ALLOCATED, classify_hardware, find_factors, is_layout
from bench.prediction.other_software_memory import predict_beside_state, predict_peak
from bench.prediction.pipeline.time import count_concurrent_pipelines
from bench.prediction.prediction import MemoryPrediction, PredictedRange, Prediction, TimePrediction
from bench.prediction.simulation.device_memory import find_float8_margins, predict_fit
from bench.prediction.simulation.other_loop import LossMemory
from bench.strategies.step_plan import PIPELINE_GROUP, TENSOR_GROUP
from bench.validation.mesh_words import MicroBatches, continue_prediction
from bench.validation.readings import Reading, build_published_config

STATE_PARTS: tuple[str, ...] = ("parameters", "gradients", "optimizer")


def read_as_published(reading: Reading, predictions: tuple[Prediction, ...]) -> Prediction:
    """One prediction of a row from those of its runs."""
    memory = _convert_memory(reading, predictions)
    if reading.micro_batches is None:
        return dataclasses.replace(predictions[0], memory=memory)
    time_predictions = predictions[-len(reading.micro_batches.simulated) :]
    time = continue_prediction(time_predictions, reading.micro_batches).time
    if reading.waits_for_sends and time is not None:
        time = _add_waiting(time, compute_waited_seconds(reading.config, reading.micro_batches))
    return dataclasses.replace(predictions[0], memory=memory, time=time)


def _convert_memory(reading: Reading, predictions: tuple[Prediction, ...]) -> MemoryPrediction:
    """The memory of the first run, less or more by what the source's software has less or more of."""
    memory = predictions[0].memory
    num_runs = 1 if reading.micro_batches is None else len(reading.micro_batches.simulated)
    allocated = [prediction.memory.allocated.value for prediction in predictions[:num_runs]]
    margin = 0.0
    if reading.state_bytes is not None:
        last_run = reading.runs[num_runs - 1]
        converted, margin = compute_allocated_beside_state(last_run, reading.state_bytes, reading.loss_memory)
    else:
        converted = predict_peak(reading.config, loss=reading.loss_memory) if reading.loss_memory else allocated[0]
        if len(allocated) > 1:
            assert reading.micro_batches is not None
            few, more = reading.micro_batches.simulated
            per_micro_batch = max(0.0, allocated[1] - allocated[0]) / (more - few)
            converted += per_micro_batch * ((1 if reading.receives_in_turn else reading.micro_batches.count) - few)
    difference = converted - memory.allocated.value
    if not difference:
        return memory
    low = math.inf
    if margin:  # two reasons to be uncertain, which have nothing to do with each other
        config = reading.config
        factors = find_factors(
            ALLOCATED, classify_hardware(config.hardware), row_class=reading.assumed_class, is_layout=is_layout(config)
        )
        low = (converted - margin) * factors.low
    return _shift(memory, difference, low)


@functools.lru_cache(maxsize=10_000)
def compute_allocated_beside_state(
    settings: tuple[tuple[str, str], ...], state_bytes: tuple[float, float], loss: LossMemory | None
) -> tuple[float, float]:
    """Peak of allocated memory of a run, in bytes, where software keeps all its state all the time, and what of it may
    not be there: half of what waits for backward where TransformerEngine keeps operands in 8 bits.

    The state adds to the peak of all else, wherever that is: a run of the suite has no gradients yet when the stages of
    its pipeline hold most.

    Parameters
    ----------
    settings: tuple
        What the run was read as, of a mesh.
    state_bytes: tuple of float
        Per parameter: of what every rank has, and of what is divided among those with the same parameters.
    loss: LossMemory, optional
        What is held of the logits, where it is not what this suite holds.
    """
    config = build_published_config(settings)
    layout, data = config.strategy.layout, config.strategy.data  # type: ignore[attr-defined]
    whole_bytes, divided_bytes = state_bytes
    num_parts = 1 if data == "ddp" else layout.get_degree("replicas", "shards", "context", "expert")
    bytes_per_parameter = (whole_bytes + divided_bytes / num_parts) / config.precision.parameter_itemsize
    state_parts = STATE_PARTS
    if data == "fsdp":
        bytes_per_parameter *= layout.get_degree("shards")
        state_parts = (*STATE_PARTS, "gathered")
    return max(
        (
            rank.parameter_bytes * bytes_per_parameter + rank.peak_bytes,
            find_float8_margins(config, {"activations": rank.activation_bytes, "parameters": 0.0})[0],
        )
        for rank in predict_beside_state(config, loss, state_parts)
    )


def compute_waited_seconds(config: RunConfig, micro_batches: MicroBatches) -> float:
    """Of a step in which a stage between others receives and sends hidden states, and their gradients, one after the
    other, while it computes nothing.

    Ranks that share layers send a part each, all at the same time, and gather what they receive:
    ``is_pipe_partitioned`` of
    https://github.com/deepspeedai/DeepSpeed/blob/97f8a9eb6688fa36dbe548e02eecdc55acc821a7/deepspeed/runtime/pipe/engine.py
    """
    (dim,) = config.strategy.list_group_dims(PIPELINE_GROUP, config.gpus)
    if dim.size == 1 or config.hardware.speeds is None:
        return 0.0
    links, split = config.hardware.speeds.links, config.strategy.build_tensor_parallel_split()
    width: int = config.model.hidden_size  # type: ignore[attr-defined]
    size: float = micro_batches.size * config.sequence_length * width * config.precision.compute_itemsize
    gather_s, num_parts = 0.0, 1
    if split is not None:
        size, num_parts = size / split.context_degree, split.degree
        if not split.sequence_parallel:
            group = build_collective_group(config, TENSOR_GROUP)
            gather_s = compute_collective_seconds(ALL_GATHER, size, group, links)
    send_s = compute_send_seconds(
        size / num_parts,
        links,
        is_in_node=2 * dim.stride <= config.gpus_per_node,
        concurrent_sends=count_concurrent_pipelines(config),
    )
    return micro_batches.count * (4 * send_s + 2 * gather_s)


def _add_waiting(time: TimePrediction, waited_s: float) -> TimePrediction:
    step_s = PredictedRange(*(seconds + waited_s for seconds in (time.step_s.value, time.step_s.low, time.step_s.high)))
    exposed_s = time.exposed_communication_s + waited_s
    return dataclasses.replace(time, step_s=step_s, exposed_communication_s=exposed_s)


def _shift(memory: MemoryPrediction, difference: float, low: float) -> MemoryPrediction:
    """All of it moved; what is allocated may be as little as `low`, or less."""

    def shift(predicted: PredictedRange) -> PredictedRange:
        return PredictedRange(predicted.value + difference, predicted.low + difference, predicted.high + difference)

    allocated = shift(memory.allocated)
    shifted = dataclasses.replace(
        memory,
        allocated=dataclasses.replace(allocated, low=min(allocated.low, low)),
        active=shift(memory.active),
        reserved=shift(memory.reserved),
        device_used=shift(memory.device_used),
        wanted=shift(memory.wanted),
    )
    if shifted.capacity is None:
        return shifted
    verdict = predict_fit(shifted.allocated, shifted.capacity, shifted.beside, finds_place=True)
    return dataclasses.replace(shifted, verdict=verdict)
