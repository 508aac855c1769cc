"""What rows do not say, and what else they may mean that takes less memory.

A run that somebody measured fitted. Where it is predicted not to fit because of something that was assumed, something
else was true.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping

from bench.core.errors import UsageError
from bench.validation.readings import Reading, Settings, build_published_config, order_settings

PURE = {"precision": "bf16_pure"}
REDUCED_OFTEN = {"gradient_accumulation_sync": "true"}
CHECKPOINTED = {"activation_checkpointing": "full"}


def list_smaller_readings(reading: Reading) -> list[Reading]:
    """The same row with less memory, the likelier first: parameters in 16 bits, gradients that are sharded after every
    micro-batch, then both."""
    changes = []
    if "precision" in reading.open_settings:
        changes.append(PURE)
    if _keeps_whole_gradients(reading):
        changes.append(REDUCED_OFTEN)
    return list(_change_settings(reading, changes))


def list_checkpointed_readings(reading: Reading) -> list[Reading]:
    """The same row and the smaller ones with activations computed again, where it does not say that they are not."""
    if "activation_checkpointing" not in reading.open_settings:
        return []
    return [
        checkpointed
        for each in (reading, *list_smaller_readings(reading))
        for checkpointed in _change_settings(each, [CHECKPOINTED])
    ]


def _keeps_whole_gradients(reading: Reading) -> bool:
    """Whether they stay whole, by the suite's default, from one micro-batch to the next."""
    settings, config = dict(reading.settings), reading.config
    is_fsdp = settings.get("strategy.data", config.strategy.name).startswith("fsdp")
    return is_fsdp and config.gradient_accumulation > 1 and "gradient_accumulation_sync" not in settings


def _change_settings(reading: Reading, changes: list[dict[str, str]]) -> Iterator[Reading]:
    for count in range(1, len(changes) + 1):
        for chosen in itertools.combinations(changes, count):
            changed: Mapping[str, str] = {key: value for change in chosen for key, value in change.items()}
            runs: list[Settings] = [order_settings({**dict(run), **changed}) for run in reading.runs]
            try:
                for run in runs:
                    build_published_config(run)
            except UsageError:
                continue
            words = ", ".join(f"{key}={value}" for key, value in changed.items())
            yield dataclasses.replace(
                reading,
                settings=runs[0],
                further_settings=tuple(runs[1:]),
                assumptions=(*reading.assumptions, f"{words}, without which it is predicted not to fit"),
                is_complete=False,
                is_read_again=True,
            )
