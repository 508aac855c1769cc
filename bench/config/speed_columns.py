"""What follows from the time of a step: rates of FLOPs and tokens."""

from __future__ import annotations

from typing import Any

from bench.config.run_config import RunConfig


def compute_speed_columns(config: RunConfig, step_time_s: float) -> dict[str, Any]:
    """The columns of a row that follow from the time of an optimizer step, in seconds.

    TFLOP/s per rank count the model's own FLOPs, or all that the device executes, recomputation included; MFU and HFU
    are their shares of the dense peak of the precision, None where that is unknown. The causal columns are the model's
    FLOPs with half of the scores where attention is causal.
    """
    sequences = config.sequences_per_gpu
    flop_count = config.trained_model.count_flops_per_sequence(config.sequence_length)
    model_flops = sequences * flop_count.model_flops
    hardware_flops = sequences * config.hardware_flops_per_sequence
    tflops, hardware_tflops = (flops / step_time_s / 1e12 for flops in (model_flops, hardware_flops))
    peak_tflops = config.hardware.peak_tflops.get(config.precision.peak)
    causal_flops = sequences * flop_count.causal_model_flops
    causal_tflops = causal_flops / step_time_s / 1e12
    tokens = sequences * config.model.count_tokens_per_sequence(config.sequence_length)
    return {
        "tflops_per_gpu": tflops,
        "hardware_tflops_per_gpu": hardware_tflops,
        "causal_tflops_per_gpu": causal_tflops,
        "mfu": tflops / peak_tflops if peak_tflops else None,
        "causal_mfu": causal_tflops / peak_tflops if peak_tflops else None,
        "hfu": hardware_tflops / peak_tflops if peak_tflops else None,
        "tokens_per_second_per_gpu": tokens / step_time_s,
        "step_time_median_s": step_time_s,
        "flops": {"model": model_flops, "hardware": hardware_flops, "causal": causal_flops},
    }
