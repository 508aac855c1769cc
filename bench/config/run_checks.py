"""What of a run's settings do not go together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.core.errors import ImpossibleError, invalid_value_error
from bench.core.precision import require_torchao
from bench.models.base import ALTERNATE_OPERATORS, OPERATORS, SELECTIVE, find_checkpointing_budget
from bench.models.checkpointing import CHECKPOINTING_MODES
from bench.strategies import (
    StepSettings,
    require_finetune,
    require_float8,
    require_fp32_adapters,
    require_whole_replicas,
)
from bench.strategies.pipeline.schedule import SPLIT_BACKWARD_SCHEDULES

if TYPE_CHECKING:
    from bench.config.run_config import RunConfig

MAX_TOKENS_PER_PROCESS = 2**27
"""Of one micro-batch in one process."""


def check_run(config: RunConfig) -> None:
    """Raise `ImpossibleError` unless a run can be carried out as it is."""
    config.strategy.check_mode(config.mode)
    if config.is_rehearsed:
        config.strategy.find_rehearsed_rank(config.rehearse.rank, config.gpus)
    elif config.rehearse.rank is not None:
        valid = f"null with mode={config.mode}, or mode=rehearse"
        raise invalid_value_error("rehearse.rank", config.rehearse.rank, valid, ImpossibleError)
    if config.is_rehearsed and config.devices_per_process > 1:
        raise ImpossibleError(
            f"mode=rehearse is not valid for strategy={config.strategy.name}, which drives all devices from one "
            "process, so that the first cannot run alone: choose mode=predict or measure."
        )
    unsteady_steps = config.strategy.first_steady_step - 1
    if not config.is_predicted and config.measurement.warmup_steps < unsteady_steps:
        valid_values = (
            f"at least {unsteady_steps}, since so many steps of strategy={config.strategy.name} are not like the later"
        )
        raise invalid_value_error(
            "measurement.warmup_steps", config.measurement.warmup_steps, valid_values, ImpossibleError
        )
    if not config.is_predicted and config.measurement.steps < config.strategy.step_period:
        valid_values = (
            f"at least {config.strategy.step_period}, since so many steps of strategy={config.strategy.name} are one "
            "period"
        )
        raise invalid_value_error("measurement.steps", config.measurement.steps, valid_values, ImpossibleError)
    if config.gpus > config.gpus_per_node and config.gpus % config.gpus_per_node:
        valid_values = f"a multiple of gpus_per_node={config.gpus_per_node}, or fewer"
        raise invalid_value_error("gpus", config.gpus, valid_values, ImpossibleError)
    if config.sequences_per_rank * config.sequence_length > MAX_TOKENS_PER_PROCESS:
        valid_values = f"fewer sequences, or shorter ones: at most {MAX_TOKENS_PER_PROCESS} tokens in one process"
        raise invalid_value_error("batch_size_per_gpu", config.batch_size_per_gpu, valid_values, ImpossibleError)
    if config.expandable_segments and config.hardware.device == "cpu":
        raise ImpossibleError(
            "expandable_segments=true is not valid on a CPU, which has no caching allocator: choose false."
        )
    if config.gradient_accumulation_fusion and not config.is_predicted:
        raise ImpossibleError(
            f"gradient_accumulation_fusion=true is not valid with mode={config.mode}, since no run has Megatron's "
            "kernels: choose false, or mode=predict."
        )
    config.model.check_sequence_length(config.sequence_length)
    config.model.check_run(config.precision, config.gpus)
    if config.model.communicates:
        require_whole_replicas(config.strategy, config.model)
        if config.finetune.name != "full":
            raise invalid_value_error(
                "finetune", config.finetune.name, f"full, for model={config.model.name}", ImpossibleError
            )
    config.strategy.check_model(config.model, config.batch_size_per_gpu, config.sequence_length)
    split = config.strategy.build_tensor_parallel_split()
    config.model.check_expert_width(config.precision, 1 if split is None else split.expert_width_degree)
    config.strategy.check_device(config.hardware.device)
    if config.precision.uses_float8:
        require_float8(config.strategy, config.precision)
        _check_float8_library(config)
    config.strategy.check_precision(config.precision)
    config.strategy.check_optimizer(config.optimizer.name, config.optimizer.implementation)
    config.optimizer.check_tensors(config.strategy.name, config.strategy.updated_tensor_kind)
    config.optimizer.check_offloaded_state(config.strategy.name, config.strategy.offloaded_state)
    require_finetune(config.strategy, config.finetune.name)
    if config.trained_precision != config.precision:
        require_fp32_adapters(config.strategy)
    config.strategy.check_finetune(config.finetune.quantised_bits, config.finetune.adapter_dropout)
    if config.activation_offload and config.compile:
        raise ImpossibleError(
            "activation_offload=true is not valid with compile=true, whose blocks keep what the compiler chooses: "
            "choose false."
        )
    if find_checkpointing_budget(config.activation_checkpointing) is not None and config.compile:
        raise ImpossibleError(
            f"activation_checkpointing={config.activation_checkpointing} is not valid with compile=true, whose "
            f"compiled operators are not those of the model: choose {', '.join(CHECKPOINTING_MODES)}."
        )
    if config.is_predicted and config.compile and config.finetune.quantised_bits is not None:
        raise ImpossibleError(
            f"compile=true is not valid with mode=predict and finetune={config.finetune.name}, at whose layers torch's "
            "compiler breaks the graph of a block: choose false, or finetune=lora."
        )
    _check_compiled_division(config)
    _check_compiled_loss(config)
    if config.loss_chunks is not None:
        from bench.models.chunked_loss import check_chunked_loss  # builds the model

        check_chunked_loss(config.model)
    config.finetune.check(config.model, config.precision, config.hardware.device)
    config.strategy.check_step(
        StepSettings(
            config.gradient_accumulation,
            config.gradient_accumulation_sync,
            config.optimizer.keep_gradients,
            config.compile,
            config.precision,
            config.loss_chunks is not None,
            config.activation_offload,
            config.finetune.name,
        )
    )


def _check_float8_library(config: RunConfig) -> None:
    precision = config.precision
    if precision.uses_torchao:
        require_torchao(precision)
    elif not config.is_predicted:
        valid = f"tensorwise or rowwise with mode={config.mode}, since no run has its layers; or mode=predict"
        raise invalid_value_error("precision.float8", precision.float8, valid, ImpossibleError)


def _check_compiled_division(config: RunConfig) -> None:
    """Raise `ImpossibleError` where torch's compiler fails on blocks that ranks share (torch 2.13): on divided layers,
    parts of which are computed again, since it keeps their mesh among the tensors for backward (not with every model);
    and on parts of a block that it compiles alone, which are computed again as a whole, or exchange hidden states in
    FP8, since it takes gradients of plain tensors to be in FP8, too."""
    split = config.strategy.build_tensor_parallel_split()
    if split is None or not config.compile:
        return
    checkpointing = f"activation_checkpointing={config.activation_checkpointing}"
    recomputes_parts = config.activation_checkpointing in (SELECTIVE, OPERATORS, ALTERNATE_OPERATORS)
    if recomputes_parts and split.degree > 1:
        raise _compiled_division_error(
            checkpointing,
            "layers that ranks share, of which torch's compiler would keep the mesh among the tensors for backward",
            "none or full",
        )
    if recomputes_parts and split.breaks_graphs:
        raise _compiled_division_error(
            checkpointing,
            "experts or sequences that ranks share, where torch's compiler breaks a block's graph, and recomputes its "
            "parts as a whole",
            "none or full",
        )
    if split.breaks_graphs and split.exchanges_float8(config.precision):
        raise _compiled_division_error(
            f"precision.float8={config.precision.float8}",
            "layers that ranks share beside experts or sequences, where torch's compiler breaks a block's graph, and "
            "takes gradients of its parts to be in FP8",
            "rowwise",
        )


def _check_compiled_loss(config: RunConfig) -> None:
    """Raise `ImpossibleError` where ranks share the logits, which torch's compiler takes whole alone; and where
    backward is split, of which it is not known what a compiled loss keeps: `gpt_tiny` in two stages took 13 % more
    than predicted (torch 2.13)."""
    if not config.compiles_loss:
        return
    split, timetable = config.strategy.build_tensor_parallel_split(), config.strategy.timetable
    if timetable is not None and timetable.schedule in SPLIT_BACKWARD_SCHEDULES:
        raise ImpossibleError(
            f"loss={config.loss} is not valid with strategy.schedule={timetable.schedule}, which splits backward into "
            "that of inputs and of weights, where the suite cannot tell what a compiled loss keeps: choose loss=whole, "
            "or strategy.schedule=1f1b."
        )
    if split is not None and (split.degree > 1 or split.context_degree > 1):
        raise ImpossibleError(
            f"loss={config.loss} is not valid for strategy={config.strategy.name} with ranks that share every "
            "sequence's logits: choose loss=whole."
        )


def _compiled_division_error(setting: str, reason: str, valid: str) -> ImpossibleError:
    return ImpossibleError(f"{setting} is not valid with compile=true and {reason}: choose {valid}, or compile=false.")
