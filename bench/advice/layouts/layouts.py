"""The layouts of a question: every way of dividing a model over its GPUs that is searched, at one global batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.advice.candidates import SYNC_KEY
from bench.config.global_batch import MAX_ACCUMULATION
from bench.config.grid import RunSettings
from bench.config.run_config import RunConfig
from bench.models import Family
from bench.strategies.mesh.knobs import DDP_KIND, FSDP_KIND, ZERO1_KIND
from bench.strategies.mesh.layout import share_sequences
from bench.strategies.pipeline.balance import find_balance
from bench.strategies.pipeline.schedule import INTERLEAVED, ONE_F_ONE_B, ZERO_BUBBLE_V, repeats_recomputation

MICRO_BATCH_SIZES = (1, 2, 4)
"""Sequences of a micro-batch in one copy of the model, as far as they come to no more than..."""

MAX_MICRO_BATCH_TOKENS = 8192
"""...so many tokens, which keep a GPU busy; one sequence may be longer."""

SCHEDULES = ((ONE_F_ONE_B, 1), (INTERLEAVED, 2), (INTERLEAVED, 4), (ZERO_BUBBLE_V, 2))
"""Schedules searched, with stages per rank. GPipe has the bubble of 1F1B and keeps more."""

MIN_CONTEXT_TOKENS = 8192
"""Of a sequence's part on each rank: shorter sequences are not divided."""

MAX_PIPELINE, MAX_EXPERT = 64, 64
"""Degrees searched, at most."""

MIN_BALANCE_GAIN = 0.05
"""Share by which the stage that computes longest must get shorter for a last stage with fewer blocks to be searched."""

DATA_KINDS = (FSDP_KIND, ZERO1_KIND, DDP_KIND)


@dataclass(frozen=True)
class LayoutQuestion:
    """What layouts are searched for."""

    settings: RunSettings
    """What all have in common, as typed, with the global batch."""
    model: Family
    gpus: int
    gpus_per_node: int
    sequence_length: int
    global_sequences: int
    """Of an optimizer step of all ranks."""
    checkpointing_modes: tuple[str, ...]
    subject: RunConfig
    """A run of the model on these GPUs, with FSDP and one sequence on each."""


