"""The benchmark of the harness itself: its judgement of synthetic pairs, and that both sides do equal work."""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bench.overhead import bare_ddp
from bench.overhead.__main__ import main, read_config
from bench.overhead.compare import (
    BARE_SCRIPT,
    MAX_FIXED_RATIO,
    MAX_STEP_RATIO,
    OverheadPair,
    OverheadRun,
    build_model_config,
    count_observed_steps,
    is_ours_first,
    run_bare,
    run_ours,
    select_quiet_pairs,
    summarize_ratios,
)

SMALL = ["strategy=ddp", "gpus=1", "precision=fp32", "batch_size_per_gpu=2", "sequence_length=16"]


def make_run(
    step_s: float, *, steps: int = 5, fixed_s: float = 3.0, surplus_s: float = 0.0, others_cores: float = 0.0
) -> OverheadRun:
    return OverheadRun(1000, [step_s] * steps, 5, fixed_s + surplus_s + steps * step_s, others_cores, surplus_s)


def make_pairs(cost: float, *, noise: float, count: int = 40, seed: int = 0) -> list[OverheadPair]:
    """Pairs whose machine drifts by a factor of 2 over the session, which both runs of a pair share."""
    rng = np.random.default_rng(seed)
    speeds = np.linspace(0.02, 0.04, count)
    jitter = rng.lognormal(0, noise, (count, 2))
    return [
        OverheadPair(make_run(s * cost * a), make_run(s * b))
        for s, (a, b) in zip(speeds.tolist(), jitter.tolist(), strict=True)
    ]


def test_fixed_cost_is_the_wall_time_without_timed_steps_and_surplus() -> None:
    assert make_run(0.5, steps=4, fixed_s=3.0, surplus_s=1.0).wall_s == 6.0
    assert make_run(0.5, steps=4, fixed_s=3.0, surplus_s=1.0).fixed_s == pytest.approx(3.0)


def test_ratios_are_ours_over_the_bare_script_s() -> None:
    pair = OverheadPair(make_run(0.3, fixed_s=4.0), make_run(0.2, fixed_s=2.0))
    assert pair.step_ratio == pytest.approx(1.5)
    assert pair.fixed_ratio == pytest.approx(2.0)


def test_a_slow_step_does_not_move_the_median_step() -> None:
    assert OverheadRun(1, [0.1, 0.1, 9.0, 0.1, 0.1], 5, 10.0).step_s == 0.1


@pytest.mark.parametrize(("cost", "within"), [(1.0, True), (1.005, True), (1.02, False), (1.1, False)])
def test_a_planted_cost_is_found_under_noise_and_drift(cost: float, within: bool) -> None:
    result = summarize_ratios([pair.step_ratio for pair in make_pairs(cost, noise=0.005)], MAX_STEP_RATIO)
    assert result.is_within_limit is within
    assert result.is_conclusive
    assert result.median == pytest.approx(cost, abs=0.003)
    low, high = result.interval
    assert result.lowest <= low <= result.median <= high <= result.highest


def test_an_interval_that_holds_the_limit_settles_nothing() -> None:
    result = summarize_ratios([1.0, 1.0, 1.0, 1.005, 1.02, 1.03, 1.03, 1.03], MAX_STEP_RATIO)
    assert not result.is_conclusive
    assert "more pairs" in str(result)


def test_the_verdict_says_plainly_whether_the_limit_is_kept() -> None:
    assert ": within 1.3" in str(summarize_ratios([1.0, 1.1, 1.2], MAX_FIXED_RATIO))
    assert ": NOT within 1.3" in str(summarize_ratios([1.3, 1.4, 1.5], MAX_FIXED_RATIO))


def test_pairs_that_others_disturbed_are_left_out_whatever_their_ratio() -> None:
    quiet = [OverheadPair(make_run(0.02), make_run(0.02))] * 6
    slowed = OverheadPair(make_run(0.04), make_run(0.02, others_cores=0.9))
    hastened = OverheadPair(make_run(0.01, others_cores=0.9), make_run(0.02))
    assert select_quiet_pairs([slowed, *quiet, hastened]) == quiet
    assert select_quiet_pairs([slowed, *quiet[:5], hastened]) == [slowed, *quiet[:5], hastened], "too few quiet ones"


def test_the_order_alternates_so_that_neither_side_is_always_first() -> None:
    assert [is_ours_first(pair) for pair in range(4)] == [True, False, True, False]
    drift = [1.0 + 0.1 * slot for slot in range(40)]
    ratios = [
        b / a if not is_ours_first(n) else a / b for n, (a, b) in enumerate(zip(drift[::2], drift[1::2], strict=True))
    ]
    assert statistics.median(ratios) == pytest.approx(1.0, abs=0.02)


def test_the_bare_script_knows_nothing_of_this_suite() -> None:
    tree = ast.parse(Path(BARE_SCRIPT).read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {name.partition(".")[0] for name in names} <= {
        "time",
        "itertools",
        "argparse",
        "json",
        "os",
        "typing",
        "torch",
        "transformers",
    }


@pytest.mark.slow
@pytest.mark.parametrize("model", ["t5_tiny", "gpt_tiny"])
def test_both_sides_do_the_same_work(model: str) -> None:
    config = read_config([f"model={model}", *SMALL])
    theirs = bare_ddp.build_model(config.model.family, build_model_config(config))
    ours = config.model.build_model()
    assert {name: p.shape for name, p in theirs.named_parameters()} == {n: p.shape for n, p in ours.named_parameters()}
    inputs, labels = bare_ddp.build_synthetic_batch(config.model.family, 2048, 2, 16, torch.device("cpu"))
    batch = config.model.build_batch(2, 16, torch.Generator())
    assert {name: tensor.shape for name, tensor in inputs.items()} == {n: t.shape for n, t in batch.inputs.items()}
    assert torch.equal(labels == -100, batch.labels == -100)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # it cannot see into CPU flash
        bare_ddp.compute_loss(theirs, inputs, labels, bf16=False).backward()
    assert counter.get_total_flops() == 2 * config.model.count_flops_per_sequence(16).model_flops


@pytest.mark.long
@pytest.mark.slow
def test_both_sides_run_and_take_the_same_steps() -> None:
    overrides = ["model=t5_tiny", *SMALL, "measurement.steps=3", "measurement.warmup_steps=2"]
    config = read_config(overrides)
    ours, row = run_ours(overrides)
    bare, _ = run_bare(config)
    assert ours.parameters == bare.parameters
    assert len(ours.step_times_s) == len(bare.step_times_s) == 3
    assert ours.untimed_steps == bare.untimed_steps == 2 + count_observed_steps(config)
    assert row["flops"]["model"] == 2 * config.model.count_flops_per_sequence(16).model_flops
    assert bare.surplus_s > 0
    assert ours.fixed_s > 0
    assert bare.fixed_s > 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--pairs", "0"], "--pairs=0"),
        (["--gpus", "0"], "gpus=0"),
        (["--model", "t5_huge"], "model=t5_huge"),
        (["--steps", "0"], "measurement.steps=0"),
        (["--precision", "fp16"], "--precision=fp16"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert named in error
    assert "choose" in error
    assert error.count("\n") == 1
