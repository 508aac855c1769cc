"""One case for the guide: a model on some GPUs, its ranked candidates, and predictions of single runs of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.advice.ranking import Ranking, Row
from bench.advice.words import overrides
from bench.config import RunConfig, run_config
from bench.errors import ImpossibleError
from bench.models.blocks import CHECKPOINTING
from bench.planning.compose import composed
from bench.planning.forecast import Untold, forecasts
from bench.planning.grid import Settings
from bench.simulate.prediction import Prediction


@dataclass(frozen=True)
class Case:
    """What the tree is asked about."""

    settings: Settings
    """What is typed, the strategy and checkpointing left open; precision is chosen."""
    precision_asked: bool
    """Whether the user chose it."""
    checkpointing: Sequence[str]
    """Kinds of activation checkpointing that may be used."""
    batch: int | None
    """Sequences per GPU asked for, None where the largest that fits is searched."""
    ranking: Ranking
    """The answer of ``bench.predict``."""

    @property
    def config(self) -> RunConfig:
        """A run of the case: model, hardware, GPUs."""
        return self.ranking.first.config

    @property
    def per_node(self) -> int:
        """GPUs of the case on one node."""
        return min(self.config.gpus, self.config.gpus_per_node)

    @property
    def kinds(self) -> list[str]:
        """None and full checkpointing, as far as they may be used: the most and the least memory."""
        return [kind for kind in CHECKPOINTING[:2] if kind in self.checkpointing] or list(self.checkpointing[:1])

    def knobs(self) -> dict[str, list[str]]:
        """What a way may vary, and the batch where it was asked for."""
        asked = {} if self.batch is None else {"batch_size_per_gpu": [str(self.batch)]}
        precision = [self.settings["precision"]]
        return {"precision": precision, "activation_checkpointing": list(self.checkpointing), **asked}

    def predicted(self, **settings: str) -> Probe | Untold:
        """The prediction of one run of the case, at the batch asked for or one sequence.

        Parameters
        ----------
        settings: str
            What is typed for it beside the case, ``__`` standing for a dot.
        """
        typed = {key.replace("__", "."): value for key, value in settings.items()}
        typed = {**self.settings, "batch_size_per_gpu": str(self.batch or 1), **typed}
        try:
            config = run_config(composed({**typed, "mode": "predict"}))
        except ImpossibleError as error:
            return Untold(str(error), refused=True)
        (forecast,) = forecasts([config])
        return forecast if isinstance(forecast, Untold) else self._probe(typed, config, forecast)

    def probe(self, row: Row) -> Probe:
        """A ranked candidate."""
        return self._probe(row.settings, row.config, row.prediction)

    def _probe(self, typed: Settings, config: RunConfig, prediction: Prediction) -> Probe:
        apart = {key: value for key, value in typed.items() if self.settings.get(key) != value and key != "gpus"}
        return Probe({"gpus": str(config.gpus), **apart}, config, prediction)


@dataclass(frozen=True)
class Probe:
    """A run that was predicted to answer a step."""

    apart: Settings
    """The number of GPUs, and what sets it apart from other runs of the case."""
    config: RunConfig
    prediction: Prediction

    @property
    def source(self) -> str:
        """Which run of the case it is."""
        return "predicted: " + " ".join(overrides(self.apart))
