"""Find the largest batch that fits, with few runs. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping


def next_batch_size(tried: Mapping[int, int | None], start: int, limit_bytes: int | None, unit: int = 1) -> int | None:
    """The batch size to try next, None when the answer is known.

    Memory grows linearly with the batch, so two batches that fit foretell the largest; trying it and its neighbour
    proves it. Without a foretelling, sizes double until one does not fit and the gap is halved from there.

    Parameters
    ----------
    tried: mapping
        Batch size to its peak memory in bytes, or None if it ran out of memory.
    start: int
        Where to begin.
    limit_bytes: int or None
        Memory there is, if known.
    unit: int
        What batch sizes are multiples of, `start` among them.
    """
    units = _next({size // unit: peak for size, peak in tried.items()}, start // unit, limit_bytes)
    return None if units is None else units * unit


def _next(tried: Mapping[int, int | None], start: int, limit_bytes: int | None) -> int | None:
    if not tried:
        return start
    fits = sorted(size for size, peak in tried.items() if peak is not None)
    bursts = sorted(size for size, peak in tried.items() if peak is None)
    if not fits:
        return bursts[0] // 2 or None
    largest = fits[-1]
    ceiling = min((size for size in bursts if size > largest), default=None)
    if ceiling == largest + 1:
        return None
    guess = _foretold(tried, fits, limit_bytes)
    if ceiling is None:
        if guess is None:
            return 2 * largest
        return min(guess, 16 * largest) if guess > largest else largest + _stride(fits, guess)
    half = largest // 2
    if limit_bytes is not None and len(fits) == 1 and ceiling - largest > 4 and half and half not in tried:
        return half  # fits as well, and two that fit foretell the largest
    if guess is None or sum(size < 2 * largest for size in bursts) >= 2:
        return (largest + ceiling) // 2  # bursting twice so near means that more counts than what is reported
    if guess == largest:
        return largest + 1
    if largest < guess < ceiling:
        return guess
    # More fits than was foretold, or less: look nearby, then further and further away.
    near = largest + _stride(fits, guess) if guess < largest else ceiling - _setback(bursts, ceiling, guess)
    return near if largest < near < ceiling else (largest + ceiling) // 2


def largest_fitting(tried: Mapping[int, int | None]) -> int | None:
    """The largest batch size that fitted, None if none did."""
    return max((size for size, peak in tried.items() if peak is not None), default=None)


def _stride(fits: list[int], foretold: int) -> int:
    """How far to go on from the largest that fitted where less was foretold: one, two, four, ..."""
    gap = fits[-1] - fits[-2]
    return 2 * gap if foretold <= fits[-2] or gap <= fits[-1] // 4 else 1


def _setback(bursts: list[int], ceiling: int, foretold: int) -> int:
    """How far to go back from the smallest that ran out of memory where more was foretold: 1, 4, 16, ..."""
    second = min((size for size in bursts if size > ceiling), default=None)
    if second is not None and foretold >= second:
        return 4 * (second - ceiling)
    return 1 if foretold - ceiling <= ceiling // 16 else ceiling  # far off: nearby is no better than anywhere


def _foretold(tried: Mapping[int, int | None], fits: list[int], limit_bytes: int | None) -> int | None:
    """Largest batch whose memory, on the line through two that fitted, is within the limit."""
    if limit_bytes is None or len(fits) < 2:
        return None
    larger = fits[-1]
    # Neighbours differ by little more than fragmentation does.
    smaller = max((size for size in fits if size <= 0.75 * larger), default=fits[0])
    low, high = tried[smaller], tried[larger]
    assert low is not None
    assert high is not None
    if high <= low:
        return None
    return larger + int((limit_bytes - high) * (larger - smaller) / (high - low))
