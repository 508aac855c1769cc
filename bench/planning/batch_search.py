"""Find the largest batch that fits, with few runs or predictions, for many configurations side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from bench.config.run_config import RunConfig
from bench.core.errors import ImpossibleError


@dataclass(frozen=True)
class BatchTrial:
    """What running or predicting one batch size showed."""

    peak_bytes: float | None
    """Peak memory; None if it does not fit, and nobody knows by how much."""
    limit_bytes: int | None
    """Memory there is, if known."""
    fits: bool


@dataclass
class BatchSearch:
    """The search for the largest batch per GPU that fits one configuration, from its own batch size on."""

    config: RunConfig
    peaks_by_size: dict[int, float | None] = dataclasses.field(default_factory=dict)
    """Batch size to peak memory in bytes, None if it does not fit."""
    excessive_peaks: dict[int, float] = dataclasses.field(default_factory=dict)
    """Of those that do not fit the peak, where it is known."""
    limit_bytes: int | None = None
    sizes: Sequence[int] | None = None
    """The only sizes there are, smallest first: those that come to a global batch; None for all."""
    is_aborted: bool = False
    """A batch size could not be tried, or nothing says whether it fits."""

    @property
    def largest_batch_size(self) -> int | None:
        """None if not even the smallest batch fits, or the search was cut short."""
        return None if self.is_aborted else find_largest_fitting(self.peaks_by_size)

    def choose_next_config(self) -> RunConfig | None:
        """What to try next, None when the answer is known."""
        start, unit = self.config.batch_size_per_gpu, self.config.strategy.batch_size_multiple
        while not self.is_aborted:
            size = (
                choose_next_batch_size(self.peaks_by_size, start, self.limit_bytes, unit, self.excessive_peaks)
                if self.sizes is None
                else choose_next_listed_size(self.peaks_by_size, self.sizes)
            )
            if size is None:
                break
            try:
                return self.config.resize_batch(size)
            except ImpossibleError:  # more tokens than a run may have
                self.peaks_by_size[size] = None
        return None

    def add_trial(self, batch_size: int, trial: BatchTrial | None) -> None:
        """Take what trying a batch size showed; None if it showed nothing."""
        if trial is None:
            self.is_aborted = True
        else:
            self.peaks_by_size[batch_size] = trial.peak_bytes if trial.fits else None
            if trial.peak_bytes is not None and not trial.fits:
                self.excessive_peaks[batch_size] = trial.peak_bytes
            self.limit_bytes = trial.limit_bytes


def search_largest_batches(
    configs: Sequence[RunConfig], try_batches: Callable[[list[RunConfig]], Iterable[BatchTrial | None]]
) -> list[BatchSearch]:
    """Search the largest batch of each configuration that fits.

    Parameters
    ----------
    try_batches: callable
        Runs or predicts configurations, one of each search that goes on, and gives what each showed.
    """
    searches = [BatchSearch(config, sizes=config.valid_batch_sizes) for config in configs]
    while open_searches := [(search, config) for search in searches if (config := search.choose_next_config())]:
        trials = try_batches([config for _, config in open_searches])
        for (search, config), trial in zip(open_searches, trials, strict=True):
            search.add_trial(config.batch_size_per_gpu, trial)
    return searches


def choose_next_listed_size(peaks_by_size: Mapping[int, float | None], sizes: Sequence[int]) -> int | None:
    """Of the sizes of a global batch the one to try next, None when the answer is known.

    First the largest, which is the whole step at once: without accumulation gradients need not be kept whole beside
    the next micro-batch, so it may fit where smaller ones do not. Then the gap between what fits and what does not is
    halved.
    """
    *smaller_sizes, largest = sizes
    if largest not in peaks_by_size:
        return largest
    if peaks_by_size[largest] is not None:
        return None
    fitting = find_largest_fitting(peaks_by_size) or 0
    smallest_oom = min((size for size in smaller_sizes if size in peaks_by_size and size > fitting), default=largest)
    open_sizes = [size for size in smaller_sizes if fitting < size < smallest_oom]
    return open_sizes[len(open_sizes) // 2] if open_sizes else None


def choose_next_batch_size(
    peaks_by_size: Mapping[int, float | None],
    start: int,
    limit_bytes: float | None,
    unit: int = 1,
    excessive_peaks: Mapping[int, float] = MappingProxyType({}),
) -> int | None:
    """The batch size to try next, None when the answer is known.

    Memory grows linearly with the batch, so two batches that fit give the largest by extrapolation; trying it and
    its neighbour proves it. Where nothing can be extrapolated, sizes double until one does not fit, and the gap is
    halved from there. Where it is known how much a batch would take that does not fit, what is on the line between it
    and one that fits is tried: the largest of several peaks is convex in the batch, so that fits.

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
    excessive_peaks: mapping
        Batch size that ran out of memory to the bytes it would take, where that is known.
    """
    next_units = _choose_next_units(
        {size // unit: peak for size, peak in peaks_by_size.items()},
        start // unit,
        limit_bytes,
        {size // unit: peak for size, peak in excessive_peaks.items()},
    )
    return None if next_units is None else next_units * unit


def _choose_next_units(
    peaks_by_size: Mapping[int, float | None],
    start: int,
    limit_bytes: float | None,
    excessive_peaks: Mapping[int, float],
) -> int | None:
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
    largest_peak = peaks_by_size[largest_fit]
    if limit_bytes is not None and largest_peak is not None and smallest_oom in excessive_peaks:
        gap_bytes = max(excessive_peaks[smallest_oom] - largest_peak, 1.0)
        interpolated = largest_fit + int((smallest_oom - largest_fit) * (limit_bytes - largest_peak) / gap_bytes)
        return min(max(interpolated, largest_fit + 1), smallest_oom - 1)
    half_size = largest_fit // 2
    if (
        limit_bytes is not None
        and len(fitting_sizes) == 1
        and smallest_oom - largest_fit > 4
        and half_size
        and half_size not in peaks_by_size
    ):
        return half_size  # fits as well, and the largest can be extrapolated from two that fit
    if extrapolated is None or sum(size < 2 * largest_fit for size in oom_sizes) >= 2:
        return (largest_fit + smallest_oom) // 2  # out of memory twice so near: more counts than what is reported
    if extrapolated == largest_fit:
        return largest_fit + 1
    if largest_fit < extrapolated < smallest_oom:
        return extrapolated
    # More fits than was extrapolated, or less: look nearby, then further and further away.
    nearby_size = (
        largest_fit + _compute_step_up(fitting_sizes, extrapolated)
        if extrapolated < largest_fit
        else smallest_oom - _compute_step_down(oom_sizes, smallest_oom, extrapolated)
    )
    return nearby_size if largest_fit < nearby_size < smallest_oom else (largest_fit + smallest_oom) // 2


def find_largest_fitting(peaks_by_size: Mapping[int, float | None]) -> int | None:
    """The largest batch size that fitted, None if none did."""
    return max((size for size, peak in peaks_by_size.items() if peak is not None), default=None)


def _compute_step_up(fitting_sizes: list[int], extrapolated: int) -> int:
    """How far to go on from the largest that fitted where less was extrapolated: one, two, four, ..."""
    gap = fitting_sizes[-1] - fitting_sizes[-2]
    return 2 * gap if extrapolated <= fitting_sizes[-2] or gap <= fitting_sizes[-1] // 4 else 1


def _compute_step_down(oom_sizes: list[int], smallest_oom: int, extrapolated: int) -> int:
    """How far to go back from the smallest that ran out of memory where more was extrapolated: 1, 4, 16, ..."""
    second_smallest_oom = min((size for size in oom_sizes if size > smallest_oom), default=None)
    if second_smallest_oom is not None and extrapolated >= second_smallest_oom:
        return 4 * (second_smallest_oom - smallest_oom)
    return (
        1 if extrapolated - smallest_oom <= smallest_oom // 16 else smallest_oom
    )  # far off: nearby is no better than anywhere


def _extrapolate_largest_batch(
    peaks_by_size: Mapping[int, float | None], fitting_sizes: list[int], limit_bytes: float | None
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
