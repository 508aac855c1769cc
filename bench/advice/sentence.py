"""One sentence of advice, with the numbers it is derived from."""

from __future__ import annotations

from collections.abc import Sequence

from bench.advice.ranking import Row
from bench.advice.reasons import MOST_GPUS, spread, why_not
from bench.advice.words import CHECKPOINTING, of_capacity, percent, strategy, untimed
from bench.planning.compose import composed, groups
from bench.reporting import labels

NETWORK_MATTERS = 0.05
"""Share of a step from which waiting for the network is given as a reason."""

NEGLIGIBLE = 0.02
"""Loss of speed for which nobody should put up with sharding."""

UNSEEN = 0.005
"""Difference that no percentage shows."""


def advise(possible: Sequence[Row], infeasible: Sequence[Row]) -> str:
    """What to do, and why.

    Parameters
    ----------
    possible, infeasible: sequences of rows
        As `ranking.ranked` gives them.
    """
    fitting = [row for row in possible if row.fits]
    if not possible:
        return _nothing_fits(infeasible)
    if possible[0].prediction.time is None:
        return _by_memory(fitting or possible)
    if not fitting:
        row = min(possible, key=lambda row: row.prediction.memory.reserved.value)
        return (
            f"Too close to call: {row_name(row)} needs about {of_capacity(row)}, and nothing is predicted to fit; "
            "try it, or take more GPUs."
        )
    if len(possible) + len(infeasible) == 1:
        return _alone(possible[0])
    best = recommended(fitting)
    return f"Use {row_name(best)}: {_why(best, possible, infeasible)}{_margin(best, fitting)}."


def recommended(fitting: Sequence[Row]) -> Row:
    """The fastest, or a whole copy per GPU where that is as good: it is simpler."""
    copy = _copy(fitting)
    return copy if copy is not None and _speed(copy) > (1 - NEGLIGIBLE) * _speed(fitting[0]) else fitting[0]


def _alone(row: Row) -> str:
    """What becomes of the only candidate."""
    time = row.prediction.time
    assert time is not None
    speed = f"{labels.count(row.tokens_per_second)} tokens/s (±{percent(_uncertainty(row))})"
    share = "" if row.mfu is None else f"{percent(row.mfu)} of the peak, "
    return f"{row_name(row)} fits, {of_capacity(row)}, and reads {speed}: {share}limited by {time.limited_by}."


def _nothing_fits(infeasible: Sequence[Row]) -> str:
    nearest = infeasible[0]
    return f"Nothing fits: {row_name(nearest)} comes nearest, but {why_not(nearest)}; {_on_more_gpus(infeasible)}."


def _on_more_gpus(infeasible: Sequence[Row]) -> str:
    found = spread(infeasible)
    if found.fits is not None:
        return f"strategy={found.fits[0]} would fit from {found.fits[1]} GPUs on"
    if not found.tried:
        return "whether it would on more GPUs is not predicted"
    return f"nor would strategy={' or '.join(found.tried)} fit on any number of GPUs tried, up to {MOST_GPUS:,}"


def _by_memory(rows: Sequence[Row]) -> str:
    row = rows[0]
    choice = ""
    if row.config.hardware.speeds is None:
        described = [name for name in groups()["hardware"] if composed({"hardware": name})["hardware"].get("speeds")]
        choice = f" (choose one of {', '.join(described)} to predict time too)"
    reason = f"Only memory is predicted, since {untimed(row.config)}{choice}"
    return f"{reason}: {row_name(row)} needs least, {of_capacity(row)}."


