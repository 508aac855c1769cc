"""Whether the tree and the ranked prediction agree; if not, which step's general advice which number contradicts."""

from __future__ import annotations

from collections.abc import Sequence

from bench.advice.ranking import Row
from bench.advice.sentence import compared, overlap, recommended, row_name
from bench.advice.words import percent
from bench.guide.case import Case
from bench.guide.path import Taken
from bench.guide.tree import Leaf, Step
from bench.guide.ways import Way
from bench.guide.weighing import Weighed
from bench.reporting.labels import counted
from bench.simulate.prediction import TimePrediction

Kind = tuple[str, str]
"""Strategy, and how far it shards: whole, hybrid or full."""


def agreement(case: Case, path: Sequence[Taken], leaf: Leaf, ways: Sequence[Weighed]) -> tuple[bool | None, str]:
    """Whether they agree (None: there is nothing to compare), and a sentence that says so.

    Parameters
    ----------
    path: sequence of Taken
        The steps that were answered.
    ways: sequence of Weighed
        The leaf's.
    """
    rows = [row for row in case.ranking.possible if row.fits]
    tree = sorted((each for each in ways if each.fits), key=_slowness)
    if not rows:
        return _without_ranking(case, tree)
    best = rows[0] if rows[0].prediction.time is None else recommended(rows)
    of = f"the best of {counted(len(case.ranking.possible) + len(case.ranking.infeasible), 'ranked candidate')}"
    named = next((each for each in ways if kind_of(each.way, case) == kind(best)), None)
    quicker = [each for each in tree if _is_beyond(each.row, best)]
    if quicker:
        (row,) = [each.row for each in quicker[:1] if each.row is not None]
        return True, (
            f"They agree as far as they speak of the same: the ranking does not compare {quicker[0].way.name}, which "
            f"is {compared(row, best)}, beside {row_name(best)}, {of}."
        )
    if named is not None:
        return True, f"They agree: {row_name(best)}, {of}, is what the tree calls {named.way.name}."
    step = _contradicted(case, path, best)
    speaks = f"step {step.number} ({step.answered.answer})"
    timed = [each.row for each in tree if each.row is not None and each.row.prediction.time is not None]
    if not timed or best.prediction.time is None:
        return False, (
            f"They do not agree: of what the tree names nothing that can be timed is predicted to fit, so {speaks} "
            f"gives way to {row_name(best)}, {of}."
        )
    row = timed[0]
    if overlap(best, row):
        return True, (
            f"They agree within the predictor's uncertainty: {of} is {row_name(best)}; of what the tree names "
            f"{row_name(row)} is {compared(row, best)}."
        )
    return False, (
        f"They do not agree: {of} is {row_name(best)}, and the best that the tree names, {row_name(row)}, is "
        f"{compared(row, best)}. What contradicts the general advice of {speaks}: {_reason(row, best)}."
    )


def kind(row: Row) -> Kind:
    """What sort of sharding a candidate is; a whole copy per GPU is DDP, whoever keeps it."""
    config = row.config
    name, factor = config.strategy.name, config.strategy.factor
    extent = "whole" if factor == 1 else "full" if factor == config.gpus else "hybrid"
    return ("ddp", "whole") if extent == "whole" and name in ("fsdp", "fsdp1") and config.gpus > 1 else (name, extent)


def kind_of(way: Way, case: Case) -> Kind:
    """The same of a way."""
    factor = way.settings.get("strategy.sharding_factor", "1")
    full = factor in ("full", "stage") or (factor == "node" and case.config.nodes == 1)
    return way.settings.get("strategy", ""), "full" if full else "hybrid" if factor == "node" else "whole"


def _without_ranking(case: Case, tree: Sequence[Weighed]) -> tuple[bool | None, str]:
    count = len(case.ranking.possible) + len(case.ranking.infeasible)
    nothing = f"of {counted(count, 'candidate')} that bench.predict ranks, none is predicted to fit"
    if not tree:
        return True, f"They agree: {nothing}, nor is any way that the tree names and that can be predicted."
    names = ", ".join(each.way.name for each in tree)
    return True, f"They agree: {nothing}; the ranking does not compare {names}, predicted to fit."


def _slowness(each: Weighed) -> float:
    speed = None if each.row is None else each.row.tokens_per_second
    return -(speed or 0.0)


def _is_beyond(row: Row | None, best: Row) -> bool:
    """Whether something that the ranking did not compare is faster, beyond the uncertainty."""
    if row is None or row.tokens_per_second is None or best.tokens_per_second is None or kind(row) == kind(best):
        return False
    return row.tokens_per_second > best.tokens_per_second and not overlap(row, best)


def _contradicted(case: Case, path: Sequence[Taken], best: Row) -> Taken:
    """The last step at which another answer would have led to what is ranked best; else the last step."""
    for taken in reversed(path):
        others = [branch for answer, branch in taken.step.branches.items() if branch is not taken.following]
        leaves = [leaf for branch in others for leaf in (branch.leaves() if isinstance(branch, Step) else [branch])]
        if any(kind_of(way, case) == kind(best) for leaf in leaves for way in leaf.ways):
            return taken
    return path[-1]


def _reason(row: Row, best: Row) -> str:
    """The part of the time per token in which they differ most."""
    slow, fast = row.prediction.time, best.prediction.time
    assert slow is not None
    assert fast is not None
    words = {
        "compute_s": _computing(row, best),
        "exposed_communication_s": "it waits for the network",
        "optimizer_s": f"the optimizer, at batch {row.config.batch_size_per_gpu} rather than "
        f"{best.config.batch_size_per_gpu} per GPU, takes",
        "bubble_s": "waiting for kernels to be launched takes",
    }

    def lost(part: str) -> float:
        return float(getattr(slow, part) / row.tokens_per_step - getattr(fast, part) / best.tokens_per_step)

    part = max(words, key=lost)
    if part == "compute_s":
        return words[part]
    return f"{words[part]} {_share(slow, part)} of its step rather than {_share(fast, part)}"


def _computing(row: Row, best: Row) -> str:
    kinds = row.config.activation_checkpointing, best.config.activation_checkpointing
    per_token = _compute(row) / _compute(best) - 1
    more = f"computing takes {percent(per_token)} longer per token"
    if kinds[0] != kinds[1]:
        return f"{more}, with checkpointing {kinds[0]} rather than {kinds[1]}"
    batches = row.config.batch_size_per_gpu, best.config.batch_size_per_gpu
    return f"{more}, at batch {batches[0]} rather than {batches[1]} per GPU"


def _compute(row: Row) -> float:
    assert row.prediction.time is not None
    return row.prediction.time.compute_s / row.tokens_per_step


def _share(time: TimePrediction, part: str) -> str:
    return percent(getattr(time, part) / time.step_s.value)
