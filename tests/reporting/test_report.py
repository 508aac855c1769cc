"""What `python -m bench.report` promises: every run is shown, nothing is averaged or mixed, everything can be read."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

from bench.comparison.result import name_configurations
from bench.core import presentation
from bench.core.errors import UsageError
from bench.rank.row import build_configured_columns
from bench.records import StoreContents, read_latest_attempts
from bench.records.matching import build_run_key
from bench.report import main
from bench.reporting import build_report, write_report
from bench.reporting.drawing import style
from bench.reporting.drawing.direct_labels import MAX_LEGEND_ENTRIES, spread_apart
from bench.reporting.drawing.drawing import ReportSection, draw_caption, save_drawing
from bench.reporting.figures import FIGURE_MODULES, agreement, memory, oom_map, paper, scaling, spread, throughput
from bench.reporting.tables import frontier
from bench.reporting.tables.table import compute_step_times_s, prepare_table
from bench.sweeps.tables import _describe_differing_settings
from tests.conftest import ROOT, compose_run_config
from tests.records_fixture import make_default_sweep, make_record, write_store

CUDA = {"device": "cuda", "hardware": "h100_80gb", "gpu_name": "NVIDIA H100 80GB HBM3", "precision": "bf16"}
ROWS = make_default_sweep(("fp32",))
SPEED = (throughput, spread, scaling)


def draw(figure, rows) -> ReportSection:
    table = prepare_table(rows)
    with style.apply_report_style():
        return figure.build_section(table, style.build_palette(table["variant_key"]))


def words(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_text().strip()]


class Page(HTMLParser):
    """What the tests ask of a page: its references, images, cells and text."""

    def __init__(self, path: Path):
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.ids: set[str] = set()
        self.scripts: list[dict[str, str | None]] = []
        self.text = ""
        self.quiet = False
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        values = dict(attrs)
        self.references += [values[name] for name in ("src", "href", "srcset", "action", "data") if values.get(name)]
        self.images += [values] if tag == "img" else []
        self.ids |= {values["id"]} if values.get("id") else set()
        self.scripts += [values] if tag == "script" else []
        self.quiet = tag in ("script", "style")

    def handle_endtag(self, tag):
        self.quiet = False

    def handle_data(self, data):
        self.text += "" if self.quiet else data

    @property
    def executed(self) -> list[dict[str, str | None]]:
        """Script elements that are no data."""
        return [script for script in self.scripts if "type" not in script]


@pytest.fixture(scope="module")
def default(tmp_path_factory) -> Path:
    store = write_store(tmp_path_factory.mktemp("store"), ROWS)
    (store / ROWS[0]["run_id"] / "1.json").write_text('{"torn')
    build_report(store, store / "report")
    return store


@pytest.mark.parametrize(
    ("strategy", "effective", "factor", "world_size", "label"),
    [
        ("single", "single", 1, 1, "Single"),
        ("ddp", "ddp", 1, 4, "DDP"),
        ("fsdp", "fsdp/full_shard", 4, 4, "FSDP2 full shard"),
        ("fsdp", "fsdp/hybrid_shard", 2, 4, "FSDP2 hybrid (F=2)"),
        ("fsdp", "fsdp/full_replication", 1, 4, "FSDP2 full replication"),
        ("fsdp", "fsdp/unsharded", 1, 1, "FSDP2 unsharded"),
        ("fsdp", "fsdp/shard_grad_op", 4, 4, "FSDP2 shard grad op"),
        ("fsdp", "fsdp/hybrid_shard_grad_op", 2, 4, "FSDP2 hybrid shard grad op (F=2)"),
        ("fsdp1", "fsdp1/full_shard", 4, 4, "FSDP1 full shard"),
        ("fsdp1", "fsdp1/no_shard", 1, 4, "FSDP1 no shard"),
        ("fsdp", None, 2, 4, "FSDP2 hybrid (F=2)"),
        ("fsdp", None, None, 4, "FSDP2 full shard"),
        ("colossal", "colossal/zero_3", 4, 4, "colossal zero 3"),
        (None, None, None, None, "strategy not stated"),
    ],
)
def test_variant_names_what_the_run_really_did(strategy, effective, factor, world_size, label):
    assert presentation.build_variant(strategy, effective, factor, world_size).label == label


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0123456, "0.0123"), (0.0999, "0.0999"), (12.345, "12.3"), (1234.5, "1,234"), (0, "0"), (3.2e-7, "3.20e-07")],
)
def test_numbers_have_three_significant_digits(value, text):
    assert presentation.format_number(value) == text


def test_repeats_are_one_mark_with_their_range():
    rows = [make_record(repeat=repeat, tflops_per_gpu=value) for repeat, value in enumerate([3.0, 1.0, 7.0])]
    (cell,) = throughput.select(prepare_table(rows)).to_dict("records")
    assert (cell["median"], cell["low"], cell["high"], cell["points"]) == (3.0, 1.0, 7.0, [1.0, 3.0, 7.0])


@pytest.mark.parametrize(
    "setting",
    [
        {"batch_size_per_gpu": 8},
        {"sequence_length": 256},
        {"gradient_accumulation": 2},
        {"activation_checkpointing": "full"},
        {"compile": True},
        {"memory_limit_bytes": 2**29},
        {"attention": "eager"},
        {"gradient_clip_norm": 1.0},
        {"loss_chunks": 8},
        {"compiled_loss": True},
        {"activation_offload": True},
        {"optimizer_implementation": "foreach"},
        {"reduce_dtype": "bf16"},
        {"nodes": 2},
        {"precision": "bf16"},
        {"parameters": 7_000_000},
        {"evidence": "predicted"},
        {"hardware": "a100_80gb"},
        {"gpu_name": "another processor"},
        {"torch_version": "2.14.0"},
        {"config": {"strategy": {"bucket_cap_mb": 50}}},
        {"config": {"measurement": {"warmup_steps": 9}, "strategy": {"bucket_cap_mb": 25}}},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_nothing_is_averaged_over_a_setting_and_the_difference_is_named(setting):
    one = make_record(config={"strategy": {"bucket_cap_mb": 25}, "measurement": {"warmup_steps": 2}})
    table = prepare_table([one, make_record(**{"config": one["config"], **setting})])
    for select in (throughput.select, memory.select):
        cells = select(table)
        assert [len(points) for points in cells["points"]] == [1, 1]
        names = zip(*(cells[name] for name in ("place", "precision", "evidence", "heading", "variant")), strict=True)
        assert len(set(names)) == 2
    assert (spread.select(table)["repeats"] == 1).all()


KNOBS = {
    "loss=chunked": "loss in 8 chunks",
    "loss=compiled": "loss compiled",
    "activation_offload=true": "activations offloaded",
    "gradient_clip_norm=1.5": "gradients clipped to 1.5",
    "global_batch=16": "accumulation 4",
    "gradient_accumulation=2": "accumulation 2",
    "compile=true": "compiled",
}
"""Knobs of a run of two ranks with two sequences each, and what names say of them."""


@pytest.mark.parametrize("knob", KNOBS)
def test_runs_that_differ_in_a_knob_alone_have_names_of_their_own(knob):
    common = ("model=gpt_tiny", "gpus=2", "strategy=ddp", "hardware=a100_80gb", "mode=predict", "batch_size_per_gpu=2")
    configs = [compose_run_config(*common, *typed) for typed in ((), (knob,))]
    rows = [
        {**make_record(), **build_configured_columns(config), "hardware": "a100_80gb", "gpu_name": None}
        for config in configs
    ]
    assert rows[0]["run_id"] != rows[1]["run_id"]
    table = prepare_table(rows)
    default, other = table["heading"]
    assert KNOBS[knob] in other
    assert "not stated" not in default
    assert other != default
    assert all(variant.startswith("DDP") for variant in table["variant"])
    assert [len(points) for points in throughput.select(table)["points"]] == [1, 1]
    limits = ({"status": "ok"}, {"status": "oom", "batch_size_per_gpu": 64})
    tried = prepare_table(
        [{**row, **limit, "run_id": f"{row['run_id']}{n}"} for row in rows for n, limit in enumerate(limits)]
    )
    cells = frontier.build_frontier_cells(tried)
    assert len(set(zip(cells["heading"], cells["lane"], strict=True))) == len(cells) == 2
    names = name_configurations(rows, [build_run_key(row) or {} for row in rows])
    assert KNOBS[knob] in names[1]
    assert KNOBS[knob] not in names[0]
    assert len(set(_describe_differing_settings(configs).values())) == 2


def test_runs_of_a_model_with_other_fields_are_told_apart() -> None:
    configs = [
        compose_run_config("model=gpt_tiny", "hardware=cpu", f"model.vocabulary_size={size}") for size in (64, 65)
    ]
    assert sorted(_describe_differing_settings(configs).values()) == ["vocabulary_size=64", "vocabulary_size=65"]


def test_what_is_not_done_is_not_named():
    rows = [make_record(), make_record(gradient_clip_norm=1.0)]
    assert [heading.endswith("gradients clipped to 1") for heading in prepare_table(rows)["heading"]] == [False, True]
    everywhere = prepare_table([make_record(repeat=repeat, gradient_clip_norm=1.0) for repeat in range(2)])
    assert not any("clipped" in heading for heading in everywhere["heading"])


def test_what_only_tells_repeats_apart_is_no_setting():
    rows = [
        make_record(repeat=n, seed=n, config={"repeat": n, "seed": n, "strategy": {"name": "ddp"}}) for n in range(2)
    ]
    assert [len(points) for points in throughput.select(prepare_table(rows))["points"]] == [2]


@pytest.mark.parametrize("figure", [throughput, memory, scaling])
def test_out_of_memory_is_a_mark_not_a_gap(figure):
    rows = [make_record(world_size=size, strategy="fsdp", sharding_factor=size) for size in (2, 4)]
    rows.append(make_record(world_size=4, status="oom", oom_phase="backward"))
    selected = figure.select(prepare_table(rows))
    assert selected.loc[selected["variant"] == "DDP", "out_of_memory"].tolist() == [1]
    (drawing,) = draw(figure, rows).drawings
    crosses = [line for line in drawing.figure.axes[0].lines if line.get_marker() == "X"]
    assert len(crosses) == 1
    assert "out of memory" in words(drawing.figure)
    if figure is not scaling:
        assert any("OOM in backward" in text for text in words(drawing.figure))


def test_a_run_that_ended_before_it_counted_stands_with_its_model():
    small, large = ({"model": {"name": "t5_tiny", "d_model": size}} for size in (64, 512))
    rows = [
        make_record(strategy="fsdp", config=small),
        make_record(status="oom", oom_bytes=None, parameters=None, config=small),
        make_record(status="oom", parameters=None, config=large),
    ]
    fitted, same, other = prepare_table(rows)["heading"]
    assert fitted == same != other
    (drawing,) = draw(memory, rows[:2]).drawings
    assert "OOM in forward" in words(drawing.figure)


def test_repeats_that_ran_out_of_memory_are_counted_beside_the_others():
    rows = [make_record(repeat=0), make_record(repeat=1), make_record(repeat=2, status="oom")]
    (drawing,) = draw(throughput, rows).drawings
    assert any("(1 of 3 repeats OOM)" in text for text in words(drawing.figure))
    assert oom_map.select(prepare_table(rows))["outcome"].tolist() == ["some repeats fit"]


def test_degraded_runs_have_their_own_mark():
    (drawing,) = draw(throughput, [make_record(degraded=True, alloc_retries=3), make_record(strategy="fsdp")]).drawings
    assert sum("degraded" in text for text in words(drawing.figure)) == 2  # the mark and the legend
    assert sum(line.get_marker() == "<" for line in drawing.figure.axes[0].lines) == 1


def test_failures_are_in_no_figure_with_values():
    rows = [make_record(status=status, strategy="fsdp") for status in ("error", "timeout", "preempted", "skipped")]
    table = prepare_table(rows)
    assert [len(figure.select(table)) for figure in (throughput, memory, spread, scaling)] == [0, 0, 0, 0]


def test_oom_map_has_every_cell_and_grows_to_the_right():
    limit = {"memory_limit_bytes": 2**29, "world_size": 4}
    rows = [
        make_record(model="gpt_small", **limit, status="oom", oom_phase="init"),
        make_record(model="gpt_tiny", **limit),
        make_record(model="gpt_tiny", **limit, batch_size_per_gpu=16, status="error"),
        make_record(model="gpt_small", **limit, strategy="fsdp", sharding_factor=4),
        make_record(model="gpt_tiny", world_size=4),
    ]
    cells = oom_map.select(prepare_table(rows))
    limited = cells[cells["limit"] == "limit 0.5 GiB"]
    assert list(dict.fromkeys(limited["column"])) == [
        "gpt_tiny · batch 4 × 128",
        "gpt_tiny · batch 16 × 128",
        "gpt_small · batch 4 × 128",
    ]
    outcomes = {variant: list(group["outcome"]) for variant, group in limited.groupby("variant")}
    assert outcomes == {
        "DDP": ["fits", "failed", "out of memory"],
        "FSDP2 full shard": ["not run", "not run", "fits"],
    }
    assert cells[cells["limit"] == ""]["outcome"].tolist() == ["fits"]


@pytest.mark.parametrize("figure", SPEED)
def test_cpu_speed_says_what_it_is_no_evidence_for(figure):
    on_cpu = [make_record(world_size=size) for size in (1, 2)]
    on_gpu = [make_record(world_size=size, **CUDA) for size in (1, 2)]
    drawings = draw(figure, on_cpu + on_gpu).drawings
    assert len(drawings) == 2, "CPU and GPU rows never share axes"
    gpu, cpu = sorted(drawings, key=lambda drawing: presentation.CPU_NOTE in drawing.caption)
    assert presentation.CPU_NOTE in cpu.caption
    assert presentation.CPU_NOTE in " ".join(words(cpu.figure))
    assert not any("GPU" in text and "CPU" not in text for text in words(cpu.figure))
    assert presentation.CPU_NOTE not in gpu.caption + " ".join(words(gpu.figure))


def test_kinds_of_evidence_are_named_and_look_different():
    kinds = ("measured", "rehearsed", "predicted", "published")
    rows = [make_record(evidence=kind, **CUDA, tflops_per_gpu=100.0) for kind in kinds]
    (drawing,) = draw(throughput, rows).drawings
    shown = words(drawing.figure)
    assert {"DDP", "DDP (rehearsed)", "DDP (predicted)", "DDP (published)"} <= set(shown)
    looks = {(bar.get_hatch(), bar.get_facecolor(), bar.get_linestyle()) for bar in drawing.figure.axes[0].patches}
    assert len(looks) == len(kinds)


def test_a_step_takes_as_long_as_its_slowest_rank():
    ranks = [{"rank": 0, "step_times_s": [1.0, 1.0, 1.0, 3.0]}, {"rank": 1, "step_times_s": [2.0, 0.5, 1.0, 1.0]}]
    row = make_record(ranks=ranks)
    assert compute_step_times_s(row).tolist() == [2.0, 1.0, 1.0, 3.0]
    (lane,) = spread.select(prepare_table([row])).to_dict("records")
    assert lane["median_s"] == 1.5
    assert np.allclose(lane["deviations"], [100 / 3, -100 / 3, -100 / 3, 100])


def test_steps_beyond_the_axis_are_told_in_words():
    times = [{"rank": 0, "step_times_s": [0.1] * 9 + [0.5]}]
    (drawing,) = draw(spread, [make_record(ranks=times)]).drawings
    assert "100 ms, 1 step to 400 %" in words(drawing.figure)


def test_lines_start_where_there_is_nothing_to_shard():
    points = scaling.select(prepare_table(make_default_sweep()))
    facet = points[(points["model"] == "t5_tiny") & (points["precision"] == "fp32") & (points["limit"] == "")]
    lines = {name: sorted(group["world_size"]) for name, group in facet.groupby("series")}
    assert lines == {
        "DDP": [1, 2, 4],
        "FSDP2 full replication": [1, 2, 4],
        "FSDP2 hybrid (F=2)": [4],
        "FSDP2 full shard": [1, 2, 4],
    }


def test_one_world_size_is_no_scaling():
    section = draw(scaling, [make_record(), make_record(strategy="fsdp", sharding_factor=2)])
    assert not section.drawings
    assert "(all have 2)" in section.notice


@pytest.mark.long
@pytest.mark.slow
def test_page_is_complete_in_itself(default):
    page = Page(default / "report" / "index.html")
    assert page.executed == [{}]
    assert {script.get("id") for script in page.scripts} <= {None, "rows", "details", "figures", "charts", "library"}
    for reference in page.references:
        assert reference.startswith(("data:", "#")), reference
    assert {reference[1:] for reference in page.references if reference.startswith("#")} <= page.ids
    assert len(page.images) == len(list((default / "report" / "figures").glob("*.svg"))) > 0
    assert all(len(image["alt"] or "") > 20 for image in page.images)
    assert "url(" not in (default / "report" / "index.html").read_text()


@pytest.mark.slow
def test_every_run_is_in_the_table_with_its_failure_and_what_was_left_out(default):
    text = Page(default / "report" / "index.html").text
    for row in ROWS:
        assert text.count(row["run_id"]) >= (2 if row["status"] == "oom" else 1)
    assert f"{len(ROWS)} runs" in text
    assert presentation.CPU_NOTE in text
    for shown in (
        "96.0 MiB",
        "init",
        "optimizer",
        "AMD EPYC 9554",
        "node-a",
        "2.13.0+cpu",
        "0123456789",
        "not whole JSON",
    ):
        assert shown in text, shown


@pytest.mark.slow
def test_every_figure_is_a_png_and_an_svg(default):
    figures = default / "report" / "figures"
    pngs, svgs = sorted(figures.glob("*.png")), sorted(figures.glob("*.svg"))
    assert [path.stem for path in pngs] == [path.stem for path in svgs]
    assert {path.stem.split("-")[0] for path in pngs} == {
        "throughput",
        "memory",
        "oom",
        "sharding",
        "spread",
        "scaling",
        "trade",
    }
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000 for path in pngs)
    assert all("</svg>" in path.read_text() for path in svgs)


@pytest.mark.long
@pytest.mark.slow
def test_a_report_changes_no_row_and_is_no_row(default, tmp_path):
    def content():
        return {path: path.read_bytes() for path in default.rglob("*.json")}

    before, runs = content(), len(read_latest_attempts(default).records)
    build_report(default / ROWS[3]["run_id"], default / "report" / "again")
    assert content() == before
    assert len(read_latest_attempts(default).records) == runs == len(ROWS)


@pytest.mark.long
@pytest.mark.slow
def test_same_rows_same_bytes_and_old_figures_go(tmp_path):
    store = write_store(tmp_path / "store", [make_record(precision="bf16")])
    first, second = build_report(store, tmp_path / "a").parent, build_report(store, tmp_path / "b").parent
    for path in first.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (second / path.relative_to(first)).read_bytes(), path
    mine = first / "figures" / "mine.png"
    mine.write_bytes(b"not the report's")
    assert list(first.glob("figures/throughput-bf16*"))
    write_report(StoreContents([make_record()]), "one run", first)
    assert not list(first.glob("figures/throughput-bf16*"))
    assert mine.exists()


NULLS = {"run_id": "0" * 16, "attempt": 0, "evidence": "measured", "status": "ok", "started_at": "2026-05-04T10:00:00"}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "rows",
    [
        [make_record()],
        [make_record(status="oom"), make_record(status="oom", strategy="fsdp", sharding_factor=2)],
        [
            make_record(status="error", error="<script>alert('&')</script>"),
            make_record(status="timeout", strategy="fsdp"),
        ],
        [NULLS],
        [{**NULLS, "run_id": "1" * 16, "status": "oom", "oom_phase": "init"}, {**NULLS, "evidence": "published"}],
        [
            make_record(hosts=None, config=None, ranks=None),
            make_record(strategy="my.own.strategy", effective_strategy=None),
        ],
    ],
    ids=["one row", "only oom", "only errors", "all null", "null oom", "foreign"],
)
def test_any_subset_of_rows_makes_a_page(rows, tmp_path):
    path = write_report(StoreContents(rows), "subset", tmp_path)
    page = Page(path)
    assert all(row["run_id"] in page.text for row in rows)
    assert all(row["error"] in page.text for row in rows if row.get("error"))
    assert page.executed == [{}]


def overlaps(figure: Figure) -> list[str]:
    """Texts of a figure that cover each other or leave it."""
    with style.apply_report_style():
        figure.draw_without_rendering()
    renderer = FigureCanvasAgg(figure).get_renderer()
    beyond = set()  # matplotlib keeps labels of ticks outside the limits, and does not draw them
    for axis, coordinate in [(axis, n) for axes in figure.axes for n, axis in enumerate((axes.xaxis, axes.yaxis))]:
        low, high = sorted(axis.get_view_interval())
        labels_ = axis.get_ticklabels()
        beyond |= {label for label in labels_ if not low <= label.get_position()[coordinate] <= high}
    shown = [text for text in figure.findobj(Text) if text.get_text().strip() and text not in beyond]
    boxes = [(text.get_text(), Text.get_window_extent(text, renderer)) for text in shown]
    right, top = figure.bbox.x1 + 1, figure.bbox.y1 + 1
    found = [text for text, box in boxes if box.x0 < -1 or box.y0 < -1 or box.x1 > right or box.y1 > top]
    for (one, a), (two, b) in itertools.combinations(boxes, 2):
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1:
            found.append(f"{one!r} over {two!r}")
    return found


def long_and_many():
    names = [f"a_model_with_a_really_long_experimental_name_d1024_l{layers}_h16" for layers in (12, 24, 48, 96, 128)]
    kinds = [("ddp", 1), ("fsdp", 1), ("fsdp", 8), ("fsdp", 16), ("fsdp", 64), ("fsdp1", 64)]
    rows = []
    for size, name in enumerate(names):
        for strategy, factor in kinds:
            fate = (
                {"status": "oom", "oom_phase": "optimizer"} if factor < 16 and size > 2 else {"tflops_per_gpu": 300.0}
            )
            asked = {"strategy": strategy, "sharding_factor": factor, "world_size": 64, "steps": 4, **CUDA, **fate}
            rows.append(make_record(model=name, parameters=10**9 * 2**size, **asked, degraded=size == 2))
    knobs = [{"strategy": {"name": "fsdp", "backward_prefetch": prefetch}} for prefetch in (True, False)]
    return rows + [make_record(model=names[0], strategy="fsdp", config=knob, **CUDA) for knob in knobs]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("rows", [ROWS, long_and_many()], ids=["default sweep", "long and many"])
def test_no_label_covers_another(rows):
    for figure in FIGURE_MODULES:
        for drawing in draw(figure, rows).drawings:
            assert overlaps(drawing.figure) == [], drawing.name
            assert drawing.figure.get_figheight() < 11, "fits a printed page"


# Machado, Oliveira and Fernandes (2009), severity 1: linear RGB as protanopes, deuteranopes and tritanopes see it.
BLINDNESS = {
    "none": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def lab(colour: str, matrix) -> np.ndarray:
    """CIE L*a*b* of a colour seen through `matrix`."""
    encoded = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.asarray(matrix) @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ seen
    x, y, z = np.cbrt(np.maximum(xyz / [0.9505, 1.0, 1.089], 0.0088))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def compute_contrast(first: str, second: str) -> float:
    """WCAG 2.2's contrast of two colours, 1 to 21."""
    low, high = sorted((lab_luminance(first), lab_luminance(second)))
    return (high + 0.05) / (low + 0.05)


