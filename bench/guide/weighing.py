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
from bench.planning.compose import composed
from bench.planning.grid import Settings


@dataclass(frozen=True)
class Weighed:
    """A way with its best candidate."""

    way: Way
    settings: Settings
    """What is typed for it beside the case."""
    row: Row | None
    """The best: fastest of those that fit, else what is nearest to fitting. None where there is no prediction."""
    why_none: str
    """Why there is none, in a sentence; empty where there is one."""
    runs: bool = True
    """Whether it can be asked for: not where this version of the suite does not have it, or refuses it in this case."""

    @property
    def fits(self) -> bool:
        """Whether it is predicted to fit."""
        return self.row is not None and self.row.possible and self.row.fits

    def sweep(self, case: Case) -> str | None:
        """The command that runs it."""
        if not self.runs:
            return None
        best = self.row.settings if self.row is not None else {**case.settings, **self.settings}
        return " ".join(["python -m bench.sweep", *overrides(best)])

    def predict(self, case: Case) -> str | None:
        """The command that predicts it, at every batch and checkpointing that the case leaves open."""
        if self.row is None:
            return None
        asked = {} if case.batch is None else {"batch_size_per_gpu": str(case.batch)}
        return " ".join(["python -m bench.predict", *overrides({**case.settings, **asked, **self.settings})])


def weigh(case: Case, leaf: Leaf, on_progress: Callable[[str], None]) -> list[Weighed]:
    """Predict all ways of a leaf, in its order."""
    weighed = []
    for way in leaf.ways:
        on_progress(f"predicting {way.name}")
        weighed.append(_weighed(case, way))
    return weighed


def _weighed(case: Case, way: Way) -> Weighed:
    missing = way.missing()
    settings = way.filled(case.config.gpus, case.per_node)
    if missing is not None:
        return Weighed(way, settings, None, f"{missing} is not in this version of the suite", runs=False)
    strategy = {key: [value] for key, value in settings.items() if key.partition(".")[0] == "strategy"}
    others = {key: value for key, value in settings.items() if key not in strategy}
    try:
        ranking = rank(candidates({**case.settings, **others}, {**case.knobs(), **strategy}).to_predict)
    except UsageError as error:
        return Weighed(way, settings, None, str(error), runs=_runs(case, settings))
    fitting = [row for row in ranking.possible if row.fits]
    if fitting and fitting[0].prediction.time is None:  # ranked by memory: a larger batch moves less per token
        fitting.sort(key=lambda row: -row.config.batch_size_per_gpu)
    return Weighed(way, settings, (fitting or [ranking.first])[0], "")


def _runs(case: Case, settings: Settings) -> bool:
    """Whether a way that is not predicted can be run: some is only not predicted."""
    batch = {"batch_size_per_gpu": str(case.batch or FILLING)}
    try:
        run_config(composed({**case.settings, **batch, **settings}))
    except UsageError:
        return False
    return True
