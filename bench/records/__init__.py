"""Rows: what a run leaves behind. The ground floor: everything writes or reads it, it knows nobody."""

from bench.records.claims import Claim, TakenError
from bench.records.published import load_published, published_records
from bench.records.reading import Contents, UnreadableRecordWarning, load, read_all, read_attempts
from bench.records.schema import COLUMN_NAMES, COLUMNS, FORMAT_VERSION, NESTED, Column, Record
from bench.records.store import attempts, latest, lock, next_attempt, read, row_path, write
from bench.records.table import to_frame

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
    "read_attempts",
    "row_path",
    "to_frame",
    "write",
]