def lab_luminance(colour: str) -> float:
    encoded = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def test_every_colour_can_be_read_on_white_and_on_black():
    marks = style.list_stated_marks()
    assert len(marks) > 30
    colours = [*(mark.colour for mark in marks.values()), *style.SPARE_COLOURS, style.OOM_COLOUR, style.LIMIT_COLOUR]
    for colour in (*colours, *paper.SERIES_COLOURS, *agreement.SOURCE_COLOURS):
        assert compute_contrast(colour, "#ffffff") >= 3, colour
        assert compute_contrast(colour, "#000000") >= 3, colour


def test_similar_colours_have_different_markers():
    for (one, first), (two, second) in itertools.combinations(style.list_stated_marks().items(), 2):
        assert first.marker != second.marker or not style.is_similar_colour(first.colour, second.colour), (one, two)


def test_a_strategy_looks_the_same_whatever_else_is_in_a_report():
    variants = {key.label: key for key in prepare_table(make_default_sweep())["variant_key"]}
    variants |= {key.label: key for key in prepare_table(long_and_many())["variant_key"]}
    marks = style.build_palette(variants.values())
    for label, variant in variants.items():
        assert style.build_palette([variant]) == {label: marks[label]}


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_colours_of_the_variants_differ_for_everyone(blindness):
    main_kinds = ("ddp", "zero1", "fsdp/full_replication", "fsdp/hybrid_shard", "fsdp/shard_grad_op", "fsdp/full_shard")
    main_kinds += ("fsdp/unsharded", "fsdp1/full_shard")
    for one, two in itertools.combinations(main_kinds, 2):
        seen = [lab(style.find_strategy_colour(kind), BLINDNESS[blindness]) for kind in (one, two)]
        assert np.linalg.norm(seen[0] - seen[1]) > 10, (one, two)


