"""Give committed predictions the version of this predictor, once every number is as this predictor says.

``python -m tests.stamp_predictions results/predicted/*/`` predicts all rows of each store anew and compares; only if no
number differs, the rows' old ``predictor`` is replaced in the store's files, whatever their format, and nothing else.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench import records
from bench.config.run_config import RunConfig, build_run_config
from bench.prediction.cache import compute_predictor_version, find_user_packages
from bench.prediction.predicted_row import build_predicted_row
from bench.prediction.predictor import predict_runs
from bench.records import Record
from bench.records.schema import COLUMNS

RELATIVE_NOISE = 1e-6


def list_differences(row: Record, current: Record) -> list[str]:
    """Columns of a committed row that are not as they are predicted now."""
    return [
        f"{row['run_id']} {column.name}: {row.get(column.name)}, now {current[column.name]}"
        for column in COLUMNS
        if column.name in current and not _is_same(row.get(column.name), current[column.name])
    ]


def _is_same(known: object, current: object) -> bool:
    if isinstance(known, int | float) and isinstance(current, int | float):
        return abs(current - known) <= RELATIVE_NOISE * abs(known)
    return known == current


def compute_row_version(config: RunConfig) -> str:
    """What a row of this run would say."""
    packages = find_user_packages(config.model, config.strategy, config.finetune)
    return compute_predictor_version(config.operator_libraries, packages)


def stamp_store(store: Path) -> int:
    """Compare and stamp one store; the number of files that changed.

    Raises
    ------
    SystemExit
        If a number differs, or the rows would not all have one version.
    """
    rows = [row for row in records.read_latest_attempts(store).records if row["evidence"] == "predicted"]
    configs = [build_run_config(row["config"]) for row in rows]
    differences = [
        line
        for row, config, prediction in zip(rows, configs, predict_runs(configs), strict=True)
        for line in list_differences(row, build_predicted_row(config, prediction))
    ]
    if differences:
        raise SystemExit(
            "\n".join([f"{store}: {len(differences)} numbers differ, nothing is stamped", *differences[:20]])
        )
    old_versions = {row["predictor"] for row in rows}
    new_versions = {compute_row_version(config) for config in configs}
    if len(new_versions) > 1:
        raise SystemExit(f"{store}: rows need different libraries, so they have several versions: {new_versions}")
    changed = 0
    for file in sorted(file for file in store.rglob("*") if file.suffix in (".json", ".jsonl", ".yaml")):
        text = stamped = file.read_text()
        for old_version in old_versions:
            for mark in (f'"{old_version}"', f"predictor: {old_version}"):
                stamped = stamped.replace(mark, mark.replace(old_version, next(iter(new_versions))))
        if stamped != text:
            file.write_text(stamped)
            changed += 1
    return changed


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(f"{argument}: {stamp_store(Path(argument))} files changed")
