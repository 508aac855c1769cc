"""One optimizer step: what is still in memory when parameters are updated."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from bench.config.run_config import RunConfig
from bench.models import Family
from bench.rank.memory_probe import CpuMemoryProbe
from bench.rank.run_rank import RankCoordinates, run_rank
from bench.training.engine import Engine, EnterPhase, build_engine, build_micro_batches
from tests.conftest import SMALL_GPT, compose_run_config
from tests.extras import needs

SHORT = ("batch_size_per_gpu=4", "sequence_length=32", "measurement.warmup_steps=2", "measurement.steps=1")

STEPS = 5
"""Two are observed, two warm up, one is timed."""

STRATEGIES = [
    ("single",),
    ("ddp", "gradient_accumulation=3"),
    ("ddp", "precision=bf16"),
    ("zero1",),
    ("fsdp",),
    ("fsdp", "precision=fp16"),
    ("fsdp1",),
    ("tensor_parallel",),
    ("pipeline",),
    ("pipeline", "strategy.schedule=gpipe"),
    ("naive_pipeline",),
    pytest.param(("deepspeed",), marks=needs("deepspeed")),
    pytest.param(("accelerate",), marks=needs("accelerate")),
    pytest.param(("lightning",), marks=needs("lightning")),
]


def run_rank_alone(config: RunConfig, folder: Path, enter_phase: EnterPhase) -> None:
    """Run rank 0 in this process."""
    try:
        outcome = run_rank(
            config, RankCoordinates(0, 0, config.gpus), dist.HashStore, folder / "trace.json.gz", enter_phase
        )
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert outcome.status == "ok", outcome.error


def rehearse_rank_0(config: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[int, list[str]]:
    """Run rank 0 alone. Returns how often a loss was computed, and per optimizer phase whose logits were there."""
    logits: list[StorageWeakRef] = []
    alive: list[str] = []
    computed: list[None] = []
    model_class: Any = type(config.trained_model)
    loss = model_class.compute_loss

    def record_logits(self: Family, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits.append(StorageWeakRef(outputs.untyped_storage()))
        computed.append(None)
        result: torch.Tensor = loss(self, outputs, labels)
        return result

    def note_phase(phase: str) -> None:
        if phase == "optimizer":
            alive.append("".join("." if reference.expired() else "L" for reference in logits))
            logits.clear()

    monkeypatch.setattr(model_class, "compute_loss", record_logits)
    run_rank_alone(config, tmp_path, note_phase)
    return len(computed), alive


@pytest.mark.slow
@pytest.mark.parametrize("run", STRATEGIES, ids=lambda run: " ".join(run))
def test_no_logits_are_in_memory_when_parameters_are_updated(
    run: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    strategy, *rest = run
    gpus = () if strategy == "single" else ("gpus=2",)
    config = compose_run_config(*SMALL_GPT, f"strategy={strategy}", *gpus, *rest, "mode=rehearse", *SHORT)
    computed, alive = rehearse_rank_0(config, monkeypatch, tmp_path)
    assert len(alive) == STEPS
    assert "L" not in "".join(alive)
    if "pipeline" not in strategy:  # of a pipeline, the first rank has no loss
        assert computed == STEPS * config.gradient_accumulation


def test_the_optimizers_peak_is_without_logits() -> None:
    """Parameters, gradients and states are all there is, however large the batch."""
    config = compose_run_config(
        *SMALL_GPT, "strategy=single", "model.vocabulary_size=4096", "optimizer.name=sgd", *SHORT
    )
    device = torch.device("cpu")
    probe = CpuMemoryProbe(contextlib.nullcontext)
    updates: list[None] = []

    def enter_phase(phase: str) -> None:
        if phase == "optimizer":
            updates.append(None)
            if len(updates) == 2:
                probe.start_steady_step()

    with probe.observe():
        engine = build_engine(
            config.trained_model,
            config.strategy,
            config.precision,
            config.optimizer,
            device=device,
            enter_phase=enter_phase,
        )
        batches = build_micro_batches(config.model, batch_size=4, sequence_length=32, device=device)
        for _ in range(2):
            engine.step(batches)
    logits_bytes = 4 * 32 * 4096 * 4
    kept_bytes = 2 * 4 * config.model.num_parameters  # parameters and gradients
    assert logits_bytes > 0.5 * kept_bytes
    assert probe.read_peaks().allocated == pytest.approx(kept_bytes, rel=0.02)


@pytest.mark.parametrize("strategy", ["single", "fsdp1"])
def test_a_loss_scale_that_could_double_hides_no_skipped_step(
    strategy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch doubles it after 2,000 steps: here after every one of them."""
    monkeypatch.setattr(torch.amp.GradScaler.__init__, "__defaults__", ("cuda", 2.0**10, 2.0, 0.5, 1, True))
    config = compose_run_config(*SMALL_GPT, f"strategy={strategy}", "precision=fp16", "gpus=1", *SHORT)
    scales: list[float] = []
    step = Engine.step

    def step_and_record_scale(engine: Engine, batches: Any) -> torch.Tensor | None:
        loss = step(engine, batches)
        scales.append(engine.scaler.get_scale())
        return loss

    monkeypatch.setattr(Engine, "step", step_and_record_scale)
    run_rank_alone(config, tmp_path, lambda phase: None)
    assert len(set(scales)) == 1
