"""What DeepSpeed offloads: where it lies, what moves and how long that takes, by hand and by the library."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from bench import predict as command
from bench.advice.words import strategy as words
from bench.simulate.machine import Machine, Pace
from bench.simulate.predict import predict
from bench.simulate.prediction import DOES_NOT_FIT, Prediction
from bench.strategies.plan import Parameter, Plan, Setting, Unit
from tests.conftest import ROOT
from tests.test_deepspeed import needs_library
from tests.test_strategy_plans import Notebook, config, plan_of, step

OPTIMIZER, PARAMETERS = "strategy.offload_optimizer", "strategy.offload_parameters"
LARGE = {"model": "gpt_1b3", "strategy": "deepspeed", "gpus": 8, "hardware": "a100_80gb", "precision": "bf16"}
WAYS: list[dict[str, Any]] = [
    {"strategy.stage": 1, OPTIMIZER: "cpu"},
    {"strategy.stage": 2, OPTIMIZER: "cpu"},
    {"strategy.stage": 3, OPTIMIZER: "cpu"},
    {"strategy.stage": 3, PARAMETERS: "cpu"},
    {"strategy.stage": 3, PARAMETERS: "cpu", OPTIMIZER: "cpu"},
]

# By hand: 64 elements on two ranks. In the flat tensor 0 to 40, 40 to 56, 56 to 60 and 60 to 64 (the norm comes last),
# so that the first rank has 32 of the embedding and the second the rest; in stage 3 each has half of everything.
UNITS = (
    Unit(-1, "model", (Parameter("embedding", (10, 4)), Parameter("norm", (4,)))),
    Unit(0, "block", (Parameter("weight", (4, 4)), Parameter("bias", (4,)))),
)
HALF, LARGEST, BUCKET = 32, 40, 100
STATES = 2 * 4 * HALF + 4
"""AdamW's, of a partition."""


def by_hand(precision: str, *, micro_batches: int = 1, bucket: int = BUCKET, **knobs: Any) -> tuple[Plan, Setting]:
    sharded = {"strategy.param_persistence_threshold": 0} if knobs["strategy.stage"] == 3 else {}
    run = config(**{**LARGE, **knobs, **sharded, "precision": precision, "strategy.reduce_bucket_size": bucket})
    setting = Setting(UNITS, run.precision, 2, run.optimizer.states_per_parameter, micro_batches)
    return run.strategy.plan(setting), setting


def moved(device: Notebook) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, size in device.moved:
        found[name] += int(size)
    return found


def walked(plan: Plan, setting: Setting) -> Notebook:
    """A step, which leaves behind what it found."""
    device = Notebook()
    plan.begin(device)
    found = dict(device.held)
    every = setting.micro_batches > 1 and getattr(plan, "_partitions_gradients", True)
    step(plan, setting, device, micro_batches=setting.micro_batches, every=every)
    assert device.held == found
    return device


@pytest.mark.parametrize(
    ("way", "precision", "device_bytes", "host_bytes"),
    [
        # Parameters, and room for the largest gradient; partition, gradients and states in fp32, what is sent, room.
        (0, "fp32", (64 + LARGEST) * 4, HALF * (4 + 4 + 4) + STATES + LARGEST * 4),
        (0, "bf16", (64 + LARGEST) * 2, HALF * (4 + 4 + 2) + STATES + LARGEST * 2),
        (1, "fp32", (64 + LARGEST) * 4, HALF * (4 + 4 + 4) + STATES + LARGEST * 4),
        (1, "bf16", (64 + LARGEST) * 2, HALF * (4 + 4 + 2) + STATES + LARGEST * 2),
        # The partition and the bucket, in fp32; partition and twice its gradients in fp32, states.
        (2, "fp32", HALF * 4 + BUCKET * 4, HALF * (4 + 4 + 4) + STATES),
        (2, "bf16", HALF * 2 + BUCKET * 4, HALF * (4 + 4 + 4) + STATES),
        # All of the optimizer's and gradients, and the bucket; the partition.
        (3, "fp32", HALF * (4 + 4) + STATES + BUCKET * 4, HALF * 4),
        (3, "bf16", HALF * (4 + 4) + STATES + BUCKET * 4, HALF * 2),
        # The bucket alone.
        (4, "fp32", BUCKET * 4, HALF * (4 + 4 + 4 + 4) + STATES),
        (4, "bf16", BUCKET * 4, HALF * (2 + 4 + 4 + 4) + STATES),
    ],
)
def test_where_everything_lies(way: int, precision: str, device_bytes: int, host_bytes: int) -> None:
    plan, _ = by_hand(precision, **WAYS[way])
    device = Notebook()
    plan.begin(device)
    assert device.total() == device_bytes
    assert plan.host_bytes == host_bytes
    assert plan.updates_on_host == (OPTIMIZER in WAYS[way])


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("precision", "size"), [("fp32", 4), ("bf16", 2)])
def test_gradients_leave_with_their_bucket_and_the_updated_partition_comes_back(
    stage: int, precision: str, size: int
) -> None:
    ways = {"strategy.stage": stage, OPTIMIZER: "cpu"}
    plan, setting = by_hand(precision, **ways)
    assert moved(walked(plan, setting)) == {"gradient out": HALF * 4, "updated partition": HALF * size}
    assert plan.copied_on_host == HALF * (4 + size)
    # All but the embedding are the second rank's; then 32 of the embedding are the first's: one after the other.
    plan, setting = by_hand(precision, bucket=30, **ways)
    assert moved(walked(plan, setting))["gradient out"] == (24 + 32) * 4


