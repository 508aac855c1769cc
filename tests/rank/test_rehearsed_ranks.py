"""Rehearsals of a mesh: which rank runs, and that it needs what it needs among all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bench.core.errors import UsageError
from tests.conftest import compose_run_config

STEPS = ("measurement.warmup_steps=2", "measurement.steps=1", "sequence_length=128", "hardware=cpu")
ON_EIGHT = ("model=gpt_tiny", "strategy=mesh", "gpus=8", *STEPS)
TENSOR_PIPELINE = (*ON_EIGHT, "strategy.tensor=2", "strategy.pipeline=2")

PLACES = {"0": 0, "7": 7, "stage:0": 0, "stage:1": 4, "pipeline:1-tensor:1": 5, "shards:1": 2}
"""Of a mesh of pipeline x shards x tensor, two of each: the rank that each means."""

WORST_RANKS = {
    "tensor x pipeline": ((*TENSOR_PIPELINE, "batch_size_per_gpu=1"), "stage:1"),
    "expert x ddp": ((*ON_EIGHT, "model=moe_tiny", "strategy.expert=4", "strategy.data=ddp"), "0"),
    "context": ((*ON_EIGHT, "strategy.context=2", "strategy.context_form=all_gather"), "0"),
}
"""Layouts, and the rank of each that needs most."""


@pytest.mark.parametrize("place", PLACES)
def test_a_place_means_the_first_rank_there(place: str) -> None:
    assert (
        compose_run_config(*TENSOR_PIPELINE, "mode=rehearse", f"rehearse.rank={place}").rehearsed_rank == PLACES[place]
    )


@pytest.mark.parametrize("place", ["8", "-1", "stage:2", "stage:", "tensor:2", "expert", "stage:1-"])
def test_a_rank_that_is_not_there_is_refused(place: str) -> None:
    with pytest.raises(
        UsageError, match=r"rehearse\.rank=.* is not valid: choose null, or a number from 0 to 7, stage"
    ):
        compose_run_config(*TENSOR_PIPELINE, "mode=rehearse", f"rehearse.rank={place}")


def test_only_rehearsals_have_a_rank() -> None:
    with pytest.raises(UsageError, match=r"rehearse\.rank=1 is not valid: choose null with mode=predict"):
        compose_run_config(*TENSOR_PIPELINE, "mode=predict", "rehearse.rank=1")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", WORST_RANKS)
def test_the_rehearsed_rank_allocates_what_the_worst_of_all_ranks_does(
    name: str, execute: Callable[..., list[dict[str, Any]]]
) -> None:
    layout, rank = WORST_RANKS[name]
    measured, rehearsed = execute(layout, (*layout, "mode=rehearse", f"rehearse.rank={rank}"))
    assert (measured["status"], rehearsed["status"]) == ("ok", "ok"), rehearsed["error"]
    # How many tokens a rank's experts get differs between ranks.
    assert rehearsed["peak_allocated_bytes"] == pytest.approx(measured["peak_allocated_bytes"], rel=0.01)
