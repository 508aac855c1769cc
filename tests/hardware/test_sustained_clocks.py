"""Clocks of steps that a power limit sets: the law against what an H100 did, and where it ends."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from bench.core.installation import DATA_FOLDER
from bench.hardware.sustained_clocks import MEMORY_BOUND_POWER_SHARE, compute_clock_share, compute_sustained_share

MEASURED = pd.read_csv(DATA_FOLDER / "results" / "calibration" / "h100_power.csv").set_index("what")
PRODUCT = MEASURED.loc["product bf16 8192 8192 8192"]
COPY = MEASURED.loc["copy 268435456"]


def compute_share(*kernels: tuple[float, float]) -> float:
    """Of kernels given as their seconds in a burst and the share of that speed that they keep up alone."""
    seconds, shares = np.array(kernels).T
    return compute_clock_share(seconds, shares)


@pytest.mark.parametrize(("mixture", "copied_elements"), [("1:2^26", 2**26), ("1:2^27", 2**27), ("1:2^28", 2**28)])
def test_products_beside_copies_take_what_they_took_on_an_h100(mixture: str, copied_elements: int) -> None:
    """The law knows products alone and copies alone; the mixtures were not used for it."""
    alone = PRODUCT.burst_ms / PRODUCT.sustained_ms
    copy_ms = COPY.sustained_ms * copied_elements / 2**28
    clock = compute_share((PRODUCT.burst_ms, alone), (copy_ms, 1.0))
    mixed_ms = MEASURED.loc[f"product and copy {mixture}"].sustained_ms
    assert PRODUCT.burst_ms / clock + copy_ms == pytest.approx(mixed_ms, rel=0.015)
    at_lasting_speed, at_burst = PRODUCT.sustained_ms + copy_ms, PRODUCT.burst_ms + copy_ms
    assert abs(PRODUCT.burst_ms / clock + copy_ms - mixed_ms) < min(
        abs(at_lasting_speed - mixed_ms), abs(at_burst - mixed_ms)
    )


@pytest.mark.parametrize(
    ("what", "is_attention"),
    [
        *((f"product bf16 {shape}", False) for shape in ("16384 8192 2048", "16384 2048 8192", "4096 4096 4096")),
        *((f"attention {direction} 8x16x2048x128", True) for direction in ("forward", "backward")),
    ],
)
def test_an_h100_keeps_up_the_share_that_the_law_says(what: str, is_attention: bool) -> None:
    """These products were not used for it; of attention the mean of both directions was."""
    measured = MEASURED.loc[what]
    share = compute_sustained_share(700, measured.burst_tflops, "H100", is_attention)
    assert share == pytest.approx(measured.sustained_tflops / measured.burst_tflops, rel=0.025)


def test_copies_draw_the_stated_share_of_the_limit() -> None:
    assert COPY.energy_w / 700 == pytest.approx(MEMORY_BOUND_POWER_SHARE, abs=0.005)


def test_alone_a_kernel_has_the_speed_that_it_keeps_up() -> None:
    assert compute_share((0.3, 0.77)) == pytest.approx(0.77, abs=1e-4)
    assert compute_share((0.3, 1.0)) == 1.0
    between = compute_share((0.3, 0.77), (0.3, 0.9))
    assert 0.77 < between < 0.9


def test_the_more_there_is_beside_it_the_faster_a_product_is() -> None:
    shares = [compute_share((1.0, 0.77), (beside, 1.0)) for beside in (0.0, 0.2, 0.5, 1.0, 3.0, 6.0)]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0, "so little of the step that bursts never end"