def test_markers_of_variants_differ():
    marks = style.build_palette(prepare_table(make_default_sweep())["variant_key"])
    assert len({mark.marker for mark in marks.values()}) == len(marks) == 5
    assert len({mark.colour for mark in marks.values()}) == len(marks)
    assert set(marks) <= {"DDP", "FSDP2 full shard", "FSDP2 full replication", "FSDP2 hybrid (F=2)", "FSDP2 unsharded"}


@pytest.mark.long
@pytest.mark.slow
def test_versions_are_named_only_where_nothing_else_tells_rows_apart():
    plain, hooked = ({"strategy": {"communication_hook": hook}} for hook in ("none", "bf16"))
    settings = [{"optimizer": {"lr": lr}} for lr in (1, 2)]
    for one, two in ((plain, hooked), settings):
        rows = [make_record(config=one, git_sha="a" * 40), make_record(config=two, git_sha="b" * 40)]
        for ordered in (rows, rows[::-1], [make_record(model="gpt_tiny", strategy="zero1"), *rows]):
            names = [name for name in prepare_table(ordered)["variant"] if name.startswith("DDP")]
            assert len(set(names)) == 2
            assert all(name.count("=") == 1 and "git_sha" not in name for name in names), names
    same = [make_record(config=plain, git_sha=letter * 40) for letter in "ab"]
    assert [name.partition(" · ")[2] for name in prepare_table(same)["variant"]] == [f"git_sha={c * 16}" for c in "ab"]