def test_in_fp32_gradients_of_micro_batches_are_added_up_on_the_host() -> None:
    """As whole parameters: the second rank has parts of all 64 elements."""
    plan, setting = by_hand("fp32", micro_batches=3, **WAYS[1])
    assert moved(walked(plan, setting)) == {
        "gradient of a micro-batch out": 3 * 64 * 4,
        "gradient back": 2 * 64 * 4,
        "gradient out": HALF * 4,
        "updated partition": HALF * 4,
    }
    once, _ = by_hand("fp32", **WAYS[1])
    assert plan.host_bytes - once.host_bytes == 64 * 4
    for way, precision in ((1, "bf16"), (0, "fp32")):  # on the device, and sent once
        plan, setting = by_hand(precision, micro_batches=3, **WAYS[way])
        assert moved(walked(plan, setting))["gradient out"] == HALF * 4
        assert plan.host_bytes == by_hand(precision, **WAYS[way])[0].host_bytes


@pytest.mark.parametrize(("precision", "size"), [("fp32", 4), ("bf16", 2)])
def test_stage_3_moves_shards_for_every_gather_and_gradients_to_and_fro(precision: str, size: int) -> None:
    share = HALF * 4
    gradients = {"gradient out": 3 * share, "gradient back": 3 * share, "gradient out for the optimizer": share}
    plan, setting = by_hand(precision, micro_batches=3, **WAYS[2])
    assert moved(walked(plan, setting)) == {**gradients, "updated partition": HALF * size}
    assert plan.copied_on_host == (HALF * (4 + 2) if size == 2 else 0)
    plan, setting = by_hand(precision, micro_batches=3, **WAYS[4])
    device = walked(plan, setting)
    assert moved(device) == {**gradients, "upload": device.volume("all-gather", "world") / 2}
    assert device.volume("all-gather", "world") == 3 * 64 * size
    assert plan.copied_on_host == HALF * (4 + size)
    plan, setting = by_hand(precision, micro_batches=3, **WAYS[3])  # rounded on the host, so in fp32 on the way
    assert moved(walked(plan, setting)) == {"upload": 3 * HALF * size, "updated partition": share}
    assert plan.copied_on_host == (HALF * (4 + 2) if size == 2 else 0)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("overlaps", ["true", "false"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_step_leaves_behind_what_it_found(way: Any, precision: str, overlaps: str, micro_batches: int) -> None:
    walked(*by_hand(precision, micro_batches=micro_batches, **way, **{"strategy.overlap_comm": overlaps}))


class Issued(Machine):
    """Notes when the processor starts to reduce."""

    at: tuple[float, ...] = ()

    def send(self, name: str, kind: str, size: float, group: str, stream: str, *, after: str | None = None) -> None:
        super().send(name, kind, size, group, stream, after=after)
        if kind == "reduce-scatter":
            self.at += (self.processor,)


def test_the_processor_waits_until_the_link_has_done_all_but_two_of_the_reductions_before() -> None:
    """Gradients of 4, 16, 4 and 40 elements; of each the half goes, comes and goes, at a byte per second."""
    plan, setting = by_hand("fp32", bucket=4, **WAYS[2])
    machine = Issued(Pace(transfer_s_per_byte=1.0))
    plan.begin(machine)
    step(plan, setting, machine)
    assert machine.at == (0.0, 0.0, 0.0, 3 * 2 * 4)
    assert machine.elapsed >= 3 * HALF * 4


def predicted(**knobs: object) -> Prediction:
    return predict(config(**{**LARGE, **knobs}))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_offloading_is_predicted_to_save_the_device_and_fill_the_host(way: dict[str, object]) -> None:
    plain, found = predicted(**{"strategy.stage": way["strategy.stage"]}), predicted(**way)
    assert plain.memory.host == 0 < found.memory.host
    assert found.memory.allocated.value < plain.memory.allocated.value
    if OPTIMIZER in way:
        assert found.memory.parts["optimizer"] == 0
    assert plain.time is not None
    assert found.time is not None
    assert found.time.step_s.value > plain.time.step_s.value
    assert found.time.step_s.high / found.time.step_s.value == pytest.approx(1.3)
    run = config(**{**LARGE, **way})
    unknown = dataclasses.replace(run, hardware=dataclasses.replace(run.hardware, host=None))
    assert predict(unknown).time is None
    small = dataclasses.replace(run.hardware.host, memory_gib=1.0)  # type: ignore[type-var]
    full = dataclasses.replace(run, hardware=dataclasses.replace(run.hardware, host=small))
    assert predict(full).memory.verdict == DOES_NOT_FIT


def seconds(**knobs: object) -> float:
    time = predicted(**knobs).time
    assert time is not None
    return time.step_s.value


def test_time_follows_from_the_link_and_from_the_memory_of_the_machine() -> None:
    way = {**LARGE, "strategy.stage": 2, OPTIMIZER: "cpu"}
    run = config(**way)
    once = seconds(**way)
    partition = run.model.num_parameters / 8
    # AdamW in one pass reads 4 tensors and writes 3 in fp32; then the updated one is rounded. The memory is of 8 ranks.
    slower = seconds(**way, **{"hardware.host.memory_gb_s": 204.8}) - once
    assert slower == pytest.approx((7 * 4 + 4 + 2) * partition * 8 / (409.6e9 * 0.84), rel=0.01)
    plan, setting = plan_of(run)
    size = sum(moved(walked(plan, setting)).values())
    assert size > (4 + 2) * partition
    # Two GPUs share the way to the memory. Nothing of it is hidden: the processor waits for every bucket.
    slower = seconds(**way, **{"hardware.host.link_gb_s": 13.1}) - once
    assert slower == pytest.approx(size * 2 / 26.2e9, rel=0.02)
    rounding = {"strategy.stage": 3, PARAMETERS: "cpu"}
    slower = seconds(**rounding, **{"hardware.host.memory_gb_s": 204.8}) - seconds(**rounding)
    assert slower == pytest.approx((4 + 2) * partition * 8 / (409.6e9 * 0.84), rel=0.01)


def test_a_prediction_says_what_is_offloaded(capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["model=gpt_mini", "gpus=8", "hardware=a100_80gb", "strategy=deepspeed", "precision=bf16"]
    assert (
        command.main([*typed, "strategy.stage=2", f"{OPTIMIZER}=cpu", "sequence_length=64", "batch_size_per_gpu=1"])
        == 0
    )
    out = " ".join(capsys.readouterr().out.split())
    assert "DeepSpeed stage 2 with optimizer offloaded" in out
    run = config(**{**LARGE, **WAYS[4]})
    assert words(run) == "DeepSpeed stage 3 with parameters and optimizer offloaded"
    assert run.strategy.effective(8) == "deepspeed/stage_3_offload"


@needs_library
@pytest.mark.slow
def test_on_a_cpu_the_library_takes_what_is_predicted_of_device_and_host_together() -> None:
    """And trains as without offloading. A run on a CPU is refused: there both are the same memory."""
    base = ["model=gpt_tiny", "sequence_length=64", "batch_size_per_gpu=2", "strategy=deepspeed"]
    base += ["strategy.reduce_bucket_size=200000"]
    one, two = ["gpus=1", "strategy.stage=1"], ["gpus=1", "strategy.stage=2"]
    three = ["gpus=2", "strategy.stage=3", "strategy.param_persistence_threshold=0"]
    often, bf16 = ["gradient_accumulation=3", "gradient_accumulation_sync=true"], "precision=bf16"
    embedding = ["model.vocabulary_size=16384", "model.num_layers=1", "sequence_length=8"]
    optimizer, parameters = f"{OPTIMIZER}=cpu", f"{PARAMETERS}=cpu"
    asked = {
        "stage 2": [*two, *often],
        "stage 2 offloaded": [*two, *often, optimizer],
        "stage 3": [*three, *often],
        "stage 3 offloaded": [*three, *often, optimizer, parameters],
        "stage 1": [*one, optimizer],
        "stage 2 in bf16": [*two, bf16, optimizer],
        "the embedding's norm": [*three, *embedding, bf16, optimizer, "strategy.reduce_bucket_size=4000000"],
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.offloaded_anyway", json.dumps([[*base, *each] for each in asked.values()])],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = dict(zip(asked, json.loads(done.stdout.splitlines()[-1]), strict=True))
    for name, memory in found.items():
        assert memory["measured"] == pytest.approx(memory["device"] + memory["host"], rel=0.03), name
        assert (memory["host"] > 0) == (optimizer in asked[name]), name
    for stage in ("stage 2", "stage 3"):
        assert found[f"{stage} offloaded"]["losses"] == found[stage]["losses"], stage
