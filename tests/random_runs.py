"""Configurations drawn at random: shapes, strategies and knobs that nobody chose, the same ones for the same seed.

``python -m tests.random_runs STORE COUNT [FIRST [SEED]]`` measures runs number FIRST to FIRST + COUNT into a store and
prints how far off the predictions of their memory are. Drawn are all strategies and precisions that run on a CPU and
need no extra.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import records
from bench.config.compose import compose_config
from bench.config.run_config import RunConfig
from bench.core.errors import UsageError
from bench.launch.local import LocalLauncher
from bench.launch.ranks import StopSignal
from bench.launch.task import LaunchTask
from bench.prediction.predictor import predict_runs
from tests.conftest import CPU, compose_run_config

SEED = 14

FIXED_VALUES = {"hardware": "cpu", "measurement.steps": 1}

PARAMETER_RANGE = range(200_000, 1_500_000)
"""What oneDNN takes for itself, which no prediction sees, is small beside so many; and they are quick."""

MAX_STEP_FLOPS = 1e9
"""Of one step of all ranks."""

Overrides = tuple[str, ...]
Values = dict[str, Any]
DrawValues = Callable[[random.Random], Values]


def round_up(size: int, divisor: int) -> int:
    return -(-size // divisor) * divisor


def draw_t5_shape(rng: random.Random, degree: int) -> Values:
    return {
        "model": "t5_tiny",
        "model.num_heads": degree * rng.randint(1, 6 // degree),
        "model.d_kv": rng.choice([8, 12, 17, 24, 32]),
        "model.d_model": rng.randint(24, 200),
        "model.d_ff": round_up(rng.choice([rng.randint(50, 900), rng.randint(1000, 4001)]), degree),
        "model.vocabulary_size": rng.choice([rng.randint(100, 900), rng.randint(1000, 9000)]),
        "model.num_encoder_layers": rng.randint(1, 6),
        "model.num_decoder_layers": rng.randint(1, 6),
        "model.decoder_sequence_length": rng.choice(["null", "null", round_up(rng.randint(3, 60), degree)]),
    }


def draw_gpt_shape(rng: random.Random, degree: int) -> Values:
    heads = degree * rng.randint(1, 6 // degree)
    return {
        "model": "gpt_tiny",
        "model.family": rng.choice(["gpt", "mingpt", *(["mpt"] if degree == 1 else [])]),
        "model.activation": rng.choice(["gelu", "gelu_new", "gelu_pytorch_tanh"]),
        "model.num_heads": heads,
        "model.hidden_size": heads * rng.choice([8, 12, 14, 17, 24, 32]),
        "model.num_layers": rng.randint(1, 9),
        "model.vocabulary_size": rng.choice([rng.randint(100, 900), rng.randint(1000, 13000)]),
        "model.intermediate_size": rng.choice(["null", round_up(rng.randint(20, 1500), degree)]),
    }


def count_parameters(shape: Values) -> int:
    """About how many there are, without building anything."""
    dimensions = {name.removeprefix("model."): value for name, value in shape.items()}
    if dimensions["model"] == "t5_tiny":
        attention, final = (
            4 * dimensions["d_model"] * dimensions["num_heads"] * dimensions["d_kv"],
            2 * dimensions["d_model"] * dimensions["d_ff"],
        )
        blocks = dimensions["num_encoder_layers"] * (attention + final) + dimensions["num_decoder_layers"] * (
            2 * attention + final
        )
        return int(dimensions["vocabulary_size"] * dimensions["d_model"] + blocks)
    hidden = dimensions["hidden_size"]
    width = 4 * hidden if dimensions["intermediate_size"] == "null" else dimensions["intermediate_size"]
    embeddings = dimensions["vocabulary_size"] * (2 if dimensions["family"] == "mingpt" else 1) + (
        0 if dimensions["family"] == "mpt" else 512
    )
    return int(embeddings * hidden + dimensions["num_layers"] * (4 * hidden**2 + 2 * hidden * width))


def draw_single(rng: random.Random) -> Values:
    return {"gpus": 1}


def draw_ddp(rng: random.Random) -> Values:
    hook = rng.choice(["none"] * 7 + ["fp16", "bf16", "powersgd"])
    return {
        "gpus": rng.choice([1, 2, 3, 4]),
        "strategy.bucket_cap_mb": rng.choice(["null", "null", 1, 2]),
        "strategy.gradient_as_bucket_view": rng.choice(["true", "true", "false"]),
        "strategy.static_graph": rng.choice(["null", "null", "false"]),
        "strategy.communication_hook": hook,
        "strategy.matrix_approximation_rank": rng.choice([1, 2, 5]) if hook == "powersgd" else 1,
    }


def draw_zero1(rng: random.Random) -> Values:
    return {**draw_ddp(rng), "strategy.parameters_as_bucket_view": rng.choice(["true", "false"])}


def draw_sharding(rng: random.Random) -> Values:
    gpus = rng.choice([1, 2, 3, 4])
    return {
        "gpus": gpus,
        "strategy.sharding_factor": rng.choice(["full", "full", 1, 2] if gpus % 2 == 0 else ["full", "full", 1]),
        "strategy.blocks_per_unit": rng.choice([1, 1, 2, 3]),
        "strategy.forward_prefetch": rng.choice(["false", "true"]),
    }


def draw_fsdp1(rng: random.Random) -> Values:
    return {
        **draw_sharding(rng),
        "strategy.backward_prefetch": rng.choice(["pre", "pre", "post", "none"]),
        "strategy.limit_all_gathers": rng.choice(["true", "false"]),
    }


def draw_fsdp2(rng: random.Random) -> Values:
    return {
        **draw_sharding(rng),
        "strategy.backward_prefetch": rng.choice(["true", "true", "false"]),
        "strategy.mesh_2d": rng.choice(["false", "false", "true"]),
    }


def draw_tensor_parallel(rng: random.Random) -> Values:
    gpus, kind = rng.choice([2, 3, 4, 4]), rng.choice(["fsdp", "ddp"])
    inner_knobs: Values = (
        {"reshard_after_forward": rng.choice(["null", "false"]), "mesh_2d": rng.choice(["null", "true"])}
        if kind == "fsdp"
        else {"bucket_cap_mb": rng.choice(["null", 1])}
    )
    return {
        "gpus": gpus,
        "strategy.degree": 2 if gpus == 4 and rng.random() < 0.7 else gpus,
        "strategy.sequence_parallel": rng.choice(["true", "false"]),
        "strategy.data_parallel": kind,
        **{f"strategy.{name}": value for name, value in inner_knobs.items()},
    }


def draw_naive_pipeline(rng: random.Random) -> Values:
    gpus = rng.choice([2, 3, 4, 4])
    has_replicas = gpus == 4 and rng.random() < 0.7
    return {
        "gpus": gpus,
        "strategy.stages": 2 if has_replicas else gpus,
        "strategy.data_parallel": rng.choice(["ddp", "fsdp"]) if has_replicas else "null",
    }


def draw_pipeline(rng: random.Random) -> Values:
    schedule = rng.choice(["gpipe", "1f1b", "interleaved_1f1b"])
    return {
        **draw_naive_pipeline(rng),
        "strategy.schedule": schedule,
        "strategy.virtual_stages": rng.choice(["null", 2, 3]) if schedule == "interleaved_1f1b" else "null",
        "strategy.micro_batches": rng.choice(["null", 4, 6]),
    }


STRATEGIES: dict[str, DrawValues] = {
    "single": draw_single,
    "ddp": draw_ddp,
    "zero1": draw_zero1,
    "fsdp": draw_fsdp2,
    "zero2": draw_fsdp2,
    "fsdp1": draw_fsdp1,
    "zero2_fsdp1": draw_fsdp1,
    "tensor_parallel": draw_tensor_parallel,
    "pipeline": draw_pipeline,
    "naive_pipeline": draw_naive_pipeline,
}
"""Those of conf/strategy that run on a CPU without an extra."""

DIVIDED_STRATEGIES, STAGED_STRATEGIES = ("tensor_parallel",), ("pipeline", "naive_pipeline")


def draw_common_values(rng: random.Random, name: str, degree: int) -> Values:
    """What every run has beside its model and its strategy."""
    fp16_choices = [] if name in (*DIVIDED_STRATEGIES, *STAGED_STRATEGIES) else ["fp16", "fp16"]
    precision = rng.choice(["fp32", "fp32", "bf16", "bf16", "bf16_pure", "bf16_pure", *fp16_choices])
    accumulation = 1 if name in STAGED_STRATEGIES else rng.choice([1, 1, 2, 3])
    optimizer = rng.choice(["adamw", "adamw", "sgd"])
    return {
        "precision": precision,
        "precision.mixing": rng.choice(["null", "null", "autocast"]) if precision in ("bf16", "fp16") else "null",
        "batch_size_per_gpu": rng.randint(1, 5),
        "sequence_length": round_up(rng.randint(5, 70), degree),
        "gradient_accumulation": accumulation,
        "gradient_accumulation_sync": rng.choice(["true", "false"]) if accumulation > 1 else "false",
        "activation_checkpointing": rng.choice(["none", "none", "full", "selective"]),
        "optimizer": optimizer,
        "optimizer.implementation": rng.choice(["fused", "foreach", "for_loop"]),
        **({"optimizer.momentum": rng.choice([0.0, 0.9])} if optimizer == "sgd" else {}),
        "optimizer.keep_gradients": rng.choice(["false", "false", "true"]),
        "model.attention": rng.choice(["sdpa", "sdpa", "eager"]),
        "model.dropout": 0.0 if name in DIVIDED_STRATEGIES else rng.choice([0.0, 0.0, 0.0, 0.1]),
        "measurement.warmup_steps": 2,
    }


def draw_overrides(number: int, seed: int = SEED, strategies: Sequence[str] = tuple(STRATEGIES)) -> Overrides:
    """Run number `number`: strategies take turns, the rest is chance. What cannot run is drawn again."""
    rng = random.Random(f"{seed} {number}")
    name = strategies[number % len(strategies)]
    while True:
        strategy = STRATEGIES[name](rng)
        degree = strategy.get("strategy.degree", 1)
        shape = rng.choice([draw_t5_shape, draw_gpt_shape])(rng, degree)
        values = {**shape, "strategy": name, **strategy, **draw_common_values(rng, name, degree), **FIXED_VALUES}
        if strategy.get("strategy.communication_hook") == "powersgd":
            values["measurement.warmup_steps"] = 4
        if (
            count_parameters(shape) not in PARAMETER_RANGE
            or count_step_flops(values, count_parameters(shape)) > MAX_STEP_FLOPS
        ):
            continue
        overrides = tuple(f"{key}={value}" for key, value in values.items())
        with contextlib.suppress(UsageError):
            compose_run_config(*overrides)
            return overrides


def count_step_flops(values: Values, parameters: int) -> float:
    """About how many one step of all ranks takes."""
    sequences = values["batch_size_per_gpu"] * values["gpus"] * values["gradient_accumulation"]
    return float(6 * parameters * sequences * values["sequence_length"])


def measure_runs(configs: list[RunConfig], store: Path) -> None:
    """Measure runs one after the other in one job."""
    launcher = LocalLauncher(compose_config({})["cluster"], CPU)
    for config in configs:
        launcher.check(config)
    with StopSignal() as stop:
        launcher.launch([LaunchTask(config) for config in configs], store, "random", stop, lambda event: None)


def compute_memory_errors(configs: Sequence[RunConfig], store: Path) -> list[tuple[float, str]]:
    """Of the predicted peaks, relative to the measured ones in a store, with the runs; largest first.

    Raises
    ------
    AssertionError
        If a run has no row, or did not end well.
    """
    memory_errors = []
    for config, predicted in zip(configs, predict_runs(configs), strict=True):
        row = records.read_latest_row(store, config.run_id)
        assert row is not None, f"{config.label} left no row"
        assert row["status"] == "ok", (config.label, row.get("error"))
        error = predicted.memory.allocated.value / row["peak_allocated_bytes"] - 1
        memory_errors.append((error, f"{config.run_id} {config.label}"))
    return sorted(memory_errors, key=lambda pair: -abs(pair[0]))


if __name__ == "__main__":
    folder, count, *rest = sys.argv[1:]
    first, seed = int(rest[0]) if rest else 0, int(rest[1]) if len(rest) > 1 else SEED
    runs = [compose_run_config(*draw_overrides(number, seed)) for number in range(first, first + int(count))]
    measure_runs(runs, Path(folder))
    memory_errors = compute_memory_errors(runs, Path(folder))
    for error, run in memory_errors:
        print(f"{error:+.4%} {run}")
    print(f"{len(memory_errors)} runs, {statistics.fmean(abs(error) for error, _ in memory_errors):.4%} off on average")