@pytest.mark.long
@pytest.mark.slow
def test_command_prints_where_the_page_is_and_what_was_left_out(tmp_path, capsys):
    store = write_store(tmp_path / "store", [make_record(status="error")])
    assert main([str(store)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(store / "report" / "index.html"), "1 run"]
    stray = store / make_record(status="error")["run_id"] / "notes.txt"
    stray.write_text("mine")
    assert main([str(store), "--output", str(tmp_path / "elsewhere")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        str(tmp_path / "elsewhere" / "index.html"),
        "1 run, 1 file left out:",
        f"  {stray}: not a file of this suite",
    ]


@pytest.mark.slow
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, capsys):
    store = write_store(tmp_path / "store", [make_record()])
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("in the way")
    cases = {
        "There is no store at": [str(tmp_path / "missing")],
        "holds no rows": [str(tmp_path / "empty")],
        "choose another folder with --output": [str(store), "--output", str(tmp_path / "file" / "below")],
    }
    for sentence, arguments in cases.items():
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert sentence in err
        assert err.count("\n") == 1
    with pytest.raises(UsageError):
        build_report(tmp_path / "missing", tmp_path / "report")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("store", ["predicted/a100_80gb", "measured/strategies", "measured/cpu_2core"])
def test_figures_of_committed_rows_can_be_read(store, tmp_path):
    """No text leaves its figure or covers another, legends are short, and what is saved has its caption."""
    rows = read_latest_attempts(ROOT / "results" / store).records
    for figure in FIGURE_MODULES:
        for drawing in draw(figure, rows).drawings:
            assert overlaps(drawing.figure) == [], drawing.name
            assert all(len(legend.get_texts()) <= MAX_LEGEND_ENTRIES for legend in drawing.figure.legends), drawing.name
            caption = draw_caption(drawing)
            assert overlaps(caption) == [], drawing.name
            assert " ".join(words(caption)).startswith(drawing.caption[:60].rpartition(" ")[0]), drawing.name


def test_saved_figures_carry_their_captions(tmp_path):
    (drawing,) = draw(throughput, [make_record(), make_record(strategy="fsdp")]).drawings
    svg_text = save_drawing(drawing, tmp_path)
    saved = (tmp_path / f"{drawing.name}.svg").read_text()
    pixels = imread(tmp_path / f"{drawing.name}.png")
    dpi = style.RC_PARAMS["savefig.dpi"]
    assert pixels.shape[1] == int(drawing.figure.get_figwidth() * dpi)
    below = pixels[int(drawing.figure.get_figheight() * dpi) :]
    assert len(below) > 20
    assert below[..., :3].min() < 0.6, "there are letters"
    shown = " ".join(re.findall("<!-- (.*?) -->", saved))
    assert drawing.caption in shown
    assert drawing.caption not in " ".join(re.findall("<!-- (.*?) -->", svg_text))
    ElementTree.fromstring(saved)


@pytest.mark.parametrize("positions", [[0.1, 0.11, 0.12], [0.98, 0.99, 1.0], [0.0, 0.5, 1.0], [0.5] * 6])
def test_direct_labels_keep_apart_and_inside(positions):
    spread = spread_apart(positions, 0.1)
    assert all(second - first >= 0.1 - 1e-9 for first, second in itertools.pairwise(spread))
    assert spread[-1] <= 1
    assert spread == sorted(spread)
    assert spread_apart([0.2, 0.7], 0.1) == [0.2, 0.7], "those that have room stay"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("store", ["measured/strategies", "measured/cpu_pipelines", "predicted/a100_80gb"])
def test_a_figure_whose_needs_are_not_met_draws_nothing_of_these_rows(store):
    """So that a report need not ask it. Of single rows and some that stand together, drawn at random."""
    rows = read_latest_attempts(ROOT / "results" / store).records
    generator = np.random.default_rng(0)
    asked, drawn = set(), set()
    for size in (1, 1, 1, 2, 2, 2, 3, 3, 4, 6, 10, len(rows)):
        start = generator.integers(len(rows) - size + 1)
        table = prepare_table(rows[start : start + size])
        palette = style.build_palette(table["variant_key"])
        for figure in FIGURE_MODULES:
            section = figure.build_section(table, palette)
            if figure.FIGURE.needs.are_met_by(table):
                drawn |= {figure} if section.planned_figures else set()
            else:
                asked.add(figure)
                assert section == figure.FIGURE.create_empty_section(table), (figure, size)
    assert len(asked) > 5
    assert len(drawn) > 3


@pytest.mark.long
@pytest.mark.slow
def test_the_fewest_rows_that_a_figure_draws_meet_its_needs():
    """Rows are left out as long as the figure still draws something."""
    shrunk = {}
    for figure in FIGURE_MODULES:
        rows = ROWS
        size = len(rows) // 2 if draw(figure, rows).planned_figures else 0
        while size:
            start = 0
            while start < len(rows):
                fewer = rows[:start] + rows[start + size :]
                if fewer and draw(figure, fewer).planned_figures:
                    rows = fewer
                else:
                    start += size
            size //= 2
            shrunk[figure] = rows
    for figure, rows in shrunk.items():
        assert figure.FIGURE.needs.are_met_by(prepare_table(rows)), figure
    assert {figure: len(rows) for figure, rows in shrunk.items()}.items() >= {scaling: 2, throughput: 1}.items()
