"""Combinations that torch, or this suite, does not have: each refused before anything starts, with the reason."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bench.core.errors import ImpossibleError, invalid_value_error
from bench.core.precision import TRANSFORMER_ENGINE, Precision
from bench.models import Family
from bench.strategies.base import StepSettings
from bench.strategies.mesh.knobs import ALL_TO_ALL, ALL_TO_ALL_DISPATCHER, TORCH
from bench.strategies.mesh.layout import CONTEXT, EXPERT, PIPELINE, SHARDS, TENSOR
from bench.strategies.pipeline.schedule import ALL_SCHEDULES, ALTERNATING_SCHEDULES, SPLIT_BACKWARD_SCHEDULES
from bench.strategies.pipeline.schedule_checks import check_schedule, check_stage_blocks
from bench.strategies.requirements import list_divisors, require_no_dropout, require_stored_reduce_dtype

if TYPE_CHECKING:
    from bench.strategies.mesh.strategy import MeshStrategy


def check_knobs(strategy: MeshStrategy) -> None:
    """Raise `ImpossibleError` where knobs contradict each other, whatever is trained."""
    layout, data = strategy.layout, strategy.data
    if data in ("ddp", "zero1") and layout.get_degree(SHARDS) > 1:
        raise invalid_value_error(
            "strategy.shards",
            strategy.shards,
            f"null or 1 with strategy.data={data}, which shards no parameters, or strategy.data=fsdp",
            ImpossibleError,
        )
    if data == "zero1" and layout.get_degree(EXPERT) > 1:
        raise ImpossibleError(
            f"strategy.data=zero1 is not valid with strategy.expert={strategy.expert}, since torch's "
            "ZeroRedundancyOptimizer divides states among the ranks of one process group, and experts have another one "
            "than the rest: choose strategy.data=fsdp or ddp."
        )
    ranks_per_copy = layout.get_degree(TENSOR, PIPELINE, CONTEXT)
    if ranks_per_copy % strategy.num_ranks_per_batch:
        raise invalid_value_error(
            "strategy.ranks_per_batch",
            strategy.ranks_per_batch,
            f"a divisor of the {ranks_per_copy} ranks of tensor x pipeline x context, which share their sequences: "
            f"{', '.join(map(str, list_divisors(ranks_per_copy)))}",
            ImpossibleError,
        )
    if not (layout.expert_tensor_parallel or strategy.sequence_parallel):
        raise ImpossibleError(
            "strategy.expert_tensor_parallel=false is not valid with strategy.sequence_parallel=false, with which all "
            "tensor-parallel ranks would send the same tokens to the experts: choose true for one of them."
        )
    timetable = strategy.timetable
    if timetable is not None:
        check_schedule(timetable)
        if strategy.schedule in SPLIT_BACKWARD_SCHEDULES and data in ("ddp", "zero1"):
            raise ImpossibleError(
                f"strategy.data={data} is not valid with strategy.schedule={strategy.schedule}, whose gradients of "
                "weights torch computes without the hooks that tell DDP of them: choose strategy.data=fsdp, or "
                "strategy.schedule=1f1b."
            )
    if strategy.async_tensor_parallel and layout.get_degree(TENSOR) == 1:
        raise invalid_value_error(
            "strategy.async_tensor_parallel", True, "false, or strategy.tensor of 2 or more", ImpossibleError
        )
    if strategy.overlap_kernels == TRANSFORMER_ENGINE and not strategy.sequence_parallel:
        raise invalid_value_error(
            "strategy.overlap_kernels",
            strategy.overlap_kernels,
            f"{TORCH}, or strategy.sequence_parallel=true, whose exchanges they are",
            ImpossibleError,
        )
    _check_token_knobs(strategy)


def _check_token_knobs(strategy: MeshStrategy) -> None:
    layout = strategy.layout
    sends_tokens = layout.get_degree(*layout.expert_dims) > 1
    for name, is_asked, default in (
        ("overlap_experts", strategy.overlap_experts, "false"),
        ("token_dispatcher", strategy.merges_tokens_per_node, ALL_TO_ALL_DISPATCHER),
    ):
        if is_asked and not sends_tokens:
            valid = f"{default}, or strategy.expert of 2 or more, whose ranks tokens are sent to"
            raise invalid_value_error(f"strategy.{name}", getattr(strategy, name), valid, ImpossibleError)
    if strategy.overlap_experts and strategy.schedule not in ALTERNATING_SCHEDULES:
        raise ImpossibleError(
            f"strategy.overlap_experts=true is not valid with strategy.schedule={strategy.schedule}, in which no "
            "forward pass is followed by a backward pass: choose false, or one of "
            f"{', '.join(ALTERNATING_SCHEDULES)} with strategy.pipeline or strategy.micro_batches of 2 or more."
        )


def check_mode(strategy: MeshStrategy, mode: str) -> None:
    """Raise `ImpossibleError` for what is predicted only: micro-batches without a pipeline, and what is Megatron's."""
    if mode == "predict":
        return
    megatron_reason = f"is not valid with mode={mode}, since no run has Megatron's"
    if strategy.overlap_experts:
        raise ImpossibleError(
            f"strategy.overlap_experts=true {megatron_reason} schedule: choose false, or mode=predict."
        )
    if strategy.token_dispatcher != ALL_TO_ALL_DISPATCHER:
        raise ImpossibleError(
            f"strategy.token_dispatcher={strategy.token_dispatcher} {megatron_reason} dispatchers: choose "
            f"{ALL_TO_ALL_DISPATCHER}, or mode=predict."
        )
    if strategy.overlap_kernels == TRANSFORMER_ENGINE:
        raise ImpossibleError(
            f"strategy.overlap_kernels={TRANSFORMER_ENGINE} {megatron_reason} kernels: choose {TORCH}, or mode=predict."
        )
    if strategy.micro_batches is not None and strategy.layout.get_degree(PIPELINE) == 1:
        raise ImpossibleError(
            f"strategy.micro_batches={strategy.micro_batches} is not valid with mode={mode} and strategy.pipeline=1, "
            "since torch's schedules take no pipeline of one rank: choose null with gradient_accumulation="
            f"{strategy.micro_batches}, strategy.pipeline of 2 or more, or mode=predict."
        )


