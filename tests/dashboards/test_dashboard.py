"""The dashboard as the real library builds it, and as a server is given it; and who is told of a regression."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from bench import compare as compare_command
from bench import dashboard
from bench.dashboards.dashboard import build_comparison_run, send_alert
from bench.tracking.tracked_run import OOM_TABLE, build_tracked_run
from bench.tracking.wandb import WandbTracker
from tests.conftest import ROOT, run_command
from tests.fake_wandb import add_wandb_login, fake_wandb, remove_wandb_login
from tests.records_fixture import make_record, write_store
from tests.repeated_runs import draw_step_times, make_runs
from tests.wandb_files import read_offline_runs


@pytest.fixture(autouse=True)
def nobody(monkeypatch, tmp_path):
    remove_wandb_login(monkeypatch, tmp_path / "home")


@pytest.fixture(scope="module")
def specification(tmp_path_factory) -> dict[str, Any]:
    """What dry_run prints, of a command that finds no server."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        remove_wandb_login(monkeypatch, tmp_path_factory.mktemp("home"))
        monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:1")
        done = run_command("bench.dashboard", "dry_run=true", "tracker.entity=team", "baseline=v1.0")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    specification: dict[str, Any] = json.loads(done.stdout)
    return specification


def iterate_panels(specification: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every panel of workspace and report, under the title of its section."""
    for section in specification["workspace"]["spec"]["section"]["panelBankConfig"]["sections"]:
        yield from ((section["name"], panel) for panel in section["panels"])
    title = ""
    for block in specification["report"]["spec"]["blocks"]:
        if block["type"] == "heading":
            title = block["children"][0]["text"]
        elif block["type"] == "panel-grid":
            yield from ((title, panel) for panel in block["metadata"]["panelBankSectionConfig"]["panels"])


def find_runsets(specification: dict[str, Any], title: str) -> dict[str, dict[str, Any]]:
    """The run sets of one part of the report, by name."""
    blocks = specification["report"]["spec"]["blocks"]
    heading = next(n for n, block in enumerate(blocks) if block.get("children") == [{"text": title}])
    grid = next(block for block in blocks[heading:] if block["type"] == "panel-grid")
    return {runset["name"]: runset for runset in grid["metadata"]["runSets"]}


def list_conditions(runset: dict[str, Any]) -> list[tuple[str, str, Any]]:
    """What a run must be to be in a run set."""
    return [
        (condition["key"]["name"], condition["op"], condition["value"]) for condition in runset["filters"]["filters"]
    ]


@pytest.mark.slow
def test_workspace_and_report_answer_the_same_questions(specification):
    titles = [
        section["name"] for section in specification["workspace"]["spec"]["section"]["panelBankConfig"]["sections"]
    ]
    assert titles == ["Speed over commits", "Memory over commits", "Scaling", "Out of memory", "Against v1.0", "Steps"]
    assert list(dict.fromkeys(title for title, _ in iterate_panels(specification))) == titles
    assert specification["workspace"]["entity"] == "team"
    assert specification["workspace"]["project"] == specification["report"]["project"] == "fsdp-bench"


@pytest.mark.slow
def test_speed_and_memory_are_drawn_over_commits_for_each_configuration(specification):
    lines = [
        (title, panel["config"])
        for title, panel in iterate_panels(specification)
        if title.endswith("over commits") and panel["viewType"] == "Run History Line Plot"
    ]
    wanted = {"result/tflops_per_gpu", "result/peak_allocated_gib", "result/peak_reserved_gib"}
    assert {config["metrics"][0] for _, config in lines} == wanted
    for _, config in lines:
        assert config["xAxis"] == "result/started_unix_s"
        assert config["groupBy"] == "configuration.value"
    bars = [panel["config"] for title, panel in iterate_panels(specification) if panel["viewType"] == "Bar Chart"]
    assert {"tflops_per_gpu", "peak_allocated_bytes"} <= {
        config["metrics"][0] for config in bars if config.get("groupBy") == "commit.value"
    }


@pytest.mark.slow
def test_scaling_curves_join_world_sizes(specification):
    scaling_configs = [panel["config"] for title, panel in iterate_panels(specification) if title == "Scaling"]
    assert scaling_configs
    assert {config["xAxis"] for config in scaling_configs} == {"result/world_size"}
    assert {config["groupBy"] for config in scaling_configs} == {"scaling_series.value"}


@pytest.mark.slow
def test_the_oom_table_is_the_one_that_runs_send(specification):
    tables = [panel for title, panel in iterate_panels(specification) if title == "Out of memory"]
    assert [OOM_TABLE in json.dumps(panel) for panel in tables] == [True, True]
    (runset,) = find_runsets(specification, "Out of memory").values()
    assert ("status", "=", "oom") in list_conditions(runset)


@pytest.mark.slow
def test_the_baseline_is_beside_all_others(specification):
    sets = find_runsets(specification, "Against v1.0")
    assert ("tags", "IN", ["v1.0"]) in list_conditions(sets["v1.0"])
    assert ("tags", "NIN", ["v1.0"]) in list_conditions(sets["all others"])
    grouping = specification["workspace"]["spec"]["section"]["runSets"][0]["grouping"]
    assert [key["name"] for key in grouping] == ["configuration.value", "labels.value"]


@pytest.mark.slow
def test_kinds_of_evidence_are_never_mixed(specification):
    sets = [specification["workspace"]["spec"]["section"]["runSets"][0]]
    for title in dict.fromkeys(title for title, _ in iterate_panels(specification)):
        sets += find_runsets(specification, title).values()
    assert all(("jobType", "=", "measured") in list_conditions(runset) for runset in sets)


@pytest.mark.slow
def test_panels_show_what_runs_send(specification, tmp_path):
    """Every metric, column and key of a panel is one that a run has."""
    ran = build_tracked_run(make_record(losses=[1.0], flops={"model": 10**9}), tmp_path / "0.json")
    metrics = {name for point in ran.history for name in point}
    keys = {*ran.config, "labels"}
    for _, panel in iterate_panels(specification):
        config = panel["config"]
        for name in [*config.get("metrics", []), config.get("xAxis", ""), config.get("yAxis", "")]:
            bare = name.removeprefix("summary:")
            assert not bare or bare in metrics or bare in ran.summary, name
        if "groupBy" in config:
            assert config["groupBy"].removesuffix(".value") in keys
    columns = specification["workspace"]["spec"]["section"]["runSets"][0]["runFeed"]["columnOrder"]
    known_columns = {*ran.summary, "oom_phase"}
    assert all(column.removeprefix("summary:") in known_columns for column in columns if column.startswith("summary:"))


@pytest.mark.long
@pytest.mark.slow
def test_the_same_dashboard_is_updated_and_another_name_is_another(monkeypatch):
    with fake_wandb() as server:
        add_wandb_login(monkeypatch, server)
        first = run_command("bench.dashboard")
        assert first.returncode == 0, first.stderr
        assert first.stderr == ""
        views = {view["type"]: view for view in server.views.values()}
        assert views.keys() == {"project-view", "runs"}
        monkeypatch.delenv("WANDB_BASE_URL")
        again = run_command("bench.dashboard", "baseline=v2.0", f"tracker.base_url={server.url}")
        assert again.stdout == first.stdout
        assert len(server.views) == 2
        changed = {view["type"]: view for view in server.views.values()}
        for kind, view in views.items():
            assert changed[kind]["id"] == view["id"]
            assert changed[kind]["displayName"] == "FSDP against DDP"
            assert "Against v2.0" in changed[kind]["spec"]
            assert "Against baseline" in view["spec"]
        assert server.projects == ["fsdp-bench"]
        assert server.unknown_requests == []


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("login", [False, True])
def test_without_a_login_or_a_server_nothing_is_changed_and_it_is_said(login, monkeypatch):
    if login:
        add_wandb_login(monkeypatch, "http://127.0.0.1:1")
    done = run_command("bench.dashboard")
    assert (done.returncode, done.stdout) == (1, "")
    why = "http://127.0.0.1:1 cannot be reached" if login else "nobody is logged in"
    assert why in done.stderr
    assert "the dashboard is not changed" in done.stderr


# Alerts


@dataclass
class ComparedRow:
    name: str


@dataclass
class FakeComparison:
    """What bench.comparison says, as far as an alert asks."""

    verdict: str = "regression"
    sentence: str = "1 of 3 configurations is slower: 3.1 %."
    exit_code: int = 1
    worse: list[ComparedRow] = field(default_factory=lambda: [ComparedRow("t5_tiny ddp fp32 2 ranks")])

    def list_with_verdict(self, verdict: str) -> list[ComparedRow]:
        return self.worse if verdict == "regression" else []


def make_tracker() -> WandbTracker:
    return WandbTracker("wandb", "auto", None, None, None, None, [], 30.0)


@pytest.mark.slow
def test_a_regression_is_told_once_to_whoever_wants_to_be_told(monkeypatch, tmp_path, capsys):
    """By either command: the comparison is the same."""
    random = np.random.default_rng(1)
    base, candidate = str(tmp_path / "base"), str(tmp_path / "candidate")
    write_store(base, make_runs(draw_step_times(random, 5, 0.005)))
    write_store(candidate, make_runs(draw_step_times(random, 5, 0.005, slower=0.05), day="2026-06-01"))
    with fake_wandb() as server:
        add_wandb_login(monkeypatch, server)
        assert compare_command.main([base, candidate, "--alert"]) == 1
        assert dashboard.main(["alert", base, candidate]) == 1
        assert capsys.readouterr().err.count("wandb: 1 run at") == 2
        (alert,) = server.alerts
        assert alert["title"] == "Regression: candidate against base"
        assert "Regression. Of 1 configuration: 1 regression. Step time +5" in alert["text"]
        assert "t5_tiny" in alert["text"]
        assert alert["severity"] == "ERROR"
        (arrived,) = server.runs.values()
        assert arrived.summary["verdict"] == "regression"
        assert arrived.creation_variables["jobType"] == "comparison"
        assert arrived.exit_code == 0  # the comparison has not failed


@pytest.mark.slow
def test_an_alert_waits_offline_until_it_is_synchronised(tmp_path):
    send_alert(FakeComparison(), "base", str(tmp_path / "candidate"), [make_record()], make_tracker(), print)
    (run,) = read_offline_runs(tmp_path / "candidate" / ".tracking").values()
    assert [title for title, *_ in run.alerts] == ["Regression: candidate against base"]


def test_no_regression_alarms_nobody():
    quiet = build_comparison_run(FakeComparison("no change", "No change.", 0, []), "base", "candidate", ["a"])
    assert quiet.alert is None
    assert quiet.id == build_comparison_run(FakeComparison(), "base", "candidate", ["a"]).id
    assert quiet.id != build_comparison_run(FakeComparison(), "base", "candidate", ["b"]).id


def test_a_long_list_is_cut_and_so_is_a_title():
    many = FakeComparison(worse=[ComparedRow(f"configuration {n}") for n in range(30)])
    title, text = build_comparison_run(many, "base", "c" * 100, ["a"]).alert or ("", "")
    assert len(title) < 64
    assert "and 20 more" in text


# Bad input


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["baseline="], ("baseline=", "1 to 64 characters")),
        ([f"baseline={'x' * 65}"], ("baseline=xxx", "1 to 64 characters")),
        (["baseline=it's"], ("baseline=it's", "a tag")),
        (["name="], ("name=", "1 to 128 characters")),
        (["evidence=published"], ("evidence=published", "measured, rehearsed, predicted")),
        (["dry_run=yes"], ("dry_run=yes", "true, false")),
        (["project=ours"], ("project ", "tracker.project")),
        (["tracker.project=a/b"], ("tracker.project=a/b", "128 characters")),
        (["tracker.mode=onlin"], ("tracker.mode=onlin", "auto, online, offline")),
        (["tracker=none"], ("tracker=none", "choose mlflow, wandb")),
        (["workspace"], ("workspace ", "key=value")),
        (["alert"], ("alert BASE CANDIDATE",)),
        (["alert", "results/measured"], ("alert BASE CANDIDATE",)),
        (["alert", "nowhere", "results/measured"], ("no store at nowhere",)),
    ],
)
def test_what_is_mistyped_is_said_in_one_sentence(arguments, parts, capfd, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert dashboard.main(arguments) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    assert all(part in captured.err for part in parts), captured.err
