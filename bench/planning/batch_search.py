"""Find the largest batch that fits, with few runs. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping


def choose_next_batch_size(
    peaks_by_size: Mapping[int, int | None], start: int, limit_bytes: int | None, unit: int = 1
) -> int | None:
    """The batch size to try next, None when the answer is known.

    Memory grows linearly with the batch, so two batches that fit foretell the largest; trying it and its neighbour
    proves it. Without a foretelling, sizes double until one does not fit and the gap is halved from there.

    Parameters
    ----------
    peaks_by_size: mapping
        Batch size to its peak memory in bytes, or None if it ran out of memory.
    start: int
        Where to begin.
    limit_bytes: int or None
        Memory there is, if known.
    unit: int
        What batch sizes are multiples of, `start` among them.
    """
    next_units = _choose_next_units(
        {size // unit: peak for size, peak in peaks_by_size.items()}, start // unit, limit_bytes
    )
    return None if next_units is None else next_units * unit


def _choose_next_units(peaks_by_size: Mapping[int, int | None], start: int, limit_bytes: int | None) -> int | None:
    if not peaks_by_size:
        return start
    fitting_sizes = sorted(size for size, peak in peaks_by_size.items() if peak is not None)
    oom_sizes = sorted(size for size, peak in peaks_by_size.items() if peak is None)
    if not fitting_sizes:
        return oom_sizes[0] // 2 or None
    largest_fit = fitting_sizes[-1]
    smallest_oom = min((size for size in oom_sizes if size > largest_fit), default=None)
    if smallest_oom == largest_fit + 1:
        return None
    extrapolated = _extrapolate_largest_batch(peaks_by_size, fitting_sizes, limit_bytes)
    if smallest_oom is None:
        if extrapolated is None:
            return 2 * largest_fit
        return (
            min(extrapolated, 16 * largest_fit)
            if extrapolated > largest_fit
            else largest_fit + _compute_step_up(fitting_sizes, extrapolated)
        )
    half_size = largest_fit // 2
    if (
        limit_bytes is not None
        and len(fitting_sizes) == 1
        and smallest_oom - largest_fit > 4
        and half_size
        and half_size not in peaks_by_size
    ):
        return half_size  # fits as well, and two that fit foretell the largest
    if extrapolated is None or sum(size < 2 * largest_fit for size in oom_sizes) >= 2:
        return (largest_fit + smallest_oom) // 2  # bursting twice so near means that more counts than what is reported
    if extrapolated == largest_fit:
        return largest_fit + 1
    if largest_fit < extrapolated < smallest_oom:
        return extrapolated
    # More fits than was foretold, or less: look nearby, then further and further away.
    nearby_size = (
        largest_fit + _compute_step_up(fitting_sizes, extrapolated)
        if extrapolated < largest_fit
        else smallest_oom - _compute_step_down(oom_sizes, smallest_oom, extrapolated)
    )
    return nearby_size if largest_fit < nearby_size < smallest_oom else (largest_fit + smallest_oom) // 2


def find_largest_fitting(peaks_by_size: Mapping[int, int | None]) -> int | None:
    """The largest batch size that fitted, None if none did."""
    return max((size for size, peak in peaks_by_size.items() if peak is not None), default=None)


def _compute_step_up(fitting_sizes: list[int], extrapolated: int) -> int:
    """How far to go on from the largest that fitted where less was foretold: one, two, four, ..."""
    gap = fitting_sizes[-1] - fitting_sizes[-2]
    return 2 * gap if extrapolated <= fitting_sizes[-2] or gap <= fitting_sizes[-1] // 4 else 1


def _compute_step_down(oom_sizes: list[int], smallest_oom: int, extrapolated: int) -> int:
    """How far to go back from the smallest that ran out of memory where more was foretold: 1, 4, 16, ..."""
    second_smallest_oom = min((size for size in oom_sizes if size > smallest_oom), default=None)
    if second_smallest_oom is not None and extrapolated >= second_smallest_oom:
        return 4 * (second_smallest_oom - smallest_oom)
    return (
        1 if extrapolated - smallest_oom <= smallest_oom // 16 else smallest_oom
    )  # far off: nearby is no better than anywhere


def _extrapolate_largest_batch(
    peaks_by_size: Mapping[int, int | None], fitting_sizes: list[int], limit_bytes: int | None
) -> int | None:
    """Largest batch whose memory, on the line through two that fitted, is within the limit."""
    if limit_bytes is None or len(fitting_sizes) < 2:
        return None
    larger_size = fitting_sizes[-1]
    # Neighbours differ by little more than fragmentation does.
    smaller_size = max((size for size in fitting_sizes if size <= 0.75 * larger_size), default=fitting_sizes[0])
    smaller_peak, larger_peak = peaks_by_size[smaller_size], peaks_by_size[larger_size]
    assert smaller_peak is not None
    assert larger_peak is not None
    if larger_peak <= smaller_peak:
        return None
    return larger_size + int((limit_bytes - larger_peak) * (larger_size - smaller_size) / (larger_peak - smaller_peak))
