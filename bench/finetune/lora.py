"""Low-rank adapters beside frozen weights. Nothing here imports peft."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from bench.core.errors import ImpossibleError, invalid_value_error
from bench.core.precision import Precision, get_torch_dtype
from bench.core.presentation import Presentation, TrainingOption, TrainingTerm
from bench.core.typed_config import Within
from bench.finetune.adapters import ALL_LINEAR, AdapterSpec
from bench.finetune.base import Finetune
from bench.models import Family


@dataclass(frozen=True)
class LoRA(Finetune):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): beside a frozen matrix of out x in, B A of out x r x in."""

    presentation = Presentation(label="LoRA", position=10)
    training_terms = (TrainingTerm("LoRA, QLoRA", ("finetune=lora",), "fine-tuning in a fraction of the memory"),)
    training_options = (
        TrainingOption(
            "LoRA",
            {"finetune": "lora"},
            "for fine-tuning only: trains small adapters, the model's weights stay frozen",
            leaves={"too few GPUs": 3, "offload": 3},
        ),
    )

    rank: Annotated[int, Within(1, 2**20)] = 8
    """r."""
    alpha: Annotated[float, Within(0, 1e6, exclusive_minimum=True)] = 16.0
    """An adapter's product counts alpha / rank times."""
    target_modules: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """Names of the linear layers that get an adapter, or `all-linear` alone."""
    dropout: Annotated[float, Within(0, 1, exclusive_maximum=True)] = 0.0
    """Probability that an adapter takes an element of its input as zero (peft's lora_dropout)."""
    fp32_adapters: bool = False
    """Adapters in fp32 beside weights in 16 bit, as peft's `get_peft_model` makes them (autocast_adapter_dtype); false:
    all in precision.parameters."""

    required_packages: ClassVar[tuple[str, ...]] = ("peft",)

    def adapt_family(self, family: Family, precision: Precision, storage_format: str) -> Family:
        from bench.finetune.family import AdaptedFamily

        storage_dtype = get_torch_dtype(storage_format)
        return AdaptedFamily(
            family.name, family.family, family.attention, family, self.adapter_spec, precision, storage_dtype
        )

    @property
    def adapter_spec(self) -> AdapterSpec:
        """What decides how the model is changed."""
        return AdapterSpec(
            self.rank, self.alpha, tuple(self.target_modules), dropout=self.dropout, fp32_adapters=self.fp32_adapters
        )

    @property
    def adapter_dropout(self) -> float:
        return self.dropout

    def find_trained_precision(self, precision: Precision) -> Precision:
        return dataclasses.replace(precision, parameters="fp32", reduce="fp32") if self.fp32_adapters else precision

    def check(self, family: Family, precision: Precision, device: str) -> None:
        """Adapters must have layers to stand beside, and be narrower than these."""
        from bench.finetune.adapters import find_linear_layers

        if self.fp32_adapters and precision.parameters == "fp32":
            raise ImpossibleError(
                f"finetune.fp32_adapters=true is not valid with precision={precision.name}, whose parameters are in "
                "fp32, adapters with them: choose false, or precision=bf16_pure."
            )
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