def _why(best: Row, possible: Sequence[Row], infeasible: Sequence[Row]) -> str:
    """The reason for how far the best shards."""
    config = best.config
    if config.gpus == 1:
        return f"it fits on the one GPU there is, {of_capacity(best)}"
    if config.strategy.factor == 1:
        return f"a whole copy of the model fits on each GPU ({of_capacity(best)}), so nothing needs to be gathered"
    copy = _copy([row for row in possible if row.fits])
    if copy is not None:
        reason = f"a whole copy of the model fits on each GPU too, but {row_name(copy)} is {compared(copy, best)}"
    elif too_large := [row for row in infeasible if row.config.strategy.factor == 1]:
        where = (
            "for each GPU does not fit" if too_large[0].prediction.memory.host_is_short else "does not fit on one GPU"
        )
        reason = f"a whole copy of the model {where} ({why_not(too_large[0])})"
    else:
        reason = f"it is the fastest of those that fit ({of_capacity(best)})"
    return reason + _network(best, possible)


def _copy(rows: Sequence[Row]) -> Row | None:
    """The fastest of those with a whole copy per GPU, of those that never gather if there are any."""
    copies = [row for row in rows if row.config.strategy.factor == 1]
    plain = [row for row in copies if getattr(row.config.strategy, "reshard_after_forward", None) is None]
    return next(iter(plain or copies), None)


def _network(best: Row, possible: Sequence[Row]) -> str:
    """What sharding over all GPUs would cost, where it costs waiting for the network."""
    full = [row for row in possible if row.config.strategy.factor == row.config.gpus]
    if best.config.strategy.factor == best.config.gpus or not full:
        return ""
    assert best.prediction.time is not None
    cost = (_exposed(full[0]) - _exposed(best)) * best.tokens_per_step / best.prediction.time.step_s.value
    if cost < NETWORK_MATTERS:
        return ""
    return f", and sharded over all {best.config.gpus} it would wait for the network {percent(cost)} of its time more"


def _margin(best: Row, fitting: Sequence[Row]) -> str:
    """How the next approach compares, and how sure that is."""
    told = {_approach(best)}
    copy = None if best.config.strategy.factor == 1 else _copy(fitting)
    if copy is not None:
        told.add(_approach(copy))
    others = [row for row in fitting if _approach(row) not in told]
    others = others or [row for row in fitting if row is not best and row is not copy]
    return f"; {row_name(others[0])} is {compared(others[0], best)}" if others else ""


def compared(row: Row, best: Row) -> str:
    """``4 % slower, within the predictor's uncertainty (±10 %)``."""
    ratio = _speed(row) / _speed(best)
    sure = "within" if overlap(best, row) else "beyond"
    difference = f"{percent(ratio - 1)} faster" if ratio > 1 else f"{percent(1 - ratio)} slower"
    how = "as fast" if abs(ratio - 1) < UNSEEN else difference
    return f"{how}, {sure} the predictor's uncertainty (±{percent(max(_uncertainty(best), _uncertainty(row)))})"


def row_name(row: Row) -> str:
    """``FSDP2 full shard with no activation checkpointing, bf16, batch 8``."""
    config = row.config
    return (
        f"{strategy(config)} with {CHECKPOINTING[config.activation_checkpointing]}, "
        f"{config.precision.name}, batch {config.batch_size_per_gpu}"
    )


def _approach(row: Row) -> tuple[str, int]:
    return row.config.strategy.effective(row.config.gpus), row.config.strategy.factor


def _speed(row: Row) -> float:
    assert row.tokens_per_second is not None
    return row.tokens_per_second


def _exposed(row: Row) -> float:
    """Seconds of waiting for communication per token that a rank reads."""
    assert row.prediction.time is not None
    return row.prediction.time.exposed_communication_s / row.tokens_per_step


def overlap(one: Row, other: Row) -> bool:
    """Whether the intervals of their tokens per second overlap."""
    (low, high), (other_low, other_high) = _interval(one), _interval(other)
    return low <= other_high and other_low <= high


def _interval(row: Row) -> tuple[float, float]:
    """Tokens per second of a rank, at the slowest and at the fastest step expected."""
    assert row.prediction.time is not None
    step = row.prediction.time.step_s
    return row.tokens_per_step / step.high, row.tokens_per_step / step.low


def _uncertainty(row: Row) -> float:
    assert row.prediction.time is not None
    step = row.prediction.time.step_s
    return (step.high - step.low) / 2 / step.value
