"""What every way to train says: which libraries it needs, how it changes a model, and what of it makes no sense."""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from bench.core import plugins
from bench.core.errors import ImpossibleError
from bench.core.installation import format_install_command
from bench.core.precision import Precision
from bench.core.presentation import Presentation, TrainingOption, TrainingTerm
from bench.models import Family

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it, and it warns that it could be faster


@dataclass(frozen=True)
class Finetune(ABC):
    """Which parameters are trained. Subclasses add knobs as fields."""

    name: str
    """File under bench/finetune that defines the subclass."""

    presentation: ClassVar[Presentation] = Presentation()
    """How reports call it: written with literals alone (`bench.core.presentation`)."""

    training_terms: ClassVar[tuple[TrainingTerm, ...]] = ()
    """Its names in the field, as ``bench.advise names`` lists them."""

    training_options: ClassVar[tuple[TrainingOption, ...]] = ()
    """Ways to train with it, each with the leaves of the decision tree that name it."""

    required_packages: ClassVar[tuple[str, ...]] = ()
    """Libraries it needs: optional extras of this package."""

    def list_preload_modules(self, device: str) -> tuple[str, ...]:
        """Modules worth importing once, before ranks are forked: none beside GPUs, which bitsandbytes initialises."""
        return tuple(filter(is_installed, self.required_packages)) if device == "cpu" else ()

    @abstractmethod
    def adapt_family(self, family: Family, precision: Precision, storage_format: str) -> Family:
        """The model as it is trained. The strategy hands parameters to it in `storage_format`, of fp32, bf16
        and fp16."""

    def find_trained_precision(self, precision: Precision) -> Precision:
        """The formats of what is trained, where weights have those of `precision`."""
        return precision

    @property
    def quantised_bits(self) -> int | None:
        """Bits of a frozen weight; None where none is quantised."""
        return None

    @property
    def adapter_dropout(self) -> float:
        """Probability that adapters take an element of their input as zero."""
        return 0.0

    def check(self, family: Family, precision: Precision, device: str) -> None:
        """Raise `UsageError` where a knob makes no sense for this model, precision and device (cpu or cuda)."""

    def check_installed(self) -> None:
        """Raise `ImpossibleError` where a library is missing that a run needs. A prediction needs none."""
        missing = [package for package in self.required_packages if not is_installed(package)]
        if missing:
            package_text = "package {}, which is" if len(missing) == 1 else "packages {}, which are"
            raise ImpossibleError(
                f"finetune={self.name} needs the {package_text.format(' and '.join(missing))} not installed: "
                f"{format_install_command(*self.required_packages)}, or choose finetune=full."
            )


def is_installed(package: str) -> bool:
    """Whether a library can be imported."""
    return importlib.util.find_spec(package) is not None


def load_finetune(name: str) -> type[Finetune]:
    """The class that ``bench/finetune/<name>.py`` defines.

    Raises
    ------
    UsageError
        If there is none of this name.
    """
    finetune_class: type[Finetune] = plugins.find_own_plugin_class(
        "finetune.name", name, sys.modules[__package__], Finetune
    )
    return finetune_class


@functools.cache
def list_finetunes() -> tuple[type[Finetune], ...]:
    """All ways to train, in their order."""
    names = plugins.list_plugin_names(sys.modules[__package__], Finetune)
    return tuple(sorted(map(load_finetune, names), key=lambda finetune_class: finetune_class.presentation.position))
