"""Whether the tree and the ranked prediction agree; if not, which step's general advice which number contradicts."""

from __future__ import annotations

from collections.abc import Sequence

from bench.advice.ranking import Row
from bench.advice.sentence import UNSEEN, compared, overlap, recommended, row_name
from bench.advice.words import listing
from bench.guide.case import Case
from bench.guide.path import Taken
from bench.guide.tree import Step
from bench.guide.ways import Way
from bench.guide.weighing import Weighed
from bench.reporting import labels
from bench.reporting.labels import counted

FULL, WITHIN, ACROSS = "over all GPUs", "within a node", "across nodes"
SHARDING = ("fsdp", "fsdp1")
"""Strategies whose sharding factor is one of these."""

Kind = tuple[str, str]
"""Strategy, and how far it shards where that is a choice."""


def agreement(case: Case, path: Sequence[Taken], ways: Sequence[Weighed]) -> tuple[bool | None, str]:
    """Whether they agree (None: nothing tells), and a sentence that says so.

    Parameters
    ----------
    path: sequence of Taken
        The steps that were answered.
    ways: sequence of Weighed
        The leaf's.
    """
    agrees, said = _compared(case, path, ways)
    if ways[0].row is None and any(each.row is not None for each in ways):
        said += f" What the tree names first, {ways[0].way.name}, is not predicted."
    return agrees, said


def _compared(case: Case, path: Sequence[Taken], ways: Sequence[Weighed]) -> tuple[bool | None, str]:
    rows = [row for row in case.ranking.possible if row.fits]
    tree = [row for each in ways if (row := each.row) is not None and each.fits]
    if not rows and not tree and case.ranking.possible:
        return None, "Nothing tells: nothing is predicted to fit for sure, and what might is too close to call."
    if not rows:
        return True, _without_ranking(case, [each for each in ways if each.fits])
    count = counted(len(case.ranking.possible) + len(case.ranking.infeasible), "ranked candidate")
    if rows[0].prediction.time is None:
        return None, (
            f"Nothing tells: no time is predicted, so the {count} are in the order of memory, and {row_name(rows[0])} "
            "needs least. The tree prefers what is simple among what fits."
        )
    best = recommended(rows)
    of = f"the best of {count}"
    timed = sorted((row for row in tree if row.tokens_per_second), key=lambda row: -(row.tokens_per_second or 0.0))
    if timed and not overlap(best, timed[0]) and (timed[0].tokens_per_second or 0) > (best.tokens_per_second or 0):
        return False, (
            f"They do not agree, since the ranking does not compare everything: {_name_of(timed[0], ways)}, which the "
            f"tree names, is {compared(timed[0], best)}, than {of}, {row_name(best)}."
        )
    called = _called(best, ways, case)
    if called is not None and as_fast(called, best):
        said = f"They agree: {of}, {row_name(best)}, is what the tree calls {_name_of(called, ways)}"
        return True, said + _first_named(tree, called, best)
    if timed and overlap(best, timed[0]):
        return True, (
            f"They agree within the predictor's uncertainty: {of} is {row_name(best)}; of what the tree names "
            f"{row_name(timed[0])} is {_against(timed[0], best)}" + _first_named(tree, timed[0], best)
        )
    if called is not None:
        return False, (
            f"They do not agree: {of} is {row_name(best)}, and {_name_of(called, ways)}, which the tree names, is "
            f"{_against(called, best)}" + _first_named(tree, called, best)
        )
    step = _contradicted(case, path, best)
    speaks = f"step {step.number} ({step.answered.answer})"
    if not timed:
        return False, (
            f"They do not agree: of what the tree names nothing that can be timed is predicted to fit, so {speaks} "
            f"gives way to {row_name(best)}, {of}."
        )
    return False, (
        f"They do not agree: {of} is {row_name(best)}, and the best that the tree names, {row_name(timed[0])}, is "
        f"{compared(timed[0], best)}. What contradicts the general advice of {speaks}: {_reason(timed[0], best)}."
    )


def _called(best: Row, ways: Sequence[Weighed], case: Case) -> Row | None:
    """The fastest row of the ways of the same kind as what is ranked best, None if none is predicted to fit."""
    alike = [each.row for each in ways if each.row is not None and each.fits and _is_of(best, each.way, case)]
    return max(alike, key=lambda row: row.tokens_per_second or 0.0, default=None)


