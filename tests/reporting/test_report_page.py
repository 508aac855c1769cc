"""What the report page is made of: causes, machines, details of a run, interactive figures, and what they promise."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import shlex

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from bench.records import StoreContents, read_latest_attempts
from bench.report import main
from bench.reporting import write_report
from bench.reporting.drawing import style
from bench.reporting.drawing.drawing import render_svg
from bench.reporting.figures import frontier, memory, oom_map, scaling, spread, throughput
from bench.reporting.page import page
from bench.reporting.page.hosts import MAX_HOST_SYSTEMS, find_host_systems, format_change, pair_host_systems
from bench.reporting.page.interactive import (
    InteractiveChart,
    build_explorer_charts,
    build_scaling_charts,
    load_plotly_js,
)
from bench.reporting.page.packing import GLYPH, compress_json, pack_figures
from bench.reporting.page.page import group_failures
from bench.reporting.page.rerun_command import build_rerun_command
from bench.reporting.page.run_details import MAX_LISTED_RANKS, build_details, deduplicate_blocks
from bench.reporting.tables.table import prepare_table
from tests.conftest import SMALL_GPT, SMALL_T5, compose_run_config
from tests.records_fixture import GIB, make_default_sweep, make_record, write_store
from tests.reporting.test_report import CUDA, Page, draw, words

ENVIRONMENT = {"python": "3.11.7", "packages": {"torch": "2.13.0", "numpy": "2.4.6"}, "kernel": "6.1"}


def on(host: str = "node-a", *, driver: str = "", launcher: str = "local", **columns):
    """A row of one host."""
    devices = {"rank 0": {"name": "GPU", "driver": driver, "power_limit_w": 700.0}} if driver else {}
    row = make_record(**columns)
    facts = columns.get("environment") or ENVIRONMENT
    return {**row, "hosts": host, "launcher": launcher, "environment": {**facts, "devices": devices}}


# ---- how to run it again


@pytest.mark.parametrize(
    "asked",
    [
        SMALL_T5,
        (*SMALL_GPT, "strategy=ddp", "gpus=4", "strategy.bucket_cap_mb=50", "seed=3", "repeat=2"),
        (*SMALL_T5, "gpus=4", "strategy=fsdp", "strategy.sharding_factor=2", "strategy.backward_prefetch=false"),
        (*SMALL_T5, "gpus=4", "strategy=fsdp1", "strategy.backward_prefetch=none", "precision=bf16"),
        (*SMALL_GPT, "hardware=cpu", "hardware.memory_limit_gib=0.27", "optimizer=sgd", "optimizer.momentum=0.9"),
        ("model=t5_11b", "gpus=64", "hardware=a100_80gb", "mode=predict", "activation_checkpointing=full"),
        (*SMALL_GPT, "hardware=cpu", "+hardware.peak_tflops.fp32=0.1"),
        (*SMALL_GPT, "gpus=16", "mode=rehearse", "gpus_per_node=4", "measurement.steps=5", "compile=true"),
    ],
)
def test_the_command_of_a_row_comes_to_the_same_run(asked):
    config = compose_run_config(*asked)
    typed = build_rerun_command({"config": config.to_dict(), "requested": config.requested})
    python, m, module, *settings = shlex.split(typed)
    assert (python, m, module) == ("python", "-m", "bench.sweep" if config.is_predicted else "bench.run")
    again = compose_run_config(*(setting for setting in settings if setting != "force=true"))
    assert again.run_id == config.run_id
    assert len(settings) <= len(asked) + 4, "what is as the files say is not repeated"


def test_a_row_without_a_configuration_has_no_command():
    assert build_rerun_command(make_record(config=None)) is None
    assert "force=true" in build_rerun_command({**make_record(), "launcher": "slurm"})


# ---- causes


def test_runs_that_ended_for_one_reason_are_one_cause():
    rows = [
        make_record(),
        make_record(status="oom", memory_limit_bytes=GIB, oom_phase="forward"),
        make_record(status="oom", memory_limit_bytes=GIB, oom_phase="forward", model="gpt_tiny", oom_bytes=2**30),
        make_record(status="oom", memory_limit_bytes=GIB, oom_phase="optimizer"),
        make_record(status="error", error="rank 3 (pid 411): no route to 10.0.0.7"),
        make_record(status="error", error="rank 1 (pid 97): no route to 10.0.0.9", model="gpt_tiny"),
        make_record(status="error", error="no space left"),
        make_record(status="timeout", error=None),
    ]
    found = group_failures(prepare_table(rows))
    assert [(cause.status, cause.count) for cause in found] == [
        ("oom", 2), ("oom", 1), ("error", 2), ("error", 1), ("timeout", 1),
    ]  # fmt: skip
    assert found[0].reason == "in forward, limit of 1 GiB; asked for 96.0 MiB to 1.00 GiB more"
    assert found[0].configurations == "DDP × 2; t5_tiny, gpt_tiny, 2 processes"
    assert found[2].reason.startswith("rank 3 (pid 411): no route")
    assert found[4].reason == "no cause recorded"
    assert {run_id for cause in found for run_id, _ in cause.runs} == {row["run_id"] for row in rows[1:]}


# ---- machines


def test_a_machine_is_a_host_and_its_software():
    newer = {**ENVIRONMENT, "packages": {"torch": "2.13.0", "numpy": "2.5.0"}}
    rows = [on(), on(model="gpt_tiny"), on("node-b"), on(environment=newer, seed=1), on(git_sha="f" * 40)]
    rows.append(make_record(evidence="predicted", hosts=None))
    found, others = find_host_systems(prepare_table(rows), rows)
    assert sorted(len(machine.rows) for machine in found) == [1, 1, 1, 2]
    assert others == 0
    assert [machine.letter for machine in found] == ["A", "B", "C", "D"]


def test_nodes_of_a_scheduler_are_one_cluster():
    rows = [on(f"gpu{n:03}, gpu{n + 1:03}", launcher="slurm", seed=n) for n in range(4)]
    rows.append(on("other1", launcher="slurm"))
    found, _ = find_host_systems(prepare_table(rows), rows)
    assert sorted(len(machine.rows) for machine in found) == [1, 4]


def test_the_machines_with_most_runs_are_compared():
    rows = [on(f"host-{'abcdefghij'[n]}", seed=n) for n in range(MAX_HOST_SYSTEMS + 3)]
    rows += [on("host-j", seed=99), on("host-j", seed=98)]
    found, others = find_host_systems(prepare_table(rows), rows)
    assert (len(found), others) == (MAX_HOST_SYSTEMS, 4)
    assert "host-j" in {machine.properties["Hosts"] for machine in found}


def pair_of(*rows):
    found, _ = find_host_systems(prepare_table(rows), rows)
    (pair,) = pair_host_systems(found)
    return pair


def test_matched_runs_are_compared_by_the_medians_of_their_repeats():
    def times(host, *seconds):
        return [
            on(host, repeat=n, step_time_median_s=value, peak_allocated_bytes=100) for n, value in enumerate(seconds)
        ]

    pair = pair_of(*times("node-a", 1.0, 3.0, 1.1), *times("node-b", 2.2, 2.2, 9.0), on("node-b", model="gpt_tiny"))
    (one,) = pair.matched
    assert one.step_times_s == (1.1, 2.2)
    assert one.step_ratio == pytest.approx(2.0)
    assert one.peak_ratio == 1.0
    assert [len(runs) for runs in one.run_anchors] == [3, 3]
    assert pair.unmatched_counts == (0, 1)
    assert pair.differing_properties == ["Hosts"]


def test_what_a_machine_is_does_not_keep_its_runs_from_matching_but_what_was_asked_does():
    gpu = {**CUDA, "config": {"model": {"name": "t5_tiny"}, "hardware": {"name": "h100_80gb", "cpu_threads": 1}}}
    other = {**gpu, "hardware": "a100_80gb", "gpu_name": "NVIDIA A100-SXM4-80GB"}
    assert len(pair_of(on(driver="535.1", **gpu), on("node-b", driver="550.2", **other)).matched) == 1
    other["config"] = {"model": {"name": "t5_tiny", "num_layers": 3}}
    pair = pair_of(on(**gpu), on("node-b", **other))
    assert pair.matched == []
    assert "nothing can be compared" in pair.sentences[0]


def test_a_processor_is_not_compared_with_a_gpu():
    pair = pair_of(on(), on("node-b", **CUDA))
    assert "One is a CPU, the other a GPU" in pair.sentences[0]


def test_a_rehearsal_is_not_compared_with_a_measurement():
    pair = pair_of(on(), on("node-b", evidence="rehearsed"))
    assert pair.matched == []
    assert "All rows of A are" in pair.sentences[0]


def test_other_fates_and_degraded_times_are_said():
    slow = {"step_time_median_s": 9.0, "degraded": True}
    pair = pair_of(
        on(step_time_median_s=1.0), on(model="gpt_tiny", **slow), on("node-b", status="oom", started_at="2026-06-01"),
        on("node-b", model="gpt_tiny", step_time_median_s=1.0, started_at="2026-06-02"),
    )  # fmt: skip
    notes = {one.name.split(" · ")[2]: (one.notes, one.step_ratio) for one in pair.matched}
    assert notes["t5_tiny"][0] == ("A ok, B out of memory",)
    assert notes["gpt_tiny"][0] == ("degraded runs of A are not in the time",)
    assert all(np.isnan(ratio) for _, ratio in notes.values())
    assert any("1 configuration ran out of memory on one of them only" in text for text in pair.sentences)


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(1.031, "+3.1 %"), (0.8, "−20.0 %"), (1.0, "0 %"), (2.5, "× 2.5"), (0.2, "× 0.20"), (float("nan"), "–")],
)
def test_changes_in_words(ratio, text):
    assert format_change(ratio) == text


# ---- the details of a run


def test_blocks_that_runs_share_are_kept_once():
    rows = [on(seed=n) for n in range(50)]
    data = deduplicate_blocks({row["run_id"]: build_details(row, "file", "heading") for row in rows})
    titles = [block["title"] for block in data["blocks"]]
    assert titles.count("Environment") == titles.count("Configuration: model") == 1
    for row in rows:
        shown = [data["blocks"][number] for number in data["runs"][row["run_id"]]]
        (steps,) = (block for block in shown if "steps" in block)
        assert len(steps["steps"]) == 20


def test_many_ranks_are_listed_in_part():
    (block,) = (
        block for block in build_details(make_record(world_size=MAX_LISTED_RANKS + 9), "", "") if "columns" in block
    )
    assert len(block["rows"]) == MAX_LISTED_RANKS
    assert f"the first {MAX_LISTED_RANKS} of {MAX_LISTED_RANKS + 9}" in block["title"]


def test_what_is_packed_can_stand_anywhere_and_is_the_same_every_time():
    value = {"error": "</script><!-- \u2028 & 'quotes'"}
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", compress_json(value))
    assert json.loads(gzip.decompress(base64.b64decode(compress_json(value)))) == value
    assert compress_json(value) == compress_json(value)


@pytest.mark.slow
def test_figures_share_the_outlines_of_their_characters():
    drawings = draw(throughput, [make_record(), make_record(strategy="fsdp", **CUDA)]).drawings
    texts = {drawing.name: render_svg(drawing.figure) for drawing in drawings}
    assert len(texts) == 2
    packed = pack_figures(texts)
    unpacked = json.loads(gzip.decompress(base64.b64decode(packed)))
    assert len(packed) < 0.75 * len(compress_json(texts))
    for name, text in texts.items():
        rest, glyphs = unpacked["figures"][name]
        outlines = "".join(f'<path id="{glyph}" {unpacked["glyphs"][glyph]}/>' for glyph in glyphs)
        assert dict(GLYPH.findall(outlines)) == dict(GLYPH.findall(text)) != {}
        assert not GLYPH.findall(rest)
        defined = {*glyphs, *re.findall(r'<path id="(DejaVu[^"]+)"', rest)}  # a space has no outline, and stays
        assert set(re.findall(r'xlink:href="#(DejaVu[^"]+)"', rest)) <= defined


def test_details_of_many_runs_are_left_to_their_rows(monkeypatch):
    rows = [make_record(seed=seed, ranks=[{"rank": 0, "step_times_s": [seed / 7] * 20}]) for seed in range(40)]
    contents, files = StoreContents(rows), [f"{row['run_id']}/0.json" for row in rows]
    table = prepare_table(rows)
    complete = page.pack_details(table, contents, files)
    for limit, num_runs, is_complete in ((len(complete), 40, True), (len(complete) - 1, 40, False), (100, 0, False)):
        monkeypatch.setattr(page, "MAX_DETAILS_BYTES", limit)
        packed = page.pack_details(table, contents, files)
        assert len(packed) <= limit
        unpacked = json.loads(gzip.decompress(base64.b64decode(packed)))
        titles = {block["title"] for block in unpacked["blocks"]}
        assert len(unpacked["runs"]) == num_runs
        assert ("The rest" in titles) == (num_runs > 0 and not is_complete)
        assert any(title.startswith("Step times") for title in titles) == is_complete


def test_rows_are_named_by_the_file_they_lie_in(tmp_path):
    write_store(tmp_path / "a", [make_record(), make_record(seed=1)])
    write_store(tmp_path / "b", [make_record()])
    contents = read_latest_attempts(tmp_path)
    assert contents.files == [
        f"{store}/{run['run_id']}/0.json"
        for store, runs in (
            ("a", sorted([make_record(), make_record(seed=1)], key=lambda row: row["run_id"])),
            ("b", [make_record()]),
        )
        for run in runs
    ]
    one = tmp_path / "b" / make_record()["run_id"] / "0.json"
    assert read_latest_attempts(one).files == ["0.json"]
    page = Page(write_report(contents, "stores", tmp_path / "report", interactive=False))
    assert {f"run-{make_record()['run_id']}", f"run-{make_record()['run_id']}-2"} <= page.ids


# ---- the page


@pytest.mark.slow
def test_only_the_pages_own_scripts_are_executed(tmp_path):
    text = write_report(StoreContents([make_record()]), "one run", tmp_path).read_text()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none';")
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    for source in (script, load_plotly_js()):
        assert base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() in policy
    (packed_text,) = re.findall(r'id="library">([^<]*)<', text)
    assert gzip.decompress(base64.b64decode(packed_text)).decode() == load_plotly_js()


@pytest.mark.long
@pytest.mark.slow
def test_interactive_figures_can_be_left_out(tmp_path, capsys):
    store = write_store(tmp_path / "store", [make_record()])
    assert main([str(store)]) == 0
    full = (store / "report" / "index.html").stat().st_size
    assert main([str(store), "--no-interactive"]) == 0
    page = Page(store / "report" / "index.html")
    assert full - (store / "report" / "index.html").stat().st_size > 10**6
    assert "library" not in page.ids
    assert page.executed == [{}]


@pytest.mark.slow
def test_a_run_that_nothing_can_be_drawn_of_needs_no_library(tmp_path):
    page = Page(write_report(StoreContents([make_record(status="error")]), "one run", tmp_path))
    assert "library" not in page.ids


# ---- interactive figures


def charts(rows) -> list[InteractiveChart]:
    table = prepare_table(rows)
    marks = style.build_palette(table["variant_key"])
    return [*build_explorer_charts(table, marks), *build_scaling_charts(table, marks)]


def test_plotly_accepts_what_is_drawn():
    for chart in charts(make_default_sweep()):
        figure = go.Figure(chart.spec)
        assert len(figure.data) > 1
        assert len(chart.alt) > 40


def test_explorer_has_a_point_per_run_and_memory_exhausted_on_the_axis():
    limit = GIB // 2
    rows = [
        make_record(tflops_per_gpu=2.0, peak_allocated_bytes=GIB),
        make_record(strategy="fsdp", tflops_per_gpu=1.0, peak_allocated_bytes=GIB // 4, degraded=True),
        make_record(status="oom", memory_limit_bytes=limit, model="gpt_tiny"),
        make_record(status="oom", model="gpt_small"),
        make_record(status="oom", evidence="predicted", peak_allocated_bytes=3 * GIB, model="t5_small"),
        make_record(status="error"),
    ]
    (chart,) = charts(rows)
    found = {}
    for trace in chart.spec["data"]:
        for x, y, anchor in zip(trace["x"], trace["y"], trace.get("customdata", ()), strict=False):
            found.setdefault(anchor, []).append((x, y, trace["marker"]["symbol"]))
    places = [found.pop(f"run-{row['run_id']}", None) for row in rows]
    assert found == {}
    assert places[0] == [(1.0, 2.0, "diamond")]
    assert [mark[:2] for mark in places[1]] == [(0.25, 1.0)] * 2, "a degraded run has a second mark"
    assert places[2] == [(pytest.approx(0.5, rel=0.05), 0.0, "x")]
    assert places[3] == [(pytest.approx(3 * 1.06, rel=0.05), 0.0, "x")]
    assert places[4] == [(pytest.approx(3.0, rel=0.05), 0.0, "x-open")]
    assert places[2][0][0] / 0.5 != places[4][0][0] / 3.0, "beside each other"
    assert places[5] is None


def test_places_never_share_interactive_axes():
    found = charts([make_record(), make_record(strategy="fsdp"), make_record(**CUDA)])
    assert [chart.group for chart in found] == ["explorer", "explorer"]
    assert len({chart.title for chart in found}) == 2


def test_what_a_point_says_is_no_markup():
    (chart,) = charts([make_record(model='<a href="javascript:alert(1)">model</a>')])
    (trace,) = chart.spec["data"]
    assert "<a" not in trace["text"][0]
    assert "&lt;a href" in trace["text"][0]


def test_interactive_kinds_of_evidence_differ_without_colour():
    kinds = ("measured", "rehearsed", "predicted", "published")
    rows = [make_record(evidence=kind, world_size=size) for kind in kinds for size in (1, 2)]
    scatter, line = charts(rows)
    for chart in (scatter, line):
        assert len({trace["marker"]["symbol"] for trace in chart.spec["data"]}) == 4
    assert len({trace["line"]["dash"] for trace in line.spec["data"]}) == 4
    assert all(anchor for trace in line.spec["data"] for anchor in trace["customdata"])


# ---- static figures


def markers(drawing):
    return [line for axes in drawing.figure.axes for line in axes.lines]


def test_kinds_of_evidence_differ_in_lines_without_colour():
    kinds = ("measured", "rehearsed", "predicted", "published")
    rows = [make_record(evidence=kind, world_size=size, **CUDA) for kind in kinds for size in (1, 2)]
    (drawing,) = draw(scaling, rows).drawings
    drawn = [line for line in markers(drawing) if len(line.get_xdata()) == 2 and line.get_marker() not in ("", "None")]
    fills = {(line.get_fillstyle(), line.get_markerfacecolor() == "white") for line in drawn}
    assert len(fills) == len({line.get_linestyle() for line in drawn}) == 4


def test_a_predicted_cross_differs_from_a_measured_one():
    for figure in (throughput, memory, scaling):
        faces = set()
        for kind in ("measured", "predicted"):
            rows = [make_record(world_size=1, evidence=kind), make_record(world_size=2, status="oom", evidence=kind)]
            crosses = [
                line for drawing in draw(figure, rows).drawings for line in markers(drawing) if line.get_marker() == "X"
            ]
            faces |= {line.get_markerfacecolor() for line in crosses}
        assert len(faces) == 2, figure


def test_degraded_runs_are_marked_in_every_figure_of_runs():
    limit = {"memory_limit_bytes": GIB, "degraded": True, "alloc_retries": 3, "world_size": 2}
    one = [make_record(**limit)]
    several = [
        make_record(**limit, config={"model": {}, "batch_size_per_gpu": 4}),
        make_record(
            memory_limit_bytes=GIB, world_size=2, evidence="rehearsed", config={"model": {}, "batch_size_per_gpu": 4}
        ),
    ]
    for figure, rows in ((throughput, one), (memory, one), (spread, one), (oom_map, one), (frontier, several)):
        (drawing,) = draw(figure, rows).drawings
        assert sum(line.get_marker() == "<" for line in markers(drawing)) == 1, figure
        shown = " ".join(" ".join(words(drawing.figure)).split())
        assert "degraded: time not representative" in shown, figure


def test_the_spread_of_steps_says_which_runs_have_none():
    section = draw(
        spread,
        [make_record(), make_record(status="oom", strategy="fsdp"), make_record(status="oom", evidence="predicted")],
    )
    assert section.notice == "Out of memory, so without timed steps: 1 run (FSDP2 full replication × 1)."


def test_empty_tables_make_empty_parts():
    table = prepare_table([make_record(evidence="predicted", status="skipped")])
    assert isinstance(table, pd.DataFrame)
    assert find_host_systems(table, [make_record(evidence="predicted", status="skipped")]) == ([], 0)
    assert pair_host_systems([]) == []
