"""The OOM frontier: which rows answer one question, what they say together, where they contradict each other."""

from __future__ import annotations

import math

import pytest
from matplotlib.text import Text

from bench.identity import ADDED as ADDED_TO_CONFIG
from bench.records import matching, read_all
from bench.records.matching import fit_question, identity, time_question
from bench.reporting import style, write_report
from bench.reporting.answers import agreement, answer, disagree, disagreement
from bench.reporting.figures import frontier, oom_map, throughput
from bench.reporting.frontier_cells import frontier_cells, on_the_frontier, without_tries
from bench.reporting.table import prepare
from bench.row import configured_row
from tests.conftest import configuration, run_command
from tests.records_fixture import default_sweep, write_store

GIB = 2**30
LIMIT = "hardware.memory_limit_gib=0.32"


def row(*overrides, status="ok", peak=0.25, **columns):
    """A row of the run that `overrides` describe: it fitted with so many GiB, or ran out of memory."""
    config = configuration(*overrides)
    ended = {"peak_allocated_bytes": int(peak * GIB), "peak_reserved_bytes": int(peak * GIB)}
    ended |= {"step_time_median_s": 0.1, "tflops_per_gpu": 0.01}
    if status == "oom":
        ended = {"oom_phase": "backward", "oom_bytes": 2**20}
    if config.predicted:
        ended |= {"fit": "fits" if status == "ok" else "does not fit", "peak_reserved_bytes": int(peak * GIB)}
    times = {"started_at": "2026-05-04T10:00:00+00:00", "finished_at": "2026-05-04T10:00:20+00:00"}
    return {**configured_row(config), "attempt": 0, "status": status, "sweep": "test", **times, **ended, **columns}


def drawn(rows, figure=frontier):
    table = prepare(rows)
    with style.context():
        return figure.section(table, style.palette(table["variant_key"]))


def cell(rows):
    """The answers in the only cell that some rows come to."""
    cells = frontier_cells(prepare(rows))
    assert len(cells) == 1
    return cells["answers"][0]


# Which rows answer one question


@pytest.mark.parametrize(
    "also",
    [
        ("mode=rehearse",),
        ("mode=predict",),
        ("repeat=1",),
        ("seed=3",),
        ("measurement.profile=true", "measurement.steps=5"),
    ],
)
def test_how_an_answer_is_found_is_no_part_of_the_question(also):
    asked, again = row("gpus=2", LIMIT), row("gpus=2", LIMIT, *also)
    assert fit_question(asked) == fit_question(again) is not None
    assert time_question(asked) == time_question(again) is not None


@pytest.mark.parametrize(
    "also",
    [
        ("gpus=4",),
        ("model=gpt_tiny",),
        ("model.d_ff=64",),
        ("strategy=ddp",),
        ("strategy.sharding_factor=1",),
        ("strategy.reshard_after_forward=false",),
        ("precision=bf16",),
        ("batch_size_per_gpu=8",),
        ("activation_checkpointing=full",),
        ("optimizer.implementation=foreach",),
        ("hardware.memory_limit_gib=0.5",),
    ],
)
def test_whatever_changes_the_answer_changes_the_question(also):
    asked, other = row("gpus=2", LIMIT), row("gpus=2", LIMIT, *also)
    assert fit_question(asked) != fit_question(other)
    assert time_question(asked) != time_question(other)


def test_a_limit_on_a_larger_gpu_is_a_gpu_of_that_size_for_memory_but_not_for_time():
    limited = row("mode=predict", "hardware=h200", "hardware.memory_limit_gib=80", "precision=bf16")
    sold = row("mode=predict", "hardware=a100_80gb", "precision=bf16")
    whole = row("mode=predict", "hardware=h200", "precision=bf16")
    assert fit_question(limited) == fit_question(sold) != fit_question(whole)
    other = row("mode=predict", "hardware=h100_80gb", "hardware.memory_limit_gib=80", "precision=bf16")
    assert fit_question(limited) == fit_question(other)
    assert time_question(limited) != time_question(other)