def _name_of(row: Row, ways: Sequence[Weighed]) -> str:
    return next(each.way.name for each in ways if each.row is row)


def _first_named(tree: Sequence[Row], told: Row, best: Row) -> str:
    """How what the tree names first compares, if that is not what was told already; the end of the sentence."""
    first = tree[0]
    if first is told or first.tokens_per_second is None:
        return "."
    return f"; what the tree names first, {row_name(first)}, is {_against(first, best)}."


def _against(row: Row, best: Row) -> str:
    """How it compares with what is ranked best, and where it is slower why."""
    slower = (row.tokens_per_second or 0.0) < (best.tokens_per_second or 0.0) and not as_fast(row, best)
    return compared(row, best) + (f": {_reason(row, best)}" if slower else "")


def as_fast(row: Row, best: Row) -> bool:
    """Whether no percentage shows a difference."""
    return abs((row.tokens_per_second or 0.0) / (best.tokens_per_second or 1.0) - 1) < UNSEEN


def kind(row: Row) -> Kind:
    """What sort of sharding a candidate is; a whole copy per GPU is DDP, whoever keeps it."""
    config = row.config
    name, factor = config.strategy.name, config.strategy.factor
    if name not in SHARDING:
        return name, ""
    if factor == 1 and config.gpus > 1:
        return "ddp", ""
    return name, FULL if factor == config.gpus else WITHIN if factor <= config.gpus_per_node else ACROSS


def kind_of(way: Way, case: Case) -> Kind:
    """The same of a way."""
    name, factor = way.settings.get("strategy", ""), way.settings.get("strategy.sharding_factor")
    if name not in SHARDING:
        return name, ""
    return name, WITHIN if factor == "node" and case.config.nodes > 1 else FULL


def _is_of(row: Row, way: Way, case: Case) -> bool:
    """Whether a candidate is what a way means."""
    reshard = way.settings.get("strategy.reshard_after_forward")
    does = str(getattr(row.config.strategy, "reshard_after_forward", None)).lower()
    return kind(row) == kind_of(way, case) and reshard in (None, does)


def _without_ranking(case: Case, tree: Sequence[Weighed]) -> str:
    count = len(case.ranking.possible) + len(case.ranking.infeasible)
    nothing = f"of {counted(count, 'candidate')} that bench.predict ranks, none is predicted to fit"
    if not tree:
        return f"They agree: {nothing}, nor is any way that the tree names and that can be predicted."
    names = listing([each.way.name for each in tree])
    return f"They agree: {nothing}; the ranking does not compare {names}, predicted to fit."


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
    words = {
        "compute_s": _computing(row, best),
        "exposed_communication_s": "it waits for the network",
        "optimizer_s": f"at batch {row.config.batch_size_per_gpu} rather than {best.config.batch_size_per_gpu} per GPU "
        "its optimizer steps take",
        "bubble_s": f"it waits for {_awaited(row)}",
    }

    def spent(row: Row, part: str) -> float:
        return float(getattr(row.prediction.time, part) / row.tokens_per_step)

    part = max(words, key=lambda part: spent(row, part) - spent(best, part))
    slow, fast = (labels.seconds(1000 * spent(each, part)) for each in (row, best))
    return f"{words[part]} {slow} per 1,000 tokens of a GPU rather than {fast}"


def _awaited(row: Row) -> str:
    """What a device waits for that is no communication."""
    if row.prediction.time is not None and row.prediction.time.degraded:
        return "the allocator, its memory nearly exhausted,"
    return "kernels to be launched" if row.config.strategy.timetable is None else "other stages"


def _computing(row: Row, best: Row) -> str:
    kinds = row.config.activation_checkpointing, best.config.activation_checkpointing
    if kinds[0] != kinds[1]:
        return f"with checkpointing {kinds[0]} rather than {kinds[1]} it computes"
    batches = row.config.batch_size_per_gpu, best.config.batch_size_per_gpu
    return f"at batch {batches[0]} rather than {batches[1]} per GPU it computes"
