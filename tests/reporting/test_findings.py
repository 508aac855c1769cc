"""The sentences that a report begins with: what they say follows from the rows, and each leads to the runs it is of."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench.records import StoreContents
from bench.reporting import write_report
from bench.reporting.findings import find_topics
from bench.reporting.findings.finding import MAX_FINDINGS_PER_TOPIC, FindingTopic, join_words
from bench.reporting.findings.news import find_news, list_reported_runs, read_reported_runs, write_reported_runs
from bench.reporting.tables.table import prepare_table
from tests.records_fixture import GIB, make_record
from tests.reporting.test_report import CUDA

FULL = {"strategy": "fsdp", "sharding_factor": 4}
FOUR = {"world_size": 4}


def find(rows, title: str, last_runs=None) -> FindingTopic:
    table = prepare_table(rows)
    topics = {topic.title: topic for topic in find_topics(table, table, last_runs)}
    assert title in topics, list(topics)
    return topics[title]


def find_text(rows, title: str) -> str:
    return " ".join(finding.text for finding in find(rows, title).findings)


def titles(rows) -> set[str]:
    table = prepare_table(rows)
    return {topic.title for topic in find_topics(table, table)}


def links(*rows) -> set[str]:
    return {f"run-{row['run_id']}" for row in rows}


def test_the_fastest_and_the_leanest_have_their_numbers_and_their_runs():
    ddp = make_record(**FOUR, tflops_per_gpu=3.0, peak_allocated_bytes=4 * GIB)
    full = make_record(**FOUR, **FULL, tflops_per_gpu=2.0, peak_allocated_bytes=GIB)
    other = make_record(model="gpt_tiny", **FOUR, tflops_per_gpu=9.0)
    fastest, leanest = (find([ddp, full, other], title).findings[0] for title in ("Fastest", "Leanest"))
    assert fastest.text.startswith("DDP (measured, CPU")
    assert "3.00 TFLOP/s per process, 1.50 times FSDP2 full shard" in fastest.text
    assert leanest.text.startswith("FSDP2 full shard")
    assert "1.00 GiB allocated at the peak, 75 % less than DDP (4.00 GiB)" in leanest.text
    assert set(fastest.run_links) == set(leanest.run_links) == links(ddp, full)


def test_who_wins_most_comparisons_is_named_and_how_often():
    rows = []
    for batch, (first, second) in {1: (3.0, 2.0), 2: (3.0, 2.0), 4: (1.0, 2.0)}.items():
        rows.append(make_record(**FOUR, batch_size_per_gpu=batch, tflops_per_gpu=first))
        rows.append(make_record(**FOUR, **FULL, batch_size_per_gpu=batch, tflops_per_gpu=second))
    assert "DDP (measured, CPU · AMD EPYC 9554 64-Core Processor) in 2 of 3 comparisons" in find_text(rows, "Fastest")


def test_leads_that_do_not_settle_anything_are_called_so():
    repeats = [make_record(**FOUR, repeat=n, tflops_per_gpu=value) for n, value in enumerate((3.0, 2.0))]
    rows = [*repeats, make_record(**FOUR, **FULL, tflops_per_gpu=2.4)]
    assert "their repeats overlap: not told apart" in find_text(rows, "Fastest")
    interval = {"step_time_median_s": 1.0, "step_time_ci_low_s": 0.87, "step_time_ci_high_s": 1.2}
    predicted = [
        make_record(**FOUR, **CUDA, evidence="predicted", tflops_per_gpu=110.0, **interval),
        make_record(**FOUR, **FULL, **CUDA, evidence="predicted", tflops_per_gpu=100.0, **interval),
    ]
    assert "less than the prediction's interval, 20 %" in find_text(predicted, "Fastest")
    predicted[0]["tflops_per_gpu"] = 150.0
    assert "interval" not in find_text(predicted, "Fastest")


def test_what_is_no_comparison_of_speed_is_left_out():
    """Rehearsals, degraded times, adapters against whole models, places that differ."""
    ddp = make_record(**FOUR)
    for other in (
        make_record(**FOUR, **FULL, evidence="rehearsed"),
        make_record(**FOUR, **FULL, degraded=True),
        make_record(**FOUR, effective_strategy="ddp/lora", tflops_per_gpu=99.0),
        make_record(**FOUR, **FULL, **CUDA),
        make_record(**FOUR, **FULL, batch_size_per_gpu=8),
    ):
        assert "Fastest" not in titles([ddp, other]), other
    assert "Fastest" in titles([ddp, make_record(**FOUR, **FULL)])


OOM = {"status": "oom", "memory_limit_bytes": GIB // 2, "oom_phase": "forward"}


def test_what_ran_out_of_memory_and_which_strategy_saves_it():
    lost = make_record(**FOUR, **OOM)
    saved = make_record(**FOUR, **FULL, memory_limit_bytes=GIB // 2, peak_allocated_bytes=GIB // 4)
    topic = find([lost, saved], "Out of memory, and what fits instead")
    (finding,) = topic.findings
    assert finding.text.startswith("DDP ran out of memory: t5_tiny")
    assert "under 0.5 GiB" in finding.text
    assert finding.text.endswith("FSDP2 full shard (0.250 GiB) fits.")
    assert set(finding.run_links) == links(lost, saved)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_size_per_gpu": 1}, "batch 1 (DDP"),
        ({"activation_checkpointing": "full"}, "activation checkpointing full (DDP"),
        ({"world_size": 8, "strategy": "fsdp", "sharding_factor": 8}, "8 ranks (FSDP2 full shard"),
        ({"precision": "bf16"}, "bf16 (DDP"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_where_no_strategy_fits_what_else_does_is_named(change, words):
    lost = [make_record(**FOUR, **OOM), make_record(**FOUR, **FULL, **OOM)]
    saved = make_record(**{**FOUR, "memory_limit_bytes": GIB // 2, **change})
    text = find_text([*lost, saved], "Out of memory, and what fits instead")
    assert "No strategy that was tried there fits" in text
    assert words in text
    twice = make_record(**{**FOUR, "memory_limit_bytes": GIB // 2, **change, "sequence_length": 64})
    assert "Nothing that was tried with this model fits" in find_text(
        [*lost, twice], "Out of memory, and what fits instead"
    )


def test_the_sharding_factor_is_said_in_memory_speed_and_communication():
    rows = [
        make_record(
            strategy="fsdp", sharding_factor=factor, **FOUR, peak_reserved_bytes=memory * GIB, tflops_per_gpu=speed,
            exposed_communication=exposed,
        )
        for factor, memory, speed, exposed in ((1, 8, 4.0, 0.01), (2, 4, 3.5, 0.1), (4, 2, 3.0, 0.2))
    ]  # fmt: skip
    (finding,) = find(rows, "What the sharding factor gives and costs").findings
    assert "FSDP2 from F = 1 to F = 4" in finding.text
    assert "8.00 GiB to 2.00 GiB per process (−75 %)" in finding.text
    assert "from 4.00 to 3.00 TFLOP/s (−25 %)" in finding.text
    assert "exposed communication from 1.0 to 20 % of the step" in finding.text
    assert set(finding.run_links) == links(*rows)
    (hurts,) = find(rows, "Where communication hurts").findings
    assert hurts.text.startswith("20 % of the step of FSDP2 full shard")
    assert "of which 1 communicate" in hurts.text
    assert set(hurts.run_links) == links(rows[2])


def test_without_a_share_the_loss_from_few_to_many_ranks_is_said():
    rows = [make_record(world_size=size, tflops_per_gpu=speed) for size, speed in ((1, 4.0), (2, 3.0), (4, 1.0))]
    (finding,) = find(rows, "Where communication hurts").findings
    assert "loses 75 % of its speed from 1 to 4 ranks (4.00 to 1.00 TFLOP/s per process)" in finding.text
    assert "functional evidence" in finding.text
    assert set(finding.run_links) == links(rows[0], rows[2])
    rows[2]["tflops_per_gpu"] = 5.0
    rows[1]["tflops_per_gpu"] = 5.0
    assert "Where communication hurts" not in titles(rows)


def test_estimates_that_are_off_are_said_with_the_worst_of_them():
    measured = make_record(**FOUR, hardware_tflops_per_gpu=2.0, peak_allocated_bytes=GIB)
    predicted = make_record(**FOUR, hardware_tflops_per_gpu=3.0, peak_allocated_bytes=GIB, evidence="predicted")
    predicted |= {name: measured[name] for name in ("config", "gpu_name", "hosts")}
    topic = find([measured, predicted], "Where estimates and reality differ")
    assert "Predicted speed is 50 % off what was measured on average" in topic.findings[0].text
    assert "at worst +50 %" in topic.findings[0].text
    assert set(topic.findings[0].run_links) == links(measured, predicted)
    assert "The rest agrees better: 1 pair" in topic.findings[1].text


def test_contradictions_about_what_fits_are_said_first():
    measured = make_record(**FOUR, **OOM)
    predicted = {
        **make_record(**FOUR, memory_limit_bytes=GIB // 2, evidence="predicted"),
        **{name: measured[name] for name in ("config", "gpu_name", "hosts")},
    }
    first = find([measured, predicted], "Where estimates and reality differ").findings[0]
    assert "contradict each other on whether 1 of 1 configuration fit" in first.text
    assert set(first.run_links) == links(measured, predicted)


def test_what_is_new_since_the_last_report(tmp_path: Path):
    old, changed, gone = make_record(), make_record(status="error", world_size=8), make_record(seed=9)
    first = prepare_table([old, changed, gone])
    assert "first report" in find_news(first, None)[0].text
    write_reported_runs(tmp_path, list_reported_runs(first))
    last_runs = read_reported_runs(tmp_path)
    assert [news.text.partition(" since")[0] for news in find_news(first, last_runs)] == ["Nothing is new"]
    new = make_record(model="gpt_tiny", finished_at="2026-06-01T10:00:00+00:00")
    news = find_news(prepare_table([old, {**changed, "status": "ok"}, new]), last_runs)
    assert [set(one.run_links) for one in news] == [links(new), links(changed), set()]
    assert news[0].text.startswith("1 new run since the last report (3 runs, the newest of 2026-05-04 10:00 UTC): 1 ok")
    assert "1 from error to ok" in news[1].text
    assert "1 run of the last report" in news[2].text
    (tmp_path / ".reported-runs").write_text("[torn")
    assert read_reported_runs(tmp_path) is None


@pytest.mark.slow
def test_a_page_begins_with_findings_and_says_what_is_new(tmp_path: Path):
    rows = [make_record(**FOUR), make_record(**FOUR, **FULL)]
    for shown, words in ((rows[:1], "first report"), (rows, "1 new run since"), (rows, "Nothing is new since")):
        html = write_report(StoreContents(shown), "a store", tmp_path, interactive=False, max_figures=0).read_text()
        assert words in html
    assert html.index('id="findings"') < html.index('id="summary"')
    selected = re.findall(r'data-runs="([^"]+)"', html)
    assert {tuple(sorted(text.split(","))) for text in selected} >= {tuple(sorted(row["run_id"] for row in rows))}
    assert set(json.loads((tmp_path / ".reported-runs").read_text())) == links(*rows)


def test_a_topic_is_short_and_says_what_it_leaves_out():
    rows = [make_record(**FOUR, **OOM, model=f"model_{number}", parameters=number) for number in range(9)]
    topic = find(rows, "Out of memory, and what fits instead")
    assert len(topic.findings) == MAX_FINDINGS_PER_TOPIC
    assert topic.more_note.startswith(f"{9 - MAX_FINDINGS_PER_TOPIC} more")
    assert "model_8" in topic.findings[0].text, "the largest model first"


def test_names_are_listed_as_in_a_sentence():
    assert [join_words(list("abcdef"[:count])) for count in (1, 2, 4, 6)] == [
        "a", "a and b", "a, b, c and d", "a, b, c and 3 more",
    ]  # fmt: skip
