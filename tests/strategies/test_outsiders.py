"""A strategy and a model family of outside packages: installed, they run, are rehearsed, predicted, advised, reported.

They do so under their own names, and no test of something else knows of them.
"""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import records
from bench.config.compose import compose_config
from bench.config.run_config import RunConfig, build_run_config
from bench.core import plugins, presentation
from bench.core.presentation import read_presentations
from bench.rank.engine import build_engine, build_micro_batches
from bench.records import Record
from bench.reporting.drawing import style
from tests.conftest import ROOT
from tests.records_fixture import make_record

SOURCES = Path(__file__).parents[1] / "outsiders"

LABEL, COLOUR = "Local SGD", "#117733"

RUN = ("gpus=2", "precision=fp32", "hardware=cpu", "sequence_length=32", "batch_size_per_gpu=2", "check=false")

PERIOD, START = 3, 2

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that both packages are installed in, as a user would with pip; nothing is fetched."""
    folder = tmp_path_factory.mktemp("installed")
    sources = [shutil.copytree(source, folder / "sources" / source.name) for source in SOURCES.iterdir()]
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    command = [sys.executable, *install, "--target", str(folder / "site"), *map(str, sources)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return folder / "site"


def run_python(site: Path | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python process with the packages, or without."""
    path = os.pathsep.join(str(folder) for folder in (ROOT, site) if folder is not None)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def run_command(site: Path | None, module: str, *arguments: str) -> str:
    """What a command writes, which must end well."""
    done = run_python(site, "-m", module, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def store(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both models with both strategies, as the three kinds of evidence."""
    store = tmp_path_factory.mktemp("outsiders") / "store"
    axes = ("model=gpt_tiny,neox_tiny", "mode=measure,rehearse,predict", "measurement.steps=7", f"store={store}")
    knobs = (f"strategy.period={PERIOD}", f"strategy.start_local_step={START}")
    for strategy in (("strategy=local_sgd", *knobs), ("strategy=ddp",)):
        run_command(site, "bench.sweep", "-m", *strategy, *axes, *RUN, "report=false")
    return store


@pytest.fixture(scope="module")
def rows(store: Path) -> dict[tuple[str, str, str], Record]:
    """By model, strategy and evidence."""
    latest = records.read_latest_attempts(store).records
    return {(row["model"], row["strategy"], row["evidence"]): row for row in latest}


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The packages are there for this process as well."""
    caches: tuple[Any, ...] = (plugins.list_entry_points, plugins.list_installed_conf_folders, read_presentations)
    monkeypatch.syspath_prepend(str(site))
    caches += (importlib.import_module("bench.config.groups").list_config_groups,)
    caches += (importlib.import_module("bench.config.hydra_calls").compose_choices,)
    for cache in caches:
        cache.cache_clear()
    yield
    monkeypatch.undo()
    for cache in caches:
        cache.cache_clear()


@pytest.mark.long
def test_all_runs_are_there(rows: dict[tuple[str, str, str], Record]) -> None:
    assert len(rows) == 2 * 2 * 3
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert {row["effective_strategy"] for row in rows.values()} == {"local_sgd", "ddp"}
    assert {row["family"] for row in rows.values()} == {"gpt", "neox"}


@pytest.mark.long
@pytest.mark.parametrize("model", ["gpt_tiny", "neox_tiny"])
@pytest.mark.parametrize("strategy", ["local_sgd", "ddp"])
def test_memory_is_as_rehearsed_and_as_predicted(
    model: str, strategy: str, rows: dict[tuple[str, str, str], Record]
) -> None:
    measured, rehearsed, predicted = (
        rows[model, strategy, evidence]["peak_allocated_bytes"] for evidence in ("measured", "rehearsed", "predicted")
    )
    assert rehearsed == pytest.approx(measured, abs=1024)
    assert predicted == pytest.approx(measured, rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("model", ["gpt_tiny", "neox_tiny"])
def test_averaging_is_part_of_the_predicted_peaks(model: str, rows: dict[tuple[str, str, str], Record]) -> None:
    """A buffer of all parameters, beside them, in one step of three: where the optimizer steps."""
    averaging, plain = (rows[model, strategy, "predicted"] for strategy in ("local_sgd", "ddp"))
    peaks = [row["prediction"]["memory"]["phase_peaks_bytes"] for row in (averaging, plain)]
    assert peaks[0]["optimizer"] - peaks[1]["optimizer"] == pytest.approx(4 * averaging["parameters"], rel=0.01)
    assert peaks[0]["forward"] == peaks[1]["forward"]


def train_by_hand(config: RunConfig, num_steps: int) -> list[float]:
    """Two ranks in one process: their mean loss in each step. Gradients are averaged at first, parameters later."""
    single = build_run_config(compose_config({"strategy": "single", "model": "gpt_tiny", "hardware": "cpu"})).strategy
    engines = [
        build_engine(config.model, single, config.precision, config.optimizer, device=torch.device("cpu"))
        for _ in range(2)
    ]
    batches = [
        build_micro_batches(
            config.model, batch_size=2, sequence_length=32, device=torch.device("cpu"), share_index=rank, num_shares=2
        )[0]
        for rank in range(2)
    ]
    parameters = list(zip(*(engine.module.parameters() for engine in engines), strict=True))
    losses = []
    for step in range(num_steps):
        step_losses = [
            engine.loss(engine.module(**batch.inputs)["logits"], batch.labels)
            for engine, batch in zip(engines, batches, strict=True)
        ]
        losses.append(statistics.fmean(loss.item() for loss in step_losses))
        for loss in step_losses:
            loss.backward()
        if step < START:
            for copies in parameters:
                mean = torch.stack([parameter.grad for parameter in copies if parameter.grad is not None]).mean(0)
                for parameter in copies:
                    parameter.grad = mean.clone()
        for engine in engines:
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        if step >= START and (step - START) % PERIOD == 0:
            for copies in parameters:
                mean = torch.stack([parameter.data for parameter in copies]).mean(0)
                for parameter in copies:
                    parameter.data = mean.clone()
    return losses


@pytest.mark.long
def test_losses_are_those_of_an_independent_loop(rows: dict[tuple[str, str, str], Record]) -> None:
    row = rows["gpt_tiny", "local_sgd", "measured"]
    ddp_row = copy.deepcopy(rows["gpt_tiny", "ddp", "measured"])
    expected = train_by_hand(build_run_config(ddp_row["config"]), len(row["losses"]))
    assert row["losses"] == pytest.approx(expected, rel=1e-5)
    compared = min(len(row["losses"]), len(ddp_row["losses"]))
    assert row["losses"][:compared] != pytest.approx(ddp_row["losses"][:compared], rel=1e-5)


@pytest.mark.long
def test_speed_is_the_median_over_periods_of_their_mean(rows: dict[tuple[str, str, str], Record]) -> None:
    row = rows["gpt_tiny", "local_sgd", "measured"]
    assert row["timed_steps"] == 9, "seven were asked for, which are not whole periods"
    slowest = [max(times) for times in zip(*(rank["step_times_s"] for rank in row["ranks"]), strict=True)]
    means = [statistics.fmean(slowest[start : start + PERIOD]) for start in (0, 3, 6)]
    assert row["step_time_median_s"] == pytest.approx(statistics.median(means))
    ddp_row = rows["gpt_tiny", "ddp", "measured"]
    slowest = [max(times) for times in zip(*(rank["step_times_s"] for rank in ddp_row["ranks"]), strict=True)]
    assert (len(slowest), ddp_row["step_time_median_s"]) == (7, pytest.approx(statistics.median(slowest)))


def read_predictions(site: Path, *arguments: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(run_command(site, "bench.predict", *arguments, "format=json"))
    return values


NETWORK = ("hardware=a100_80gb", "gpus=16", "gpus_per_node=8", "sequence_length=512", "batch_size_per_gpu=1")


@pytest.mark.long
def test_the_predicted_step_is_the_mean_over_a_period(site: Path, tmp_path: Path) -> None:
    """So it is a constant and a part that falls with the period."""
    axes = ("model=t5_611m", "strategy=local_sgd", "strategy.period=2,4,8", "mode=predict", "report=false")
    run_command(site, "bench.sweep", "-m", *axes, *NETWORK, f"store={tmp_path}")
    by_period = {
        row["config"]["strategy"]["period"]: row["step_time_median_s"]
        for row in records.read_latest_attempts(tmp_path).records
    }
    assert by_period[2] > by_period[4] > by_period[8]
    assert by_period[2] - by_period[4] == pytest.approx(2 * (by_period[4] - by_period[8]), rel=1e-6)


@pytest.mark.long
def test_a_period_longer_than_the_run_makes_that_run_alone_impossible(site: Path, tmp_path: Path) -> None:
    axes = ("strategy=local_sgd", "strategy.period=2,8", "measurement.steps=4", "dry_run=true", f"store={tmp_path}")
    shown = " ".join(run_command(site, "bench.sweep", "-m", "model=gpt_tiny", *axes, *RUN).split())
    assert "1 to run" in shown
    assert "measurement.steps=4 is not valid: choose at least 8" in shown


@pytest.mark.long
@pytest.mark.parametrize("strategies", ["ddp,local_sgd,fsdp", "local_sgd"])
def test_it_is_ranked_among_the_others_and_alone(strategies: str, site: Path) -> None:
    typed = ("model=neox_tiny", f"strategy={strategies}", "gpus=8", *NETWORK[:1])
    shown = run_command(site, "bench.predict", *typed, "top=all")
    assert LABEL in shown or "local_sgd" in shown
    values = read_predictions(site, *typed)
    assert "local_sgd" in json.dumps(values)


@pytest.mark.long
def test_it_is_advised(site: Path) -> None:
    """Where the network is slow, and in the list of names; the family as any other."""
    slow = ("hardware.speeds.links.node_gb_s=0.2", "model=neox_tiny", *NETWORK)
    (case,) = json.loads(run_command(site, "bench.advise", *slow, "format=json"))["cases"]
    assert case["leaf"]["name"] == "fewer bytes between nodes"
    (option,) = (option for option in case["leaf"]["ways"] if option["name"] == "local SGD")
    assert option["best"] is not None
    assert "strategy=local_sgd" in option["run"]
    assert "strategy=local_sgd" in run_command(site, "bench.advise", "names")
    assert "local_sgd" not in run_command(None, "bench.advise", "names")


@pytest.mark.long
def test_reports_show_its_name_and_colour(site: Path, store: Path, tmp_path: Path) -> None:
    run_command(site, "bench.report", str(store), "--output", str(tmp_path / "with"))
    run_command(None, "bench.report", str(store), "--output", str(tmp_path / "without"))
    with_package, without_package = ((tmp_path / name / "index.html").read_text() for name in ("with", "without"))
    figures = [
        "".join(file.read_text() for file in sorted((tmp_path / name / "figures").glob("*.svg")))
        for name in ("with", "without")
    ]
    assert LABEL in with_package
    assert COLOUR in figures[0]
    assert LABEL not in without_package
    assert "local_sgd" in without_package
    assert COLOUR not in figures[1]


def test_the_legend_has_its_mark(installed: None) -> None:
    variant = presentation.build_variant("local_sgd", "local_sgd", 1, 2)
    ddp = presentation.build_variant("ddp", "ddp", 1, 2)
    assert variant.label == LABEL
    assert ddp < variant
    assert style.build_palette([variant, ddp])[LABEL].colour == COLOUR


def test_a_name_in_a_store_is_never_imported(site: Path, tmp_path: Path) -> None:
    """What a store holds is data: a row of a module that lies in wait is shown, and the module is not touched."""
    traps = tmp_path / "traps"
    traps.mkdir()
    (traps / "trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w').close()\n")
    row = make_record(strategy="trap", effective_strategy="trap", run_id="0" * 16)
    row["config"]["strategy"]["name"] = "trap"
    records.write_row(tmp_path / "store", row)
    path = os.pathsep.join(map(str, (ROOT, site, traps)))
    command = [sys.executable, "-m", "bench.report", str(tmp_path / "store"), "--output", str(tmp_path / "page")]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, check=True, capture_output=True)
    assert "trap" in (tmp_path / "page/index.html").read_text()
    assert not (tmp_path / "sprung").exists()


PRINT_VERSION = """
from bench.config.compose import compose_config
from bench.config.run_config import build_run_config
from bench.prediction.cache import compute_predictor_version, find_user_packages
for strategy, model in (("local_sgd", "gpt_tiny"), ("ddp", "neox_tiny"), ("ddp", "gpt_tiny")):
    values = compose_config({"strategy": strategy, "model": model, "gpus": "2", "mode": "predict", "hardware": "cpu"})
    config = build_run_config(values)
    print(compute_predictor_version((), find_user_packages(config.model, config.strategy, config.finetune)))
"""


@pytest.mark.long
def test_its_code_is_part_of_the_version_of_its_own_predictions(site: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(site, tmp_path / "site")
    with (changed / "local_sgd/strategy.py").open("a") as file:
        file.write("# Changed.\n")
    before, after = (run_python(folder, "-c", PRINT_VERSION).stdout.split() for folder in (site, changed))
    assert len(set(before)) == 3
    assert before[0] != after[0], "of the strategy"
    assert before[1:] == after[1:], "of everything else"


@pytest.mark.long
def test_without_the_package_its_name_is_refused_in_a_sentence() -> None:
    done = run_python(None, "-m", "bench.sweep", "strategy=local_sgd", "dry_run=true")
    assert done.returncode == 2
    assert done.stderr.startswith("strategy=local_sgd is not valid: choose ")


TESTS_OF_SOMETHING_ELSE = (
    *(
        "tests/records/test_results_readme.py",
        "tests/checks/test_check.py",
        "tests/reporting/test_trade.py",
        "tests/models/test_models.py",
    ),
    *(
        "tests/hardware/test_hardware.py",
        "tests/config/test_sweeps.py",
        "tests/reporting/test_trade.py",
        "tests/launch/test_slurm_units.py",
    ),
    *("tests/advice/test_advise.py::test_names", "tests/advice/test_advise.py::test_the_tree_is_complete"),
    *("tests/advice/test_advise.py::test_every_strategy_has_its_line", "tests/strategies/test_strategy_plans.py"),
    *(
        "tests/config/test_bad_input.py",
        "tests/prediction/test_predicted_memory.py::test_cublas_has_a_workspace_of_each_of_two_threads",
    ),
)
"""What lists strategies, families, options or columns."""


@pytest.mark.long
def test_no_test_of_something_else_fails(site: Path) -> None:
    options = ("-p", "no:xdist", "-p", "no:cacheprovider", "-q", "-m", "not slow and not alone")
    done = run_python(site, "-m", "pytest", *options, *TESTS_OF_SOMETHING_ELSE)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


NewFile = Callable[[Path], None]


@pytest.mark.long
def test_in_the_suite_itself_it_is_one_file_and_its_yaml(tmp_path: Path) -> None:
    """A copy of the suite with the strategy, a GPU, a tracker and a figure put beside its own."""
    for folder in ("bench", "conf", "results/published", "results/predicted"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    package = SOURCES / "local_sgd/local_sgd"
    shutil.copy(package / "strategy.py", tmp_path / "bench/strategies/local_sgd.py")
    shutil.copy(package / "conf/strategy/local_sgd.yaml", tmp_path / "conf/strategy")
    gpu = (ROOT / "conf/hardware/h200.yaml").read_text().replace("name: h200", "name: new_gpu")
    (tmp_path / "conf/hardware/new_gpu.yaml").write_text(gpu)
    shutil.copy(ROOT / "bench/tracking/none.py", tmp_path / "bench/tracking/quiet.py")
    (tmp_path / "conf/tracker/quiet.yaml").write_text("name: quiet\n")
    figure = (ROOT / "bench/reporting/figures/spread.py").read_text()
    (tmp_path / "bench/reporting/figures/new_figure.py").write_text(figure.replace('"spread"', '"new-figure"'))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("bench.sweep", "model=gpt_tiny", "strategy=local_sgd", "tracker=quiet", "measurement.steps=4", *RUN[:-2],
        "check=false", "store=store", "report=false", "batch_size_per_gpu=1")  # fmt: skip
    run("bench.sweep", "model=gpt_tiny", "strategy=local_sgd", "gpus=2", "mode=predict", "hardware=new_gpu",
        "store=store", "report=false")  # fmt: skip
    run("bench.report", "store")
    assert LABEL in (tmp_path / "store/report/index.html").read_text()
    assert "strategy=local_sgd" in run("bench.advise", "names")
    listed = run("timeit", "-n1", "-r1", "from bench.reporting.figures import FIGURE_MODULES as m; print(len(m))")
    assert listed.startswith("13\n")