def test_what_a_description_believes_of_speeds_is_no_part_of_the_question():
    sold = row("mode=predict", "hardware=a100_80gb", "precision=bf16")
    faster = row("mode=predict", "hardware=a100_80gb", "precision=bf16", "hardware.memory_bandwidth_gb_s=4000")
    assert sold["run_id"] != faster["run_id"]
    assert time_question(sold) == time_question(faster)


def test_rows_that_say_nothing_of_memory_answer_no_question():
    assert fit_question(row("gpus=2")) is None  # a CPU without a limit: nobody knows how much there is
    published = {**row("gpus=2", LIMIT), "evidence": "published", "config": None}
    assert fit_question(published) is None
    assert time_question(published) is None


def test_rows_from_before_a_knob_answer_what_rows_at_its_default_do():
    asked = row("gpus=2", LIMIT)
    old = row("gpus=2", LIMIT)
    del old["config"]["optimizer"]["keep_gradients"]
    assert fit_question(old) == fit_question(asked)
    knobs = {f"{section}.{knob}": value for section, some in ADDED_TO_CONFIG.items() for knob, value in some.items()}
    how_found = {knob for knob in knobs if knob.partition(".")[0] in matching.ONLY_HOW}
    assert {knob: value for knob, value in knobs.items() if knob not in how_found} == matching.ADDED


def test_identity_leaves_out_what_it_is_told_to():
    four, eight = (fit_question(row(LIMIT, f"batch_size_per_gpu={size}")) for size in (4, 8))
    assert four is not None
    assert eight is not None
    assert identity(four) != identity(eight)
    assert identity(four, "batch_size_per_gpu") == identity(eight, "batch_size_per_gpu")


# What the rows of one kind of evidence say


def one(evidence="measured", **fates):
    """An answer from batch sizes and what became of them: ``b4="ok"``, ``b5="oom"``, ``b6="close"``."""
    rows = []
    for name, fate in fates.items():
        told = {"fit": "too close to call"} if fate == "close" else {}
        asked = (LIMIT, f"batch_size_per_gpu={name[1:]}")
        rows.append(row(*asked, status="oom" if fate == "oom" else "ok", peak=int(name[1:]) / 100, **told))
    return answer(evidence, prepare(rows).to_dict("records"))


@pytest.mark.parametrize(
    ("fates", "batch", "outcome"),
    [
        ({"b1": "ok", "b2": "ok", "b8": "ok", "b9": "oom"}, "8", "fits"),
        ({"b4": "ok"}, "≥4", "fits"),
        ({"b4": "ok", "b9": "oom"}, "≥4", "fits"),
        ({"b1": "oom"}, "OOM", "out of memory"),
        ({"b4": "oom"}, "<4", "out of memory"),
        ({"b1": "ok", "b4": "ok", "b5": "close", "b7": "close", "b8": "oom"}, "4–7", "fits"),
        ({"b1": "close", "b3": "close", "b4": "oom"}, "0–3", "too close to call"),
        ({"b4": "ok", "b2": "oom"}, "≥4", "some repeats fit"),
    ],
)
def test_batches_of_one_configuration_come_to_the_largest_that_fits(fates, batch, outcome):
    found = one(**fates)
    assert (found.batch if outcome != "some repeats fit" else batch, found.outcome) == (batch, outcome)


def test_an_answer_in_words_has_its_numbers():
    words = one(b1="ok", b4="ok", b5="oom").words
    assert words == "batch 4 fits (peak 41.0 MiB), batch 5 runs out of memory in backward"


@pytest.mark.parametrize(
    ("first", "second", "apart"),
    [
        ({"b4": "ok"}, {"b4": "oom"}, True),
        ({"b4": "ok"}, {"b4": "ok"}, False),
        ({"b4": "ok"}, {"b5": "oom"}, False),
        ({"b8": "ok"}, {"b5": "oom"}, True),  # what fits at 8 fits at 5
        ({"b4": "close"}, {"b4": "oom"}, False),
        ({"b4": "ok", "b7": "close", "b8": "oom"}, {"b6": "ok", "b7": "oom"}, False),
        ({"b4": "ok", "b7": "close", "b8": "oom"}, {"b8": "ok", "b9": "oom"}, True),
        ({"b4": "ok", "b2": "oom"}, {"b4": "oom"}, False),  # the first contradicts itself
    ],
)
def test_kinds_disagree_where_one_fits_what_the_other_does_not(first, second, apart):
    a, b = one("measured", **first), one("predicted", **second)
    assert disagree(a, b) == disagree(b, a) == apart
    assert bool(disagreement([a, b])) == apart


