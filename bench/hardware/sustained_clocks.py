"""Clocks under load: what a power limit leaves of the speed that a device reaches in short bursts."""

from __future__ import annotations

from collections.abc import Mapping

SUSTAINED_SHARE_AT_ONE_WATT = 0.835
"""Share of a burst's speed that is left at 1 W of board power per TFLOP/s of that burst. Fitted to matrix products in
training layouts, which were timed at length (SimuMax), against bursts on the same chips (aiconfigurator): A100 PCIe
0.85, B200 0.82. No training row was used."""

POWER_EXPONENT = 1 / 3
"""Dynamic power grows with the cube of the clock where the voltage follows it (Chandrakasan et al. 1992, IEEE Journal
of Solid-State Circuits 27(4))."""

TRAINING_SHARE = 0.96
"""Share of the speed of lasting matrix products that they have within steps of training: what no microbenchmark of one
kernel shows. The one number of kernels that was chosen on training runs, for all devices and formats: rows of
llm-foundry and the FSDP paper at 8 and 128 GPUs were predicted 3 to 4 % too fast at the median without it."""


TYPICAL_HEAD_DIMENSION = 128
"""At which the power that an attention kernel draws is estimated."""


def compute_typical_attention_share(kernel: Mapping[str, float]) -> float:
    """Share of the device's peak that an attention kernel reaches in bursts with heads of a usual size."""
    return kernel["forward"] * TYPICAL_HEAD_DIMENSION / (TYPICAL_HEAD_DIMENSION + kernel["half_width"])


def compute_training_share(board_power_w: float, burst_tflops: float) -> float:
    """Share of a burst's speed that matrix products have in training; parameters as `compute_sustained_share`."""
    return TRAINING_SHARE * compute_sustained_share(board_power_w, burst_tflops)


def compute_sustained_share(board_power_w: float, burst_tflops: float) -> float:
    """Share of a burst's speed that a device keeps up: 1 where its power limit does not matter.

    Parameters
    ----------
    board_power_w: float
        The limit of the whole board, in watts.
    burst_tflops: float
        16-bit TFLOP/s of the kernel in short bursts.
    """
    return min(1.0, SUSTAINED_SHARE_AT_ONE_WATT * (board_power_w / burst_tflops) ** POWER_EXPONENT)
