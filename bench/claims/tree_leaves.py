"""Claims of the decision tree that course notes quote, leaf by leaf: does what a leaf names fit, and is it faster?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.advice.tree.tree import DECISION_TREE, TREE_SOURCE
from bench.claims.claim import (
    DOES_NOT_HOLD,
    HOLDS,
    HOLDS_IN_PART,
    Assessment,
    ClaimRows,
    EvidenceStatement,
    PaperClaim,
    RowQuery,
)
from bench.core.presentation import format_number
from bench.prediction.prediction import DOES_NOT_FIT, FITS
from bench.records import Record

FASTER_MARGIN = 0.05
"""Relative difference up to which two predicted speeds count as equal."""

NUM_BIG_LAYER = {"model": "gpt_175b", "config.model.num_layers": 2}
"""A model of two layers that no GPU of 80 GB holds one of."""


@dataclass(frozen=True)
class LeafCase:
    """A case that leads to a leaf, and what the leaf claims of it."""

    key: str
    """The leaf's, in `bench.advice.tree.tree`."""
    claim: str
    case: str
    """Model and machine, in words."""
    where: Mapping[str, Any]
    """What all its rows have in common."""
    options: Mapping[str, Mapping[str, Any]]
    """By a name, what tells a row from the others: what the leaf names first, before what it is compared with."""
    judge: Callable[[Mapping[str, Record]], str]


def _does_fit(row: Record) -> bool:
    return bool(row["fit"] == FITS)


def _get_tokens_per_s(row: Record) -> float:
    """0 of a run that does not fit."""
    return float(row.get("tokens_per_second_per_gpu") or 0.0)


def _judge_needed(rows: Mapping[str, Record]) -> str:
    """The last that is named is the one that fits, and no other does."""
    *others, named = rows.values()
    if not _does_fit(named):
        return DOES_NOT_HOLD
    return HOLDS if all(row["fit"] == DOES_NOT_FIT for row in others) else HOLDS_IN_PART


def _judge_nothing_fits(rows: Mapping[str, Record]) -> str:
    return HOLDS if all(row["fit"] == DOES_NOT_FIT for row in rows.values()) else DOES_NOT_HOLD


def _judge_fastest(rows: Mapping[str, Record]) -> str:
    """The first is faster than all others."""
    first, *others = map(_get_tokens_per_s, rows.values())
    faster = [first > (1 + FASTER_MARGIN) * other for other in others]
    return HOLDS if all(faster) else HOLDS_IN_PART if any(faster) else DOES_NOT_HOLD


def _judge_any_faster_than_last(rows: Mapping[str, Record]) -> str:
    """Each is faster than the last."""
    *named, last = map(_get_tokens_per_s, rows.values())
    faster = [speed > (1 + FASTER_MARGIN) * last for speed in named]
    return HOLDS if all(faster) else HOLDS_IN_PART if any(faster) else DOES_NOT_HOLD


def _judge_equal(rows: Mapping[str, Record]) -> str:
    """All fit and are as fast as each other."""
    if not all(map(_does_fit, rows.values())):
        return DOES_NOT_HOLD
    speeds = sorted(map(_get_tokens_per_s, rows.values()))
    return (
        HOLDS
        if speeds[0] >= (1 - FASTER_MARGIN) * speeds[-1]
        else HOLDS_IN_PART
        if speeds[-2] >= (1 - FASTER_MARGIN) * speeds[-1]
        else DOES_NOT_HOLD
    )


def _judge_as_good(rows: Mapping[str, Record]) -> str:
    """The first, the simplest, fits and is not slower than the others."""
    first, *others = rows.values()
    if not _does_fit(first):
        return DOES_NOT_HOLD
    slower = [_get_tokens_per_s(first) < (1 - FASTER_MARGIN) * _get_tokens_per_s(other) for other in others]
    return HOLDS if not any(slower) else HOLDS_IN_PART if not all(slower) else DOES_NOT_HOLD


_FULL = {"strategy": "fsdp", "cpu_offload": False}
_OFFLOADED = {"strategy": "fsdp", "cpu_offload": True}
_ETHERNET = "config.hardware.interconnect.node_link"

