"""Predictions of published rows are no worse than the committed accuracy page says, and good enough."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

from bench.config.compose import compose_config
from bench.config.run_config import build_run_config
from bench.prediction.prediction import DOES_NOT_FIT
from bench.prediction.predictor import predict_runs
from bench.records.published import PUBLISHED_CSV, PublishedLine
from bench.reporting.drawing import style
from bench.validation import runs
from bench.validation.command import ACCURACY_PAGE, SUMMARY_FILE, list_published_lines
from bench.validation.figure import build_accuracy_figure
from bench.validation.gate import (
    CONFIGURATION_MARGIN,
    GROUP_MARGIN,
    compare_errors,
    list_wrong_verdicts,
    render_moved,
)
from bench.validation.page import build_accuracy_summary, build_configuration_key
from bench.validation.readings import read_line
from bench.validation.scores import Score, score_readings
from bench.validation.shapes import QualitativeComparison
from bench.validation.strategies import compare_strategies
from tests.commit_draws import draw, read_commit
from tests.conftest import needs
from tests.reporting.test_report import overlaps

SAMPLE_PER_GROUP = 1
"""Drawn anew with every commit."""


@pytest.fixture(scope="module")
def summary() -> dict[str, Any]:
    """What was committed."""
    return json.loads(ACCURACY_PAGE.with_name(SUMMARY_FILE).read_text(encoding="utf-8"))


MOST_IN_FP8, MOST_OTHERS = 6, 20
"""Configurations: the traces of those in FP8 take several times as long."""

LEAST_CONFIGURATIONS = 6
"""Fewer than these would say little of all."""


def draw_sample(summary: dict[str, Any], commit: str) -> set[str]:
    """Keys of configurations, of every group."""
    groups: dict[str, list[str]] = {}
    for key, entry in summary["configurations"].items():
        groups.setdefault(entry["group"], []).append(key)
    return {key for keys in groups.values() for key in draw(keys, commit, SAMPLE_PER_GROUP)}


def list_sample_lines(summary: dict[str, Any], *, in_fp8: bool, commit: str) -> list[PublishedLine]:
    """Of one configuration of every source, metric and device some: in FP8, of which some need torchao, or others."""
    keys = draw_sample(summary, commit)
    lines = [line for line in list_published_lines() if build_configuration_key(line) in keys]
    lines = [line for line in lines if bool(re.search("fp8|float8", line["precision"].lower())) == in_fp8]
    count = MOST_IN_FP8 if in_fp8 else MOST_OTHERS
    drawn = draw({build_configuration_key(line) for line in lines}, commit, count)
    return [line for line in lines if build_configuration_key(line) in drawn]


def score_lines(lines: list[PublishedLine]) -> list[Score]:
    """Predicted today."""
    return score_readings([read_line(number, line) for number, line in enumerate(lines, start=1)])[0]


@pytest.fixture(scope="module")
def sample_scores(summary: dict[str, Any]) -> list[Score]:
    return score_lines(list_sample_lines(summary, in_fp8=False, commit=read_commit()))


@pytest.mark.slow
def test_no_prediction_of_a_sample_is_worse_than_it_was(summary: dict[str, Any], sample_scores: list[Score]) -> None:
    check_errors(summary, sample_scores, list_sample_lines(summary, in_fp8=False, commit=read_commit()))


@needs("torchao")
@pytest.mark.slow
def test_no_prediction_of_a_sample_in_fp8_is_worse_than_it_was(summary: dict[str, Any]) -> None:
    lines = list_sample_lines(summary, in_fp8=True, commit=read_commit())
    check_errors(summary, score_lines(lines), lines)


def check_errors(summary: dict[str, Any], scores: list[Score], lines: list[PublishedLine]) -> None:
    today = build_accuracy_summary(scores, [])
    asked = {build_configuration_key(line) for line in lines}
    assert len(asked) >= LEAST_CONFIGURATIONS
    assert len(today["configurations"]) >= 0.9 * len(asked)
    moved = compare_errors(summary, today)
    assert not any(error.is_worse for error in moved), (
        f"errors that moved (python -m bench.predict validate writes them anew):\n{render_moved(moved)}"
    )


@pytest.mark.slow
def test_no_run_of_the_sample_that_ran_is_said_not_to_fit(sample_scores: list[Score]) -> None:
    assert not list_wrong_verdicts(sample_scores)


def test_every_commit_predicts_other_configurations_of_every_group(summary: dict[str, Any]) -> None:
    groups = {key: entry["group"] for key, entry in summary["configurations"].items()}
    drawn = [draw_sample(summary, f"{commit:040x}") for commit in range(40)]
    for keys in drawn:
        assert sorted(groups[key] for key in keys) == sorted(set(groups.values()))
    assert len({key for keys in drawn for key in keys}) > 0.5 * len(groups)
    assert draw_sample(summary, f"{0:040x}") == drawn[0]


def test_every_commit_draws_enough_configurations(summary: dict[str, Any]) -> None:
    for in_fp8 in (False, True):
        for commit in range(40):
            lines = list_sample_lines(summary, in_fp8=in_fp8, commit=f"{commit:040x}")
            asked = {build_configuration_key(line) for line in lines}
            assert len(asked) >= LEAST_CONFIGURATIONS
            assert len(asked) <= (MOST_IN_FP8 if in_fp8 else MOST_OTHERS)


def make_summary(**errors: float) -> dict[str, Any]:
    return {"configurations": {name: {"group": "group", "error": error} for name, error in errors.items()}}


def test_an_error_that_grows_by_more_than_the_margin_is_worse_and_in_the_table() -> None:
    before = make_summary(a=-0.02, b=0.05, c=0.01)
    (group, moved) = compare_errors(before, make_summary(a=0.02 + 2 * CONFIGURATION_MARGIN, b=0.05, c=0.01))
    assert (moved.name, moved.is_worse) == ("a", True)
    assert group.is_worse == (2 / 3 * CONFIGURATION_MARGIN > GROUP_MARGIN)
    assert "| a | -2.0% | +8.0% | worse |" in render_moved([group, moved])


def test_an_error_that_shrinks_is_not_worse_and_one_that_stays_is_not_shown() -> None:
    moved = compare_errors(make_summary(a=-0.10, b=0.05), make_summary(a=0.02, b=0.05))
    assert [error.is_worse for error in moved] == [False, False]
    assert compare_errors(make_summary(a=0.1), make_summary(a=0.1)) == []


def test_many_small_steps_for_the_worse_are_worse_together() -> None:
    before = {f"run{number}": 0.02 for number in range(10)}
    after = {name: error + 2 * GROUP_MARGIN for name, error in before.items()}
    assert [
        error.name for error in compare_errors(make_summary(**before), make_summary(**after)) if error.is_worse
    ] == ["group (mean of 10)"]


def test_the_page_has_every_target_beside_what_is_reached(summary: dict[str, Any]) -> None:
    page_text = ACCURACY_PAGE.read_text(encoding="utf-8")
    for name in ("speed, known devices", "a device kind left out", "allocator's peak), complete", "Where it misses"):
        assert name in page_text
    kinds = {name.partition(":")[0] for name in summary["left out"]}
    assert kinds == {"source", "device", "model family"}


@pytest.mark.slow
def test_ddp_fits_up_to_the_model_of_the_paper() -> None:
    settings = {"mode": "predict", "strategy": "ddp", "hardware": "a100_80gb", "gpus": "64", "gpus_per_node": "8"}
    settings |= {"sequence_length": "512", "activation_checkpointing": "full"}
    runs = [build_run_config(compose_config({**settings, "model": model})) for model in ("t5_2b", "t5_11b")]
    small, large = predict_runs(runs)
    assert small.memory.verdict != DOES_NOT_FIT
    assert large.memory.verdict == DOES_NOT_FIT


@pytest.fixture(scope="module")
def of_strategies() -> list[QualitativeComparison]:
    return compare_strategies(predict_runs)


@pytest.mark.slow
@pytest.mark.long
def test_zero_3_of_2021_is_as_fast_as_one_adapter_lets_it(of_strategies: list[QualitativeComparison]) -> None:
    (shape,) = [candidate for candidate in of_strategies if "Megatron's Table 2" in candidate.statement]
    published = [float(number) for number in shape.published.split(", ")]
    assert published == [144, 88, 44]
    all_adapters, one_adapter = (re.findall(r"\d+(?=[,;]|$)", part) for part in shape.predicted.split("; "))
    assert [float(number) / value for number, value in zip(one_adapter, published, strict=True)] == pytest.approx(
        [1] * 3, rel=0.26
    )
    assert float(all_adapters[2]) > 3 * published[2]  # with all of them it would have scaled


@pytest.mark.slow
def test_tensor_parallelism_of_a_machine_is_as_fast_as_megatrons(of_strategies: list[QualitativeComparison]) -> None:
    """At degrees of 4 and 8; of whole layers and of two ranks that share them the prediction is faster."""
    (shape,) = [candidate for candidate in of_strategies if "Megatron's Table 1" in candidate.statement]
    published, predicted = (
        [float(number) for number in text.split(", ")] for text in (shape.published, shape.predicted)
    )
    assert published == [137, 138, 142, 135]
    assert predicted[2:] == pytest.approx(published[2:], rel=0.06)
    assert predicted == sorted(predicted, reverse=True)


@pytest.mark.slow
def test_what_the_zero_paper_fits_is_predicted_to_fit(of_strategies: list[QualitativeComparison]) -> None:
    (shape,) = [candidate for candidate in of_strategies if "what fits" in candidate.statement]
    assert shape.predicted.startswith("fits, does not fit; ")
    assert not shape.predicted.endswith(DOES_NOT_FIT)


@pytest.mark.slow
def test_the_largest_models_of_the_zero_paper_are_about_as_large(of_strategies: list[QualitativeComparison]) -> None:
    """Without ZeRO and with ZeRO-1; the suite's ZeRO-1 in fp16, whose parameters and gradients are fp32, fits half. The
    paper tried a few sizes, so that somewhat larger ones may have fitted."""
    (shape,) = [candidate for candidate in of_strategies if "Table 2: the largest" in candidate.statement]
    published = [float(number) for number in re.findall(r"[\d.]+(?=B)", shape.published)]
    assert published == [1.3, 6.2]
    predicted = [float(number) for number in re.findall(r"[\d.]+(?=B)", shape.predicted)]
    surely, at_most = predicted[::2], predicted[1::2]
    middle = [(low * high) ** 0.5 for low, high in zip(surely, at_most, strict=True)]
    assert middle[:2] == pytest.approx(published, rel=0.35)
    assert all(low < high for low, high in zip(surely, at_most, strict=True))
    assert middle[2] < 0.5 * middle[1]


@pytest.mark.slow
def test_what_is_published_of_strategies_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PUBLISHED_CSV.read_text(encoding="utf-8")
    for old, new in (
        ("120.29 s/it", "100.00 s/it"),
        (",>40,", ",>41,"),
        ("1.4B,DDP,", "1.5B,DDP,"),
        ("20,yes,tflops_per_gpu,159", "20,yes,tflops_per_gpu,160"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    text = text.replace("max_model_parameters,6.2B", "max_model_parameters,6.3B")
    (tmp_path / "changed.csv").write_text(text, encoding="utf-8")
    monkeypatch.setattr(runs, "PUBLISHED_CSV", tmp_path / "changed.csv")
    one_prediction = predict_runs(
        [build_run_config(compose_config({"mode": "predict", "hardware": "a100_80gb", "precision": "bf16"}))]
    )
    published_texts = [shape.published for shape in compare_strategies(lambda configs: one_prediction * len(configs))]
    assert published_texts[2:] == [
        "100.00 / 137.34 s = 0.73; 72 - 37 = 35 GB",
        "1.3B, 6.3B",
        "DDP up to 1.5B; ZeRO-2 up to 13B",
        "more than 41",
        "160",
    ]


@pytest.mark.slow
def test_the_figure_has_every_source_and_no_text_over_another(sample_scores: list[Score]) -> None:
    with style.apply_report_style():
        figure = build_accuracy_figure(sample_scores)
    try:
        assert overlaps(figure) == []
        labels = {label.get_text().split()[0] for axes in figure.axes for label in axes.get_yticklabels()}
        assert labels == {score.reading.source for score in sample_scores if score.is_counted}
    finally:
        plt.close(figure)
