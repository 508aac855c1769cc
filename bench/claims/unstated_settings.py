"""Figures 6(a) and 8(c) of the FSDP paper: what it leaves open of them, and the grids that are searched."""

from __future__ import annotations

from pathlib import Path

from bench.claims.settings_search import COUNTED_FLOPS, AxisAlternative, FigurePoint, SettingsSearch
from bench.core.installation import DATA_FOLDER
from bench.records import Record, read_published_records

RESULTS_FOLDER = DATA_FOLDER / "results" / "predicted"


def get_result_path(name: str, folder: Path = RESULTS_FOLDER) -> Path:
    """Where the result of a search lies."""
    return folder / f"unstated_{name}.json"


SOFTWARE = {
    "hardware": "a100_80gb",
    "gpus_per_node": "8",
    "model.attention": "eager",
    "optimizer.implementation": "foreach",
}
"""What is taken for granted: the GPU is stated; attention that materialises its scores and Adam over lists of tensors
are the software of the time (`bench/validation/runs.py`)."""


def _build_axis(*alternatives: dict[str, str]) -> tuple[AxisAlternative, ...]:
    return tuple(tuple(alternative.items()) for alternative in alternatives)


def _build_plain_axis(key: str, *values: str) -> tuple[AxisAlternative, ...]:
    return _build_axis(*({key: value} for value in values))


PRECISIONS = {
    "fp32": {"precision": "fp32", "precision.mixing": "null", "precision.reduce": "fp32"},
    "tf32": {"precision": "tf32", "precision.mixing": "null", "precision.reduce": "fp32"},
    "bf16, parameters cast": {"precision": "bf16", "precision.mixing": "parameters", "precision.reduce": "bf16"},
    "bf16, autocast": {"precision": "bf16", "precision.mixing": "autocast", "precision.reduce": "fp32"},
    "bf16 throughout": {"precision": "bf16_pure", "precision.mixing": "null", "precision.reduce": "bf16"},
}

SHARDING_POINTS = {
    "fsdp1/full_shard": {"strategy": "fsdp1", "strategy.sharding_factor": "full"},
    "fsdp1/hybrid_shard": {"strategy": "fsdp1", "strategy.sharding_factor": "node"},
    "fsdp1/no_shard": {"strategy": "fsdp1", "strategy.sharding_factor": "1"},
    "ddp": {"strategy": "ddp"},
}
"""Strategies of the paper's rows, and what is typed for them."""


def build_model_scale_search(published: list[Record] | None = None) -> SettingsSearch:
    """Figure 6(a): one setting for the bars of all models, those of 611M first."""
    rows = [
        row
        for row in published or read_published_records()
        if row["source"]["source_key"] == "fsdp_paper"
        and row["source"]["figure"] == "Figure 6(a)"
        and row["hardware_tflops_per_gpu"] is not None
    ]

    def list_points(model: str, *strategies: str) -> tuple[FigurePoint, ...]:
        return tuple(
            FigurePoint(
                f"{model} {strategy}",
                row["hardware_tflops_per_gpu"],
                "tflops",
                tuple({"model": model, **SHARDING_POINTS[strategy]}.items()),
            )
            for strategy in strategies
            for row in rows
            if (row["model"], row["effective_strategy"]) == (model, strategy)
        )

    others = ("fsdp1/hybrid_shard", "fsdp1/no_shard", "ddp")
    return SettingsSearch(
        name="figure_6a",
        fixed=SOFTWARE,
        axes={
            "precision": _build_axis(*(value for name, value in PRECISIONS.items() if name != "bf16 throughout")),
            "sequence length": _build_plain_axis("sequence_length", "128", "256", "512", "1024", "2048"),
            "batch per GPU": _build_plain_axis("batch_size_per_gpu", "1", "2", "4", "8", "16", "32"),
            "checkpointing": _build_plain_axis("activation_checkpointing", "none", "full"),
            "GPUs": _build_plain_axis("gpus", "16", "64", "128", "512"),
            "optimizer": _build_plain_axis("optimizer", "adamw", "sgd"),
            "blocks per unit": _build_plain_axis("strategy.blocks_per_unit", "1", "4"),
            "FLOPs counted": _build_plain_axis(COUNTED_FLOPS, "hardware", "model"),
        },
        stages=(
            ("611M, full sharding", list_points("t5_611m", "fsdp1/full_shard")),
            ("2.28B, full sharding", list_points("t5_2b", "fsdp1/full_shard")),
            ("611M and 2.28B, all strategies", list_points("t5_611m", *others) + list_points("t5_2b", *others)),
            ("11.3B", list_points("t5_11b", "fsdp1/full_shard", "fsdp1/hybrid_shard")),
        ),
    )


MEMORY_QUANTITIES = {
    "peak_memory_allocated": "allocated",
    "peak_memory_active": "active",
    "peak_memory_reserved": "reserved",
}


def build_memory_search(published: list[Record] | None = None) -> SettingsSearch:
    """Figure 8(c): T5-11B, batch 8 and 16, 8 to 512 GPUs; what is allocated first.

    Batches, GPUs and checkpointing are stated; a length of 512 and BF16 are, too, but are not taken for granted here.
    TF32 takes the memory of fp32.
    """
    rows = [
        row
        for row in published or read_published_records()
        if row["source"]["source_key"] == "fsdp_paper" and row["source"]["figure"] == "Figure 8(c)"
    ]

    def list_points(metric: str) -> tuple[FigurePoint, ...]:
        quantity = MEMORY_QUANTITIES[metric]
        return tuple(
            FigurePoint(
                f"{quantity}, {row['world_size']} GPUs, batch {row['batch_size_per_gpu']}",
                float(row["source"]["value"]),
                quantity,
                tuple(
                    {
                        "model": "t5_11b",
                        **SHARDING_POINTS["fsdp1/full_shard"],
                        "gpus": str(row["world_size"]),
                        "batch_size_per_gpu": str(row["batch_size_per_gpu"]),
                    }.items()
                ),
            )
            for row in sorted(rows, key=lambda row: -row["world_size"])
            if row["source"]["metric"] == metric
        )

    return SettingsSearch(
        name="figure_8c",
        fixed={**SOFTWARE, "activation_checkpointing": "full"},
        axes={
            "precision": _build_axis(*(value for name, value in PRECISIONS.items() if name != "tf32")),
            "optimizer state": _build_axis({"optimizer": "adamw"}, {"optimizer": "sgd"}),
            "gradients between steps": _build_plain_axis("optimizer.keep_gradients", "true", "false"),
            "blocks per unit": _build_plain_axis("strategy.blocks_per_unit", "1", "2", "4", "12"),
            "sequence lengths": _build_axis(
                {"sequence_length": "512", "model.decoder_sequence_length": "512"},
                {"sequence_length": "1024", "model.decoder_sequence_length": "1024"},
            ),
            "dropout": _build_plain_axis("model.dropout", "0.0", "0.1"),
        },
        stages=(
            ("allocated", list_points("peak_memory_allocated")),
            ("active", list_points("peak_memory_active")),
            ("reserved", list_points("peak_memory_reserved")),
        ),
    )


SEARCHES = {"figure_6a": build_model_scale_search, "figure_8c": build_memory_search}
"""By name."""