def check_model(strategy: MeshStrategy, family: Family, batch_size_per_gpu: int, sequence_length: int) -> None:
    """Raise `ImpossibleError` where a dimension cannot divide the model, its sequences or the batch."""
    layout = strategy.layout
    for name in (TENSOR, CONTEXT):
        if layout.get_degree(name) > 1:
            require_no_dropout(
                "model.dropout", getattr(family, "dropout", 0.0), f"strategy.{name}={layout.get_degree(name)}"
            )
    if layout.get_degree(*layout.expert_dims) > 1:
        _check_experts(strategy, family)
    if layout.get_degree(TENSOR) > 1:
        _check_layers(strategy, family, sequence_length)
    if layout.get_degree(CONTEXT) > 1:
        _check_sequences(strategy, family, sequence_length)
    if layout.get_degree(PIPELINE) > 1:
        _check_stages(strategy, family, batch_size_per_gpu)


def _check_experts(strategy: MeshStrategy, family: Family) -> None:
    num_experts, layout = getattr(family, "num_experts", 0), strategy.layout
    if not num_experts:
        is_spread = layout.get_degree(EXPERT) == 1
        asked, valid = ("expert_tensor_parallel=false", "true") if is_spread else (f"expert={strategy.expert}", "1")
        raise ImpossibleError(
            f"strategy.{asked} is not valid for model={family.name}, which has no experts: choose {valid}, or a model "
            "of family moe."
        )
    if not layout.expert_tensor_parallel and num_experts % layout.get_degree(*layout.expert_dims):
        raise ImpossibleError(
            f"strategy.expert={strategy.expert} is not valid with strategy.tensor={strategy.tensor} and "
            f"strategy.expert_tensor_parallel=false, since model.num_experts={num_experts} are spread over both: "
            f"choose degrees whose product is one of {', '.join(map(str, list_divisors(num_experts)))}, or "
            "strategy.expert_tensor_parallel=true."
        )
    if num_experts % layout.get_degree(EXPERT):
        raise invalid_value_error(
            "strategy.expert",
            strategy.expert,
            f"a divisor of model.num_experts={num_experts}: {', '.join(map(str, list_divisors(num_experts)))}",
            ImpossibleError,
        )


