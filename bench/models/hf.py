"""Any decoder, encoder, or both, that transformers builds from a ``config.json``: ``model=hf model.path=FILE``."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bench.core.errors import UsageError, invalid_value_error
from bench.core.typed_config import OneOf, Within
from bench.models.base import SEQUENCE_LENGTH_RANGE, Family
from bench.models.pretrained import PretrainedFamily, shorten_list
from bench.models.routing import ROUTINGS, Routing
from bench.models.tasks import TASKS, Task, find_task_name

if TYPE_CHECKING:
    from torch import nn

OPTION_NAME = "hf"
"""Of the model whose configuration is read from a file."""

IGNORED_KEYS = (
    *("_name_or_path", "transformers_version", "torch_dtype", "dtype", "quantization_config", "use_cache"),
    *("_attn_implementation", "attn_implementation"),
)
"""Keys of a ``config.json`` that say nothing about a model's shape, or what fields of a run say."""

DEPTH_FIELDS = (
    ("num_hidden_layers",),
    ("num_layers", "num_decoder_layers"),
    ("encoder_layers", "decoder_layers"),
    ("num_layers",),
)
"""How configurations call their numbers of blocks."""


@dataclass(frozen=True)
class HfFamily(PretrainedFamily):
    path: str | None = None
    """A ``config.json``, a folder with one, or the name of a model on the Hugging Face Hub."""
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the file says, and what was set instead; other fields of the model's section end up here."""
    task: Annotated[str | None, OneOf(*TASKS)] = None
    """What the model is trained to do; null for what the file's ``architectures`` say."""
    decoder_sequence_length: Annotated[int | None, SEQUENCE_LENGTH_RANGE] = None
    """Tokens per sequence in the decoder of a model with encoder and decoder; null for the encoder's length."""
    block_lists: list[str] | None = None
    """Names of the module lists whose entries are sharded and checkpointed one by one; null for those of layers that
    transformers itself can checkpoint."""
    routing: Annotated[str, OneOf(*ROUTINGS)] = "balanced"
    """How tokens are sent to experts, where the model has some."""
    routing_skew: Annotated[float, Within(0, 10)] = 1.0
    """Exponent of Zipf's law for the popularity of experts at ``routing=skewed``; 0: all as popular."""

    def __hash__(self) -> int:
        return hash(json.dumps(dataclasses.asdict(self), sort_keys=True))

    def __post_init__(self) -> None:
        if not self.config:
            raise UsageError(
                "model.path has no value: choose a config.json, a folder with one, or the name of a model on the "
                "Hugging Face Hub."
            )
        self.build_config()

    @classmethod
    def complete_fields(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Read the file, if it was not yet, and put over it what is set; name the model after it."""
        path, config = values.get("path"), values.get("config") or {}
        if "model_type" in config or path is None:
            return values
        if not isinstance(path, str):
            raise invalid_value_error("model.path", path, "a config.json, a folder with one, or the name of a model")
        file_config = {key: value for key, value in read_model_config(path).items() if key not in IGNORED_KEYS}
        _check_field_names(config, {**file_config, **config})
        name = _find_model_name(path) if values.get("name") == OPTION_NAME else values["name"]
        return {**values, "name": name, "config": {**file_config, **config}}

    def build_config(self) -> Any:
        """Its configuration.

        Raises
        ------
        UsageError
            If transformers does not take it, naming the field.
        """
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        model_type = self.config.get("model_type")
        if model_type not in CONFIG_MAPPING:
            raise invalid_value_error(
                "model.model_type", model_type, "a type that the installed transformers has, such as llama"
            )
        try:
            config = AutoConfig.for_model(**copy.deepcopy(self.config))
        except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise UsageError(f"model.path is not valid: transformers refuses the configuration: {reason}.") from None
        return config.get_text_config() if self._task_name_of(config) == "causal_lm" else config

    def _task_name_of(self, config: Any) -> str:
        return self.task or find_task_name(config, self.config.get("architectures") or [])

    def _build_routing(self) -> Routing:
        return Routing(self.routing, self.routing_skew)

    @functools.cached_property
    def task_name(self) -> str:  # type: ignore[override]
        return self._task_name_of(self.build_config())

    @functools.cached_property
    def _task(self) -> Task:  # type: ignore[override]
        return TASKS[self.task_name]

    @property
    def _decoder_length(self) -> int | None:
        return self.decoder_sequence_length

    def _find_block_list_names(self, model: nn.Module) -> tuple[str, ...]:
        from torch import nn

        if self.block_lists is None:
            return super()._find_block_list_names(model)
        lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
        for name in self.block_lists:
            if name not in lists:
                raise invalid_value_error("model.block_lists", name, ", ".join(lists) or "null")
        return tuple(self.block_lists)

    def limit_blocks(self, max_blocks: int, period: int = 1) -> Family | None:
        """None where inner blocks do not repeat, or where their number is no field of the configuration."""
        block_counts = [len(blocks) for blocks in self.find_block_lists(self.build_model())]
        short_counts = [min(max_blocks, num_blocks) for num_blocks in block_counts]
        if not self._can_be_shortened(max_blocks, period):
            return None
        if short_counts == block_counts:
            return self
        config = self.build_config()
        fields = {
            name: shorten_list(value, short_counts[block_counts.index(len(value))], period)
            for name, value in config.to_dict().items()
            if isinstance(value, list) and len(value) in block_counts and self.block_period > 1
        }
        kept = {
            name: value
            for name, value in self.config.items()
            if not (isinstance(value, list) and len(value) in block_counts)
        }
        for names in DEPTH_FIELDS:
            if len(names) == len(short_counts) and all(hasattr(config, name) for name in names):
                depths = dict(zip(names, short_counts, strict=True))
                short_family = dataclasses.replace(self, config={**kept, **fields, **depths})
                if [
                    len(blocks) for blocks in short_family.find_block_lists(short_family.build_model())
                ] == short_counts:
                    return short_family
        return None


def _check_field_names(chosen: dict[str, Any], config: dict[str, Any]) -> None:
    """Raise `UsageError` where a field was set that neither the file nor transformers has."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if config.get("model_type") not in CONFIG_MAPPING:
        return
    config_class = CONFIG_MAPPING[config["model_type"]]
    names = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    names |= config.keys() - chosen.keys()
    for name in chosen:
        if name not in names:
            close_names = difflib.get_close_matches(name, names, cutoff=0.0)
            raise UsageError(
                f"model.{name} is not a field of a {config['model_type']}'s configuration: choose "
                f"{', '.join(f'model.{close_name}' for close_name in close_names)} or another that it has."
            )


@functools.cache
def read_model_config(path: str) -> dict[str, Any]:
    """A model's ``config.json``.

    Parameters
    ----------
    path: str
        The file, a folder with it, or the name of a model on the Hugging Face Hub.

    Raises
    ------
    UsageError
        If it cannot be read.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.exists() and not path.endswith(".json") and path.count("/") <= 1 and not Path(path).is_dir():
        file = _download_config(path)
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise UsageError(f"model.path={path} cannot be read: {error.strerror}.") from None
    except ValueError:
        raise UsageError(f"model.path={path} is not valid: {file.name} is not JSON.") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise UsageError(f"model.path={path} is not valid: choose a config.json of transformers, with a model_type.")
    return config


def _download_config(name: str) -> Path:
    """The ``config.json`` of a model on the Hugging Face Hub, or in its cache on this machine."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(hf_hub_download(name, "config.json"))
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        reason = " ".join(str(error).split("\n")[0].split()).rstrip(".")
        raise UsageError(
            f"model.path={name} is no file or folder here, and the Hugging Face Hub does not give it ({reason}): "
            "download its config.json and choose model.path=FILE."
        ) from None


def _find_model_name(path: str) -> str:
    """A short name for rows and figures: the folder's, the file's or the model's on the hub, in small letters."""
    parts = [part for part in Path(path).absolute().parts if part != "config.json"]
    return parts[-1].removesuffix(".json").lower()
