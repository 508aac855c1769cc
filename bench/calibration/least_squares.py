"""Fit positive numbers to timings: least squares of relative errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

Floats = npt.NDArray[np.float64]

OUTLIER = 0.25
"""Relative error beyond which a timing pulls no harder: Huber's loss."""


def fitted(predict: Callable[[Floats], Floats], measured: Sequence[float], start: Sequence[float]) -> Floats:
    """The parameters at which predictions are closest to what was measured, in the logarithm.

    Parameters
    ----------
    predict: callable
        Parameters, all above 0, to predictions, all above 0.
    measured: sequence
        One value above 0 for each prediction.
    start: sequence
        Where to begin: rough values of the parameters.
    """
    target = np.log(np.asarray(measured, dtype=float))

    def errors(logarithms: Floats) -> Floats:
        return np.asarray(np.log(predict(np.exp(logarithms))) - target, dtype=float)

    found = least_squares(errors, np.log(np.asarray(start, dtype=float)), loss="huber", f_scale=OUTLIER)
    return np.asarray(np.exp(found.x), dtype=float)
