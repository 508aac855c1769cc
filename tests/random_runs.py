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
from bench.config import RunConfig
from bench.errors import UsageError
from bench.launch.local import LocalLauncher
from bench.launch.stop import StopSignal
from bench.launch.task import Task
from bench.planning.compose import composed
from bench.simulate.predict import predict_all
from tests.conftest import CPU, configuration

SEED = 14

ALWAYS = {"hardware": "cpu", "measurement.steps": 1}

PARAMETERS = range(200_000, 1_500_000)
"""What oneDNN takes for itself, which no prediction sees, is small beside so many; and they are quick."""

MOST_FLOPS = 1e9
"""Of one step of all ranks."""

Overrides = tuple[str, ...]
Values = dict[str, Any]
Draw = Callable[[random.Random], Values]


def rounded_up(size: int, divisor: int) -> int:
    return -(-size // divisor) * divisor


def shape_of_t5(r: random.Random, split: int) -> Values:
    return {
        "model": "t5_tiny",
        "model.num_heads": split * r.randint(1, 6 // split),
        "model.d_kv": r.choice([8, 12, 17, 24, 32]),
        "model.d_model": r.randint(24, 200),
        "model.d_ff": rounded_up(r.choice([r.randint(50, 900), r.randint(1000, 4001)]), split),
        "model.vocabulary_size": r.choice([r.randint(100, 900), r.randint(1000, 9000)]),
        "model.num_encoder_layers": r.randint(1, 6),
        "model.num_decoder_layers": r.randint(1, 6),
        "model.decoder_sequence_length": r.choice(["null", "null", rounded_up(r.randint(3, 60), split)]),
    }


def shape_of_gpt(r: random.Random, split: int) -> Values:
    heads = split * r.randint(1, 6 // split)
    return {
        "model": "gpt_tiny",
        "model.family": r.choice(["gpt", "mingpt", *(["mpt"] if split == 1 else [])]),
        "model.activation": r.choice(["gelu", "gelu_new", "gelu_pytorch_tanh"]),
        "model.num_heads": heads,
        "model.hidden_size": heads * r.choice([8, 12, 14, 17, 24, 32]),
        "model.num_layers": r.randint(1, 9),
        "model.vocabulary_size": r.choice([r.randint(100, 900), r.randint(1000, 13000)]),
        "model.intermediate_size": r.choice(["null", rounded_up(r.randint(20, 1500), split)]),
    }


def parameters_of(shape: Values) -> int:
    """About how many there are, without building anything."""
    of = {name.removeprefix("model."): value for name, value in shape.items()}
    if of["model"] == "t5_tiny":
        attention, final = 4 * of["d_model"] * of["num_heads"] * of["d_kv"], 2 * of["d_model"] * of["d_ff"]
        blocks = of["num_encoder_layers"] * (attention + final) + of["num_decoder_layers"] * (2 * attention + final)
        return int(of["vocabulary_size"] * of["d_model"] + blocks)
    hidden = of["hidden_size"]
    width = 4 * hidden if of["intermediate_size"] == "null" else of["intermediate_size"]
    tables = of["vocabulary_size"] * (2 if of["family"] == "mingpt" else 1) + (0 if of["family"] == "mpt" else 512)
    return int(tables * hidden + of["num_layers"] * (4 * hidden**2 + 2 * hidden * width))


def single(r: random.Random) -> Values:
    return {"gpus": 1}


def ddp(r: random.Random) -> Values:
    hook = r.choice(["none"] * 7 + ["fp16", "bf16", "powersgd"])
    return {
        "gpus": r.choice([1, 2, 3, 4]),
        "strategy.bucket_cap_mb": r.choice(["null", "null", 1, 2]),
        "strategy.gradient_as_bucket_view": r.choice(["true", "true", "false"]),
        "strategy.static_graph": r.choice(["null", "null", "false"]),
        "strategy.communication_hook": hook,
        "strategy.matrix_approximation_rank": r.choice([1, 2, 5]) if hook == "powersgd" else 1,
    }


def zero1(r: random.Random) -> Values:
    return {**ddp(r), "strategy.parameters_as_bucket_view": r.choice(["true", "false"])}


def sharded(r: random.Random) -> Values:
    gpus = r.choice([1, 2, 3, 4])
    return {
        "gpus": gpus,
        "strategy.sharding_factor": r.choice(["full", "full", 1, 2] if gpus % 2 == 0 else ["full", "full", 1]),
        "strategy.blocks_per_unit": r.choice([1, 1, 2, 3]),
        "strategy.forward_prefetch": r.choice(["false", "true"]),
    }


def fsdp1(r: random.Random) -> Values:
    return {
        **sharded(r),
        "strategy.backward_prefetch": r.choice(["pre", "pre", "post", "none"]),
        "strategy.limit_all_gathers": r.choice(["true", "false"]),
    }


def fsdp2(r: random.Random) -> Values:
    return {
        **sharded(r),
        "strategy.backward_prefetch": r.choice(["true", "true", "false"]),
        "strategy.mesh_2d": r.choice(["false", "false", "true"]),
    }


def tensor_parallel(r: random.Random) -> Values:
    gpus, kind = r.choice([2, 3, 4, 4]), r.choice(["fsdp", "ddp"])
    own: Values = (
        {"reshard_after_forward": r.choice(["null", "false"]), "mesh_2d": r.choice(["null", "true"])}
        if kind == "fsdp"
        else {"bucket_cap_mb": r.choice(["null", 1])}
    )
    return {
        "gpus": gpus,
        "strategy.degree": 2 if gpus == 4 and r.random() < 0.7 else gpus,
        "strategy.sequence_parallel": r.choice(["true", "false"]),
        "strategy.data_parallel": kind,
        **{f"strategy.{name}": value for name, value in own.items()},
    }


def naive_pipeline(r: random.Random) -> Values:
    gpus = r.choice([2, 3, 4, 4])
    copies = gpus == 4 and r.random() < 0.7
    return {
        "gpus": gpus,
        "strategy.stages": 2 if copies else gpus,
        "strategy.data_parallel": r.choice(["ddp", "fsdp"]) if copies else "null",
    }


def pipeline(r: random.Random) -> Values:
    schedule = r.choice(["gpipe", "1f1b", "interleaved_1f1b"])
    return {
        **naive_pipeline(r),
        "strategy.schedule": schedule,
        "strategy.virtual_stages": r.choice(["null", 2, 3]) if schedule == "interleaved_1f1b" else "null",
        "strategy.micro_batches": r.choice(["null", 4, 6]),
    }


STRATEGIES: dict[str, Draw] = {
    "single": single,
    "ddp": ddp,
    "zero1": zero1,
    "fsdp": fsdp2,
    "zero2": fsdp2,
    "fsdp1": fsdp1,
    "zero2_fsdp1": fsdp1,
    "tensor_parallel": tensor_parallel,
    "pipeline": pipeline,
    "naive_pipeline": naive_pipeline,
}
"""Those of conf/strategy that run on a CPU without an extra."""

LAYERS_DIVIDED, STAGED = ("tensor_parallel",), ("pipeline", "naive_pipeline")


def frame(r: random.Random, name: str, split: int) -> Values:
    """What every run has beside its model and its strategy."""
    scales = [] if name in (*LAYERS_DIVIDED, *STAGED) else ["fp16", "fp16"]
    precision = r.choice(["fp32", "fp32", "bf16", "bf16", "bf16_pure", "bf16_pure", *scales])
    accumulation = 1 if name in STAGED else r.choice([1, 1, 2, 3])
    optimizer = r.choice(["adamw", "adamw", "sgd"])
    return {
        "precision": precision,
        "precision.mixing": r.choice(["null", "null", "autocast"]) if precision in ("bf16", "fp16") else "null",
        "batch_size_per_gpu": r.randint(1, 5),
        "sequence_length": rounded_up(r.randint(5, 70), split),
        "gradient_accumulation": accumulation,
        "gradient_accumulation_sync": r.choice(["true", "false"]) if accumulation > 1 else "false",
        "activation_checkpointing": r.choice(["none", "none", "full", "selective"]),
        "optimizer": optimizer,
        "optimizer.implementation": r.choice(["fused", "foreach", "for_loop"]),
        **({"optimizer.momentum": r.choice([0.0, 0.9])} if optimizer == "sgd" else {}),
        "optimizer.keep_gradients": r.choice(["false", "false", "true"]),
        "model.attention": r.choice(["sdpa", "sdpa", "eager"]),
        "model.dropout": 0.0 if name in LAYERS_DIVIDED else r.choice([0.0, 0.0, 0.0, 0.1]),
        "measurement.warmup_steps": 2,
    }


def draw(number: int, seed: int = SEED, strategies: Sequence[str] = tuple(STRATEGIES)) -> Overrides:
    """Run number `number`: strategies take turns, the rest is chance. What cannot run is drawn again."""
    r = random.Random(f"{seed} {number}")
    name = strategies[number % len(strategies)]
    while True:
        strategy = STRATEGIES[name](r)
        split = strategy.get("strategy.degree", 1)
        shape = r.choice([shape_of_t5, shape_of_gpt])(r, split)
        values = {**shape, "strategy": name, **strategy, **frame(r, name, split), **ALWAYS}
        if strategy.get("strategy.communication_hook") == "powersgd":
            values["measurement.warmup_steps"] = 4
        if parameters_of(shape) not in PARAMETERS or flops(values, parameters_of(shape)) > MOST_FLOPS:
            continue
        overrides = tuple(f"{key}={value}" for key, value in values.items())
        with contextlib.suppress(UsageError):
            configuration(*overrides)
            return overrides


def flops(values: Values, parameters: int) -> float:
    """About how many one step of all ranks takes."""
    sequences = values["batch_size_per_gpu"] * values["gpus"] * values["gradient_accumulation"]
    return float(6 * parameters * sequences * values["sequence_length"])


def measure(configs: list[RunConfig], store: Path) -> None:
    """Measure runs one after the other in one job."""
    launcher = LocalLauncher(composed({})["cluster"], CPU)
    for config in configs:
        launcher.check(config)
    with StopSignal() as stop:
        launcher.launch([Task(config) for config in configs], store, "random", stop, lambda event: None)


def errors(configs: Sequence[RunConfig], store: Path) -> list[tuple[float, str]]:
    """Of the predicted peaks, relative to the measured ones in a store, with the runs; largest first.

    Raises
    ------
    AssertionError
        If a run has no row, or did not end well.
    """
    found = []
    for config, predicted in zip(configs, predict_all(configs), strict=True):
        row = records.latest(store, config.run_id)
        assert row is not None, f"{config.label} left no row"
        assert row["status"] == "ok", (config.label, row.get("error"))
        error = predicted.memory.allocated.value / row["peak_allocated_bytes"] - 1
        found.append((error, f"{config.run_id} {config.label}"))
    return sorted(found, key=lambda pair: -abs(pair[0]))


if __name__ == "__main__":
    folder, count, *rest = sys.argv[1:]
    first, seed = int(rest[0]) if rest else 0, int(rest[1]) if len(rest) > 1 else SEED
    runs = [configuration(*draw(number, seed)) for number in range(first, first + int(count))]
    measure(runs, Path(folder))
    differences = errors(runs, Path(folder))
    for error, run in differences:
        print(f"{error:+.4%} {run}")
    print(f"{len(differences)} runs, {statistics.fmean(abs(error) for error, _ in differences):.4%} off on average")
