"""Memory and losses of ranks that DeepSpeed offloads for on a CPU, which a run refuses: both memories are one."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import sys

import torch

from bench.prediction.predictor import predict_run
from bench.rank.engine import build_engine, build_micro_batches
from bench.rank.memory_probe import CpuMemoryProbe
from bench.rank.rehearsal_group import init_rehearsal_group
from bench.strategies.deepspeed.strategy import DeepSpeedStrategy
from tests.conftest import compose_run_config


def allow_offload_from_cpu() -> None:
    """Take any device to have another memory beside it."""
    DeepSpeedStrategy.check_device = lambda self, device: None  # type: ignore[method-assign]


def measure_offloaded_run(overrides: list[str]) -> dict[str, object]:
    """The first rank's third step, the others' part made up; what is predicted beside it, on device and host."""
    run, cpu = compose_run_config(*overrides, "mode=rehearse"), torch.device("cpu")
    init_rehearsal_group(run.gpus)
    probe = CpuMemoryProbe(contextlib.nullcontext)
    with probe.observe():
        engine = build_engine(
            run.model,
            run.strategy,
            run.precision,
            run.optimizer,
            device=cpu,
            world_size=run.gpus,
            rehearsed=True,
            num_micro_batches=run.gradient_accumulation,
            synchronize_every_micro_batch=run.gradient_accumulation_sync,
        )
        batches = build_micro_batches(
            run.model,
            batch_size=run.batch_size_per_gpu,
            sequence_length=run.sequence_length,
            device=cpu,
            num_micro_batches=run.gradient_accumulation,
            share_index=0,
            num_shares=run.gpus,
        )
        losses = [float(engine.step(batches)) for _ in range(2)]
        probe.start_steady_step()
        losses.append(float(engine.step(batches)))
    memory = predict_run(run).memory
    return {
        "losses": losses,
        "measured": probe.read_peaks().allocated,
        "device": memory.allocated.value,
        "host": memory.host,
    }


if __name__ == "__main__":
    allow_offload_from_cpu()
    os.environ["DS_ACCELERATOR"] = "cpu"
    for module in ("torch._inductor.compile_fx", "deepspeed"):  # once, for every rank
        importlib.import_module(module)
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        print(json.dumps(pool.map(measure_offloaded_run, json.loads(sys.argv[1]), chunksize=1)))
