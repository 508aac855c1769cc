"""``python -m bench.overhead``: does the harness cost anything?

Alternates `bench.run` and the bare script in one session, pair by pair, and compares the median step and the fixed
cost (the command's wall time outside of the timed steps). Exit code 0 if both limits are kept, 1 if not (or if a side
failed), 2 on bad input.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from bench.config.run_config import RunConfig
from bench.core import command_line
from bench.core.command_line import parse_path_argument
from bench.core.errors import UsageError, require_at_least, require_choice
from bench.hardware import detect_device
from bench.launch.run_on_host import compose_single_run
from bench.overhead.compare import (
    MAX_FIXED_RATIO,
    MAX_STEP_RATIO,
    MODEL_FAMILIES,
    OverheadPair,
    SideFailedError,
    is_ours_first,
    run_bare,
    run_ours,
    select_quiet_pairs,
    summarize_ratios,
)
from bench.planning.request import parse_sweep_request
from bench.rank.row import compute_median


def main(arguments: list[str] | None = None) -> int:
    options = _build_parser().parse_args(arguments)
    try:
        require_at_least("--pairs", options.pairs, 1)
        require_choice("--precision", options.precision, ("fp32", "bf16"))
        overrides = [
            *(f"model={options.model}", "strategy=ddp", f"gpus={options.gpus}", f"precision={options.precision}"),
            *(f"batch_size_per_gpu={options.batch_size}", f"sequence_length={options.sequence_length}"),
            *(f"measurement.steps={options.steps}", f"measurement.warmup_steps={options.warmup_steps}"),
        ]
        config = read_config(overrides)
        print(
            f"{config.label}, {options.steps} timed steps a run; one pair to warm up, then {options.pairs}", flush=True
        )
        pairs = [measure_pair(config, overrides, pair_number) for pair_number in range(-1, options.pairs)][1:]
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except SideFailedError as error:
        print(error, file=sys.stderr)
        return 1
    if options.output:
        options.output.write_text(json.dumps([dataclasses.asdict(pair) for pair in pairs], indent=1) + "\n")
    judged_pairs, num_quiet = select_quiet_pairs(pairs), sum(pair.is_quiet for pair in pairs)
    print(f"{num_quiet} of {len(pairs)} pairs had the machine to themselves; judged by {len(judged_pairs)}")
    step_summary = summarize_ratios([pair.step_ratio for pair in judged_pairs], MAX_STEP_RATIO)
    fixed_summary = summarize_ratios([pair.fixed_ratio for pair in judged_pairs], MAX_FIXED_RATIO)
    print(f"median step, ours / bare: {step_summary}")
    print(f"fixed cost, ours / bare: {fixed_summary}")
    surplus_s = compute_median([pair.bare.surplus_s for pair in pairs])
    print(
        f"(the bare script with {options.warmup_steps} warm-up steps; its other untimed steps took {surplus_s:.3f} s)"
    )
    return 0 if step_summary.is_within_limit and fixed_summary.is_within_limit else 1


def read_config(overrides: list[str]) -> RunConfig:
    """The one run that overrides describe, as `bench.run` would execute it here.

    Raises
    ------
    UsageError
        If it would not, or the bare script does not know the model's family.
    """
    device = detect_device()
    request = parse_sweep_request([*overrides, "sweep=adhoc"], multirun=False, device=device)
    config = compose_single_run(request, device)
    require_choice("model.family", config.model.family, MODEL_FAMILIES)
    return config


def measure_pair(config: RunConfig, overrides: list[str], pair_number: int) -> OverheadPair:
    """Run both sides once, the order alternating with the pair's number, and print what they took."""
    if is_ours_first(pair_number):
        ours = run_ours(overrides)[0]
        bare = run_bare(config)[0]
    else:
        bare = run_bare(config)[0]
        ours = run_ours(overrides)[0]
    pair = OverheadPair(ours, bare)
    print(
        f"{pair_number + 1 or 'warm-up':>7}  step {ours.step_s * 1000:8.3f} / {bare.step_s * 1000:8.3f} ms = "
        f"{pair.step_ratio:.4f}   fixed {ours.fixed_s:6.2f} / {bare.fixed_s:6.2f} s = {pair.fixed_ratio:.3f}"
        f"{'' if pair.is_quiet else '   others were busy'}",
        flush=True,
    )
    return pair


def _build_parser() -> argparse.ArgumentParser:
    parser = command_line.build_parser("overhead", "Compare bench.run with a bare hand-written DDP script.")
    parser.add_argument("--pairs", type=int, default=10, help="how often each side runs (default 10)")
    parser.add_argument("--gpus", type=int, default=1, help="world size (default 1)")
    parser.add_argument("--model", default="t5_tiny", help="a configuration in conf/model (default t5_tiny)")
    parser.add_argument("--precision", default="fp32", help="fp32 or bf16 (default fp32)")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per rank (default 4)")
    parser.add_argument("--sequence-length", type=int, default=64, help="tokens per sequence (default 64)")
    parser.add_argument("--steps", type=int, default=40, help="timed steps per run (default 40)")
    parser.add_argument("--warmup-steps", type=int, default=3, help="warm-up steps per run (default 3)")
    parser.add_argument("--output", type=parse_path_argument, help="write every step time of every run here, as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(command_line.run_main(main))
