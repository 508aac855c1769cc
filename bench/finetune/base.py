"""The knobs of fine-tuning, and what of them makes no sense. Nothing here imports peft or bitsandbytes."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from bench.core.errors import ImpossibleError, invalid_value_error, require_choice
from bench.core.installation import format_install_command
from bench.core.precision import Precision
from bench.core.typed_config import OneOf, Within
from bench.core.units import MIB
from bench.finetune.shape import ALL_LINEAR, AdapterSpec
from bench.models import Family

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it, and it warns that it could be faster

SUPPORTED_BITS = (4, 8)

CPU_INPUT_WIDTH_MULTIPLE = 64
"""bitsandbytes 0.50.2 (``dequantize_4bit`` on a CPU) counts the blocks of 64 weights anew in every row: with rows that
are no multiple of that, weights get the scales of others (17 to 32 % mean error where NF4 itself has 9 %)."""


@dataclass(frozen=True)
class Finetune:
    """Which parameters are trained. Subclasses add knobs as fields."""

    name: str
    """full, lora or qlora."""

    required_packages: ClassVar[tuple[str, ...]] = ()
    """Libraries it needs: optional extras of this package."""

    def list_preload_modules(self, device: str) -> tuple[str, ...]:
        """Modules worth importing once, before ranks are forked: none beside GPUs, which bitsandbytes initialises."""
        return self.required_packages if device == "cpu" else ()

    def adapt_family(self, family: Family, precision: Precision) -> Family:
        """The model as it is trained."""
        return family

    def check(self, family: Family, precision: Precision, device: str) -> None:
        """Raise `UsageError` where a knob makes no sense for this model, precision and device (cpu or cuda)."""

    def check_installed(self) -> None:
        """Raise `ImpossibleError` where a library is missing: without it no model can be built, nor predicted."""
        missing = [package for package in self.required_packages if importlib.util.find_spec(package) is None]
        if missing:
            package_text = "package {}, which is" if len(missing) == 1 else "packages {}, which are"
            raise ImpossibleError(
                f"finetune={self.name} needs the {package_text.format(' and '.join(missing))} not installed: "
                f"{format_install_command(*self.required_packages)}, or choose finetune=full."
            )


@dataclass(frozen=True)
class FullFinetune(Finetune):
    """Every parameter is trained."""


@dataclass(frozen=True)
class LoRA(Finetune):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): beside a frozen matrix of out x in, B A of out x r x in."""

    rank: Annotated[int, Within(1, MIB)] = 8
    """r."""
    alpha: Annotated[float, Within(0, 1e6, exclusive_minimum=True)] = 16.0
    """An adapter's product counts alpha / rank times."""
    target_modules: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """Names of the linear layers that get an adapter, or `all-linear` alone."""

    required_packages: ClassVar[tuple[str, ...]] = ("peft",)

    def adapt_family(self, family: Family, precision: Precision) -> Family:
        """With adapters."""
        from bench.finetune.family import AdaptedFamily

        return AdaptedFamily(family.name, family.family, family.attention, family, self.adapter_spec, precision)

    @property
    def adapter_spec(self) -> AdapterSpec:
        """What decides how the model is changed."""
        return AdapterSpec(self.rank, self.alpha, tuple(self.target_modules))

    def check(self, family: Family, precision: Precision, device: str) -> None:
        """Adapters must have layers to stand beside, and be narrower than these."""
        from bench.finetune.adapters import find_linear_layers

        layers = find_linear_layers(family)
        target_names = list(layers) if self.target_modules == [ALL_LINEAR] else list(self.target_modules)
        unknown_names = [name for name in target_names if name not in layers]
        if unknown_names or not target_names:
            raise invalid_value_error(
                "finetune.target_modules",
                list(self.target_modules),
                f"[{ALL_LINEAR}], or names of linear layers that model={family.name} has: {', '.join(layers)}",
                ImpossibleError,
            )
        for name in target_names:
            smallest_shape = min(layers[name], key=min)
            if self.rank > min(smallest_shape):
                raise invalid_value_error(
                    "finetune.rank",
                    self.rank,
                    f"a whole number from 1 to {min(smallest_shape)}: the layer {name} of model={family.name} is "
                    f"{smallest_shape[0]} x {smallest_shape[1]}",
                    ImpossibleError,
                )


@dataclass(frozen=True)
class QLoRA(LoRA):
    """Adapters over quantised weights (Dettmers et al. 2023, arXiv:2305.14314)."""

    bits: Annotated[int, OneOf(*SUPPORTED_BITS)] = 4
    """4: NF4 in blocks of 64 weights. 8: int8, a scale per row."""
    double_quantisation: bool = True
    """Of 4 bits: the scales of the blocks have 8 bits themselves."""

    required_packages: ClassVar[tuple[str, ...]] = ("peft", "bitsandbytes")

    @property
    def adapter_spec(self) -> AdapterSpec:
        """With quantised weights."""
        return AdapterSpec(self.rank, self.alpha, tuple(self.target_modules), self.bits, self.double_quantisation)

    def check(self, family: Family, precision: Precision, device: str) -> None:
        """As LoRA, no loss scaling, and only weights that the library can read back."""
        from bench.finetune.adapters import find_linear_layers

        super().check(family, precision, device)
        if precision.scales_loss:
            raise ImpossibleError(
                f"precision={precision.name} is not valid with finetune=qlora, whose layers are computed in one format "
                "throughout, and T5's must not all be in fp16: choose bf16, fp32, or finetune=lora."
            )
        input_widths = [(name, inputs) for name, shapes in find_linear_layers(family).items() for inputs, _ in shapes]
        unsupported_widths = [(name, width) for name, width in input_widths if width % CPU_INPUT_WIDTH_MULTIPLE]
        if unsupported_widths and self.bits == 4 and device == "cpu":
            raise ImpossibleError(
                f"finetune.bits=4 is not valid for model={family.name} on a CPU: bitsandbytes reads weights of 4 bits "
                f"back wrongly there unless a layer's input is a multiple of {CPU_INPUT_WIDTH_MULTIPLE} wide, and that "
                "of "
                f"{unsupported_widths[0][0]} is {unsupported_widths[0][1]}: choose finetune.bits=8, or another model."
            )


FINETUNE_CLASSES: dict[str, type[Finetune]] = {"full": FullFinetune, "lora": LoRA, "qlora": QLoRA}


def load_finetune(name: str) -> type[Finetune]:
    """The class of a way to train.

    Raises
    ------
    UsageError
        If there is none of this name.
    """
    require_choice("finetune.name", name, FINETUNE_CLASSES)
    return FINETUNE_CLASSES[name]
