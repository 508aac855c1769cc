"""What of a run its prediction starts from: the trace it needs, where its parameters are, what its plan is told."""

from __future__ import annotations

import dataclasses

from bench.config.run_config import RunConfig
from bench.prediction.simulation.parameter_layout import ParameterLayout, build_parameter_layout
from bench.prediction.trace.scaled_trace import ScaledTrace, list_traced_batch_sizes
from bench.prediction.trace.trace import TraceKey
from bench.strategies.plan_inputs import PlanInputs


def build_trace_key(config: RunConfig) -> TraceKey:
    """What of a run its trace depends on: runs that are traced alike have equal keys."""
    precision = config.precision
    changes_formats = precision.is_mixed or precision.scales_loss or precision.uses_torchao
    has_autocast = changes_formats and config.strategy.uses_autocast(precision)
    return TraceKey(
        family=config.trained_model,
        sequence_length=config.sequence_length,
        precision=dataclasses.replace(precision, mixing=None),
        autocast=has_autocast,
        activation_checkpointing=config.activation_checkpointing,
        micro_batches=min(config.gradient_accumulation, 2),
        device=config.hardware.torch_device,
        compile=config.compile,
        widens_outputs=config.strategy.casts_outputs_to_fp32(precision),
        split=config.strategy.build_tensor_parallel_split(),
        autocast_caches=config.strategy.has_autocast_cache or not has_autocast,
        loss_chunks=config.loss_chunks,
        compiles_loss=config.compiles_loss,
        activation_offload=config.activation_offload,
        shards_fp32_separately=precision.scales_loss
        and not config.strategy.uses_autocast(precision)
        and config.strategy.shards_fp32_layers_separately,
        shards_trained_separately=config.strategy.shards_trained_layers_separately and config.finetune.name != "full",
        shards_experts_separately=config.strategy.shards_experts_separately and config.strategy.timetable is None,
        num_ranks=config.gpus if config.trained_model.communicates else 1,
    )


def list_traced_sizes(config: RunConfig) -> tuple[int, int]:
    """The batch sizes that a device's step is predicted from."""
    return list_traced_batch_sizes(config.sequences_per_device, is_compiled=config.has_compiled_parts)


def build_run_layout(config: RunConfig) -> ParameterLayout:
    """Where the parameters of a run's model are, and the units its strategy makes of them."""
    blocks_per_unit = getattr(config.strategy, "blocks_per_unit", None) or 1
    return build_parameter_layout(
        config.trained_model,
        blocks_per_unit,
        config.precision.scales_loss,
        config.strategy.build_tensor_parallel_split(),
        shards_fp32_separately=build_trace_key(config).shards_fp32_separately,
        shards_trained_separately=config.strategy.shards_trained_layers_separately,
        shards_experts_separately=config.strategy.shards_experts_separately,
    )


def build_plan_inputs(config: RunConfig, scaled_trace: ScaledTrace | None) -> PlanInputs:
    """What the strategy's plan is told of a run; without a trace, nothing of what the model returns."""
    outputs_bytes = logits_bytes = 0.0
    if scaled_trace is not None:
        batch_weight = scaled_trace.compute_batch_weight(config.sequences_per_device)
        outputs_bytes = scaled_trace.outputs_bytes[0] + batch_weight * scaled_trace.outputs_bytes[1]
        logits_bytes = scaled_trace.logits_bytes[0] + batch_weight * scaled_trace.logits_bytes[1]
    return PlanInputs(
        units=build_run_layout(config).units,
        explicit_parameter_order=build_run_layout(config).parameter_order,
        precision=config.trained_precision,
        casts_parameters=not config.strategy.uses_autocast(config.precision),
        world_size=config.gpus,
        optimizer=config.optimizer,
        num_micro_batches=config.gradient_accumulation,
        keep_gradients=config.optimizer.keep_gradients,
        gradient_accumulation_fusion=config.gradient_accumulation_fusion,
        outputs_bytes=outputs_bytes,
        logits_bytes=logits_bytes,
        is_on_cpu=config.hardware.device == "cpu",
    )
