"""The plan: which runs there are, which are done already, which are impossible and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench import records
from bench.config.compose import compose_shared_config
from bench.config.grid import RunSettings
from bench.config.run_config import RunConfig, build_run_config
from bench.core import processes
from bench.core.command_line import refuse_unreadable_store
from bench.core.errors import ImpossibleError
from bench.planning.checkpointing_choice import choose_budget
from bench.prediction.cache import compute_predictor_version, find_user_packages
from bench.rank.environment import list_changed_variables
from bench.records import Record
from bench.records.schema import FINISHED_STATUSES


@dataclass
class SweepPlan:
    """Every run asked for, once, sorted into what happens to it."""

    possible: list[RunConfig] = field(default_factory=list)
    """All but the impossible ones, in the order asked for."""
    to_run: list[RunConfig] = field(default_factory=list)
    done: list[tuple[RunConfig, str]] = field(default_factory=list)
    """Runs with their recorded status."""
    recorded_rows: dict[str, Record] = field(default_factory=dict)
    """The rows of those that are done, by run_id; of predicted ones what `drop_settings` leaves."""
    on_cluster: list[tuple[RunConfig, str]] = field(default_factory=list)
    """Runs that a cluster has already, and in which job."""
    skipped: list[tuple[RunConfig, str]] = field(default_factory=list)
    """Runs left out on request, and why."""
    impossible: list[tuple[str, str]] = field(default_factory=list)
    """Settings, and the sentence that says why they cannot run."""

    @property
    def runs_per_shape(self) -> dict[tuple[int, int], int]:
        """Runs to execute per resource shape (nodes, world size)."""
        counts: dict[tuple[int, int], int] = {}
        for config in self.to_run:
            if config.is_predicted:
                continue
            shape = (config.active_nodes, config.active_devices)
            counts[shape] = counts.get(shape, 0) + 1
        return counts

    def set_aside_submitted(self, cluster_jobs: Mapping[str, str]) -> None:
        """Take out of `to_run` what waits or runs on a cluster already.

        Parameters
        ----------
        cluster_jobs: mapping
            Words that say where, by run_id.
        """
        self.on_cluster = [
            (config, cluster_jobs[config.run_id]) for config in self.to_run if config.run_id in cluster_jobs
        ]
        self.to_run = [config for config in self.to_run if config.run_id not in cluster_jobs]

    @property
    def size(self) -> int:
        """Runs asked for that are possible."""
        return len(self.possible)

    @property
    def runs_to_report(self) -> list[RunConfig]:
        """Runs that are done, or will be when `to_run` is carried out, in the order asked for."""
        left_out_run_ids = {config.run_id for config, _ in (*self.on_cluster, *self.skipped)}
        return [config for config in self.possible if config.run_id not in left_out_run_ids]

    def list_changed_variables(self, environment: Mapping[str, str]) -> list[str]:
        """Variables that can change a result and are not as they were when runs that are done were measured, each with
        the number of these runs."""
        counts = Counter(
            variable_change
            for config, _ in self.done
            if not config.is_predicted
            and (recorded_variables := (self.recorded_rows[config.run_id].get("environment") or {}).get("variables"))
            is not None
            for variable_change in list_changed_variables(recorded_variables, environment)
        )
        return [
            f"{variable_change}: {count} of {len(self.done)} runs" for variable_change, count in sorted(counts.items())
        ]

    def skip_runs(self, reasons: Mapping[str, str]) -> None:
        """Take out of `to_run` the runs that have a reason, by run_id."""
        self.skipped = [(config, reasons[config.run_id]) for config in self.to_run if config.run_id in reasons]
        self.to_run = [config for config in self.to_run if config.run_id not in reasons]


SETTING_COLUMNS = ("config", "requested", "effective", "environment")


def drop_settings(row: Record) -> Record:
    """A row without what its `RunConfig` says, and without where it was made: most of the memory that it takes."""
    return {name: value for name, value in row.items() if name not in SETTING_COLUMNS}


def is_current_result(record: Record | None, config: RunConfig) -> bool:
    """Whether a row is the result of a run: an older predictor's prediction is none."""
    if record is None or record["status"] not in FINISHED_STATUSES:
        return False
    return not config.is_predicted or record.get("predictor") == compute_predictor_version(
        config.operator_libraries, find_user_packages(config.model, config.strategy, config.finetune)
    )


def build_sweep_plan(
    points: Iterable[RunSettings], store: Path, *, force: bool, check_run: Callable[[RunConfig], None]
) -> SweepPlan:
    """Compose, check and look up every run.

    Parameters
    ----------
    points: iterable of settings
        What the user asked for; points that come to the same run are one run.
    force: bool
        Execute what is recorded already, too.
    check_run: callable
        Raises `ImpossibleError` where the launcher or the machine cannot execute a run.

    Raises
    ------
    UsageError
        If a setting is a mistake whatever it is combined with: an unknown field, a value of the wrong kind.
    """
    plan = SweepPlan()
    seen_run_ids: set[str] = set()
    with processes.pause_garbage_collection():
        for point in points:
            _add_point(plan, seen_run_ids, point, store, force=force, check_run=check_run)
    return plan


def _add_point(
    plan: SweepPlan,
    seen_run_ids: set[str],
    point: RunSettings,
    store: Path,
    *,
    force: bool,
    check_run: Callable[[RunConfig], None],
) -> None:
    """Put one point where it belongs."""
    try:
        config = compose_run(point)
        check_run(config)
    except ImpossibleError as error:
        plan.impossible.append((" ".join(f"{key}={value}" for key, value in point.items()), str(error)))
        return
    if config.run_id in seen_run_ids:
        return
    seen_run_ids.add(config.run_id)
    plan.possible.append(config)
    record = _find_recorded_row(store, config.run_id, force=force)
    if record is not None and is_current_result(record, config):
        plan.done.append((config, record["status"]))
        plan.recorded_rows[config.run_id] = drop_settings(record) if config.is_predicted else record
    else:
        plan.to_run.append(config)


def compose_run(point: RunSettings) -> RunConfig:
    """The run that settings come to.

    Raises
    ------
    UsageError
        On settings that are a mistake.
    ImpossibleError
        Where they cannot be combined.
    """
    return build_run_config(compose_shared_config(choose_budget(point)))


def _find_recorded_row(store: Path, run_id: str, *, force: bool) -> Record | None:
    """The latest row of a run; None where there is none, or the run is executed whatever it says.

    Raises
    ------
    UsageError
        If this account may not look into the run's folder.
    """
    with refuse_unreadable_store(store):
        if force:
            records.list_attempts(store, run_id)
            return None
        return records.read_latest_row(store, run_id)