def _check_layers(strategy: MeshStrategy, family: Family, sequence_length: int) -> None:
    degree = strategy.layout.get_degree(TENSOR)
    if not (family.can_divide_layers or family.can_divide_expert_layers):
        raise ImpossibleError(
            f"strategy.tensor={degree} is not valid for model.family={family.family}, which does not say how its "
            "layers are divided: choose 1, or a model of family gpt, llama, moe or t5."
        )
    local_length = sequence_length // strategy.layout.get_degree(CONTEXT)
    sizes = family.list_divided_sizes(local_length, sequence_parallel=strategy.sequence_parallel)
    if not strategy.expert_tensor_parallel:
        sizes.pop("model.intermediate_size")  # of experts, which are whole
    for name, size in sizes.items():
        if size % degree:
            divisors = list_divisors(math.gcd(*sizes.values()))
            raise ImpossibleError(
                f"strategy.tensor={degree} is not valid with {name}={size} on each rank, which it must divide: choose "
                f"{', '.join(map(str, divisors))}."
            )


def _check_sequences(strategy: MeshStrategy, family: Family, sequence_length: int) -> None:
    degree = strategy.layout.get_degree(CONTEXT)
    reason = family.find_undivided_sequence_reason()
    if reason:
        raise ImpossibleError(
            f"strategy.context={degree} is not valid for model={family.name}, {reason}: choose 1, or a model of family "
            "gpt, llama or moe with attention=sdpa over whole sequences."
        )
    parts = degree if strategy.context_form == ALL_TO_ALL else 2 * degree
    if sequence_length % parts:
        raise invalid_value_error(
            "sequence_length",
            sequence_length,
            f"a multiple of {parts}, which strategy.context={degree} divides it into",
            ImpossibleError,
        )
    num_heads = family.num_heads // strategy.layout.get_degree(TENSOR)  # type: ignore[attr-defined]
    if strategy.context_form == ALL_TO_ALL and num_heads % degree:
        raise ImpossibleError(
            f"strategy.context_form=all_to_all is not valid with strategy.context={degree} and {num_heads} heads on "
            "each rank, which it divides: choose ring or all_gather, or fewer ranks."
        )


def _check_stages(strategy: MeshStrategy, family: Family, batch_size_per_gpu: int) -> None:
    timetable = strategy.timetable
    assert timetable is not None
    if family.num_blocks is None:
        raise ImpossibleError(
            f"strategy.pipeline={strategy.pipeline} is not valid for model={family.name}, whose family does not say "
            "how it is cut into stages: choose 1, or a model of family t5, gpt, llama or moe."
        )
    if family.family == "t5" and strategy.layout.get_degree(TENSOR) > 1:
        raise ImpossibleError(
            f"strategy.pipeline={strategy.pipeline} is not valid with strategy.tensor={strategy.tensor} for "
            f"model={family.name}, whose stages each copy the table of position biases that tensor parallelism "
            "divides: choose one of them, or a model of family gpt, llama or moe."
        )
    if family.family == "t5" and timetable.schedule in SPLIT_BACKWARD_SCHEDULES:
        choices = ", ".join(name for name in ALL_SCHEDULES if name not in SPLIT_BACKWARD_SCHEDULES)
        raise ImpossibleError(
            f"strategy.schedule={timetable.schedule} is not valid for model={family.name}, whose blocks share a table "
            "of position biases: torch, which splits backward there into that of inputs and of weights, goes backward "
            f"through what several blocks share more than once: choose {choices}."
        )
    if timetable.num_stages > family.num_blocks:
        raise ImpossibleError(
            f"strategy.pipeline={strategy.pipeline} with {timetable.num_stages} stages is not valid for "
            f"model={family.name}, which has {family.num_blocks} blocks: choose strategy.pipeline and "
            f"strategy.virtual_stages whose product is at most {family.num_blocks}."
        )
    check_stage_blocks(timetable, family.num_blocks)
    sharing = strategy.layout.get_degree(TENSOR, PIPELINE, CONTEXT) // strategy.num_ranks_per_batch
    noun = "ranks" if strategy.num_ranks_per_batch == 1 else f"groups of {strategy.num_ranks_per_batch} ranks"
    sequences = batch_size_per_gpu * sharing
    if sequences % timetable.micro_batches:
        raise invalid_value_error(
            "strategy.micro_batches",
            timetable.micro_batches,
            f"a divisor of the {sequences} sequences that one pipeline reads (batch_size_per_gpu={batch_size_per_gpu} "
            f"on each of {sharing} {noun}): {', '.join(map(str, list_divisors(sequences)))}",
            ImpossibleError,
        )


