"""Fit positive numbers to timings: least squares of relative errors, by Levenberg and Marquardt's method."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

ITERATIONS = 100
STEP = 1e-4
"""Relative change of a parameter by which its influence is found."""
LONGEST_MOVE = 1.0
"""Of a parameter's logarithm in one iteration: far from the measurements slopes say little."""
CLOSE_ENOUGH = 1e-10
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

    at = np.log(np.asarray(start, dtype=float))
    damping, found = 1e-2, errors(at)
    for _ in range(ITERATIONS):
        slopes = np.stack([(errors(at + STEP * unit) - found) / STEP for unit in np.eye(len(at))], axis=1)
        weights = np.minimum(1.0, OUTLIER / np.maximum(np.abs(found), 1e-12))
        normal = slopes.T @ (weights[:, None] * slopes)
        scale = damping * np.maximum(np.diag(normal), 1e-9)
        move = -np.linalg.solve(normal + np.diag(scale), slopes.T @ (weights * found))
        move *= min(1.0, LONGEST_MOVE / float(np.max(np.abs(move), initial=1e-12)))
        moved = errors(at + move)
        if _loss(moved) < _loss(found):
            improved = _loss(found) - _loss(moved)
            at, found, damping = at + move, moved, max(damping / 5, 1e-9)
            if improved < CLOSE_ENOUGH:
                break
        else:
            damping *= 5
            if damping > 1e9:
                break
    return np.asarray(np.exp(at), dtype=float)


def _loss(errors: Floats) -> float:
    sizes = np.abs(errors)
    return float(np.sum(np.where(sizes <= OUTLIER, sizes**2 / 2, OUTLIER * (sizes - OUTLIER / 2))))
