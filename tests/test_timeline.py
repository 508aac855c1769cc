"""The picture of a simulated step: what occupies which lane, and how it is told apart."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from bench.reporting import style
from bench.reporting.timeline import HATCHED, KINDS, draw_timeline, lane_name, lanes
from bench.simulate.predict import predict
from bench.simulate.prediction import Span
from tests.conftest import SMALL_GPT, configuration

ON_GPUS = (*SMALL_GPT, "mode=predict", "hardware=a100_80gb", "precision=bf16", "gpus=4")
SPLIT = ("strategy=tensor_parallel", "strategy.degree=2")
OFFLOADED = ("strategy=fsdp", "strategy.cpu_offload=true")


def spans(*overrides: str) -> tuple[Span, ...]:
    time = predict(configuration(*ON_GPUS, *overrides), timeline=True).time
    assert time is not None
    return time.timeline


def drawn(of: tuple[Span, ...]) -> tuple[list[str], list[str], set[str]]:
    """Labels of the lanes, those of the key, and the colours of what is not hatched."""
    with style.context():
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
    assert KINDS["exchange"] in colours


def test_a_lane_of_transfers_is_called_so() -> None:
    found = spans(*OFFLOADED)
    names, key, colours = drawn(found)
    assert names == ["compute", "all-gather", "reduce", "transfer"]
    assert "transfer" in key
    assert KINDS["transfer"] in colours
    hybrid = spans("strategy=fsdp", "strategy.sharding_factor=2")
    assert [lane_name(stream, hybrid) for stream in lanes(hybrid)] == ["compute", "all-gather", "reduce", "replicas"]


@pytest.mark.parametrize("overrides", [SPLIT, OFFLOADED], ids=["tensor parallelism", "offload"])
def test_every_kind_has_a_colour_of_its_own(overrides: tuple[str, ...]) -> None:
    kinds = {span.kind for span in spans(*overrides)}
    assert kinds <= set(KINDS)
    assert len({KINDS[kind] for kind in kinds}) == len(kinds)
    assert HATCHED == ("wait",)
