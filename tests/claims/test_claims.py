"""The claims of papers and notes: all that are asked for are there, and each verdict is what its rows say."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest

from bench.claims import large_runs
from bench.claims.__main__ import main
from bench.claims.claim import (
    CANNOT_TELL,
    DOES_NOT_HOLD,
    HOLDS,
    HOLDS_IN_PART,
    VERDICTS,
    Assessment,
    PaperClaim,
    RowQuery,
    assess_claim,
    count_sent_elements,
    read_evidence,
    select_rows,
)
from bench.claims.page import CLAIM_GROUPS, assess_all, list_claims, render_claims, render_summary, render_terminal
from bench.claims.tree_leaves import LEAF_CASES, TREE_LEAVES
from bench.hardware.speeds import MANY_GPUS_SHARE
from bench.prediction.prediction import DOES_NOT_FIT, FITS
from bench.records import Record
from bench.records.schema import EVIDENCE_KINDS
from tests.conftest import ROOT

CLAIMS = {claim.key: claim for claim in list_claims()}

EXPECTED_VERDICTS = {
    "zero_1_memory": HOLDS_IN_PART,
    "zero_2_memory": HOLDS,
    "zero_3_memory": HOLDS,
    "sixteen_bytes": HOLDS,
    "twenty_times_weights": DOES_NOT_HOLD,
    "zero_1_traffic": DOES_NOT_HOLD,
    "zero_2_traffic": HOLDS,
    "zero_3_traffic": HOLDS,
    "sharding_factor": HOLDS_IN_PART,
    "resharding": HOLDS,
    "small_all_gathers": HOLDS_IN_PART,
    "as_fast_as_ddp": HOLDS_IN_PART,
    "sixteen_bits": HOLDS_IN_PART,
    "scaling_loss": HOLDS_IN_PART,
    "backward_prefetch": HOLDS_IN_PART,
    "rate_limiter": HOLDS_IN_PART,
    "rate_limiter_cost": HOLDS_IN_PART,
    "gpt_175b_batch_1": HOLDS_IN_PART,
    "gpt_175b_batch_2": HOLDS_IN_PART,
    "ddp_out_of_memory": HOLDS,
    "allocation_retries": HOLDS_IN_PART,
    "offloading": HOLDS,
    "v100_of_80_gb": DOES_NOT_HOLD,
    "text_and_figures": HOLDS_IN_PART,
    "leaf_plain_training": HOLDS,
    "leaf_offload": HOLDS,
    "leaf_layer_larger_than_the_GPU": HOLDS,
    "leaf_DDP": HOLDS,
    "leaf_shard_within_the_node": DOES_NOT_HOLD,
    "leaf_pipeline_within_the_node": HOLDS,
    "leaf_tensor_parallelism": HOLDS,
    "leaf_too_few_GPUs": HOLDS,
    "leaf_DDP_across_nodes": HOLDS,
    "leaf_fewer_bytes_between_nodes": HOLDS,
    "leaf_shard_over_all_nodes": HOLDS,
    "leaf_keep_traffic_within_nodes": HOLDS,
}
"""What the committed rows say, of every claim that is asked for: other rows, other verdicts."""


def alter(claim: PaperClaim, change: Callable[[str, Record], None]) -> Assessment:
    """The assessment with rows changed: `change` is given the name of each query and a copy of each of its rows."""
    rows = {}
    for name, query in claim.needs.items():
        rows[name] = copy.deepcopy(select_rows(read_evidence(query.store), query.where))
        for row in rows[name]:
            change(name, row)
    return claim.assess(rows)


def test_every_claim_that_is_asked_for_exists() -> None:
    assert set(CLAIMS) == set(EXPECTED_VERDICTS)
    leaves = {key for key in CLAIMS if key.startswith("leaf_")}
    assert leaves == {f"leaf_{key.replace(' ', '_')}" for key in TREE_LEAVES}
    assert len(CLAIMS) == sum(map(len, CLAIM_GROUPS.values()))


def test_every_leaf_of_the_tree_has_a_case() -> None:
    assert [leaf.key for leaf in LEAF_CASES] == list(dict.fromkeys(leaf.key for leaf in LEAF_CASES))
    assert {leaf.key for leaf in LEAF_CASES} == set(TREE_LEAVES)


@pytest.mark.slow
def test_verdicts_are_those_of_the_committed_rows() -> None:
    assert {key: assessment.verdict for key, assessment in assess_all().items()} == EXPECTED_VERDICTS


@pytest.mark.parametrize("key", CLAIMS)
def test_a_claim_has_a_source_rows_and_evidence_of_their_kinds(key: str) -> None:
    claim = CLAIMS[key]
    assessment = assess_claim(claim)
    assert claim.source
    assert assessment.verdict in VERDICTS
    assert assessment.verdict != CANNOT_TELL, assessment.reason
    assert assessment.evidence
    assert assessment.numbers
    kinds = {
        row.get("evidence", "published")
        for query in claim.needs.values()
        for row in select_rows(read_evidence(query.store), query.where)
    }
    assert {statement.kind for statement in assessment.evidence} == kinds
    assert kinds <= set(EVIDENCE_KINDS)


@pytest.mark.parametrize("key", CLAIMS)
def test_without_rows_nothing_is_told(key: str) -> None:
    assessment = assess_claim(CLAIMS[key], lambda store: [])
    assert assessment.verdict == CANNOT_TELL
    assert next(iter(CLAIMS[key].needs.values())).store in assessment.reason


def set_speed(row: Record, tflops: float) -> None:
    row["hardware_tflops_per_gpu"] = tflops
    if "source" in row:
        row["source"]["value"] = str(tflops)


def plant_larger_states(name: str, row: Record) -> None:
    if name == "DeepSpeed, predicted":
        row["prediction"]["memory"]["parts_bytes"]["optimizer"] *= 1000


def plant_larger_peaks(name: str, row: Record) -> None:
    if name == "measured":
        row["peak_allocated_bytes"] *= 2


def plant_smaller_activations(name: str, row: Record) -> None:
    row["peak_allocated_bytes"] = 5 * 4 * row["parameters"]


def plant_no_broadcasts(name: str, row: Record) -> None:
    row["ranks"][0]["collectives"].pop("broadcast", None)


def plant_twice_as_much_gathered(name: str, row: Record) -> None:
    if name.startswith("FSDP1"):
        row["ranks"][0]["collectives"]["all_gather"]["elements"] *= 2


def plant_time_like_factor(name: str, row: Record) -> None:
    if name == "predicted":
        row["prediction"]["time"]["communication_s"] = float(row["sharding_factor"])


def plant_less_memory_if_kept(name: str, row: Record) -> None:
    if name.startswith("kept"):
        row["peak_allocated_bytes"] /= 10


def plant_equal_bandwidths(name: str, row: Record) -> None:
    row["value"] = "100"


def plant_slow_fsdp(name: str, row: Record) -> None:
    if row["strategy"] == "fsdp1" and row["hardware_tflops_per_gpu"] is not None:
        row["hardware_tflops_per_gpu"] /= 2


def plant_slow_sixteen_bits(name: str, row: Record) -> None:
    if name == "fp16 of others":
        set_speed(row, 0.1)
    elif name == "predicted" and row["precision"] == "bf16":
        set_speed(row, 1.0)


def plant_claimed_loss(name: str, row: Record) -> None:
    set_speed(row, 93.0 if row["world_size"] == 512 else 100.0)


def plant_claimed_gain(name: str, row: Record) -> None:
    if row["hardware_tflops_per_gpu"] is not None:
        set_speed(row, 118.0 if row["backward_prefetch"] == "pre" else 100.0)


def plant_fivefold_time(name: str, row: Record) -> None:
    row["step_time_median_s"] = 1.0 if row["limit_all_gathers"] else 5.0


def plant_free_limiter(name: str, row: Record) -> None:
    row["step_time_median_s"] = 1.0


def plant_claimed_tflops(name: str, row: Record) -> None:
    set_speed(row, {1: 173.5, 2: 187.0}[row["batch_size_per_gpu"]])


def plant_ddp_that_fits(name: str, row: Record) -> None:
    if row["strategy"] == "ddp":
        row["status"] = "ok"


def plant_no_retries(name: str, row: Record) -> None:
    if name == "predicted":
        row["prediction"]["time"]["retry_probability"] = 0.0
    else:
        set_speed(row, 180.0)


def plant_fast_offloading(name: str, row: Record) -> None:
    if row["cpu_offload"] and name == "predicted":
        row["step_time_median_s"] /= 100


def plant_v100(name: str, row: Record) -> None:
    row["source"]["gpu"] = "V100-80GB"


def plant_other_text(name: str, row: Record) -> None:
    if row["source"]["provenance"] == "text" and row["source"]["metric"] == "tflops_per_gpu":
        set_speed(row, 1.0)


def plant_the_opposite(name: str, row: Record) -> None:
    """What fits does not, and the other way round; the fastest is the slowest."""
    row["fit"] = {FITS: DOES_NOT_FIT, DOES_NOT_FIT: FITS}.get(row["fit"], FITS)
    row["status"] = "ok"
    row["tokens_per_second_per_gpu"] = 1e6 / (row.get("tokens_per_second_per_gpu") or 1.0)


def plant_equal_speeds(name: str, row: Record) -> None:
    row["fit"], row["tokens_per_second_per_gpu"] = FITS, 1000.0


PLANTS: dict[str, Callable[[str, Record], None]] = {
    "zero_1_memory": plant_larger_states,
    "zero_2_memory": plant_larger_states,
    "zero_3_memory": plant_larger_states,
    "sixteen_bytes": plant_larger_peaks,
    "twenty_times_weights": plant_smaller_activations,
    "zero_1_traffic": plant_no_broadcasts,
    "zero_2_traffic": plant_twice_as_much_gathered,
    "zero_3_traffic": plant_twice_as_much_gathered,
    "sharding_factor": plant_time_like_factor,
    "resharding": plant_less_memory_if_kept,
    "small_all_gathers": plant_equal_bandwidths,
    "as_fast_as_ddp": plant_slow_fsdp,
    "sixteen_bits": plant_slow_sixteen_bits,
    "scaling_loss": plant_claimed_loss,
    "backward_prefetch": plant_claimed_gain,
    "rate_limiter": plant_fivefold_time,
    "rate_limiter_cost": plant_free_limiter,
    "gpt_175b_batch_1": plant_claimed_tflops,
    "gpt_175b_batch_2": plant_claimed_tflops,
    "ddp_out_of_memory": plant_ddp_that_fits,
    "allocation_retries": plant_no_retries,
    "offloading": plant_fast_offloading,
    "v100_of_80_gb": plant_v100,
    "text_and_figures": plant_other_text,
    **{key: plant_the_opposite for key in CLAIMS if key.startswith("leaf_")},
    "leaf_shard_within_the_node": plant_equal_speeds,
}
"""By claim: a change of rows after which the verdict is another."""


@pytest.mark.parametrize("key", CLAIMS)
def test_other_rows_have_another_verdict(key: str) -> None:
    claim = CLAIMS[key]
    assert alter(claim, lambda name, row: None).verdict == assess_claim(claim).verdict
    assert alter(claim, PLANTS[key]).verdict != assess_claim(claim).verdict


def build_profiled_row(world_size: int, factor: int, **collectives: int) -> Record:
    counts = {name: {"calls": 1, "elements": elements} for name, elements in collectives.items()}
    return {
        "world_size": world_size,
        "sharding_factor": factor,
        "parameters": 800,
        "ranks": [{"rank": 0, "collectives": counts}],
    }


def test_sent_elements_are_those_of_the_papers_formulas() -> None:
    """Section 3.2 of the FSDP paper: 2 M (W - 1) / W of full replication, 3 M (W - 1) / W of full sharding."""
    replicated = build_profiled_row(8, 1, all_reduce=800)
    sharded = build_profiled_row(8, 8, all_gather=2 * 100, reduce_scatter=100)
    hybrid = build_profiled_row(8, 4, all_gather=2 * 200, reduce_scatter=200, all_reduce=200)
    assert count_sent_elements(replicated) == pytest.approx(2 * 7 / 8)
    assert count_sent_elements(sharded) == pytest.approx(3 * 7 / 8)
    assert count_sent_elements(hybrid) == pytest.approx(3 * 3 / 4 + 2 * (1 / 4) * (1 / 2))


def test_the_page_and_the_terminal_have_every_claim_once() -> None:
    assessments = assess_all()
    summary, details, terminal = render_summary(assessments), render_claims(assessments), render_terminal(assessments)
    for claim in CLAIMS.values():
        anchor = claim.key.replace("_", "-")
        assert summary.count(f"(#{anchor})") == 1
        assert details.count(f"({anchor})=") == 1
        assert terminal.count(claim.text) >= 1
    assert len(terminal.splitlines()) == len(CLAIMS)


def test_the_command_prints_the_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert all(claim.text in printed for claim in CLAIMS.values())


def test_a_query_takes_nested_values_and_several() -> None:
    rows = [{"a": {"b": 1}, "c": "x"}, {"a": {"b": 2}, "c": "y"}, {"c": "x"}]
    assert select_rows(rows, {"a.b": (1, 2), "c": "y"}) == rows[1:2]
    assert RowQuery("store", {"a.b": 1}).describe() == "store: a.b=1"


def test_the_papers_points_are_predicted_with_the_constant_of_the_accuracy_page() -> None:
    """That which is chosen there without the paper's rows, or, where no other is, that in use."""
    page = (ROOT / "results" / "predicted" / "ACCURACY.md").read_text(encoding="utf-8")
    chosen = re.search(r"\| fsdp_paper \|.*\| (?:(hardware\.[\w.]+)=([\d.]+)|-) \|\n", page)
    assert chosen is not None
    name, value = (chosen[1], float(chosen[2])) if chosen[1] else ("hardware.speeds.many_gpus_share", MANY_GPUS_SHARE)
    assert {f"config.{name}": value} == large_runs.LEFT_OUT
