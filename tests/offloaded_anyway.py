"""Memory and losses of ranks that DeepSpeed offloads for on a CPU, which a run refuses: both memories are one."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import sys

import torch

from bench.measure.memory import CpuProbe
from bench.measure.rehearsal import start_rehearsal
from bench.simulate.predict import predict
from bench.strategies.deepspeed import DeepSpeed
from bench.training.engine import build_engine, micro_batches
from tests.conftest import configuration


def offload_from_anywhere() -> None:
    """Take any device to have another memory beside it."""
    DeepSpeed.check_device = lambda self, device: None  # type: ignore[method-assign]


def measured(overrides: list[str]) -> dict[str, object]:
    """The first rank's third step, the others' part made up; what is predicted beside it, on device and host."""
    run, cpu = configuration(*overrides, "mode=rehearse"), torch.device("cpu")
    start_rehearsal(run.gpus)
    probe = CpuProbe(contextlib.nullcontext)
    with probe.observe():
        engine = build_engine(
            run.model,
            run.strategy,
            run.precision,
            run.optimizer,
            device=cpu,
            world_size=run.gpus,
            rehearsed=True,
            micro_batches=run.gradient_accumulation,
            synchronize_every_micro_batch=run.gradient_accumulation_sync,
        )
        batches = micro_batches(
            run.model,
            batch_size=run.batch_size_per_gpu,
            sequence_length=run.sequence_length,
            device=cpu,
            num_micro_batches=run.gradient_accumulation,
            share=0,
            shares=run.gpus,
        )
        losses = [float(engine.step(batches)) for _ in range(2)]
        probe.start_steady_step()
        losses.append(float(engine.step(batches)))
    memory = predict(run).memory
    return {
        "losses": losses,
        "measured": probe.peaks().allocated,
        "device": memory.allocated.value,
        "host": memory.host,
    }


if __name__ == "__main__":
    offload_from_anywhere()
    os.environ["DS_ACCELERATOR"] = "cpu"
    for module in ("torch._inductor.compile_fx", "deepspeed"):  # once, for every rank
        importlib.import_module(module)
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        print(json.dumps(pool.map(measured, json.loads(sys.argv[1]), chunksize=1)))