def find_batch_size_multiple(strategy: MeshStrategy) -> int:
    """Of the batch size per GPU, so that every micro-batch of the schedule has as many sequences."""
    timetable = strategy.timetable
    if timetable is None:
        return 1
    sharing = strategy.layout.get_degree(TENSOR, PIPELINE, CONTEXT) // strategy.num_ranks_per_batch
    return timetable.micro_batches // math.gcd(timetable.micro_batches, sharing)


def check_device(strategy: MeshStrategy, device: str) -> None:
    """Raise `ImpossibleError` where a knob needs another device."""
    if strategy.async_tensor_parallel and device == "cpu":
        raise ImpossibleError(
            "strategy.async_tensor_parallel=true is not valid on a CPU, since torch overlaps gathers and products in "
            "symmetric memory, which it has between CUDA devices alone: choose false."
        )


def check_precision(strategy: MeshStrategy, precision: Precision) -> None:
    """Raise `ImpossibleError` where DDP would have to convert gradients."""
    if strategy.data in ("ddp", "zero1"):
        require_stored_reduce_dtype(f"strategy=mesh with strategy.data={strategy.data}", precision, ", or fsdp")


def check_optimizer(strategy: MeshStrategy, name: str, implementation: str) -> None:
    """Raise `ImpossibleError` for fused SGD, which torch 2.13 does not have on DTensors."""
    if strategy.data == "fsdp" and (name, implementation) == ("sgd", "fused"):
        raise ImpossibleError(
            "optimizer.implementation=fused is not valid for optimizer=sgd with strategy.data=fsdp, whose parameters "
            "are DTensors: choose foreach or for_loop, or ddp."
        )


def check_step(strategy: MeshStrategy, settings: StepSettings) -> None:
    """Raise `ImpossibleError` where a mesh cannot carry out a step like this."""
    layout = strategy.layout
    if settings.offloads_activations:
        raise ImpossibleError(
            "activation_offload=true is not valid for strategy=mesh, whose blocks keep parts that wait for other "
            "ranks: choose false."
        )
    if settings.has_chunked_loss:
        raise ImpossibleError(
            "loss=chunked is not valid for strategy=mesh, whose loss takes part of the logits on each rank: choose "
            "loss=whole."
        )
    if settings.num_micro_batches > 1 and layout.get_degree(PIPELINE) > 1:
        raise ImpossibleError(
            f"gradient_accumulation={settings.num_micro_batches} is not valid for strategy=mesh with "
            f"strategy.pipeline={strategy.pipeline}, whose micro-batches accumulate gradients already: choose 1, and a "
            "larger batch_size_per_gpu."
        )
    if (
        settings.num_micro_batches > 1
        and settings.synchronize_every_micro_batch
        and strategy.data == "ddp"
        and layout.get_degree(EXPERT) > 1
    ):
        raise ImpossibleError(
            "gradient_accumulation_sync=true is not valid with strategy.data=ddp and "
            f"strategy.expert={strategy.expert}, whose gradients are averaged once per step: choose false."
        )
    if settings.compile:
        _check_compile(strategy)
    elif strategy.async_tensor_parallel and strategy.overlap_kernels == TORCH:
        raise invalid_value_error(
            "strategy.async_tensor_parallel",
            True,
            "false with compile=false, since torch's compiler alone overlaps gathers and products",
            ImpossibleError,
        )


def _check_compile(strategy: MeshStrategy) -> None:
    if strategy.schedule in SPLIT_BACKWARD_SCHEDULES:
        raise ImpossibleError(
            f"compile=true is not valid with strategy.schedule={strategy.schedule}, since torch does not split the "
            "backward of compiled stages into that of inputs and of weights: choose false, or strategy.schedule=1f1b."
        )
