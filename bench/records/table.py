"""Records as one table, and such a table as arrays of numbers and text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.records.schema import COLUMNS, Record

if TYPE_CHECKING:
    import pandas as pd

# pandas is imported where it is needed: a run writes its row without it.


def to_frame(records: list[Record]) -> pd.DataFrame:
    """Records as one typed table, a row per record, columns as in the schema."""
    return build_frame([record.get(column.name) for record in records] for column in COLUMNS)


def build_frame(columns: Iterable[Any]) -> pd.DataFrame:
    """A table from the values of each column, in the schema's order."""
    import pandas as pd

    return pd.DataFrame(
        {column.name: _build_array(values, column.dtype) for column, values in zip(COLUMNS, columns, strict=True)}
    )


def _build_array(values: Any, dtype: str) -> Any:
    """A column's values with None for missing. NaN is a value: `pd.array` would take it for missing."""
    import pandas as pd

    if dtype == "Float64" and not isinstance(values, pd.api.extensions.ExtensionArray):
        values = list(values)
        missing_mask = np.array([value is None or value is pd.NA for value in values], dtype=bool)
        numbers = np.array(
            [0.0 if is_missing else value for is_missing, value in zip(missing_mask, values, strict=True)], dtype=float
        )
        return pd.arrays.FloatingArray(numbers, missing_mask)
    return pd.array(values, dtype=dtype)  # type: ignore[call-overload]


def pack_frame(frame: pd.DataFrame) -> dict[str, np.ndarray]:
    """A table as arrays without Python objects: reading them back from a file executes nothing."""
    import pandas as pd

    arrays: dict[str, np.ndarray] = {}
    for column in COLUMNS:
        values = frame[column.name]
        if column.dtype == "string":
            codes, texts = pd.factorize(values)
            arrays[column.name] = codes.astype(np.int32)
            arrays[f"{column.name}.texts"] = pack_texts(list(texts))
        else:
            arrays[column.name] = values.to_numpy(column.dtype.lower().replace("boolean", "bool"), na_value=0)
            arrays[f"{column.name}.missing"] = values.isna().to_numpy()
    return arrays


def unpack_frame(arrays: Mapping[str, np.ndarray]) -> pd.DataFrame:
    """The table that `pack_frame` was given."""
    import pandas as pd

    columns = []
    for column in COLUMNS:
        values: Any = arrays[column.name]
        if column.dtype == "string":
            texts = np.array([*unpack_texts(arrays[f"{column.name}.texts"]), None], dtype=object)
            values = texts[values]  # code -1, for missing, is the last
        else:
            values = _build_array(values, column.dtype)
            values[arrays[f"{column.name}.missing"]] = pd.NA
        columns.append(values)
    return build_frame(columns)


def pack_texts(texts: list[str]) -> np.ndarray:
    """Texts of any length as an array of bytes."""
    return np.frombuffer(json.dumps(texts).encode(), np.uint8)


def unpack_texts(array: np.ndarray) -> list[str]:
    """The texts that `pack_texts` was given."""
    texts: list[str] = json.loads(array.tobytes())
    return texts
