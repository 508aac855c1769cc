"""What rows say about whether something fits: of repeats, of several batch sizes, of several kinds of evidence."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from bench.reporting.cells import first_known, known
from bench.reporting.labels import TOO_CLOSE, listing, memory

FITS, OOM, MIXED, FAILED, SKIPPED = "fits", "out of memory", "some repeats fit", "failed", "skipped"
CLOSE = TOO_CLOSE


Row = Mapping[str, Any]

COLUMNS = (
    *("status", "fit", "batch_size_per_gpu", "oom_phase", "degraded"),
    *("peak_allocated_bytes", "peak_reserved_bytes"),
)
"""What of a row an answer is made of."""


def outcome_of(repeats: Sequence[Row]) -> str:
    """What became of the repeats of one run, in a word."""
    fitted, out_of_memory = ([row for row in repeats if row["status"] == status] for status in ("ok", "oom"))
    if fitted and out_of_memory:
        return MIXED
    if fitted:
        return CLOSE if CLOSE in known(fitted, "fit") else FITS
    if out_of_memory:
        return OOM
    return SKIPPED if all(row["status"] == "skipped" for row in repeats) else FAILED


@dataclass(frozen=True)
class Answer:
    """What one kind of evidence says about one configuration, over all the batch sizes it was asked about."""

    evidence: str
    tried: tuple[int, ...]
    """Batch sizes, ascending."""
    most: int | None
    """The largest batch that fits."""
    perhaps: int | None
    """A larger one that is predicted too close to the limit to call."""
    least: int | None
    """The smallest batch that runs out of memory."""
    peak_bytes: float
    """Memory reserved at `most`, or at `perhaps` where nothing surely fits; NaN if unknown."""
    needed_bytes: float
    """Memory that `least` is predicted to need; NaN where it ran (and nobody knows) or nothing runs out of memory."""
    phase: str | None
    """Where memory runs out at `least`."""
    degraded: bool = False
    """Whether the largest batch that fits does so at a time that does not represent its speed."""

    @property
    def mixed(self) -> bool:
        """Whether the rows contradict one another: some repeats fit, or a larger batch than one that does not."""
        return self.most is not None and self.least is not None and self.least <= self.most

    @property
    def outcome(self) -> str:
        """In a word, whether anything that was tried fits."""
        if self.mixed:
            return MIXED
        if self.most is not None:
            return FITS
        return CLOSE if self.perhaps is not None else OOM

    @property
    def batch(self) -> str:
        """The largest batch that fits: ``148``, ``≥8`` where no larger one was tried, ``0-3`` where nobody can tell."""
        if self.most is None and self.perhaps is None:
            smallest = self.tried[0]
            return "OOM" if smallest == 1 else f"<{smallest}"
        low = self.most or 0
        if self.perhaps is not None:
            return f"{low}–{self.perhaps}"
        return f"{low}" if self.least is not None and self.least <= low + 1 else f"≥{low}"

    @property
    def words(self) -> str:
        """In words and numbers: ``batch 4 fits (peak 250 MiB), batch 5 runs out of memory in forward``."""
        size = f"peak {memory(self.peak_bytes)}"
        parts = []
        if self.most is not None:
            parts.append(f"batch {self.most} fits ({size})")
        if self.perhaps is not None:
            parts.append(f"batch {self.perhaps} is {CLOSE}" + ("" if self.most is not None else f" ({size})"))
        if self.least is not None:
            needed = "" if pd.isna(self.needed_bytes) else f" (needs {memory(self.needed_bytes)})"
            parts.append(f"batch {self.least} runs out of memory in {self.phase or 'a phase not stated'}{needed}")
        return ", ".join(parts)


def answer(evidence: str, rows: Sequence[Row]) -> Answer:
    """The answer of some rows (``ok`` or ``oom``, with `COLUMNS`) of one kind of evidence and one configuration but for
    the batch."""
    by_size: dict[int, list[Row]] = {}
    for row in rows:
        by_size.setdefault(int(row["batch_size_per_gpu"]), []).append(row)
    sizes = sorted(by_size)
    outcomes = {size: outcome_of(by_size[size]) for size in sizes}
    fits = [size for size, outcome in outcomes.items() if outcome in (FITS, MIXED)]
    close = [size for size, outcome in outcomes.items() if outcome == CLOSE]
    bursts = [size for size, outcome in outcomes.items() if outcome in (OOM, MIXED)]
    most, least = max(fits, default=None), min(bursts, default=None)
    perhaps = max((size for size in close if most is None or size > most), default=None)
    largest = perhaps if most is None else most
    ran = [row for row in by_size.get(largest or 0, []) if row["status"] == "ok"]
    burst = [row for row in by_size.get(least or 0, []) if row["status"] == "oom"]
    phases = known(burst, "oom_phase")
    return Answer(
        evidence=evidence,
        tried=tuple(sizes),
        most=most,
        perhaps=perhaps,
        least=least,
        peak_bytes=_largest(ran),
        needed_bytes=_largest(burst),
        phase=phases[0] if phases else None,
        degraded=any(known(ran, "degraded")),
    )


def _largest(rows: Sequence[Row]) -> float:
    """The largest memory reserved, or allocated where that is all that is known."""
    peaks = first_known(rows, "peak_reserved_bytes", "peak_allocated_bytes")
    return float(max(peaks)) if peaks else float("nan")


def disagree(first: Answer, second: Answer) -> bool:
    """Whether what one says fits is at least as large as what the other says does not.

    What fits at some batch fits at every smaller one, so answers about different batches can contradict each other,
    too. A prediction that is too close to call contradicts nothing, nor do repeats that contradict each other.
    """
    return any(
        fitting.most is not None and burst.least is not None and fitting.most >= burst.least
        for fitting, burst in ((first, second), (second, first))
    ) and not (first.mixed or second.mixed)


def disagreement(answers: Sequence[Answer]) -> str:
    """What different kinds of evidence contradict each other in, in words and numbers; empty if they do not."""
    apart = [pair for pair in itertools.combinations(answers, 2) if disagree(*pair)]
    involved = [one for one in answers if any(one in pair for pair in apart)]
    return "; ".join(f"{one.evidence}: {one.words}" for one in involved)


def agreement(cells: Sequence[Sequence[Answer]]) -> str:
    """How many configurations have several kinds of evidence, and how many of these contradict each other."""
    several = [answers for answers in cells if len(answers) > 1]
    if not several:
        return ""
    kinds = list(dict.fromkeys(one.evidence for answers in several for one in answers))
    apart = sum(bool(disagreement(answers)) for answers in several)
    verdict = "all agree" if not apart else f"{apart} of them disagree"
    return f"{len(several)} with several kinds of evidence ({listing(kinds)}): {verdict}."
