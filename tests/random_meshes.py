"""Layouts drawn at random: degrees, models and knobs of `strategy=mesh` that nobody chose, the same for the same seed.

``python -m tests.random_meshes STORE COUNT [FIRST [SEED]]`` measures runs number FIRST to FIRST + COUNT into a store,
each beside the run of one process that trains alike, and prints how far off its losses and the prediction of its memory
are.
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import records
from bench.config.run_config import RunConfig
from bench.core.errors import UsageError
from bench.models.llama import ARCHITECTURES
from bench.models.moe import EXPERT_COUNT_FIELDS, LATENT_ATTENTION_ARCHITECTURES
from bench.strategies.mesh.layout import DEFAULT_ORDER
from bench.strategies.pipeline.schedule import ALL_SCHEDULES, SPLIT_BACKWARD_SCHEDULES
from tests.conftest import compose_run_config
from tests.random_runs import FIXED_VALUES, Overrides, Values, compute_memory_errors, measure_runs

SEED = 18

KINDS = ("gpt", "llama", "moe", "t5")
"""They take turns."""


def draw_model(rng: random.Random, kind: str) -> Values:
    """A model whose heads, widths and experts can be divided by 2, and often by 3 and 4."""
    heads = rng.choice([4, 4, 6, 8, 12])
    hidden, layers = heads * rng.choice([16, 24, 32] if heads < 8 else [8, 16]), rng.randint(4, 6)
    width, vocabulary = 12 * rng.randint(8, 40), rng.choice([rng.randint(600, 5000), 12 * rng.randint(50, 400)])
    common = {"model": f"{kind}_tiny", "model.num_heads": heads, "model.vocabulary_size": vocabulary}
    if kind == "t5":
        stacks = {"model.num_encoder_layers": rng.randint(2, 4), "model.num_decoder_layers": rng.randint(2, 4)}
        sizes = {"model.d_model": hidden, "model.d_ff": width, "model.d_kv": rng.choice([8, 16, 24])}
        return {**common, **stacks, **sizes}
    sizes = {"model.hidden_size": hidden, "model.num_layers": layers, "model.intermediate_size": width}
    if kind == "gpt":
        return {**common, **sizes, "model.family": rng.choice(["gpt", "mingpt"])}
    architecture = rng.choice(ARCHITECTURES if kind == "llama" else list(EXPERT_COUNT_FIELDS))
    decoder: Values = {
        "model.architecture": architecture,
        "model.num_kv_heads": heads // rng.choice([1, 1, 2]),
        "model.tie_embeddings": rng.choice(["true", "false"]),
        "model.attention": "eager" if architecture in ("gemma2", "gpt_oss") else "sdpa",
        "model.sliding_window": 16 if architecture.startswith("gemma") and architecture != "gemma" else "null",
    }
    experts = draw_experts(rng, architecture, heads) if kind == "moe" else {}
    return {**common, **sizes, **decoder, **experts}


def draw_experts(rng: random.Random, architecture: str, heads: int) -> Values:
    experts: Values = {"num_experts": rng.choice([4, 8, 12]), "experts_per_token": rng.randint(1, 3)}
    experts["routing"] = rng.choice(["balanced", "balanced", "skewed", "router"])
    if architecture in LATENT_ATTENTION_ARCHITECTURES:
        experts |= {
            "num_kv_heads": heads,
            "kv_rank": rng.choice([16, 24]),
            "rotary_size": 8,
            "head_size": 16,
            "query_rank": rng.choice(["null", 24]),
            "num_shared_experts": rng.randint(0, 2),
            "num_dense_layers": 1,
            "dense_intermediate_size": 12 * rng.randint(4, 12),
        }
    return {f"model.{name}": value for name, value in experts.items()}


def draw_layout(rng: random.Random, kind: str) -> Values:
    """Degrees whose product divides 4, 6 or 8 ranks, and the knobs of the dimensions that there are."""
    gpus = rng.choice([4, 4, 6, 8, 8])
    degrees: dict[str, int] = {}
    while not degrees:
        for name in rng.sample(["tensor", "pipeline", "context", *(["expert"] if kind == "moe" else [])], k=3):
            degree = rng.choice([1, 2, 2, 3, 4])
            if degree > 1 and gpus // math.prod(degrees.values()) % degree == 0:
                degrees[name] = degree
    layout: Values = {**degrees, "data": rng.choice(["fsdp", "fsdp", "ddp", "zero1"])}
    if "pipeline" in degrees:
        layout |= {
            "schedule": rng.choice(list(ALL_SCHEDULES)),
            "micro_batches": rng.choice(["null", 4, 8]),
            "last_stage_less_blocks": rng.choice([0, 0, 0, 1]),
        }
    if "context" in degrees:
        layout["context_form"] = rng.choice(["ring", "all_gather", "all_to_all"])
    if "tensor" in degrees:
        layout |= {name: rng.choice(["true", "true", "false"]) for name in ("sequence_parallel", "loss_parallel")}
        if "expert" in degrees:
            layout["expert_tensor_parallel"] = rng.choice(["true", "false"])
    if layout["data"] == "fsdp":
        rest = gpus // math.prod(degrees.values()) * degrees.get("expert", 1)
        layout |= {
            "replicas": rng.choice(["null", "null", 2]) if rest % 2 == 0 else "null",
            "reshard_after_forward": rng.choice(["null", "false", *([] if "pipeline" in degrees else ["true"])]),
        }
    if rng.random() < 0.3:
        layout["order"] = "-".join(rng.sample(DEFAULT_ORDER, k=len(DEFAULT_ORDER)))
    return {"gpus": gpus, **{f"strategy.{name}": value for name, value in layout.items()}}


def draw_training(rng: random.Random, layout: Values) -> Values:
    accumulation = 1 if "strategy.pipeline" in layout else rng.choice([1, 1, 2, 3])
    checkpointing = ["none", "none", "full", "selective", "operators", "every_2", "operators_every_2"]
    if layout.get("strategy.schedule") in SPLIT_BACKWARD_SCHEDULES:
        checkpointing = ["none"]  # others are not predicted
    optimizer = rng.choice(["adamw", "sgd"])
    return {
        "precision": rng.choice(["fp32", "fp32", "fp32", "bf16", "bf16_pure"]),
        "batch_size_per_gpu": rng.choice([2, 4, 8]),
        "sequence_length": rng.choice([48, 72, 96]),
        "gradient_accumulation": accumulation,
        "gradient_accumulation_sync": rng.choice(["true", "false"]) if accumulation > 1 else "false",
        "activation_checkpointing": rng.choice(checkpointing),
        "optimizer": optimizer,
        "optimizer.implementation": rng.choice(["fused", "foreach", "for_loop"]),
        "gradient_clip_norm": rng.choice(["null", "null", 0.3]),
        "compile": rng.choice(["false"] * 9 + ["true"]),
        "finetune": rng.choice(["full"] * 7 + ["lora"]),
        "measurement.warmup_steps": 2,
    }


def draw_overrides(number: int, seed: int = SEED) -> Overrides:
    """Run number `number`: kinds of models take turns, the rest is chance. What cannot run is drawn again."""
    rng = random.Random(f"{seed} {number}")
    kind = KINDS[number % len(KINDS)]
    while True:
        layout = draw_layout(rng, kind)
        values = {
            **draw_model(rng, kind),
            "strategy": "mesh",
            **layout,
            **draw_training(rng, layout),
            **FIXED_VALUES,
        }
        overrides = tuple(f"{key}={value}" for key, value in values.items())
        with contextlib.suppress(UsageError):
            compose_run_config(*overrides)
            return overrides


def build_one_process_run(overrides: Overrides) -> RunConfig:
    """The run of one process that takes the same steps, with the sequences of all ranks."""
    values = dict(override.split("=", 1) for override in overrides if not override.startswith("strategy."))
    sequences = int(values["batch_size_per_gpu"]) * int(values["gpus"])
    changes = {"strategy": "single", "gpus": 1, "batch_size_per_gpu": sequences}
    return compose_run_config(*(f"{key}={value}" for key, value in {**values, **changes}.items()))


def measure_beside_one_process(numbers: range, seed: int, store: Path) -> list[tuple[RunConfig, RunConfig]]:
    """Measure drawn runs, each with that of one process that takes the same steps; the pairs."""
    drawn = [draw_overrides(number, seed) for number in numbers]
    pairs = [(compose_run_config(*overrides), build_one_process_run(overrides)) for overrides in drawn]
    measure_runs([run for pair in pairs for run in pair], store)
    return pairs


def compute_loss_errors(runs: Sequence[tuple[RunConfig, RunConfig]], store: Path) -> list[tuple[float, RunConfig]]:
    """Of each layout's losses, relative to those of one process in a store, the largest; largest first."""
    loss_errors = []
    for config, one_process in runs:
        row, other = (records.read_latest_row(store, run.run_id) for run in (config, one_process))
        assert row is not None, f"{config.label} left no row"
        assert other is not None, f"{one_process.label} left no row"
        assert row["status"] == other["status"] == "ok", (config.label, row.get("error"), other.get("error"))
        pairs = zip(row["losses"], other["losses"], strict=True)
        loss_errors.append((max(abs(loss / one_loss - 1) for loss, one_loss in pairs), config))
    return sorted(loss_errors, key=lambda pair: -pair[0])


if __name__ == "__main__":
    folder, count, *rest = sys.argv[1:]
    first, seed = int(rest[0]) if rest else 0, int(rest[1]) if len(rest) > 1 else SEED
    runs = measure_beside_one_process(range(first, first + int(count)), seed, Path(folder))
    for error, config in compute_loss_errors(runs, Path(folder)):
        print(f"{error:.1e} {config.precision.name} {config.run_id} {config.label}")
    memory_errors = compute_memory_errors([config for config, _ in runs], Path(folder))
    for error, name in memory_errors:
        print(f"{error:+.4%} {name}")
    print(f"{len(memory_errors)} runs, {statistics.fmean(abs(error) for error, _ in memory_errors):.4%} off on average")
