"""Predictions of meshes as other software would have run them: exchanges of stages, receive buffers and states.

What is known to be different is converted, as TFLOPS that count recomputation are. A prediction is of torch's pieces,
which receive every micro-batch of a step in a buffer of its own (`bench.prediction.pipeline.predictor`), and keep
gradients twice in a pipeline under DDP. Megatron and DeepSpeed receive one after the other, and keep parameters in 16
bit, gradients once, and a copy of parameters in fp32 beside the optimizer's state. DeepSpeed's pipeline computes
nothing while it sends or receives (``deepspeed/runtime/pipe/engine.py``), where torch's goes on.
"""

from __future__ import annotations

import dataclasses

from bench.config.run_config import RunConfig
from bench.prediction.cost.collectives import ALL_GATHER, compute_collective_seconds, compute_send_seconds
from bench.prediction.cost.rank_speed import build_collective_group
from bench.prediction.pipeline.time import count_concurrent_pipelines
from bench.prediction.prediction import MemoryPrediction, PredictedRange, Prediction, TimePrediction
from bench.prediction.simulation.device_memory import predict_fit
from bench.strategies.step_plan import PIPELINE_GROUP, TENSOR_GROUP
from bench.validation.mesh_words import MicroBatches, continue_prediction
from bench.validation.readings import Reading

STATE_PARTS = ("parameters", "gradients", "optimizer")


def read_as_published(reading: Reading, predictions: tuple[Prediction, ...]) -> Prediction:
    """One prediction of a row from those of its runs."""
    if reading.micro_batches is None:
        return predictions[0]
    num_runs = len(reading.micro_batches.simulated)
    predictions, time_predictions = predictions[:num_runs], predictions[-num_runs:]
    time = continue_prediction(time_predictions, reading.micro_batches).time
    prediction = dataclasses.replace(predictions[0], time=time)
    if reading.waits_for_sends and prediction.time is not None:
        waited_s = compute_waited_seconds(reading.config, reading.micro_batches)
        prediction = dataclasses.replace(prediction, time=_add_waiting(prediction.time, waited_s))
    memory, difference = prediction.memory, 0.0
    if reading.state_bytes is not None:
        difference += compute_state_difference(reading, memory)
    if len(predictions) > 1:
        few, more = reading.micro_batches.simulated
        per_micro_batch = max(0.0, predictions[1].memory.allocated.value - memory.allocated.value) / (more - few)
        num_received = 1 if reading.receives_in_turn else reading.micro_batches.count
        difference += per_micro_batch * (num_received - few)
    if not difference:
        return prediction
    return dataclasses.replace(prediction, memory=_shift(memory, difference))


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
    size: float = micro_batches.size * config.sequence_length * width * config.precision.compute_dtype.itemsize
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


def compute_state_difference(reading: Reading, memory: MemoryPrediction) -> float:
    """Bytes of parameters, gradients and optimizer state that the source's software has beyond the predicted ones."""
    assert reading.state_bytes is not None
    config = reading.config
    whole_bytes, divided_bytes = reading.state_bytes
    layout, data = config.strategy.layout, config.strategy.data  # type: ignore[attr-defined]
    parameters = memory.parts["parameters"] / config.precision.parameter_dtype.itemsize
    num_parts = 1 if data == "ddp" else layout.get_degree("replicas", "shards", "context", "expert")
    predicted = sum(memory.parts[part] for part in STATE_PARTS)
    if data == "fsdp":
        parameters *= layout.get_degree("shards")
        predicted += memory.parts["gathered"]
    return parameters * (whole_bytes + divided_bytes / num_parts) - predicted


def _shift(memory: MemoryPrediction, difference: float) -> MemoryPrediction:
    def shift(predicted: PredictedRange) -> PredictedRange:
        return PredictedRange(predicted.value + difference, predicted.low + difference, predicted.high + difference)

    shifted = dataclasses.replace(
        memory,
        allocated=shift(memory.allocated),
        active=shift(memory.active),
        reserved=shift(memory.reserved),
        device_used=shift(memory.device_used),
        wanted=shift(memory.wanted),
    )
    if shifted.capacity is None:
        return shifted
    verdict = predict_fit(shifted.allocated, shifted.capacity, shifted.beside, finds_place=True)
    return dataclasses.replace(shifted, verdict=verdict)
