"""Times that are sums of a few kinds of work: how long a unit of each takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

FloatArray = npt.NDArray[np.float64]

WEIGHT_POWER = 0.5
"""Weight of a timing is its inverse to this power: between errors in seconds (0) and relative ones (1). What is large
makes up a step, what is small shows what does not grow."""


def fit_seconds_per_unit(work: Sequence[Sequence[float]], seconds: Sequence[float]) -> FloatArray:
    """Seconds per unit of each kind of work, none below 0.

    Parameters
    ----------
    work: sequence
        For each timing how much there was of each kind.
    seconds: sequence
        Each timing.
    """
    amounts, target_seconds = np.asarray(work, dtype=float), np.asarray(seconds, dtype=float)
    weights = target_seconds**-WEIGHT_POWER
    scale = np.maximum(amounts.max(axis=0), 1e-300)
    weighted_amounts, weighted_seconds = amounts / scale * weights[:, None], target_seconds * weights
    return np.asarray(nnls(weighted_amounts, weighted_seconds)[0] / scale, dtype=float)
