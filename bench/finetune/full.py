"""Every parameter is trained."""

from __future__ import annotations

from dataclasses import dataclass

from bench.core.precision import Precision
from bench.finetune.base import Finetune
from bench.models import Family


@dataclass(frozen=True)
class FullFinetune(Finetune):
    def adapt_family(self, family: Family, precision: Precision, storage_format: str) -> Family:
        return family
