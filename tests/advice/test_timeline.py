"""The picture of a simulated step: what occupies which lane, and how it is told apart."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from bench.prediction.prediction import TimelineSpan
from bench.prediction.predictor import predict_run
from bench.reporting.drawing import style
from bench.reporting.timelines.timeline import (
    HATCHED_KINDS,
    SPAN_KIND_COLOURS,
    draw_timeline,
    get_lane_name,
    list_streams,
)
from tests.conftest import SMALL_GPT, compose_run_config

ON_GPUS = (*SMALL_GPT, "mode=predict", "hardware=a100_80gb", "precision=bf16", "gpus=4")
SPLIT = ("strategy=tensor_parallel", "strategy.degree=2")
OFFLOADED = ("strategy=fsdp", "strategy.cpu_offload=true")


def spans(*overrides: str) -> tuple[TimelineSpan, ...]:
    time = predict_run(compose_run_config(*ON_GPUS, *overrides), timeline=True).time
    assert time is not None
    return time.timeline


def drawn(of: tuple[TimelineSpan, ...]) -> tuple[list[str], list[str], set[str]]:
    """Labels of the lanes, those of the key, and the colours of what is not hatched."""
    with style.apply_report_style():
        figure = draw_timeline(of, "title", "subtitle")
    axes = figure.axes[0]
    bars = [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_fill()]
    colours = {to_hex(bar.get_facecolor()) for bar in bars if not bar.get_hatch()}
    return (
        [text.get_text() for text in axes.get_yticklabels()],
        [t.get_text() for t in figure.legends[0].texts],
        colours,
    )


def test_what_ranks_that_share_layers_exchange_is_no_idleness() -> None:
    found = spans(*SPLIT)
    exchanges = [span for span in found if span.name.startswith("exchange ")]
    assert exchanges
    assert {span.kind for span in exchanges} == {"exchange"}
    _, key, colours = drawn(found)
    assert "exchange" in key
    assert SPAN_KIND_COLOURS["exchange"] in colours


def test_a_lane_of_transfers_is_called_so() -> None:
    found = spans(*OFFLOADED)
    names, key, colours = drawn(found)
    assert names == ["compute", "all-gather", "reduce", "transfer"]
    assert "transfer" in key
    assert SPAN_KIND_COLOURS["transfer"] in colours
    hybrid = spans("strategy=fsdp", "strategy.sharding_factor=2")
    assert [get_lane_name(stream, hybrid) for stream in list_streams(hybrid)] == [
        "compute",
        "all-gather",
        "reduce",
        "replicas",
    ]


@pytest.mark.parametrize("overrides", [SPLIT, OFFLOADED], ids=["tensor parallelism", "offload"])
def test_every_kind_has_a_colour_of_its_own(overrides: tuple[str, ...]) -> None:
    kinds = {span.kind for span in spans(*overrides)}
    assert kinds <= set(SPAN_KIND_COLOURS)
    assert len({SPAN_KIND_COLOURS[kind] for kind in kinds}) == len(kinds)
    assert HATCHED_KINDS == ("wait",)