def test_a_disagreement_names_those_who_disagree_and_their_numbers():
    measured, rehearsed = one("measured", b4="oom"), one("rehearsed", b4="ok")
    text = disagreement([measured, rehearsed, one("predicted", b4="close")])
    assert text == "measured: batch 4 runs out of memory in backward; rehearsed: batch 4 fits (peak 41.0 MiB)"
    assert agreement([[measured, rehearsed], [measured]]).startswith("1 with several kinds of evidence")
    assert agreement([[measured, rehearsed]]).endswith("1 of them disagree.")
    assert agreement([[rehearsed, rehearsed]]).endswith("all agree.")


# Which cells there are


def test_kinds_of_evidence_on_different_hardware_share_a_cell():
    asked = ("model=t5_2b", "gpus=8", "precision=bf16", "batch_size_per_gpu=8")
    rows = [
        row("mode=rehearse", "hardware=h200", "hardware.memory_limit_gib=80", *asked, peak=60),
        row("hardware=a100_80gb", *asked, peak=61),
        row("mode=predict", "hardware=a100_80gb", *asked, status="oom", peak=90),
    ]
    answers = cell(rows)
    assert [found.evidence for found in answers] == ["measured", "rehearsed", "predicted"]
    assert "needs 90.0 GiB" in disagreement(answers)
    (drawing,) = drawn(rows).drawings
    assert len(drawing.notes) == 1
    assert "t5_2b" in drawing.notes[0]


def test_settings_that_differ_are_told_apart_and_models_ordered_by_size():
    rows = [
        row("mode=predict", "hardware=a100_80gb", f"model={model}", f"gpus={gpus}", f"activation_checkpointing={how}")
        for model in ("t5_2b", "t5_tiny")
        for gpus in (8, 64)
        for how in ("none", "full")
    ]
    cells = frontier_cells(prepare(rows))
    assert list(cells["heading"].unique()) == [f"FSDP2 full shard · checkpointing {how}" for how in ("full", "none")]
    assert list(cells["lane"].unique()) == ["t5_tiny 1.18 M", "t5_2b 2.28 B"]
    assert cells["shared"].unique().tolist() == ["batch 4 × 128"]
    assert len(cells) == 8


def test_knobs_of_a_strategy_and_shapes_of_one_model_are_told_apart():
    rows = [
        row(LIMIT, "gpus=2", f"model.d_ff={width}", f"strategy.backward_prefetch={ahead}", mode)
        for width in (64, 128)
        for ahead in ("true", "false")
        for mode in ("mode=measure", "mode=rehearse")
    ]
    cells = frontier_cells(prepare(rows))
    assert len(cells) == len(cells.drop_duplicates(["heading", "lane"])) == 4
    assert any(heading.endswith("backward_prefetch=false") for heading in cells["heading"])
    assert any("d_ff=64" in lane for lane in cells["lane"])


def test_one_rank_begins_the_line_of_what_shards_fully():
    rows = [row(LIMIT, f"strategy={name}", f"gpus={gpus}") for name in ("fsdp", "fsdp1") for gpus in (1, 2)]
    assert set(frontier_cells(prepare(rows))["heading"]) == {"FSDP2 full shard", "FSDP1 full shard"}


def test_every_run_is_on_the_frontier_or_in_the_oom_map():
    rows = [*default_sweep(("fp32",)), row(LIMIT, "gpus=2"), row(LIMIT, "gpus=2", "mode=rehearse")]
    table = prepare(rows)
    shown = on_the_frontier(table)
    assert shown.sum() == 2
    cells = oom_map.select(table[~shown])
    assert (cells["outcome"] != "not run").sum() == len(rows) - 2
    assert drawn(rows[-2:], oom_map).nothing
    assert not drawn(rows[:1]).drawings
    assert drawn(rows[:1]).nothing


