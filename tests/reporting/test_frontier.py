"""The OOM frontier: which rows answer one question, what they say together, where they contradict each other."""

from __future__ import annotations

import math

import pytest
from matplotlib.text import Text

from bench.rank.row import build_configured_columns
from bench.records import read_latest_attempts
from bench.records.matching import build_fit_key, build_step_time_key, encode_config_key
from bench.reporting import write_report
from bench.reporting.drawing import style
from bench.reporting.figures import frontier, oom_map, throughput
from bench.reporting.tables.cells import build_fit_answer, describe_agreement, describe_disagreement, is_disagreement
from bench.reporting.tables.frontier import build_frontier_cells, drop_batch_search_tries, find_frontier_rows
from bench.reporting.tables.table import prepare_table
from tests.conftest import compose_run_config, run_command
from tests.records_fixture import make_default_sweep, write_store

GIB = 2**30
LIMIT = "hardware.memory_limit_gib=0.32"


def make_row(*overrides, status="ok", peak=0.25, **columns):
    """A row of the run that `overrides` describe: it fitted with so many GiB, or ran out of memory."""
    config = compose_run_config(*overrides)
    ended = {"peak_allocated_bytes": int(peak * GIB), "peak_reserved_bytes": int(peak * GIB)}
    ended |= {"step_time_median_s": 0.1, "tflops_per_gpu": 0.01}
    if status == "oom":
        ended = {"oom_phase": "backward", "oom_bytes": 2**20}
    if config.is_predicted:
        ended |= {"fit": "fits" if status == "ok" else "does not fit", "peak_reserved_bytes": int(peak * GIB)}
    times = {"started_at": "2026-05-04T10:00:00+00:00", "finished_at": "2026-05-04T10:00:20+00:00"}
    return {
        **build_configured_columns(config),
        "attempt": 0,
        "status": status,
        "sweep": "test",
        **times,
        **ended,
        **columns,
    }


def draw_section(rows, figure=frontier):
    table = prepare_table(rows)
    with style.apply_report_style():
        return figure.build_section(table, style.build_palette(table["variant_key"]))


def find_only_answers(rows):
    """The answers in the only cell that some rows come to."""
    cells = build_frontier_cells(prepare_table(rows))
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
    base_row, varied_row = make_row("gpus=2", LIMIT), make_row("gpus=2", LIMIT, *also)
    assert build_fit_key(base_row) == build_fit_key(varied_row) is not None
    assert build_step_time_key(base_row) == build_step_time_key(varied_row) is not None


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
    base_row, varied_row = make_row("gpus=2", LIMIT), make_row("gpus=2", LIMIT, *also)
    assert build_fit_key(base_row) != build_fit_key(varied_row)
    assert build_step_time_key(base_row) != build_step_time_key(varied_row)


def test_a_limit_on_a_larger_gpu_is_a_gpu_of_that_size_for_memory_but_not_for_time():
    limited = make_row("mode=predict", "hardware=h200", "hardware.memory_limit_gib=80", "precision=bf16")
    sold = make_row("mode=predict", "hardware=a100_80gb", "precision=bf16")
    whole = make_row("mode=predict", "hardware=h200", "precision=bf16")
    assert build_fit_key(limited) == build_fit_key(sold) != build_fit_key(whole)
    other = make_row("mode=predict", "hardware=h100_80gb", "hardware.memory_limit_gib=80", "precision=bf16")
    assert build_fit_key(limited) == build_fit_key(other)
    assert build_step_time_key(limited) != build_step_time_key(other)


def test_what_a_description_believes_of_speeds_is_no_part_of_the_question():
    sold = make_row("mode=predict", "hardware=a100_80gb", "precision=bf16")
    faster = make_row("mode=predict", "hardware=a100_80gb", "precision=bf16", "hardware.memory_bandwidth_gb_s=4000")
    assert sold["run_id"] != faster["run_id"]
    assert build_step_time_key(sold) == build_step_time_key(faster)


def test_rows_that_say_nothing_of_memory_answer_no_question():
    assert build_fit_key(make_row("gpus=2")) is None  # a CPU without a limit: nobody knows how much there is
    published = {**make_row("gpus=2", LIMIT), "evidence": "published", "config": None}
    assert build_fit_key(published) is None
    assert build_step_time_key(published) is None


def test_rows_from_before_a_knob_answer_what_rows_at_its_default_do():
    current_row = make_row("gpus=2", LIMIT)
    old = make_row("gpus=2", LIMIT)
    del old["config"]["optimizer"]["keep_gradients"]
    assert build_fit_key(old) == build_fit_key(current_row)


def test_identity_leaves_out_what_it_is_told_to():
    four, eight = (build_fit_key(make_row(LIMIT, f"batch_size_per_gpu={size}")) for size in (4, 8))
    assert four is not None
    assert eight is not None
    assert encode_config_key(four) != encode_config_key(eight)
    assert encode_config_key(four, "batch_size_per_gpu") == encode_config_key(eight, "batch_size_per_gpu")


