"""Find the largest batch that fits, with few runs. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping


def next_batch_size(tried: Mapping[int, int | None], start: int, limit_bytes: int | None) -> int | None:
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
    """
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
        return max(largest + 1, min(guess, 16 * largest)) if guess else 2 * largest
    if guess is not None and not any(size in tried for size in (guess, guess + 1)):
        return min(max(guess, largest + 1), ceiling - 1)
    if guess is not None and largest == guess:
        return largest + 1
    return (largest + ceiling) // 2


def largest_fitting(tried: Mapping[int, int | None]) -> int | None:
    """The largest batch size that fitted, None if none did."""
    return max((size for size, peak in tried.items() if peak is not None), default=None)


def _foretold(tried: Mapping[int, int | None], fits: list[int], limit_bytes: int | None) -> int | None:
    """Largest batch whose memory, on the line through the two largest that fitted, is within the limit."""
    if limit_bytes is None or len(fits) < 2:
        return None
    smaller, larger = fits[-2:]
    low, high = tried[smaller], tried[larger]
    assert low is not None
    assert high is not None
    if high <= low:
        return None
    return larger + int((limit_bytes - high) * (larger - smaller) / (high - low))