@dataclass(frozen=True)
class Layout:
    """One way to divide a model, its sequences and the batch of a step."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    shards: int
    """Ranks that FSDP shards over, beside those of expert and context; 1 with ddp and zero1."""
    replicas: int
    data: str
    reshards: bool | None
    """With FSDP and without a pipeline: whether gathered parameters are freed after forward."""
    schedule: str | None
    virtual_stages: int
    micro_batch: int
    """Sequences that one copy of the model takes at a time."""
    micro_batches: int
    """Of one copy, in a step."""
    last_stage_less_blocks: int
    """Blocks that the last stage has less than others."""
    checkpointing: str
    synchronizes: bool = False
    """Gradients are reduced after every micro-batch, so that none is whole any longer; only with FSDP and without a
    pipeline."""
    whole_experts: bool = False
    """Experts are spread over tensor-parallel ranks, too, each of which has whole ones."""

    @property
    def copies(self) -> int:
        """Ranks that read different sequences."""
        return self.shards * self.replicas * self.expert

    @property
    def num_stages(self) -> int:
        """Of one copy of the model."""
        return self.pipeline * self.virtual_stages

    @property
    def trace_group(self) -> tuple[object, ...]:
        """What decides which kernels a rank runs in all: layouts of one group differ in stages, schedule and ways to be
        sharded alone."""
        keeps_dtensors = self.data == FSDP_KIND
        degrees = (self.tensor, self.context, self.expert, self.whole_experts)
        return (*degrees, self.micro_batch, self.checkpointing, keeps_dtensors)

    def list_settings(self) -> RunSettings:
        """What is typed for it, beside what all have in common."""
        degrees = {"tensor": self.tensor, "pipeline": self.pipeline, "context": self.context, "expert": self.expert}
        settings = {"strategy": "mesh"} | {
            f"strategy.{name}": str(degree) for name, degree in degrees.items() if degree > 1
        }
        if self.whole_experts:
            settings["strategy.expert_tensor_parallel"] = "false"
        settings["strategy.data"] = self.data
        if self.data == FSDP_KIND and self.replicas > 1:
            settings |= {"strategy.shards": str(self.shards), "strategy.replicas": str(self.replicas)}
        if self.synchronizes:
            settings[SYNC_KEY] = "true"
        if self.reshards is not None:
            settings["strategy.reshard_after_forward"] = str(self.reshards).lower()
        ranks_per_copy = self.tensor * self.pipeline * self.context
        sequences = self.micro_batch * (self.micro_batches if self.pipeline > 1 else 1)
        batch, ranks_per_batch = share_sequences(sequences, ranks_per_copy)
        if ranks_per_batch > 1:
            settings["strategy.ranks_per_batch"] = str(ranks_per_batch)
        if self.schedule is not None:
            settings |= {"strategy.schedule": self.schedule, "strategy.micro_batches": str(self.micro_batches)}
            if self.virtual_stages > 1:
                settings["strategy.virtual_stages"] = str(self.virtual_stages)
            if self.last_stage_less_blocks:
                settings["strategy.last_stage_less_blocks"] = str(self.last_stage_less_blocks)
        settings |= {"activation_checkpointing": self.checkpointing, "batch_size_per_gpu": str(batch)}
        return settings


def list_layouts(question: LayoutQuestion) -> Iterator[Layout]:
    """Every layout that divides more than parameters: tensor parallelism within a node, pipelines of powers of two and
    of divisors of the blocks, with as many blocks in each stage and with fewer in the last one for its head, context
    parallelism of long sequences, expert parallelism of mixtures of experts, with each kind of data parallelism and
    mode of checkpointing."""
    for tensor, pipeline, context, expert in _list_degrees(question):
        copies_by_expert = question.gpus // (tensor * pipeline * context * expert)
        copies = copies_by_expert * expert
        if question.global_sequences % copies:
            continue
        sequences = question.global_sequences // copies
        for micro_batch in MICRO_BATCH_SIZES:
            num_micro_batches = sequences // micro_batch
            if sequences % micro_batch or num_micro_batches > MAX_ACCUMULATION:
                continue
            if micro_batch > 1 and micro_batch * question.sequence_length > MAX_MICRO_BATCH_TOKENS:
                continue
            schedules = _list_schedules(question, pipeline, num_micro_batches)
            for schedule, virtual_stages in schedules:
                for data, shards, reshards in _list_data(question, tensor, pipeline, context, expert, schedule):
                    accumulates_shards = data == FSDP_KIND and pipeline == 1 and num_micro_batches > 1
                    for whole_experts, checkpointing, synchronizes, less_blocks in itertools.product(
                        _list_expert_divisions(question, tensor, expert),
                        question.checkpointing_modes,
                        _list_synchronizations(question) if accumulates_shards else (False,),
                        _list_stage_balances(question, pipeline * virtual_stages),
                    ):
                        if repeats_recomputation(schedule, checkpointing):
                            continue
                        yield Layout(
                            tensor,
                            pipeline,
                            context,
                            expert,
                            shards,
                            copies_by_expert // shards,
                            data,
                            reshards,
                            schedule,
                            virtual_stages,
                            micro_batch,
                            num_micro_batches,
                            less_blocks,
                            checkpointing,
                            synchronizes,
                            whole_experts,
                        )


def _list_stage_balances(question: LayoutQuestion, num_stages: int) -> Sequence[int]:
    """Blocks less in the last stage: none, and as many as its head takes, if that helps."""
    balance = find_balance(question.model, question.sequence_length, num_stages, MIN_BALANCE_GAIN)
    return list(dict.fromkeys((0, balance)))


def _list_expert_divisions(question: LayoutQuestion, tensor: int, expert: int) -> Sequence[bool]:
    """Whether experts are whole on tensor-parallel ranks. Where tokens are sent to experts in any case they are, if
    there are enough: divided, each rank has as many weights and products, and all of them send the same tokens."""
    if tensor == 1 or not _divides(tensor * expert, getattr(question.model, "num_experts", 0)):
        return (False,)
    return (True,) if expert > 1 else (False, True)


def _list_synchronizations(question: LayoutQuestion) -> Sequence[bool]:
    """Whether gradients are reduced after every micro-batch: as was said, or both ways."""
    given = question.settings.get(SYNC_KEY)
    return (False, True) if given is None else (given == "true",)


def _list_degrees(question: LayoutQuestion) -> Iterator[tuple[int, int, int, int]]:
    """Of tensor, pipeline, context and expert, but all 1."""
    model, node = question.model, min(question.gpus, question.gpus_per_node)
    num_blocks, num_experts = model.num_blocks or 1, getattr(model, "num_experts", 0)
    pipelines = [
        degree
        for degree in range(1, min(MAX_PIPELINE, num_blocks) + 1)
        if degree & (degree - 1) == 0 or num_blocks % degree == 0
    ]
    tensors = _list_powers(node) if model.can_divide_layers or model.can_divide_expert_layers else [1]
    parts = 1 if model.find_undivided_sequence_reason() else max(1, question.sequence_length // MIN_CONTEXT_TOKENS)
    experts = [degree for degree in _list_powers(MAX_EXPERT) if degree == 1 or _divides(degree, num_experts)]
    for tensor, context, expert, pipeline in itertools.product(tensors, _list_powers(parts), experts, pipelines):
        product = tensor * context * expert * pipeline
        if product > 1 and question.gpus % product == 0:
            yield tensor, pipeline, context, expert


def _divides(degree: int, number: int) -> bool:
    return number > 0 and number % degree == 0


def _list_powers(limit: int) -> list[int]:
    return [2**power for power in range(limit.bit_length()) if 2**power <= limit]


def _list_schedules(
    question: LayoutQuestion, pipeline: int, num_micro_batches: int
) -> Sequence[tuple[str | None, int]]:
    """Those that a pipeline can have, with stages per rank."""
    if pipeline == 1:
        return [(None, 1)]
    num_blocks = question.model.num_blocks or 1
    return [
        (schedule, virtual_stages)
        for schedule, virtual_stages in SCHEDULES
        if virtual_stages * pipeline <= num_blocks
        and num_micro_batches >= pipeline
        and (schedule != INTERLEAVED or num_micro_batches % (num_micro_batches // pipeline) == 0)
    ]


def _list_data(
    question: LayoutQuestion, tensor: int, pipeline: int, context: int, expert: int, schedule: str | None
) -> Iterator[tuple[str, int, bool | None]]:
    """Kinds of data parallelism: the kind, ranks that FSDP shards over, and whether it reshards after forward."""
    copies = question.gpus // (tensor * pipeline * context * expert)
    if copies * expert * context == 1:
        yield FSDP_KIND, 1, None
        return
    node = min(question.gpus, question.gpus_per_node)
    in_node = node // (tensor * context * expert) if tensor * context * expert <= node else 1
    for shards in dict.fromkeys((copies, in_node if copies % in_node == 0 and in_node < copies else copies)):
        for reshards in (True, False) if pipeline == 1 else (None,):
            yield FSDP_KIND, shards, reshards
    if schedule != ZERO_BUBBLE_V:
        yield DDP_KIND, 1, None
        if expert == 1:
            yield ZERO1_KIND, 1, None
