"""The figure of the committed rows of all strategies: each is a point, has a name, and can be told from the others."""

from __future__ import annotations

import itertools
import math

import pandas as pd
import pytest
from matplotlib.colors import to_rgb

from bench.reporting.builder import read_store
from bench.reporting.drawing import style
from bench.reporting.figures import trade
from bench.reporting.tables.table import prepare_table
from tests.conftest import ROOT

COMMITTED = ROOT / "results" / "measured" / "strategies"


@pytest.fixture(scope="module")
def committed() -> pd.DataFrame:
    return prepare_table(read_store(COMMITTED).records)


def test_every_committed_strategy_is_a_point(committed: pd.DataFrame) -> None:
    ran = committed[committed["status"] == "ok"]
    identity = ["model", "precision", "variant", "settings"]
    selected = trade.select(committed)
    assert set(ran[identity].itertuples(index=False)) == set(selected[identity].itertuples(index=False))
    assert set(ran["effective_strategy"]) >= {"ddp", "ddp/lora", "ddp/qlora", "fsdp/full_shard_lora"}
    assert set(ran["precision"]) == {"fp32", "fp8 autocast"}
    with style.apply_report_style():
        drawings = trade.build_section(committed, style.build_palette(committed["variant_key"])).drawings
    assert len(drawings) == committed["model"].nunique() == 2
    for drawing in drawings:
        points = [line for line in drawing.figure.axes[0].lines if line.get_marker() in style.MARKERS]
        assert len(points) == len(selected) / 2


def test_committed_names_say_nothing_that_tells_nothing_apart(committed: pd.DataFrame) -> None:
    names = set(trade.select(committed)["choice"])
    assert not [name for name in names if "git_sha" in name or "torch_version" in name]
    hooks = {f"DDP · communication_hook={hook}" for hook in ("none", "bf16", "powersgd")}
    assert {name for name in names if name.startswith("DDP ·")} == {
        *hooks,
        "DDP · communication_hook=none, fp8 autocast",
    }


def test_points_of_the_committed_strategies_can_be_told_apart(committed: pd.DataFrame) -> None:
    palette = style.build_palette(committed["variant_key"])
    assert len(set(palette.values())) == len(palette)
    for _, facet in trade.select(committed).groupby("model"):
        looks = trade._assign_marks(facet, palette)
        for one, other in itertools.combinations(looks, 2):
            alike = math.dist(to_rgb(looks[one].colour), to_rgb(looks[other].colour)) < 0.2
            assert looks[one].marker != looks[other].marker or not alike, (one, other)


@pytest.mark.parametrize(
    ("adapters", "kind"),
    [
        ("DDP LoRA", "ddp"),
        ("DDP QLoRA", "ddp"),
        ("FSDP2 full shard LoRA", "fsdp/full_shard"),
    ],
)
def test_adapters_are_a_shade_of_their_strategy(committed: pd.DataFrame, adapters: str, kind: str) -> None:
    colour, base = style.build_palette(committed["variant_key"])[adapters].colour, style.find_strategy_colour(kind)
    added = [(own - one) / (1 - one) for own, one in zip(to_rgb(colour), to_rgb(base), strict=True)]
    assert added == pytest.approx([added[0]] * 3, abs=0.01)
    assert added[0] > 0.1
