"""DeepSpeed's stages: what they compute, keep and refuse. Without the library, only what needs it not."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import predict as command
from bench.advice.wording import format_strategy as words
from bench.core.errors import UsageError
from bench.prediction.prediction import DOES_NOT_FIT, Prediction
from bench.prediction.predictor import predict_run
from bench.prediction.simulation.simulated_rank import RankSpeed, SimulatedRank
from bench.run import main
from bench.strategies.deepspeed.stages_0_to_2 import find_ranks_of_parameters
from bench.strategies.plan_inputs import ParameterSpec, PlanInputs, ShardingUnit
from bench.strategies.step_plan import StepPlan
from tests.conftest import ROOT, SMALL_GPT, SMALL_LLAMA, SMALL_MOE, SMALL_T5, compose_run_config, needs
from tests.strategies.test_strategy_plans import Notebook, config, plan_of, step

Execute = Callable[..., list[dict[str, Any]]]

STEPS = ("sequence_length=16", "measurement.warmup_steps=2", "measurement.steps=1", "optimizer.learning_rate=1e-3")
STAGES = (0, 1, 2, 3)
BUCKET = "strategy.reduce_bucket_size=20000"

needs_library = needs("deepspeed")


def build_stage_overrides(number: int, *more: str) -> tuple[str, ...]:
    """Stage 3 with all parameters sharded: small ones, and here all are small, would stay whole."""
    sharded = ("strategy.param_persistence_threshold=0",) if number == 3 else ()
    return ("strategy=deepspeed", f"strategy.stage={number}", BUCKET, *sharded, *more)


@pytest.mark.long
@needs_library
@pytest.mark.slow
@pytest.mark.parametrize("model", [SMALL_T5, SMALL_GPT, SMALL_LLAMA, SMALL_MOE], ids=["t5", "gpt", "llama", "moe"])
def test_every_stage_computes_what_one_process_does(execute: Execute, model: Any, tmp_path: Path) -> None:
    overrides_by_stage = {
        number: (*model, *STEPS, *build_stage_overrides(number), "gpus=4", "batch_size_per_gpu=2") for number in STAGES
    }
    single, alone, *others = execute(
        (*model, *STEPS, "strategy=single", "gpus=1", "batch_size_per_gpu=8"),
        (*overrides_by_stage[2], "mode=rehearse"),
        *overrides_by_stage.values(),
    )
    runs = dict(zip(STAGES, others, strict=True))
    for number, record in runs.items():
        assert record["status"] == "ok", record["error"]
        # From the third step on AdamW's losses show whether gradients were clipped or divided.
        assert record["losses"] == pytest.approx(single["losses"], rel=1e-5), number
        assert record["effective_strategy"] == f"deepspeed/stage_{number}"
        assert record["environment"]["packages"]["deepspeed"]
    for number in STAGES:
        expected = predict_run(compose_run_config(*overrides_by_stage[number])).memory.allocated.value
        assert runs[number]["peak_allocated_bytes"] == pytest.approx(expected, rel=0.03), number
    first = runs[2]["ranks"][0]["peak_allocated_bytes"]
    assert alone["peak_allocated_bytes"] == pytest.approx(first, rel=0.01)
    for log in tmp_path.glob("store/*/*.log"):
        assert "deprecated" not in log.read_text()
        assert len(log.read_text().splitlines()) < 20


@pytest.mark.long
@needs_library
@pytest.mark.slow
def test_micro_batches_and_narrow_formats(execute: Execute) -> None:
    # SGD, whose losses show by how much gradients were divided: AdamW's do not.
    half = (*SMALL_T5, *STEPS, "optimizer=sgd", "gpus=2", "batch_size_per_gpu=2", "gradient_accumulation=2")
    overrides_by_name = {
        "ddp": (*half, "strategy=ddp"),
        "accumulates": (*half, *build_stage_overrides(1, "strategy.overlap_comm=true")),
        "reduces": (*half, *build_stage_overrides(2), "gradient_accumulation_sync=true"),
        "bf16": (*half, *build_stage_overrides(3), "gradient_accumulation_sync=true", "precision=bf16"),
    }
    runs = dict(zip(overrides_by_name, execute(*overrides_by_name.values()), strict=True))
    for name, record in runs.items():
        assert record["status"] == "ok", (name, record["error"])
    losses = runs["ddp"]["losses"]
    for name in ("accumulates", "reduces"):
        assert runs[name]["losses"] == pytest.approx(losses, rel=1e-5), name
        expected = predict_run(compose_run_config(*overrides_by_name[name])).memory.allocated.value
        assert runs[name]["peak_allocated_bytes"] == pytest.approx(expected, rel=0.03), name
    assert runs["bf16"]["losses"] == pytest.approx(losses, rel=0.02)
    assert runs["bf16"]["losses"] != pytest.approx(losses, rel=1e-5)
    assert runs["bf16"]["mixed_precision"] == "deepspeed bf16"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("strategy.stage=4",), r"strategy.stage=4 is not valid: choose 0, 1, 2, 3"),
        (("strategy.sharding_factor=2",), r"strategy.sharding_factor=2 is not valid: choose stage: .*strategy.stage=2"),
        (("strategy.stage=3", "strategy.sharding_factor=2"), r"over 4 of gpus=4"),
        (
            ("strategy.offload_parameters=cpu",),
            r"offload_parameters=cpu is not valid with strategy.stage=2: choose.* 3",
        ),
        (("strategy.stage=0", "strategy.offload_optimizer=cpu"), r"choose stage 1, 2 or 3"),
        (("strategy.offload_optimizer=nvme", "strategy.nvme_path=/n"), r"stages 1 and 2 offload to the CPU alone"),
        (("strategy.stage=3", "strategy.offload_optimizer=nvme"), r"strategy.nvme_path=null is not valid"),
        (("strategy.nvme_path=/n",), r"nvme_path=/n is not valid: choose null"),
        (("strategy.offload_optimizer=disk",), r"offload_optimizer=disk is not valid: choose none, cpu, nvme"),
        (("strategy.offload_optimizer=cpu",), r"offload_optimizer=cpu is not valid on a CPU"),
        (("strategy.stage=0", "strategy.overlap_comm=true"), r"overlap_comm=true is not valid: choose false or null"),
        (("strategy.reduce_bucket_size=0",), r"reduce_bucket_size=0 is not valid"),
        (("precision=fp16",), r"precision=fp16 is not valid for strategy=deepspeed"),
        (("precision=bf16_pure",), r"precision=bf16_pure is not valid for strategy=deepspeed"),
        (("strategy.stage=0", "precision=bf16"), r"strategy.stage=0, which does not reduce gradients in fp32"),
        (("precision.reduce=bf16",), r"precision.reduce=bf16 .* choose fp32, or strategy ddp"),
        (("optimizer.keep_gradients=true",), r"keep_gradients=true is not valid"),
        (("compile=true",), r"compile=true is not valid for strategy=deepspeed"),
        (("gradient_accumulation=2",), r"gradient_accumulation_sync=false is not valid .*stage=2: choose true"),
        (
            ("strategy.stage=1", "gradient_accumulation=2", "gradient_accumulation_sync=true"),
            r"gradient_accumulation_sync=true is not valid .*stage=1: choose false",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        compose_run_config(*SMALL_T5, "strategy=deepspeed", "gpus=4", *overrides)


def test_the_stage_says_how_many_ranks_share_parameters() -> None:
    factors = [
        compose_run_config(*SMALL_T5, *build_stage_overrides(number), "gpus=4").strategy.resolved_sharding_factor
        for number in STAGES
    ]
    assert factors == [1, 1, 1, 4]
    named = compose_run_config(*SMALL_T5, *build_stage_overrides(3), "gpus=4", "strategy.sharding_factor=full")
    assert named.run_id == compose_run_config(*SMALL_T5, *build_stage_overrides(3), "gpus=4").run_id


@needs_library
@pytest.mark.parametrize("number", [2, 3])
def test_settings_that_nobody_gives_are_the_librarys_own(number: int) -> None:
    knobs = compose_run_config(*SMALL_T5, "strategy=deepspeed", f"strategy.stage={number}", "gpus=4").to_dict()[
        "strategy"
    ]
    buckets = ("reduce_bucket_size", "prefetch_bucket_size")
    thresholds = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance", "sub_group_size")
    names = ("overlap_comm", "contiguous_gradients", *buckets, *thresholds)
    script = f"from deepspeed.runtime.zero.config import *; own = DeepSpeedZeroConfig(stage={number})\n"
    script += f"print([getattr(own, name) for name in {names}])"
    env = os.environ | {"DS_ACCELERATOR": "cpu"}
    completed = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert ast.literal_eval(completed.stdout.splitlines()[-1]) == [knobs[name] for name in names]


def test_an_offloaded_run_says_so() -> None:
    run = compose_run_config(
        *SMALL_T5, *build_stage_overrides(3, "strategy.offload_parameters=cpu"), "hardware=a100_80gb", "gpus=4"
    )
    assert run.strategy.describe_effective_strategy(4) == "deepspeed/stage_3_offload"


@pytest.mark.parametrize(
    "overrides",
    [
        ("strategy.stage=3", "strategy.prefetch_bucket_size=0"),
        ("strategy.contiguous_gradients=false",),
        ("strategy.stage=3", "strategy.offload_parameters=nvme", "strategy.nvme_path=/n", "hardware=a100_80gb"),
        ("strategy.stage=3", "strategy.offload_optimizer=nvme", "strategy.nvme_path=/n", "hardware=a100_80gb"),
    ],
)
def test_what_is_not_known_is_not_predicted(overrides: tuple[str, ...]) -> None:
    run = compose_run_config(*SMALL_T5, *build_stage_overrides(2), "gpus=4", "mode=predict", *overrides)
    with pytest.raises(UsageError, match=r"strategy=deepspeed with .* cannot be predicted: choose"):
        predict_run(run)


def test_without_the_library_nothing_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "deepspeed" not in sys.modules  # only ranks that use it import it
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    run = (*SMALL_T5, *build_stage_overrides(2), "gpus=2", f"store={tmp_path}")
    assert main([*run]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert 'pip install --no-build-isolation -e ".[deepspeed]"' in sentence
    assert not list(tmp_path.iterdir())
    assert (
        predict_run(
            compose_run_config(*SMALL_T5, *build_stage_overrides(2), "gpus=2", "mode=predict")
        ).memory.allocated.value
        > 0
    )


def test_a_parameter_belongs_to_every_rank_whose_partition_it_touches() -> None:
    parameters = [
        ParameterSpec("a", (3,)),
        ParameterSpec("b", (6,)),
        ParameterSpec("c", (1,)),
        ParameterSpec("d", (2,)),
    ]
    assert find_ranks_of_parameters(parameters, 4) == [range(0, 1), range(0, 3), range(2, 3), range(2, 3)]


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("overlaps", ["true", "false"])
def test_a_step_leaves_behind_what_it_found_and_sends_the_model_twice(
    number: int, micro_batches: int, overlaps: str
) -> None:
    knobs = {"strategy.stage": number, "strategy.reduce_bucket_size": 2000000} | (
        {"strategy.overlap_comm": overlaps} if number else {}
    )
    every = {"gradient_accumulation_sync": "true"} if number == 2 else {}
    run = config(strategy="deepspeed", gradient_accumulation=micro_batches, **knobs, **every)
    plan, plan_inputs = plan_of(run)
    device = Notebook()
    plan.allocate_persistent_state(device)
    initial_tensors = dict(device.held)
    step(plan, plan_inputs, device, micro_batches=micro_batches, every=bool(every))
    assert device.held == initial_tensors
    whole = sum(parameter.numel for unit in plan_inputs.units for parameter in unit.parameters) * 4
    reduced = micro_batches if number == 2 else 1
    assert device.volume("all-reduce", "world") == pytest.approx(reduced * whole, rel=1e-4)
    assert device.volume("all-gather", "world") == pytest.approx(whole if number else 0, rel=1e-4)


BF16 = (
    "measurement.warmup_steps=2",
    "measurement.steps=1",
    "sequence_length=64",
    "batch_size_per_gpu=2",
    "precision=bf16",
)


@pytest.mark.long
@needs_library
@pytest.mark.slow
def test_memory_in_bf16_and_with_persistent_parameters_is_predicted(execute: Execute) -> None:
    """On models that are not too small: oneDNN's bf16 products take memory of their own that nobody predicts."""
    bucket = "strategy.reduce_bucket_size=200000"
    runs: list[tuple[str, ...]] = [
        ("model=gpt_tiny", "gpus=2", *BF16, "strategy=deepspeed", bucket, f"strategy.stage={number}")
        for number in (1, 2, 3)
    ]
    runs.append((*runs[-1], "precision=fp32", "activation_checkpointing=full"))
    for run, record in zip(runs, execute(*runs), strict=True):
        assert record["status"] == "ok", record["error"]
        expected = predict_run(compose_run_config(*run)).memory.allocated.value
        assert record["peak_allocated_bytes"] == pytest.approx(expected, rel=0.03), run


