"""Adapters over quantised weights. Nothing here imports peft or bitsandbytes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, ClassVar

from bench.core.errors import ImpossibleError
from bench.core.precision import Precision
from bench.core.presentation import Presentation, TrainingOption, TrainingTerm
from bench.core.typed_config import OneOf
from bench.finetune.adapters import AdapterSpec
from bench.finetune.lora import LoRA
from bench.models import Family

SUPPORTED_BITS = (4, 8)

CPU_INPUT_WIDTH_MULTIPLE = 64
"""bitsandbytes 0.50.2 (``dequantize_4bit`` on a CPU) counts the blocks of 64 weights anew in every row: with rows that
are no multiple of that, weights get the scales of others (17 to 32 % mean error where NF4 itself has 9 %)."""


@dataclass(frozen=True)
class QLoRA(LoRA):
    """Adapters over quantised weights (Dettmers et al. 2023, arXiv:2305.14314)."""

    presentation = Presentation(label="QLoRA", position=20)
    training_terms = (TrainingTerm("LoRA, QLoRA", ("finetune=qlora",), "fine-tuning in a fraction of the memory"),)
    training_options = (
        TrainingOption(
            "QLoRA",
            {"finetune": "qlora", "finetune.bits": "4"},
            "as LoRA, with frozen weights of 4 bits",
            leaves={"too few GPUs": 4, "offload": 4, "layer larger than the GPU": 1},
        ),
    )

    bits: Annotated[int, OneOf(*SUPPORTED_BITS)] = 4
    """4: NF4 in blocks of 64 weights. 8: int8, a scale per row."""
    double_quantisation: bool = True
    """Of 4 bits: the scales of the blocks have 8 bits themselves."""

    required_packages: ClassVar[tuple[str, ...]] = ("peft", "bitsandbytes")

    @property
    def adapter_spec(self) -> AdapterSpec:
        return dataclasses.replace(super().adapter_spec, bits=self.bits, double_quantisation=self.double_quantisation)

    @property
    def quantised_bits(self) -> int:
        return self.bits

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
