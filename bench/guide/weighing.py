"""The ways a leaf names, predicted for the case: whether each fits, at which batch, how fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.advice.candidates import candidates
from bench.advice.ranking import Row, rank
from bench.advice.words import overrides
from bench.config import run_config
from bench.errors import UsageError
from bench.guide.case import Case
from bench.guide.tree import Leaf
from bench.guide.ways import FILLING, Way
from bench.planning.compose import composed, groups
from bench.planning.grid import Settings


@dataclass(frozen=True)
class Weighed:
    """A way with its best candidate."""

    way: Way
    settings: Settings
    """What is typed for it beside the case, or in place of what the case says."""
    row: Row | None
    """The best: fastest of those that fit, else what is nearest to fitting. None where there is no prediction."""
    why_none: str
    """Why there is none, in a sentence; empty where there is one."""
    runs: bool = True
    """Whether it can be asked for: not where the suite refuses it in this case."""

    @property
    def fits(self) -> bool:
        """Whether it is predicted to fit."""
        return self.row is not None and self.row.possible and self.row.fits

    def sweep(self, case: Case) -> str | None:
        """The command that runs it."""
        if not self.runs:
            return None
        best = self.row.settings if self.row is not None else _together(case, self.settings)
        return " ".join(["python -m bench.sweep", *overrides(best)])

    def predict(self, case: Case) -> str | None:
        """The command that predicts it, at every batch and checkpointing that the case leaves open."""
        if self.row is None:
            return None
        asked = {} if case.batch is None else {"batch_size_per_gpu": str(case.batch)}
        return " ".join(["python -m bench.predict", *overrides({**_together(case, self.settings), **asked})])


def weigh(case: Case, leaf: Leaf, on_progress: Callable[[str], None]) -> list[Weighed]:
    """Predict all ways of a leaf, in its order."""
    weighed = []
    for way in leaf.ways:
        on_progress(f"predicting {way.name}")
        weighed.append(_weighed(case, way))
    return weighed


def _weighed(case: Case, way: Way) -> Weighed:
    """In the precision of the case; in others, too, where the user chose none and it is refused or does not fit.

    Some ways refuse to scale the loss, which fp32 does not need; and weights that stay as they are may be in bf16.
    """
    settings = way.filled(case.config.gpus, case.per_node, case.batch)
    usual = _attempt(case, way, settings)
    if usual.fits or case.precision_asked:
        return usual
    others = [*(["bf16_pure"] if way.trains_adapters else []), *(["fp32"] if usual.row is None else [])]
    attempts = [_attempt(case, way, {**settings, "precision": precision}) for precision in others]
    return min([usual, *attempts], key=lambda each: (not each.fits, each.row is None, not each.runs))


def _attempt(case: Case, way: Way, settings: Settings) -> Weighed:
    strategy = {key: [value] for key, value in settings.items() if key.partition(".")[0] == "strategy"}
    others = {key: value for key, value in settings.items() if key not in strategy}
    knobs = {**case.knobs(), "precision": [settings.get("precision", case.settings["precision"])]}
    try:
        ranking = rank(candidates(_together(case, others), {**knobs, **strategy}).to_predict)
    except UsageError as error:
        return Weighed(way, settings, None, str(error), runs=_runs(case, settings))
    fitting = [row for row in ranking.possible if row.fits]
    if fitting and fitting[0].prediction.time is None:
        fitting.sort(key=_untimed_worth)
    return Weighed(way, settings, (fitting or [ranking.first])[0], "")


def _untimed_worth(row: Row) -> tuple[int, float]:
    """What comes first where no time is predicted: a larger batch moves less per token; then what computes least."""
    config = row.config
    flops = config.trained.flops_per_sequence(config.sequence_length).hardware(config.activation_checkpointing)
    return -config.batch_size_per_gpu, flops


def _together(case: Case, settings: Settings) -> Settings:
    """What is typed for the case and a way, without fields of the case that what a way chooses does not have."""
    chosen = {group: composed({group: value})[group] for group, value in settings.items() if group in groups()}
    kept = {}
    for key, value in case.settings.items():
        group, _, name = key.partition(".")
        if not name or group not in chosen or name.partition(".")[0] in chosen[group]:
            kept[key] = value
    return {**kept, **settings}


def _runs(case: Case, settings: Settings) -> bool:
    """Whether a way that is not predicted can be run: some is only not predicted."""
    batch = {"batch_size_per_gpu": str(case.batch or FILLING)}
    try:
        run_config(composed({**_together(case, settings), **batch}))
    except UsageError:
        return False
    return True
