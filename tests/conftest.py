"""Shared by the tests: composing a configuration, and running the real command in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench import records
from bench.config.compose import compose_config
from bench.config.run_config import RunConfig, build_run_config
from bench.hardware.detect import DetectedDevice
from bench.launch.local import LocalLauncher
from bench.launch.ranks import StopSignal
from bench.launch.task import LaunchTask
from bench.planning.request import parse_sweep_request
from tests.commit_draws import is_drawn, read_commit
from tests.fakecuda.library import fake_cuda  # noqa: F401
from tests.slurm_cluster import idle_slurm, slurm  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]

FULL_SCALE = bool(os.environ.get("SCALE"))
"""Whether tests of how long many runs or rows take are of all of them: `make scale`."""

CPU = DetectedDevice("cpu", "test processor", 0)

SMALL_T5 = ("model=t5_tiny", "model.d_model=32", "model.d_ff=64", "model.d_kv=8", "model.vocabulary_size=128")
SMALL_GPT = ("model=gpt_tiny", "model.hidden_size=32", "model.num_layers=2", "model.vocabulary_size=128")
SMALL_LLAMA = (
    *("model=llama_tiny", "model.hidden_size=32", "model.intermediate_size=64", "model.num_kv_heads=4"),
    "model.vocabulary_size=128",
)
SMALL_MOE = ("model=moe_tiny", "model.hidden_size=32", "model.intermediate_size=32", "model.vocabulary_size=128")


def run_command(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m module arguments`` as a person would; only the test's own time limit (pytest-timeout) ends it."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def measure_cpu_time_s() -> float:
    """Processor time of this process and the commands it ran: others may use the processors as well."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure_parse_s() -> float:
    """Processor time of parsing ``conf/hardware/h200.yaml`` (7 KB) in pure Python, the least of five: what other work
    in Python is held against, since processors differ."""
    text = (ROOT / "conf" / "hardware" / "h200.yaml").read_text()
    taken = []
    for _ in range(5):
        started = time.process_time()
        for _ in range(5):
            yaml.safe_load(text)
        taken.append((time.process_time() - started) / 5)
    return min(taken)


@contextmanager
def limit_cpu_time(num_parses: float) -> Iterator[None]:
    """Fail where what is done in it, and the commands it runs, take more processor time than so many times
    `measure_parse_s`: seconds would fail on a slow or busy machine."""
    before_s = measure_cpu_time_s()
    yield
    taken_s, parse_s = measure_cpu_time_s() - before_s, measure_parse_s()
    assert 0 < taken_s < num_parses * parse_s, f"{taken_s:.1f} s, {taken_s / parse_s:.0f} times parsing a file"


def compose_run_config(*overrides: str) -> RunConfig:
    """One run configuration, composed as the commands compose it, on a machine without GPU."""
    (point,) = parse_sweep_request(["sweep=adhoc", *overrides], multirun=False, device=CPU).points
    return build_run_config(compose_config(point))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Playwright's, for the tests of a file."""
    from tests.browser import open_browser

    with open_browser() as opened:
        yield opened


@pytest.fixture
def execute(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Execute runs, each given by its overrides, in one real job of the launcher; their records in the same order."""

    def execute_runs(*runs: tuple[str, ...]) -> list[dict[str, Any]]:
        store = tmp_path / "store"
        configs = [compose_run_config(*overrides) for overrides in runs]
        launcher = LocalLauncher(compose_config({})["cluster"], CPU)
        for config in configs:
            launcher.check(config)
        with StopSignal() as stop:
            launcher.launch([LaunchTask(config) for config in configs], store, "test", stop, lambda event: None)
        latest_records = [records.read_latest_row(store, config.run_id) for config in configs]
        assert all(latest_records), "a run left no row"
        return [record for record in latest_records if record is not None]

    return execute_runs


def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis draws the same examples every time, or, for `make fuzz`, others every time: what failed then is tried
    again first. Without Hypothesis the tests that need it fail, and only these."""
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import HealthCheck, settings
        from hypothesis.database import DirectoryBasedExampleDatabase

        common: Any = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
        settings.register_profile("ci", derandomize=True, database=None, **common)
        example_database = DirectoryBasedExampleDatabase(ROOT / "build" / "hypothesis")
        settings.register_profile("fuzz", derandomize=False, database=example_database, **common)
        settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs an optional extra that is not installed, and most long tests where a share is asked for."""
    skip_tests_missing_extras(items)
    num_shares = int(os.environ.get("LONG_TESTS_ONE_IN", "1"))
    if num_shares > 1:
        left_out = draw_long_tests_to_leave_out(items, num_shares, read_commit())
        config.stash[LEFT_OUT_KEY] = Counter(item.nodeid.partition("::")[0] for item in left_out)
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process that shares tests with others says which long ones it left out; all leave out the same."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(session.config.stash.get(LEFT_OUT_KEY, {}))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LEFT_OUT_KEY] = Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Say in the last lines of all which tests did not run, and why: a skipped test has not passed."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    left_out = config.stash.get(LEFT_OUT_KEY, None) or Counter()
    if terminal and left_out:
        terminal.write_line(
            f"NOT RUN: {left_out.total()} long tests of {len(left_out)} files, which other commits draw and `make "
            "test-all` runs",
            yellow=True,
        )
    skipped = terminal.stats.get("skipped", []) if terminal else []
    for reason in sorted({report.longrepr[2] for report in skipped}):
        files = Counter(report.nodeid.partition("::")[0] for report in skipped if report.longrepr[2] == reason)
        skip_counts = ", ".join(f"{count} of {file}" for file, count in sorted(files.items()))
        terminal.write_line(f"NOT RUN: {skip_counts}: {reason.removeprefix('Skipped: ')}", yellow=True)


# --- Long tests, of which every commit runs others.

LEFT_OUT_KEY = pytest.StashKey[Counter[str]]()


def draw_long_tests_to_leave_out(items: Sequence[pytest.Item], num_shares: int, commit: str) -> list[pytest.Item]:
    """All long tests but one in `num_shares`."""
    return [item for item in items if item.get_closest_marker("long") and not is_drawn(item.nodeid, commit, num_shares)]


# --- Tests that need an optional extra of the package.


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip a test where one of its packages is missing; with ``REQUIRE_EXTRAS=1`` it runs all the same, and fails."""
    return pytest.mark.needs(*packages)


def skip_tests_missing_extras(items: list[pytest.Item]) -> None:
    """Have collected tests skipped that need a package which is not installed."""
    if os.environ.get("REQUIRE_EXTRAS") == "1":
        return
    for item in items:
        packages = [package for mark in item.iter_markers("needs") for package in mark.args]
        missing = [package for package in dict.fromkeys(packages) if importlib.util.find_spec(package) is None]
        if missing:
            item.add_marker(pytest.mark.skip(reason=f"not installed: {', '.join(missing)}"))
