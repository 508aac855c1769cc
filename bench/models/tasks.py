"""What a model is trained to do: the class of transformers that builds it, and what a batch holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from bench.core.errors import ImpossibleError, invalid_value_error
from bench.models.base import IGNORED_LABEL, SEQUENCE_LENGTH_RANGE, Batch

if TYPE_CHECKING:
    import torch

MASKED_SHARE = 0.15
"""Of a sequence's tokens that a masked language model predicts: BERT's. As many in every sequence, so that ranks' mean
losses have the mean of all as their mean."""


class Task(ABC):
    """One kind of training."""

    auto_class_name: str
    """The class of transformers that builds a model for it from a configuration."""
    mapping_name: str
    """Where transformers lists the models that have such a class."""

    @abstractmethod
    def build_batch(
        self, config: Any, num_sequences: int, lengths: tuple[int, int], generator: torch.Generator
    ) -> Batch:
        """Synthetic sequences on the CPU; `lengths` are the encoder's and the decoder's, of which one may be all."""

    def count_tokens(self, lengths: tuple[int, int]) -> int:
        """Tokens that the model reads per sequence."""
        return lengths[0]

    def check_sequence_length(self, config: Any, sequence_length: int, num_unused_positions: int) -> None:
        """At most the positions that the model was made for, but for those that no token has.

        Raises
        ------
        ImpossibleError
            Naming the valid lengths.
        """
        num_positions = getattr(config, "max_position_embeddings", None) or int(SEQUENCE_LENGTH_RANGE.maximum)
        longest = num_positions - num_unused_positions
        if not 2 <= sequence_length <= longest:
            valid = f"a whole number from 2 to {longest}, the model's longest"
            raise invalid_value_error("sequence_length", sequence_length, valid, ImpossibleError)


class CausalLM(Task):
    """Every token is predicted from those before it."""

    auto_class_name, mapping_name = "AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"

    def build_batch(
        self, config: Any, num_sequences: int, lengths: tuple[int, int], generator: torch.Generator
    ) -> Batch:
        import torch
        from torch import nn

        tokens = torch.randint(0, config.vocab_size, (num_sequences, lengths[0]), generator=generator)
        next_tokens = nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORED_LABEL)
        return Batch({"input_ids": tokens}, labels=next_tokens)


class Seq2SeqLM(Task):
    """A target is predicted from a source, each token also from those before it."""

    auto_class_name, mapping_name = "AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"

    def build_batch(
        self, config: Any, num_sequences: int, lengths: tuple[int, int], generator: torch.Generator
    ) -> Batch:
        import torch
        from torch import nn

        tokens = torch.randint(0, config.vocab_size, (num_sequences, sum(lengths)), generator=generator)
        source, target = (tokens_part.contiguous() for tokens_part in tokens.split(list(lengths), dim=1))
        start = getattr(config, "decoder_start_token_id", None) or 0
        decoder_inputs = nn.functional.pad(target[:, :-1], (1, 0), value=start)
        return Batch({"input_ids": source, "decoder_input_ids": decoder_inputs}, labels=target)

    def count_tokens(self, lengths: tuple[int, int]) -> int:
        return sum(lengths)


class MaskedLM(Task):
    """Some of the tokens are predicted from all others."""

    auto_class_name, mapping_name = "AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"

    def build_batch(
        self, config: Any, num_sequences: int, lengths: tuple[int, int], generator: torch.Generator
    ) -> Batch:
        import torch

        tokens = torch.randint(0, config.vocab_size, (num_sequences, lengths[0]), generator=generator)
        num_predicted = max(1, round(MASKED_SHARE * lengths[0]))
        positions = torch.rand(tokens.shape, generator=generator).topk(num_predicted, dim=1).indices
        labels = torch.full_like(tokens, IGNORED_LABEL).scatter(1, positions, tokens.gather(1, positions))
        return Batch({"input_ids": tokens}, labels=labels)


class ImageClassification(Task):
    """An image's class is predicted from its patches, of which a sequence is made."""

    auto_class_name = "AutoModelForImageClassification"
    mapping_name = "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"

    def build_batch(
        self, config: Any, num_sequences: int, lengths: tuple[int, int], generator: torch.Generator
    ) -> Batch:
        import torch

        height, width = _get_pair(config.image_size)
        pixels = torch.randn((num_sequences, config.num_channels, height, width), generator=generator)
        classes = torch.randint(0, config.num_labels, (num_sequences,), generator=generator)
        return Batch({"pixel_values": pixels}, labels=classes)

    def check_sequence_length(self, config: Any, sequence_length: int, num_unused_positions: int) -> None:
        """What the image comes to: its patches and a token for the class."""
        (height, width), (patch_height, patch_width) = _get_pair(config.image_size), _get_pair(config.patch_size)
        valid = (height // patch_height) * (width // patch_width) + 1
        if sequence_length != valid:
            raise invalid_value_error("sequence_length", sequence_length, f"{valid}, the image's", ImpossibleError)


def _get_pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


TASKS: dict[str, Task] = {
    "causal_lm": CausalLM(),
    "seq2seq_lm": Seq2SeqLM(),
    "masked_lm": MaskedLM(),
    "image_classification": ImageClassification(),
}
"""By the name a model's YAML gives them."""


def find_task_name(config: Any, architectures: list[str]) -> str:
    """The task that a configuration's class is for, as its `architectures` say; where they do not, the first one that
    transformers has a class for.

    Raises
    ------
    ImpossibleError
        If there is none.
    """
    from transformers.models.auto import modeling_auto

    class_names = {
        name: getattr(modeling_auto, task.mapping_name).get(config.model_type) for name, task in TASKS.items()
    }
    for name, class_name in class_names.items():
        if class_name is not None and class_name in architectures:
            return name
    preferred_names = (
        ("seq2seq_lm",) if config.is_encoder_decoder else ("masked_lm", "causal_lm", "image_classification")
    )
    for name in preferred_names:
        if class_names[name] is not None:
            return name
    raise ImpossibleError(
        f"model.path is not valid: transformers has no language model and no image classifier of the type "
        f"{config.model_type}, choose a configuration of one."
    )