@needs_library
@pytest.mark.slow
def test_gradients_are_copied_for_the_optimizer_one_group_after_the_other(execute: Execute) -> None:
    shape = ("model=gpt_tiny", "model.hidden_size=256", "model.num_layers=12", "sequence_length=8")
    run = (*shape, "gpus=1", *BF16[:2], "batch_size_per_gpu=1", "strategy=deepspeed", "strategy.stage=3")
    run = (*run, "strategy.reduce_bucket_size=200000", "optimizer.implementation=for_loop")
    runs = [run, (*run, "strategy.sub_group_size=1000000")]
    peaks = []
    for run, record in zip(runs, execute(*runs), strict=True):
        assert record["status"] == "ok", record["error"]
        expected = predict_run(compose_run_config(*run)).memory.allocated.value
        assert record["peak_allocated_bytes"] == pytest.approx(expected, rel=0.03), run
        peaks.append(record["peak_allocated_bytes"])
    assert peaks[1] < 0.9 * peaks[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(("threshold", "reuse"), [(0, 10**9), (0, 0), (100000, 10**9)])
def test_stage_3_gathers_what_it_frees_once_more(
    threshold: int, reuse: int, micro_batches: int, precision: str
) -> None:
    """Small models are gathered once a step: all of it is used again soon. ZeRO's paper has 3 M for large ones."""
    settings = {"strategy.stage": 3, "strategy.reduce_bucket_size": 2000000, "precision": precision}
    settings |= {"strategy.param_persistence_threshold": threshold, "strategy.max_reuse_distance": reuse}
    more = {"gradient_accumulation": micro_batches, "gradient_accumulation_sync": "true"} if micro_batches > 1 else {}
    plan, plan_inputs = plan_of(config(strategy="deepspeed", **settings, **more))
    device = Notebook()
    plan.allocate_persistent_state(device)
    initial_tensors = dict(device.held)
    step(plan, plan_inputs, device, micro_batches=micro_batches, every=micro_batches > 1)
    assert device.held == initial_tensors
    size = 2 if precision == "bf16" else 4
    parameters = [parameter for unit in plan_inputs.units for parameter in unit.parameters]
    whole = sum(parameter.numel for parameter in parameters)
    gathered = micro_batches * whole * (2 if reuse == 0 else 1)
    small = sum(parameter.numel for parameter in parameters if parameter.numel < threshold)
    assert device.volume("reduce-scatter", "world") == pytest.approx(4 * micro_batches * whole, rel=1e-3)
    if not small:
        assert device.volume("all-gather", "world") == pytest.approx(size * gathered, rel=1e-3)
    assert device.parts()["gradients"] == pytest.approx(4 * whole / 8, rel=1e-3)


class ReductionRecorder(Notebook):
    """Notes what is whole while gradients are reduced."""

    whole_parameters: tuple[str, ...] = ()

    def run_collective(
        self, name: str, kind: str, size: float, group: str, stream: str, *, after: str | None = None
    ) -> None:
        super().run_collective(name, kind, size, group, stream, after=after)
        if kind == "reduce-scatter":
            self.whole_parameters = tuple(tensor_name for tensor_name in self.held if tensor_name.startswith("whole"))


def test_stage_3_copies_gradients_once_a_step_and_reduces_the_last_when_parameters_are_gone() -> None:
    most = []
    for micro_batches in (1, 3):
        accumulates = {"gradient_accumulation": micro_batches, "gradient_accumulation_sync": "true"}
        sharded = {"strategy.stage": 3, "strategy.param_persistence_threshold": 0}
        run = config(strategy="deepspeed", **sharded, **(accumulates if micro_batches > 1 else {}))
        plan, plan_inputs = plan_of(run)
        device = ReductionRecorder()
        plan.allocate_persistent_state(device)
        step(plan, plan_inputs, device, micro_batches=micro_batches, every=True)
        assert device.whole_parameters == ()
        most.append(device.most)
    assert most[0] == most[1]


def test_stage_3_copies_gradients_of_one_group_at_a_time() -> None:
    sharded = {"strategy.stage": 3, "strategy.sub_group_size": 20000, "strategy.reduce_bucket_size": 2000000}
    plan, plan_inputs = plan_of(config(strategy="deepspeed", **sharded))
    *full_groups, last_group = plan.updated_numels
    largest_parameter = max(parameter.numel for parameter in plan_inputs.trained_parameters)
    assert len(full_groups) > 2
    assert all(20000 <= numel < 20000 + largest_parameter for numel in full_groups)
    own_numel = sum(-(-parameter.numel // plan_inputs.world_size) for parameter in plan_inputs.trained_parameters)
    assert sum(full_groups) + last_group == own_numel
    device = Notebook()
    plan.allocate_persistent_state(device)
    held_before = device.total()
    plan.begin_micro_batch(device, number=0, synchronize=True)
    plan.after_micro_batch_backward(device)
    assert device.total() - held_before == 4 * max(full_groups)


# --- What DeepSpeed offloads: where it lies, what moves and how long that takes, by hand and by the library.


OPTIMIZER_KNOB, PARAMETERS_KNOB = "strategy.offload_optimizer", "strategy.offload_parameters"
LARGE = {"model": "gpt_1b3", "strategy": "deepspeed", "gpus": 8, "hardware": "a100_80gb", "precision": "bf16"}
OFFLOAD_KNOBS: list[dict[str, Any]] = [
    {"strategy.stage": 1, OPTIMIZER_KNOB: "cpu"},
    {"strategy.stage": 2, OPTIMIZER_KNOB: "cpu"},
    {"strategy.stage": 3, OPTIMIZER_KNOB: "cpu"},
    {"strategy.stage": 3, PARAMETERS_KNOB: "cpu"},
    {"strategy.stage": 3, PARAMETERS_KNOB: "cpu", OPTIMIZER_KNOB: "cpu"},
]

# By hand: 64 elements on two ranks. In the flat tensor 0 to 40, 40 to 56, 56 to 60 and 60 to 64 (the norm comes last),
# so that the first rank has 32 of the embedding and the second the rest; in stage 3 each has half of everything.
UNITS = (
    ShardingUnit(-1, "model", (ParameterSpec("embedding", (10, 4)), ParameterSpec("norm", (4,)))),
    ShardingUnit(0, "block", (ParameterSpec("weight", (4, 4)), ParameterSpec("bias", (4,)))),
)
HALF, LARGEST, BUCKET_NUMEL = 32, 40, 100
STATES = 2 * 4 * HALF + 4
"""AdamW's, of a partition."""


def build_small_plan(
    precision: str, *, micro_batches: int = 1, bucket: int = BUCKET_NUMEL, **knobs: Any
) -> tuple[StepPlan, PlanInputs]:
    sharded = {"strategy.param_persistence_threshold": 0} if knobs["strategy.stage"] == 3 else {}
    run = config(**{**LARGE, **knobs, **sharded, "precision": precision, "strategy.reduce_bucket_size": bucket})
    plan_inputs = PlanInputs(UNITS, run.precision, 2, run.optimizer, micro_batches)
    return run.strategy.plan(plan_inputs), plan_inputs


def sum_transfers(device: Notebook) -> Counter[str]:
    bytes_by_transfer: Counter[str] = Counter()
    for name, size in device.moved:
        bytes_by_transfer[name] += int(size)
    return bytes_by_transfer


def run_plan_step(plan: StepPlan, plan_inputs: PlanInputs) -> Notebook:
    """A step, which leaves behind what it found."""
    device = Notebook()
    plan.allocate_persistent_state(device)
    initial_tensors = dict(device.held)
    every = plan_inputs.num_micro_batches > 1 and getattr(plan, "_partitions_gradients", True)
    step(plan, plan_inputs, device, micro_batches=plan_inputs.num_micro_batches, every=every)
    assert device.held == initial_tensors
    return device


@pytest.mark.parametrize(
    ("knobs_index", "precision", "device_bytes", "host_bytes"),
    [
        # Parameters, and room for the largest gradient; partition, gradients and states in fp32, what is sent, room.
        (0, "fp32", (64 + LARGEST) * 4, HALF * (4 + 4 + 4) + STATES + LARGEST * 4),
        (0, "bf16", (64 + LARGEST) * 2, HALF * (4 + 4 + 2) + STATES + LARGEST * 2),
        (1, "fp32", (64 + LARGEST) * 4, HALF * (4 + 4 + 4) + STATES + LARGEST * 4),
        (1, "bf16", (64 + LARGEST) * 2, HALF * (4 + 4 + 2) + STATES + LARGEST * 2),
        # The partition and the bucket, in fp32; partition and twice its gradients in fp32, states.
        (2, "fp32", HALF * 4 + BUCKET_NUMEL * 4, HALF * (4 + 4 + 4) + STATES),
        (2, "bf16", HALF * 2 + BUCKET_NUMEL * 4, HALF * (4 + 4 + 4) + STATES),
        # All of the optimizer's and gradients, and the bucket; the partition.
        (3, "fp32", HALF * (4 + 4) + STATES + BUCKET_NUMEL * 4, HALF * 4),
        (3, "bf16", HALF * (4 + 4) + STATES + BUCKET_NUMEL * 4, HALF * 2),
        # The bucket alone.
        (4, "fp32", BUCKET_NUMEL * 4, HALF * (4 + 4 + 4 + 4) + STATES),
        (4, "bf16", BUCKET_NUMEL * 4, HALF * (2 + 4 + 4 + 4) + STATES),
    ],
)
def test_where_everything_lies(knobs_index: int, precision: str, device_bytes: int, host_bytes: int) -> None:
    plan, _ = build_small_plan(precision, **OFFLOAD_KNOBS[knobs_index])
    device = Notebook()
    plan.allocate_persistent_state(device)
    assert device.total() == device_bytes
    assert plan.host_bytes == host_bytes
    assert plan.updates_on_host == (OPTIMIZER_KNOB in OFFLOAD_KNOBS[knobs_index])


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("precision", "size"), [("fp32", 4), ("bf16", 2)])
def test_gradients_leave_with_their_bucket_and_the_updated_partition_comes_back(
    stage: int, precision: str, size: int
) -> None:
    knobs = {"strategy.stage": stage, OPTIMIZER_KNOB: "cpu"}
    plan, plan_inputs = build_small_plan(precision, **knobs)
    assert sum_transfers(run_plan_step(plan, plan_inputs)) == {
        "gradient out": HALF * 4,
        "updated partition": HALF * size,
    }
    assert plan.host_copy_bytes == HALF * (4 + size)
    # All but the embedding are the second rank's; then 32 of the embedding are the first's: one after the other.
    plan, plan_inputs = build_small_plan(precision, bucket=30, **knobs)
    assert sum_transfers(run_plan_step(plan, plan_inputs))["gradient out"] == (24 + 32) * 4


def test_in_fp32_gradients_of_micro_batches_are_added_up_on_the_host() -> None:
    """As whole parameters: the second rank has parts of all 64 elements."""
    plan, plan_inputs = build_small_plan("fp32", micro_batches=3, **OFFLOAD_KNOBS[1])
    assert sum_transfers(run_plan_step(plan, plan_inputs)) == {
        "gradient of a micro-batch out": 3 * 64 * 4,
        "gradient back": 2 * 64 * 4,
        "gradient out": HALF * 4,
        "updated partition": HALF * 4,
    }
    once, _ = build_small_plan("fp32", **OFFLOAD_KNOBS[1])
    assert plan.host_bytes - once.host_bytes == 64 * 4
    for knobs_index, precision in ((1, "bf16"), (0, "fp32")):  # on the device, and sent once
        plan, plan_inputs = build_small_plan(precision, micro_batches=3, **OFFLOAD_KNOBS[knobs_index])
        assert sum_transfers(run_plan_step(plan, plan_inputs))["gradient out"] == HALF * 4
        assert plan.host_bytes == build_small_plan(precision, **OFFLOAD_KNOBS[knobs_index])[0].host_bytes


@pytest.mark.parametrize(("precision", "size"), [("fp32", 4), ("bf16", 2)])
def test_stage_3_moves_shards_for_every_gather_and_gradients_to_and_fro(precision: str, size: int) -> None:
    share = HALF * 4
    gradients = {"gradient out": 3 * share, "gradient back": 3 * share, "gradient out for the optimizer": share}
    plan, plan_inputs = build_small_plan(precision, micro_batches=3, **OFFLOAD_KNOBS[2])
    assert sum_transfers(run_plan_step(plan, plan_inputs)) == {**gradients, "updated partition": HALF * size}
    assert plan.host_copy_bytes == (HALF * (4 + 2) if size == 2 else 0)
    plan, plan_inputs = build_small_plan(precision, micro_batches=3, **OFFLOAD_KNOBS[4])
    device = run_plan_step(plan, plan_inputs)
    assert sum_transfers(device) == {**gradients, "upload": device.volume("all-gather", "world") / 2}
    assert device.volume("all-gather", "world") == 3 * 64 * size
    assert plan.host_copy_bytes == HALF * (4 + size)
    plan, plan_inputs = build_small_plan(
        precision, micro_batches=3, **OFFLOAD_KNOBS[3]
    )  # rounded on the host, so in fp32 on the way
    assert sum_transfers(run_plan_step(plan, plan_inputs)) == {"upload": 3 * HALF * size, "updated partition": share}
    assert plan.host_copy_bytes == (HALF * (4 + 2) if size == 2 else 0)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("overlaps", ["true", "false"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("offload_knobs", OFFLOAD_KNOBS, ids=str)
def test_a_step_leaves_behind_what_it_found(
    offload_knobs: Any, precision: str, overlaps: str, micro_batches: int
) -> None:
    run_plan_step(
        *build_small_plan(
            precision, micro_batches=micro_batches, **offload_knobs, **{"strategy.overlap_comm": overlaps}
        )
    )


class ReductionTimes(SimulatedRank):
    """Notes when the processor starts to reduce."""

    reduction_times_s: tuple[float, ...] = ()

    def run_collective(
        self, name: str, kind: str, size: float, group: str, stream: str, *, after: str | None = None
    ) -> None:
        super().run_collective(name, kind, size, group, stream, after=after)
        if kind == "reduce-scatter":
            self.reduction_times_s += (self.processor_time,)


def test_the_processor_waits_until_the_link_has_done_all_but_two_of_the_reductions_before() -> None:
    """Gradients of 4, 16, 4 and 40 elements; of each the half goes, comes and goes, at a byte per second."""
    plan, plan_inputs = build_small_plan("fp32", bucket=4, **OFFLOAD_KNOBS[2])
    simulated_rank = ReductionTimes(RankSpeed(transfer_s_per_byte=1.0))
    plan.allocate_persistent_state(simulated_rank)
    step(plan, plan_inputs, simulated_rank)
    assert simulated_rank.reduction_times_s == (0.0, 0.0, 0.0, 3 * 2 * 4)
    assert simulated_rank.elapsed_s >= 3 * HALF * 4


def predict_large_run(**knobs: object) -> Prediction:
    return predict_run(config(**{**LARGE, **knobs}))


@pytest.mark.slow
@pytest.mark.parametrize("offload_knobs", OFFLOAD_KNOBS, ids=str)
def test_offloading_is_predicted_to_save_the_device_and_fill_the_host(offload_knobs: dict[str, object]) -> None:
    plain, offloaded = (
        predict_large_run(**{"strategy.stage": offload_knobs["strategy.stage"]}),
        predict_large_run(**offload_knobs),
    )
    assert plain.memory.host == 0 < offloaded.memory.host
    assert offloaded.memory.allocated.value < plain.memory.allocated.value
    if OPTIMIZER_KNOB in offload_knobs:
        assert offloaded.memory.parts["optimizer"] == 0
    assert plain.time is not None
    assert offloaded.time is not None
    assert offloaded.time.step_s.value > plain.time.step_s.value
    assert offloaded.time.step_s.high >= 1.3 * offloaded.time.step_s.value * (1 - 1e-9)
    run = config(**{**LARGE, **offload_knobs})
    unknown = dataclasses.replace(run, hardware=dataclasses.replace(run.hardware, host=None))
    assert predict_run(unknown).time is None
    small = dataclasses.replace(run.hardware.host, memory_gib=1.0)  # type: ignore[type-var]
    full = dataclasses.replace(run, hardware=dataclasses.replace(run.hardware, host=small))
    assert predict_run(full).memory.verdict == DOES_NOT_FIT


def predict_step_s(**knobs: object) -> float:
    time = predict_large_run(**knobs).time
    assert time is not None
    return time.step_s.value


def test_time_follows_from_the_link_and_from_the_memory_of_the_machine() -> None:
    knobs = {**LARGE, "strategy.stage": 2, OPTIMIZER_KNOB: "cpu"}
    run = config(**knobs)
    once = predict_step_s(**knobs)
    partition = run.model.num_parameters / 8
    # AdamW in one pass reads 4 tensors and writes 3 in fp32; then the updated one is rounded. The memory is of 8 ranks.
    slower = predict_step_s(**knobs, **{"hardware.host.memory_gb_s": 204.8}) - once
    assert slower == pytest.approx((7 * 4 + 4 + 2) * partition * 8 / (409.6e9 * 0.84), rel=0.01)
    plan, plan_inputs = plan_of(run)
    size = sum(sum_transfers(run_plan_step(plan, plan_inputs)).values())
    assert size > (4 + 2) * partition
    # Two GPUs share the way to the memory. Nothing of it is hidden: the processor waits for every bucket.
    slower = predict_step_s(**knobs, **{"hardware.host.link_gb_s": 13.1}) - once
    assert slower == pytest.approx(size * 2 / 26.2e9, rel=0.02)
    rounding = {"strategy.stage": 3, PARAMETERS_KNOB: "cpu"}
    slower = predict_step_s(**rounding, **{"hardware.host.memory_gb_s": 204.8}) - predict_step_s(**rounding)
    assert slower == pytest.approx((4 + 2) * partition * 8 / (409.6e9 * 0.84), rel=0.01)


@pytest.mark.long
@pytest.mark.slow
def test_a_prediction_says_what_is_offloaded(capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["model=gpt_mini", "gpus=8", "hardware=a100_80gb", "strategy=deepspeed", "precision=bf16"]
    assert (
        command.main(
            [*typed, "strategy.stage=2", f"{OPTIMIZER_KNOB}=cpu", "sequence_length=64", "batch_size_per_gpu=1"]
        )
        == 0
    )
    out = " ".join(capsys.readouterr().out.split())
    assert "DeepSpeed stage 2 with optimizer offloaded" in out
    run = config(**{**LARGE, **OFFLOAD_KNOBS[4]})
    assert words(run) == "DeepSpeed stage 3 with parameters and optimizer offloaded"
    assert run.strategy.describe_effective_strategy(8) == "deepspeed/stage_3_offload"


@pytest.mark.long
@needs_library
@pytest.mark.slow
def test_on_a_cpu_the_library_takes_what_is_predicted_of_device_and_host_together() -> None:
    """And trains as without offloading. A run on a CPU is refused: there both are the same memory."""
    base = ["model=gpt_tiny", "sequence_length=64", "batch_size_per_gpu=2", "strategy=deepspeed"]
    base += ["strategy.reduce_bucket_size=200000"]
    stage_1, stage_2 = ["gpus=1", "strategy.stage=1"], ["gpus=1", "strategy.stage=2"]
    stage_3 = ["gpus=2", "strategy.stage=3", "strategy.param_persistence_threshold=0"]
    accumulation, bf16 = ["gradient_accumulation=3", "gradient_accumulation_sync=true"], "precision=bf16"
    embedding = ["model.vocabulary_size=16384", "model.num_layers=1", "sequence_length=8"]
    optimizer, parameters = f"{OPTIMIZER_KNOB}=cpu", f"{PARAMETERS_KNOB}=cpu"
    overrides_by_name = {
        "stage 2": [*stage_2, *accumulation],
        "stage 2 offloaded": [*stage_2, *accumulation, optimizer],
        "stage 3": [*stage_3, *accumulation],
        "stage 3 offloaded": [*stage_3, *accumulation, optimizer, parameters],
        "stage 1": [*stage_1, optimizer],
        "stage 2 in bf16": [*stage_2, bf16, optimizer],
        "the embedding's norm": [*stage_3, *embedding, bf16, optimizer, "strategy.reduce_bucket_size=4000000"],
    }
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.offloaded_anyway",
            json.dumps([[*base, *overrides] for overrides in overrides_by_name.values()]),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    memory_by_name = dict(zip(overrides_by_name, json.loads(done.stdout.splitlines()[-1]), strict=True))
    for name, memory in memory_by_name.items():
        assert memory["measured"] == pytest.approx(memory["device"] + memory["host"], rel=0.03), name
        assert (memory["host"] > 0) == (optimizer in overrides_by_name[name]), name
    for stage in ("stage 2", "stage 3"):
        assert memory_by_name[f"{stage} offloaded"]["losses"] == memory_by_name[stage]["losses"], stage
