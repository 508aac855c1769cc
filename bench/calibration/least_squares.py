"""Fit positive numbers to timings: least squares of relative errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares, nnls

FloatArray = npt.NDArray[np.float64]

OUTLIER_RELATIVE_ERROR = 0.25
"""Relative error beyond which a timing pulls no harder: Huber's loss."""


def fit_least_squares(
    predict: Callable[[FloatArray], FloatArray], measured: Sequence[float], initial_parameters: Sequence[float]
) -> FloatArray:
    """The parameters at which predictions are closest to what was measured, in the logarithm.

    Parameters
    ----------
    predict: callable
        Parameters, all above 0, to predictions, all above 0.
    measured: sequence
        One value above 0 for each prediction.
    initial_parameters: sequence
        Where to begin: rough values of the parameters.
    """
    log_measured = np.log(np.asarray(measured, dtype=float))

    def compute_log_errors(log_parameters: FloatArray) -> FloatArray:
        return np.asarray(np.log(predict(np.exp(log_parameters))) - log_measured, dtype=float)

    solution = least_squares(
        compute_log_errors,
        np.log(np.asarray(initial_parameters, dtype=float)),
        loss="huber",
        f_scale=OUTLIER_RELATIVE_ERROR,
    )
    return np.asarray(np.exp(solution.x), dtype=float)


# --- Times that are sums of a few kinds of work: how long a unit of each takes.


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