LEAF_CASES = (
    LeafCase(
        "plain training", "Where one GPU holds the model, nothing has to be spread: sharding gains nothing.",
        "GPT-1.3B on one A100", {"model": "gpt_1b3", "world_size": 1},
        {"single": {"strategy": "single"}, "FSDP1": {"strategy": "fsdp1"}}, _judge_as_good,
    ),
    LeafCase(
        "offload", "Where one GPU holds a layer and not the model, ZeRO-3 or FSDP with offload trains it.",
        "GPT-13B on one A100", {"model": "gpt_13b", "world_size": 1},
        {"single": {"strategy": "single"}, "FSDP2 offloaded": _OFFLOADED}, _judge_needed,
    ),
    LeafCase(
        "layer larger than the GPU", "Where not even a layer fits, offload does not help.",
        "two layers of 12.9 billion parameters on one A100", {**NUM_BIG_LAYER, "world_size": 1},
        {"single": {"strategy": "single"}, "FSDP2 offloaded": _OFFLOADED}, _judge_nothing_fits,
    ),
    LeafCase(
        "DDP", "Where a copy fits each GPU of a node, DDP is enough: ZeRO need not be faster.",
        "GPT-1.3B on 8 A100, batch 1 of 512", {"model": "gpt_1b3", "world_size": 8},
        {"DDP": {"strategy": "ddp"}, "ZeRO-1": {"strategy": "zero1"}, "FSDP2": _FULL}, _judge_as_good,
    ),
    LeafCase(
        "shard within the node", "With fast links ZeRO-3, tensor and pipeline parallelism are about equally fast.",
        "GPT-13B on 8 A100 with NVLink, 16 sequences a step", {"model": "gpt_13b", "world_size": 8},
        {"FSDP2": _FULL, "tensor parallel": {"strategy": "tensor_parallel"}, "pipeline": {"strategy": "pipeline"}},
        _judge_equal,
    ),
    LeafCase(
        "pipeline within the node", "With slow links a pipeline is faster than ZeRO-3 and tensor parallelism.",
        "GPT-2.7B on 8 RTX 4090 over PCIe through the host, 16 sequences a step",
        {"model": "gpt_2b7", "world_size": 8, "hardware": "rtx_4090"},
        {"pipeline": {"strategy": "pipeline"}, "FSDP2": _FULL, "tensor parallel": {"strategy": "tensor_parallel"}},
        _judge_fastest,
    ),
    LeafCase(
        "tensor parallelism", "Where a layer must be cut, tensor parallelism does it, and ZeRO-3 does not help.",
        "two layers of 12.9 billion parameters on 8 A100", {**NUM_BIG_LAYER, "world_size": 8},
        {"FSDP2": _FULL, "tensor parallel": {"strategy": "tensor_parallel"}}, _judge_needed,
    ),
    LeafCase(
        "too few GPUs", "Where the GPUs together do not hold the model, more GPUs do.",
        "GPT-175B on A100", {"model": "gpt_175b", "config.model.num_layers": 96, "config.model.family": "gpt"},
        {
            "FSDP2 on 8": {**_FULL, "world_size": 8}, "offloaded on 8": {**_OFFLOADED, "world_size": 8},
            "FSDP2 on 64": {**_FULL, "world_size": 64},
        },
        _judge_needed,
    ),
    LeafCase(
        "DDP across nodes", "Where a copy fits and the network between nodes is fast, DDP is enough.",
        "GPT-1.3B on 64 A100 with RoCE, batch 1 of 512",
        {"model": "gpt_1b3", "world_size": 64, _ETHERNET: "RoCE"},
        {"DDP": {"strategy": "ddp"}, "ZeRO-1": {"strategy": "zero1"}, "FSDP2": _FULL}, _judge_as_good,
    ),
    LeafCase(
        "fewer bytes between nodes", "Where the network is slow, accumulation, compressed gradients or shards within "
        "each node are faster than DDP.",
        "GPT-1.3B on 64 A100 with 10 Gb/s Ethernet", {"model": "gpt_1b3", "world_size": 64, _ETHERNET: "Ethernet"},
        {
            "8 micro-batches a step": {"strategy": "ddp", "gradient_accumulation": 8},
            "gradients in bf16": {"strategy": "ddp", "config.strategy.communication_hook": "bf16"},
            "FSDP2 within nodes": {"strategy": "fsdp", "sharding_factor": 8},
            "DDP": {"strategy": "ddp", "gradient_accumulation": 1, "config.strategy.communication_hook": "none"},
        },
        _judge_any_faster_than_last,
    ),
    LeafCase(
        "shard over all nodes", "With a fast network ZeRO-3 over all GPUs is as good as tensor parallelism in "
        "nodes and a pipeline between them, and asks least.",
        "GPT-30B on 64 A100 with RoCE, 128 sequences a step", {"model": "gpt_30b", "world_size": 64},
        {"FSDP2": _FULL, "8 x 8 tensor and pipeline": {"strategy": "mesh"}}, _judge_as_good,
    ),
    LeafCase(
        "keep traffic within nodes", "With a slow network hybrid sharding is faster than full sharding.",
        "GPT-13B on 64 A100 with 10 Gb/s Ethernet", {"model": "gpt_13b", "world_size": 64},
        {"hybrid": {"strategy": "fsdp", "sharding_factor": 8}, "full": {"strategy": "fsdp", "sharding_factor": 64}},
        _judge_fastest,
    ),
)  # fmt: skip


def _build_claim(leaf: LeafCase) -> PaperClaim:
    def assess(rows: ClaimRows) -> Assessment:
        chosen = {name: found[0] for name, found in rows.items()}
        return Assessment(
            leaf.judge(chosen),
            f"Case: {leaf.case}.",
            (
                EvidenceStatement(
                    "predicted", "; ".join(f"{name} {_describe(row)}" for name, row in chosen.items()) + "."
                ),
            ),
            {name: _get_tokens_per_s(row) for name, row in chosen.items()},
        )

    return PaperClaim(
        key=f"leaf_{leaf.key.replace(' ', '_')}",
        text=leaf.claim,
        source=f"course notes, after [Hugging Face's documentation]({TREE_SOURCE}); leaf “{leaf.key}”",
        needs={
            name: RowQuery("predicted/claims", {"sequence_length": 512, **leaf.where, **option})
            for name, option in leaf.options.items()
        },
        assess=assess,
        caveat="One case of many; `python -m bench.advise` answers the tree for any other. Runs on such a machine "
        "would tell.",
    )


def _describe(row: Record) -> str:
    if row["status"] != "ok":
        return f"does not fit ({row['peak_reserved_bytes'] / 1e9:.0f} GB)"
    peak_gb = row["peak_reserved_bytes"] / 1e9
    fit = "" if _does_fit(row) else ", too close to call"
    return f"{format_number(_get_tokens_per_s(row), 3)} tokens/s per GPU, {peak_gb:.0f} GB{fit}"


TREE_CLAIMS = tuple(_build_claim(leaf) for leaf in LEAF_CASES)

TREE_LEAVES = tuple(dict.fromkeys(leaf.key for leaf in DECISION_TREE.list_leaves()))
"""What the tree has."""
