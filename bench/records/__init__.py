"""Rows: what a run leaves behind. The ground floor: everything writes or reads it, it knows nobody."""

from bench.records.claims import Claim, RunClaimedError
from bench.records.published import load_published, read_published_records
from bench.records.reading import (
    StoreContents,
    UnreadableRecordWarning,
    load,
    read_all_attempts,
    read_latest_attempts,
    to_frame,
)
from bench.records.schema import COLUMN_NAMES, COLUMNS, FORMAT_VERSION, NESTED_PARTS, Record, RecordColumn
from bench.records.store import (
    find_next_attempt,
    get_row_path,
    list_attempts,
    list_runs,
    lock_run,
    read_latest_row,
    read_row,
    read_row_text,
    write_row,
)

__all__ = [
    "COLUMNS",
    "COLUMN_NAMES",
    "FORMAT_VERSION",
    "NESTED_PARTS",
    "Claim",
    "Record",
    "RecordColumn",
    "RunClaimedError",
    "StoreContents",
    "UnreadableRecordWarning",
    "find_next_attempt",
    "get_row_path",
    "list_attempts",
    "list_runs",
    "load",
    "load_published",
    "lock_run",
    "read_all_attempts",
    "read_latest_attempts",
    "read_latest_row",
    "read_published_records",
    "read_row",
    "read_row_text",
    "to_frame",
    "write_row",
]
