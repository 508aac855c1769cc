"""The plan: which runs there are, which are done already, which are impossible and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench import collector, records
from bench.config import RunConfig, run_config
from bench.errors import ImpossibleError, bad_value
from bench.measure.environment import changed_variables
from bench.planning.compose import composed
from bench.planning.grid import Settings
from bench.records import Record
from bench.records.schema import FINISHED
from bench.simulate.version import outside_of, predictor_version


@dataclass
class Plan:
    """Every run asked for, once, sorted into what happens to it."""

    possible: list[RunConfig] = field(default_factory=list)
    """All but the impossible ones, in the order asked for."""
    to_run: list[RunConfig] = field(default_factory=list)
    done: list[tuple[RunConfig, str]] = field(default_factory=list)
    """Runs with their recorded status."""
    found: dict[str, Record] = field(default_factory=dict)
    """The rows of those that are done, by run_id."""
    underway: list[tuple[RunConfig, str]] = field(default_factory=list)
    """Runs that a cluster has already, and in which job."""
    skipped: list[tuple[RunConfig, str]] = field(default_factory=list)
    """Runs left out on request, and why."""
    impossible: list[tuple[str, str]] = field(default_factory=list)
    """Settings, and the sentence that says why they cannot run."""

    @property
    def shapes(self) -> dict[tuple[int, int], int]:
        """Runs to execute per resource shape (nodes, world size)."""
        counts: dict[tuple[int, int], int] = {}
        for config in self.to_run:
            if config.predicted:
                continue
            shape = (config.machines, config.devices)
            counts[shape] = counts.get(shape, 0) + 1
        return counts

    def set_aside(self, underway: Mapping[str, str]) -> None:
        """Take out of `to_run` what waits or runs on a cluster already.

        Parameters
        ----------
        underway: mapping
            Words that say where, by run_id.
        """
        self.underway = [(config, underway[config.run_id]) for config in self.to_run if config.run_id in underway]
        self.to_run = [config for config in self.to_run if config.run_id not in underway]

    @property
    def size(self) -> int:
        """Runs asked for that are possible."""
        return len(self.possible)

    @property
    def answered(self) -> list[RunConfig]:
        """Runs that are done, or will be when `to_run` is carried out, in the order asked for."""
        elsewhere = {config.run_id for config, _ in (*self.underway, *self.skipped)}
        return [config for config in self.possible if config.run_id not in elsewhere]

    def changed_variables(self, environment: Mapping[str, str]) -> list[str]:
        """Variables that can change a result and are not as they were when runs that are done were measured, each with
        the number of these runs."""
        counts = Counter(
            words
            for config, _ in self.done
            if not config.predicted
            and (recorded := (self.found[config.run_id].get("environment") or {}).get("variables")) is not None
            for words in changed_variables(recorded, environment)
        )
        return [f"{words}: {count} of {len(self.done)} runs" for words, count in sorted(counts.items())]

    def skip(self, reasons: Mapping[str, str]) -> None:
        """Take out of `to_run` the runs that have a reason, by run_id."""
        self.skipped = [(config, reasons[config.run_id]) for config in self.to_run if config.run_id in reasons]
        self.to_run = [config for config in self.to_run if config.run_id not in reasons]


def answers(record: Record | None, config: RunConfig) -> bool:
    """Whether a row is the result of a run: an older predictor's prediction is none."""
    if record is None or record["status"] not in FINISHED:
        return False
    return not config.predicted or record.get("predictor") == predictor_version(
        config.libraries, outside_of(config.model, config.strategy)
    )


def make_plan(points: Iterable[Settings], store: Path, *, force: bool, check: Callable[[RunConfig], None]) -> Plan:
    """Compose, check and look up every run.

    Parameters
    ----------
    points: iterable of settings
        What the user asked for; points that come to the same run are one run.
    force: bool
        Execute what is recorded already, too.
    check: callable
        Raises `ImpossibleError` where the launcher or the machine cannot execute a run.

    Raises
    ------
    UsageError
        If a setting is a mistake whatever it is combined with: an unknown field, a value of the wrong kind.
    """
    plan = Plan()
    seen: set[str] = set()
    with collector.at_rest():
        for point in points:
            _place(plan, seen, point, store, force=force, check=check)
    return plan


def _place(
    plan: Plan, seen: set[str], point: Settings, store: Path, *, force: bool, check: Callable[[RunConfig], None]
) -> None:
    """Put one point where it belongs."""
    try:
        config = run_config(composed(point))
        check(config)
    except ImpossibleError as error:
        plan.impossible.append((" ".join(f"{key}={value}" for key, value in point.items()), str(error)))
        return
    if config.run_id in seen:
        return
    seen.add(config.run_id)
    plan.possible.append(config)
    record = _recorded(store, config.run_id, force=force)
    if record is not None and answers(record, config):
        plan.done.append((config, record["status"]))
        plan.found[config.run_id] = record
    else:
        plan.to_run.append(config)


def _recorded(store: Path, run_id: str, *, force: bool) -> Record | None:
    """The latest row of a run; None where there is none, or the run is executed whatever it says.

    Raises
    ------
    UsageError
        If this account may not look into the run's folder.
    """
    try:
        if force:
            records.attempts(store, run_id)
            return None
        return records.latest(store, run_id)
    except PermissionError as error:
        raise bad_value("store", store, f"a folder that can be read ({error.strerror}: {error.filename})") from None
