"""Rows: what a run leaves behind. The ground floor: everything writes or reads it, it knows nobody."""

from bench.records.claims import Claim, TakenError
from bench.records.published import load_published, published_records
from bench.records.schema import COLUMN_NAMES, COLUMNS, FORMAT_VERSION, NESTED, Column, Record
from bench.records.store import (
    Contents,
    UnreadableRecordWarning,
    attempts,
    latest,
    load,
    lock,
    next_attempt,
    read,
    read_all,
    row_path,
    to_frame,
    write,
)

__all__ = [
    "COLUMNS",
    "COLUMN_NAMES",
    "FORMAT_VERSION",
    "NESTED",
    "Claim",
    "Column",
    "Contents",
    "Record",
    "TakenError",
    "UnreadableRecordWarning",
    "attempts",
    "latest",
    "load",
    "load_published",
    "lock",
    "next_attempt",
    "published_records",
    "read",
    "read_all",
    "row_path",
    "to_frame",
    "write",
]