def test_of_a_search_the_other_figures_show_the_end():
    sizes = {1: "ok", 2: "ok", 9: "ok", 10: "oom", 16: "oom"}
    search = [row(LIMIT, f"batch_size_per_gpu={size}", status=status) for size, status in sizes.items()]
    grid = [row(LIMIT, "gpus=2", f"batch_size_per_gpu={size}") for size in (1, 2, 4)]
    kept = without_tries(prepare([*search, *grid]))
    assert list(kept["batch_size_per_gpu"]) == [9, 1, 2, 4]
    assert len(throughput.select(kept)) == 4
    assert frontier_cells(prepare(search))["answers"][0][0].batch == "9"


# What is drawn


def test_the_largest_frontier_is_paginated_and_every_cell_is_drawn_once():
    models = [("t5_tiny", f"model.num_encoder_layers={layers}") for layers in range(1, 31)]
    ranks = [8, 16, 32, 64, 128, 256, 512]
    rows = [
        row("mode=predict", "hardware=a100_80gb", f"model={model}", f"gpus={gpus}", layers, peak=0.2)
        for model, layers in models
        for gpus in ranks
    ]
    section = drawn(rows)
    assert len(section.drawings) > 1
    assert all(drawing.figure.get_figheight() < 1.3 * style.MAX_HEIGHT_IN for drawing in section.drawings)
    drawn_cells = [
        text for drawing in section.drawings for text in drawing.figure.findobj(Text) if text.get_text() == "205"
    ]
    assert len(drawn_cells) == 30 * 7
    assert len(section.listings[0].rows) == 30 * 7


def test_the_page_lists_disagreements_and_the_table(tmp_path):
    rows = [
        row(LIMIT, "gpus=2", status="oom"),
        row(LIMIT, "gpus=2", "mode=rehearse", peak=0.25),
        row(LIMIT, "gpus=4"),
        row(LIMIT, "gpus=4", "mode=rehearse", peak=0.15),
    ]
    page = write_report(read_all(write_store(tmp_path / "store", rows)), "store", tmp_path / "report").read_text()
    sentence = (
        "t5_tiny 1.18 M, FSDP2 full shard, 2 processes of 0.32 GiB: measured: batch 4 runs out of memory in backward; "
        "rehearsed: batch 4 fits (peak 0.250 GiB)."
    )
    assert sentence in page
    assert "2 with several kinds of evidence (measured, rehearsed): 1 of them disagree." in page
    assert "<summary>The frontier as a table: 0.32 GiB per process, fp32</summary>" in page
    assert page.count('<td class="text">disagree</td>') == 1


def test_unknown_peaks_do_not_break_the_figure():
    rows = [row(LIMIT, f"gpus={gpus}", peak_reserved_bytes=None, peak_allocated_bytes=None) for gpus in (1, 2)]
    assert all(math.isnan(answers[0].peak_bytes) for answers in frontier_cells(prepare(rows))["answers"])
    assert drawn(rows).drawings


@pytest.mark.slow
def test_the_frontier_is_measured_rehearsed_and_predicted_with_one_command(tmp_path):
    store = tmp_path / "store"
    asked = ["-m", "sweep=oom_frontier_cpu", "gpus=1,2", "model=t5_tiny", "strategy=ddp", f"store={store}"]
    done = run_command("bench.sweep", *asked)
    assert done.returncode == 0, done.stderr
    rows = read_all(store).records
    assert sorted((found["evidence"], found["world_size"]) for found in rows) == [
        (kind, ranks) for kind in ("measured", "predicted", "rehearsed") for ranks in (1, 2)
    ]
    cells = frontier_cells(prepare(rows))
    assert [len(answers) for answers in cells["answers"]] == [3, 3]
    assert (store / "report" / "index.html").read_text().count("all agree") == 1
