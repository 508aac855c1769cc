"""The ways to train that the tree ends at, as the strategies and the ways to fine-tune state them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from bench.advice.ranking import CandidateRanking, RankedCandidate
from bench.advice.wording import format_overrides
from bench.config.compose import compose_config
from bench.config.grid import RunSettings
from bench.config.run_config import RunConfig, build_run_config
from bench.core.errors import ImpossibleError
from bench.core.presentation import TrainingOption
from bench.finetune import list_finetunes
from bench.models.checkpointing import CHECKPOINTING_MODES
from bench.planning.run_predictions import Unpredictable, predict_configs
from bench.prediction.prediction import Prediction
from bench.strategies import list_strategies


@functools.cache
def list_training_options() -> tuple[TrainingOption, ...]:
    """All of them, in the order of the strategies, then of the ways to fine-tune."""
    classes: list[type] = [*list_strategies().values(), *list_finetunes()]
    # Of each class its own: what extends DDP is another way to train than DDP.
    return tuple(option for plugin_class in classes for option in vars(plugin_class).get("training_options", ()))


@functools.cache
def list_leaf_options(leaf_key: str) -> tuple[TrainingOption, ...]:
    """Those that one leaf names, the first before the others."""
    options = [option for option in list_training_options() if leaf_key in option.leaves]
    return tuple(sorted(options, key=lambda option: option.leaves[leaf_key]))


# --- One case for the guide: a model on some GPUs, its ranked candidates, and predictions of single runs of it.


@dataclass(frozen=True)
class GuideCase:
    """What the tree is asked about."""

    settings: RunSettings
    """What is typed, the strategy and checkpointing left open; precision is chosen."""
    has_requested_precision: bool
    """Whether the user chose it."""
    checkpointing_choices: Sequence[str]
    """Kinds of activation checkpointing that may be used."""
    requested_batch: int | None
    """Sequences per GPU asked for, None where the largest that fits is searched."""
    ranking: CandidateRanking
    """The answer of ``bench.predict``."""

    @property
    def config(self) -> RunConfig:
        """A run of the case: model, hardware, GPUs."""
        return self.ranking.top_candidate.config

    @property
    def gpus_on_node(self) -> int:
        """GPUs of the case on one node."""
        return min(self.config.gpus, self.config.gpus_per_node)

    @property
    def checkpointing_extremes(self) -> list[str]:
        """None and full checkpointing, as far as they may be used: the most and the least memory."""
        return [kind for kind in CHECKPOINTING_MODES[:2] if kind in self.checkpointing_choices] or list(
            self.checkpointing_choices[:1]
        )

    def build_knobs(self) -> dict[str, list[str]]:
        """What a way may vary, and the batch where it was asked for."""
        batch_knob = {} if self.requested_batch is None else {"batch_size_per_gpu": [str(self.requested_batch)]}
        precision_values = [self.settings["precision"]]
        return {
            "precision": precision_values,
            "activation_checkpointing": list(self.checkpointing_choices),
            **batch_knob,
        }

    def predict_run(self, **settings: str) -> PredictedRun | Unpredictable:
        """The prediction of one run of the case, at the batch asked for or one sequence.

        Parameters
        ----------
        settings: str
            What is typed for it beside the case, ``__`` standing for a dot.
        """
        run_settings = {key.replace("__", "."): value for key, value in settings.items()}
        run_settings = {**self.settings, "batch_size_per_gpu": str(self.requested_batch or 1), **run_settings}
        try:
            config = build_case_config(run_settings)
        except ImpossibleError as error:
            return Unpredictable(str(error), is_impossible=True)
        (prediction,) = predict_configs([config])
        return (
            prediction
            if isinstance(prediction, Unpredictable)
            else self._build_predicted_run(run_settings, config, prediction)
        )

    def convert_candidate(self, candidate: RankedCandidate) -> PredictedRun:
        return self._build_predicted_run(candidate.settings, candidate.config, candidate.prediction)

    def _build_predicted_run(
        self, run_settings: RunSettings, config: RunConfig, prediction: Prediction
    ) -> PredictedRun:
        distinguishing_settings = {
            key: value for key, value in run_settings.items() if self.settings.get(key) != value and key != "gpus"
        }
        return PredictedRun({"gpus": str(config.gpus), **distinguishing_settings}, config, prediction)


def build_case_config(run_settings: RunSettings) -> RunConfig:
    """A run of a case, to be predicted. Where its micro-batches do not come to the global batch of the case, as one
    sequence per GPU may not, without it: what is asked of such a run is its memory.

    Raises
    ------
    ImpossibleError
        If there is no such run.
    """
    settings = {**run_settings, "mode": "predict"}
    try:
        return build_run_config(compose_config(settings))
    except ImpossibleError:
        return build_run_config(compose_config({**settings, "global_batch": "null"}))


@dataclass(frozen=True)
class PredictedRun:
    """A run that was predicted to answer a step."""

    distinguishing_settings: RunSettings
    """The number of GPUs, and what sets it apart from other runs of the case."""
    config: RunConfig
    prediction: Prediction

    @property
    def source(self) -> str:
        """Which run of the case it is."""
        return "predicted: " + " ".join(format_overrides(self.distinguishing_settings))
