"""The compute half of the predictor end to end: calibrate this machine, run, and compare the times of steps.

Needs a machine on which nothing else runs. Calibration and runs take turns, so that a change of the machine's speed
meets both; a disturbance that does not is answered with more turns, not with a wider limit. A turn in which the machine
was not quiet, as `bench.calibrate` judges it, is made again, whatever it showed.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench.calibration.compute import measure_compute
from bench.calibration.fit_compute import fit_compute
from bench.calibration.noise import Waiting, disturbances, reference
from bench.calibration.sample import Sample
from bench.simulate.predict import predict
from tests.conftest import configuration

WITHIN = 0.10
FEWEST_TURNS, MOST_TURNS = 2, 4

ONE_PROCESS = ("hardware=cpu", "strategy=single", "gpus=1", "measurement.steps=12")
RUNS = [
    ("model=gpt_tiny",),
    ("model=t5_tiny", "batch_size_per_gpu=8", "sequence_length=64", "activation_checkpointing=full"),
    ("model=gpt_tiny", "model.hidden_size=448", "model.num_heads=7", "sequence_length=96", "precision=bf16"),
    ("model=t5_tiny", "model.d_model=256", "model.d_ff=1024", "optimizer.implementation=foreach"),
    ("model=gpt_mini", "batch_size_per_gpu=2", "measurement.steps=6"),
]


def together(samples: list[Sample]) -> list[Sample]:
    """The same measurement made several times as one."""
    found: dict[tuple[Any, ...], list[Sample]] = {}
    for sample in samples:
        key = (sample.kind, sample.name, sample.format, sample.dims, sample.flops, sample.bytes_moved)
        found.setdefault(key, []).append(sample)
    return [
        dataclasses.replace(several[0], seconds=tuple(time for each in several for time in each.seconds))
        for several in found.values()
    ]


@pytest.mark.slow
def test_predicted_step_times_are_within_ten_percent_of_measured_ones(
    execute: Callable[..., list[dict[str, Any]]],
) -> None:
    base = configuration("hardware=cpu").hardware
    samples: list[Sample] = []
    measured: list[list[float]] = [[] for _ in RUNS]
    errors: list[float] = []
    quiet, disturbed = 0, []
    for turn in range(MOST_TURNS):
        waiting, device = Waiting(), torch.device("cpu")
        with waiting.watched():
            before = reference(device)
            timed = measure_compute(device, 1, quick=True, progress=lambda text: None)
            between = reference(device)
        rows = execute(*((*ONE_PROCESS, *run, f"repeat={turn}") for run in RUNS))
        noise = disturbances([before, *timed, between, reference(device)], waiting.share)
        if noise:
            disturbed.append(str(noise[0]))
            continue
        quiet += 1
        samples += timed
        for times, row in zip(measured, rows, strict=True):
            assert row["status"] == "ok", row["error"]
            times.append(row["step_time_median_s"])
        hardware = fit_compute(together(samples), base).parts.device(base)
        times_s = [
            predict(dataclasses.replace(configuration(*ONE_PROCESS, *run), hardware=hardware)).time for run in RUNS
        ]
        errors = [
            time.step_s.value / statistics.median(times) - 1
            for time, times in zip(times_s, measured, strict=True)
            if time is not None
        ]
        assert len(errors) == len(RUNS)
        if quiet >= FEWEST_TURNS and max(map(abs, errors)) <= WITHIN:
            break
    if quiet < FEWEST_TURNS:
        pytest.skip(f"this machine is not quiet enough to compare times: {'; '.join(disturbed)}")
    found = ", ".join(f"{' '.join(run)}: {error:+.1%}" for run, error in zip(RUNS, errors, strict=True))
    print(f"after {quiet} turns {found}")
    assert max(map(abs, errors)) <= WITHIN, found


@pytest.mark.slow
def test_a_rehearsal_takes_the_time_of_the_compute_alone(execute: Callable[..., list[dict[str, Any]]]) -> None:
    """DDP of 64 ranks computes what one process does: noise may be on either, seldom on the best of some."""
    run = ("model=gpt_mini", "batch_size_per_gpu=2", "sequence_length=64", "measurement.steps=6")
    best: list[tuple[float, float]] = []
    for attempt in range(3):
        single, alone = execute(
            (*run, "strategy=single", f"repeat={attempt}"),
            (*run, "strategy=ddp", "gpus=64", "mode=rehearse", f"repeat={attempt}"),
        )
        best.append((min(single["ranks"][0]["step_times_s"]), min(alone["ranks"][0]["step_times_s"])))
        ratio = min(alone for _, alone in best) / min(single for single, _ in best)
        if ratio == pytest.approx(1.0, abs=0.12):
            return
    pytest.fail(f"best steps of one process and of the rehearsal: {best}, median ratio "
                f"{statistics.median(alone / single for single, alone in best):.2f}")  # fmt: skip