# What the rows of one kind of evidence say


def make_answer(evidence="measured", **statuses):
    """An answer from batch sizes and what became of them: ``b4="ok"``, ``b5="oom"``, ``b6="close"``."""
    rows = []
    for name, status in statuses.items():
        fit_columns = {"fit": "too close to call"} if status == "close" else {}
        overrides = (LIMIT, f"batch_size_per_gpu={name[1:]}")
        rows.append(
            make_row(*overrides, status="oom" if status == "oom" else "ok", peak=int(name[1:]) / 100, **fit_columns)
        )
    return build_fit_answer(evidence, prepare_table(rows).to_dict("records"))


@pytest.mark.parametrize(
    ("statuses", "batch", "outcome"),
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
def test_batches_of_one_configuration_come_to_the_largest_that_fits(statuses, batch, outcome):
    result = make_answer(**statuses)
    assert (result.batch_label if outcome != "some repeats fit" else batch, result.outcome) == (batch, outcome)


def test_an_answer_in_words_has_its_numbers():
    words = make_answer(b1="ok", b4="ok", b5="oom").description
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
    a, b = make_answer("measured", **first), make_answer("predicted", **second)
    assert is_disagreement(a, b) == is_disagreement(b, a) == apart
    assert bool(describe_disagreement([a, b])) == apart


def test_a_disagreement_names_those_who_disagree_and_their_numbers():
    measured, rehearsed = make_answer("measured", b4="oom"), make_answer("rehearsed", b4="ok")
    text = describe_disagreement([measured, rehearsed, make_answer("predicted", b4="close")])
    assert text == "measured: batch 4 runs out of memory in backward; rehearsed: batch 4 fits (peak 41.0 MiB)"
    assert describe_agreement([[measured, rehearsed], [measured]]).startswith("1 with several kinds of evidence")
    assert describe_agreement([[measured, rehearsed]]).endswith("1 of them disagree.")
    assert describe_agreement([[rehearsed, rehearsed]]).endswith("all agree.")


# Which cells there are


@pytest.mark.slow
def test_kinds_of_evidence_on_different_hardware_share_a_cell():
    overrides = ("model=t5_2b", "gpus=8", "precision=bf16", "batch_size_per_gpu=8")
    rows = [
        make_row("mode=rehearse", "hardware=h200", "hardware.memory_limit_gib=80", *overrides, peak=60),
        make_row("hardware=a100_80gb", *overrides, peak=61),
        make_row("mode=predict", "hardware=a100_80gb", *overrides, status="oom", peak=90),
    ]
    answers = find_only_answers(rows)
    assert [kind_answer.evidence for kind_answer in answers] == ["measured", "rehearsed", "predicted"]
    assert "needs 90.0 GiB" in describe_disagreement(answers)
    (drawing,) = draw_section(rows).drawings
    assert len(drawing.notes) == 1
    assert "t5_2b" in drawing.notes[0]


def test_settings_that_differ_are_told_apart_and_models_ordered_by_size():
    rows = [
        make_row(
            "mode=predict", "hardware=a100_80gb", f"model={model}", f"gpus={gpus}", f"activation_checkpointing={how}"
        )
        for model in ("t5_2b", "t5_tiny")
        for gpus in (8, 64)
        for how in ("none", "full")
    ]
    cells = build_frontier_cells(prepare_table(rows))
    assert list(cells["heading"].unique()) == [f"FSDP2 full shard · checkpointing {how}" for how in ("full", "none")]
    assert list(cells["lane"].unique()) == ["t5_tiny 1.18 M", "t5_2b 2.28 B"]
    assert cells["shared"].unique().tolist() == ["batch 4 × 128"]
    assert len(cells) == 8


def test_knobs_of_a_strategy_and_shapes_of_one_model_are_told_apart():
    rows = [
        make_row(LIMIT, "gpus=2", f"model.d_ff={width}", f"strategy.backward_prefetch={ahead}", mode)
        for width in (64, 128)
        for ahead in ("true", "false")
        for mode in ("mode=measure", "mode=rehearse")
    ]
    cells = build_frontier_cells(prepare_table(rows))
    assert len(cells) == len(cells.drop_duplicates(["heading", "lane"])) == 4
    assert any(heading.endswith("backward_prefetch=false") for heading in cells["heading"])
    assert any("d_ff=64" in lane for lane in cells["lane"])


def test_one_rank_begins_the_line_of_what_shards_fully():
    rows = [make_row(LIMIT, f"strategy={name}", f"gpus={gpus}") for name in ("fsdp", "fsdp1") for gpus in (1, 2)]
    assert set(build_frontier_cells(prepare_table(rows))["heading"]) == {"FSDP2 full shard", "FSDP1 full shard"}


@pytest.mark.slow
def test_every_run_is_on_the_frontier_or_in_the_oom_map():
    rows = [*make_default_sweep(("fp32",)), make_row(LIMIT, "gpus=2"), make_row(LIMIT, "gpus=2", "mode=rehearse")]
    table = prepare_table(rows)
    shown = find_frontier_rows(table)
    assert shown.sum() == 2
    cells = oom_map.select(table[~shown])
    assert (cells["outcome"] != "not run").sum() == len(rows) - 2
    assert draw_section(rows[-2:], oom_map).notice
    assert not draw_section(rows[:1]).drawings
    assert draw_section(rows[:1]).notice


def test_of_a_search_the_other_figures_show_the_end():
    sizes = {1: "ok", 2: "ok", 9: "ok", 10: "oom", 16: "oom"}
    search = [make_row(LIMIT, f"batch_size_per_gpu={size}", status=status) for size, status in sizes.items()]
    grid = [make_row(LIMIT, "gpus=2", f"batch_size_per_gpu={size}") for size in (1, 2, 4)]
    kept_rows = drop_batch_search_tries(prepare_table([*search, *grid]))
    assert list(kept_rows["batch_size_per_gpu"]) == [9, 1, 2, 4]
    assert len(throughput.select(kept_rows)) == 4
    assert build_frontier_cells(prepare_table(search))["answers"][0][0].batch_label == "9"


# What is drawn


@pytest.mark.slow
def test_the_largest_frontier_is_paginated_and_every_cell_is_drawn_once():
    models = [("t5_tiny", f"model.num_encoder_layers={layers}") for layers in range(1, 31)]
    ranks = [8, 16, 32, 64, 128, 256, 512]
    rows = [
        make_row("mode=predict", "hardware=a100_80gb", f"model={model}", f"gpus={gpus}", layers, peak=0.2)
        for model, layers in models
        for gpus in ranks
    ]
    section = draw_section(rows)
    assert len(section.drawings) > 1
    assert all(drawing.figure.get_figheight() < 1.3 * style.MAX_FIGURE_HEIGHT_IN for drawing in section.drawings)
    drawn_cells = [
        text for drawing in section.drawings for text in drawing.figure.findobj(Text) if text.get_text() == "205"
    ]
    assert len(drawn_cells) == 30 * 7
    assert len(section.tables[0].rows) == 30 * 7


@pytest.mark.slow
def test_the_page_lists_disagreements_and_the_table(tmp_path):
    rows = [
        make_row(LIMIT, "gpus=2", status="oom"),
        make_row(LIMIT, "gpus=2", "mode=rehearse", peak=0.25),
        make_row(LIMIT, "gpus=4"),
        make_row(LIMIT, "gpus=4", "mode=rehearse", peak=0.15),
    ]
    page = write_report(
        read_latest_attempts(write_store(tmp_path / "store", rows)), "store", tmp_path / "report"
    ).read_text()
    sentence = (
        "t5_tiny 1.18 M, FSDP2 full shard, 2 processes of 0.32 GiB: measured: batch 4 runs out of memory in backward; "
        "rehearsed: batch 4 fits (peak 0.250 GiB)."
    )
    assert sentence in page
    assert "2 with several kinds of evidence (measured, rehearsed): 1 of them disagree." in page
    assert "<summary>The frontier as a table: 0.32 GiB per process, fp32</summary>" in page
    assert page.count('<td class="text">disagree</td>') == 1


def test_unknown_peaks_do_not_break_the_figure():
    rows = [make_row(LIMIT, f"gpus={gpus}", peak_reserved_bytes=None, peak_allocated_bytes=None) for gpus in (1, 2)]
    assert all(math.isnan(answers[0].peak_bytes) for answers in build_frontier_cells(prepare_table(rows))["answers"])
    assert draw_section(rows).drawings


@pytest.mark.long
@pytest.mark.slow
def test_the_frontier_is_measured_rehearsed_and_predicted_with_one_command(tmp_path):
    store = tmp_path / "store"
    arguments = ["-m", "sweep=oom_frontier_cpu", "gpus=1,2", "model=t5_tiny", "strategy=ddp", f"store={store}"]
    done = run_command("bench.sweep", *arguments)
    assert done.returncode == 0, done.stderr
    rows = read_latest_attempts(store).records
    assert sorted((row["evidence"], row["world_size"]) for row in rows) == [
        (kind, ranks) for kind in ("measured", "predicted", "rehearsed") for ranks in (1, 2)
    ]
    cells = build_frontier_cells(prepare_table(rows))
    assert [len(answers) for answers in cells["answers"]] == [3, 3]
    assert (store / "report" / "index.html").read_text().count("all agree") == 1
