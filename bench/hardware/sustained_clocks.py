"""Clocks under load: what a power limit leaves of the speed that a device reaches in short bursts."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

import numpy as np
import numpy.typing as npt

SUSTAINED_SHARES_AT_ONE_WATT = {"A100": 0.85, "H100": 0.886, "B200": 0.82}
"""Share of a burst's speed that is left at 1 W of board power per TFLOP/s of that burst, for products that run alone.
By chip, where it was timed: an A100 PCIe and a B200 (matrix products in training layouts that were timed at length,
SimuMax, against bursts on the same chips, aiconfigurator), and an H100 SXM (products of 8192 x 8192 x 8192 after 3 s:
results/calibration/h100_power.csv). No training row was used."""

MEAN_SHARE_AT_ONE_WATT = fmean(SUSTAINED_SHARES_AT_ONE_WATT.values())
"""For all other chips."""

ATTENTION_SHARE = 0.873
"""Of these shares, for fused attention, which draws more power at the same speed: 0.890 forward and 0.855 backward on
an H100 (8 x 16 heads of 2,048 x 128: results/calibration/h100_power.csv)."""

POWER_EXPONENT = 1 / 3
"""Dynamic power grows with the cube of the clock where the voltage follows it (Chandrakasan et al. 1992, IEEE Journal
of Solid-State Circuits 27(4))."""

MEMORY_BOUND_POWER_SHARE = 0.75
"""Share of its board's power limit that a device draws whose kernels wait for memory, or use no Tensor Cores: an H100
that copied for 3 s, at its highest clocks, drew 526 of 700 W (results/calibration/h100_power.csv)."""

CLOCK_BISECTIONS = 20

TYPICAL_HEAD_DIMENSION = 128
"""At which the power that an attention kernel draws is estimated."""


def compute_typical_attention_share(kernel: Mapping[str, float]) -> float:
    """Share of the device's peak that an attention kernel reaches in bursts with heads of a usual size."""
    return kernel["forward"] * TYPICAL_HEAD_DIMENSION / (TYPICAL_HEAD_DIMENSION + kernel["half_width"])


def compute_sustained_share(
    board_power_w: float, burst_tflops: float, chip: str | None = None, is_attention: bool = False
) -> float:
    """Share of a burst's speed that a device keeps up: 1 where its power limit does not matter.

    Parameters
    ----------
    board_power_w: float
        The limit of the whole board, in watts.
    burst_tflops: float
        16-bit TFLOP/s of the kernel in short bursts.
    chip: str, optional
        A name in `SUSTAINED_SHARES_AT_ONE_WATT`, or another.
    is_attention: bool
        Whether the kernel is fused attention, else a matrix product.
    """
    share = get_share_at_one_watt(chip, is_attention)
    return min(1.0, share * (board_power_w / burst_tflops) ** POWER_EXPONENT)


def get_share_at_one_watt(chip: str | None, is_attention: bool) -> float:
    """What was timed of this chip, else the mean over those that were."""
    share = SUSTAINED_SHARES_AT_ONE_WATT.get(chip or "", MEAN_SHARE_AT_ONE_WATT)
    return share * ATTENTION_SHARE if is_attention else share


def compute_clock_share(burst_seconds: npt.NDArray[np.float64], sustained_shares: npt.NDArray[np.float64]) -> float:
    """Share of the clocks of a burst at which the kernels of a step draw what the board may, on average over all of it.

    Kernels that would be slowed if they ran alone draw ``(clock / sustained share) ** (1 / POWER_EXPONENT)`` of the
    limit and take ``1 / clock`` of their burst; all others draw `MEMORY_BOUND_POWER_SHARE` of it and take as long as
    ever. So products beside which there is much to copy are slowed less than products alone are.

    Parameters
    ----------
    burst_seconds: array
        Of each kernel of a step.
    sustained_shares: array
        Of a burst's speed that each keeps up alone: 1 for those that draw too little to be slowed.
    """
    is_limited = sustained_shares < 1
    limited_seconds = burst_seconds[is_limited].sum()
    if not limited_seconds:
        return 1.0
    burst_energy = (burst_seconds[is_limited] * sustained_shares[is_limited] ** (-1 / POWER_EXPONENT)).sum()
    spare_energy = (1 - MEMORY_BOUND_POWER_SHARE) * burst_seconds[~is_limited].sum()

    def exceeds_limit(clock: float) -> bool:
        return bool(burst_energy * clock ** (1 / POWER_EXPONENT - 1) > limited_seconds / clock + spare_energy)

    if not exceeds_limit(1.0):
        return 1.0
    low, high = float(sustained_shares.min()), 1.0
    for _ in range(CLOCK_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if exceeds_limit(middle) else (middle, high)
    return (low + high) / 2
