"""What every model family provides: the model on meta, its weights, a batch, its blocks and its FLOPs."""

from __future__ import annotations

import copy
import functools
import hashlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from bench.core import plugins
from bench.core.errors import ImpossibleError
from bench.core.typed_config import OneOf, Within
from bench.core.units import MIB
from bench.models.division import LayerDivision, PipelineStageModule


@dataclass(frozen=True)
class Batch:
    """One micro-batch: the model's keyword arguments, each of shape (sequences, length), and the tokens to predict."""

    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor
    """Shape (sequences, predictions); `IGNORED_LABEL` where there is nothing to predict."""

    def select_sequences(self, sequences: slice, device: torch.device) -> Batch:
        """Some of the sequences, on a device."""
        inputs = {name: tensor[sequences].to(device) for name, tensor in self.inputs.items()}
        return Batch(inputs, self.labels[sequences].to(device))


IGNORED_LABEL = -100
"""Label of a position without prediction."""

ATTENTION_IMPLEMENTATIONS = ("sdpa", "eager")

BlockCount = Annotated[int, Within(1, 512)]
"""Number of blocks: each is built to be counted, which takes milliseconds."""
LayerWidth = Annotated[int, Within(1, MIB)]
HeadCount = Annotated[int, Within(1, 4096)]
TokenCount = Annotated[int, Within(1, 10**7)]
"""Size of a vocabulary, or number of positions."""
SEQUENCE_LENGTH_RANGE = Within(1, MIB)
"""Of sequences, in tokens."""
DropoutRate = Annotated[float, Within(0, 1, exclusive_maximum=True)]


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of one sequence's forward pass, a multiply-add counting 2.

    Only matrix products are counted. Attention is counted over the full square of scores, for causal attention
    too: the same convention as Megatron's and as `torch.utils.flop_counter`'s. What a fused attention kernel
    computes again for its own backward is not counted.
    """

    blocks_linear: int
    """Matrix products with weights, inside the blocks."""
    blocks_attention: int
    """Scores and their product with the values, inside the blocks."""
    blocks_last_linear: int
    """Of `blocks_linear`, the last product of each block: checkpointing stops short of computing it again, because
    its result is no input of the block's backward."""
    outside_blocks: int
    """Matrix products outside the blocks: the head over the vocabulary."""

    @property
    def model_flops(self) -> int:
        """Forward and backward without recomputation: backward takes each product twice."""
        return 3 * (self.blocks_linear + self.blocks_attention + self.outside_blocks)

    def compute_hardware_flops(self, activation_checkpointing: str) -> int:
        """What the device executes: `model_flops` and the forward products that checkpointing computes again."""
        recomputed_flops = {
            "none": 0,
            "selective": self.blocks_attention,
            "full": self.blocks_linear + self.blocks_attention - self.blocks_last_linear,
        }[activation_checkpointing]
        return self.model_flops + recomputed_flops


@dataclass(frozen=True)
class Family(ABC):
    """A model family and the shape of one model in it. Subclasses add the dimensions as fields."""

    name: str
    """Name of the configuration, for rows and figures."""
    family: str
    """File under bench/models, or module path, that defines the subclass."""
    attention: Annotated[str, OneOf(*ATTENTION_IMPLEMENTATIONS)]
    """Attention implementation: sdpa (flash where the device and the model allow it) or eager."""

    preload_modules: ClassVar[tuple[str, ...]] = ()
    """Modules worth importing once, before ranks are forked."""

    can_divide_layers: ClassVar[bool] = False
    """Whether `build_layer_division` says how tensor parallelism divides the layers."""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model on meta: ``model(**batch.inputs)["logits"]`` has shape (sequences, predictions, vocabulary)."""

    @functools.cached_property
    def num_parameters(self) -> int:
        """Parameters of the whole model, tied ones counted once. Counted on meta."""
        return sum(parameter.numel() for parameter in self.build_model().parameters())

    @abstractmethod
    def find_init_std(self, name: str, parameter: torch.Tensor) -> float | None:
        """Standard deviation of the parameter's normal distribution; 0 for zeros, None for ones."""

    @abstractmethod
    def build_batch(self, num_sequences: int, sequence_length: int, generator: torch.Generator) -> Batch:
        """Synthetic token sequences on the CPU, each tensor of shape (num_sequences, length)."""

    def compute_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy over all predictions, in fp32 whatever the format of the logits, so that every strategy
        computes the same loss."""
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    def limit_blocks(self, max_blocks: int) -> Family | None:
        """The same model with at most `max_blocks` max_blocks in every list, all others being copies of its inner ones.

        None, what a family says by itself, where blocks differ from one another: predictions then trace all of them.
        """
        return None

    @abstractmethod
    def find_block_lists(self, model: nn.Module) -> Sequence[nn.ModuleList]:
        """The lists of repeated blocks, in the order they run: what strategies wrap and checkpoint one by one."""

    @abstractmethod
    def run_blocks(self, blocks: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
        """Run several blocks as if they were one, with the call the model makes for one block."""

    @abstractmethod
    def count_flops_per_sequence(self, sequence_length: int) -> FlopCount:
        """Matrix products of one sequence's forward pass."""

    @abstractmethod
    def count_tokens_per_sequence(self, sequence_length: int) -> int:
        """Tokens the model reads per sequence."""

    @abstractmethod
    def check_sequence_length(self, sequence_length: int) -> None:
        """Raise `UsageError` if the model cannot take sequences of this length."""

    def find_seed_name(self, name: str) -> str:
        """The name by which a parameter is drawn at random: its own, but for layers that were wrapped since."""
        return name

    def convert_drawn_parameters(self, module: nn.Module) -> None:
        """A module's own parameters have just been drawn: for what is not stored as it was drawn."""

    def build_buffer(self, module: nn.Module, name: str, device: torch.device) -> torch.Tensor:
        """What a module's buffer holds, such as the frequencies of rotary embeddings: `build_model` leaves it on meta.

        Called wherever the model is given its weights, and with fake tensors where it is traced.

        Parameters
        ----------
        name: str
            The buffer's name in the module.
        device: torch.device
            Where the result goes.

        Raises
        ------
        ImpossibleError
            If the family does not say.
        """
        raise ImpossibleError(
            f"model.family={self.family} does not say what the buffer {name} of {type(module).__name__} holds, which "
            "its model has on meta: give it a `build_buffer`, or choose a model without buffers."
        )

    def find_stored_bytes(self, model: nn.Module) -> dict[int, int]:
        """Bytes of the parameters that are stored in a format of their own, by their identity."""
        return {}

    def list_divided_sizes(self, sequence_length: int, *, sequence_parallel: bool) -> dict[str, int]:
        """What tensor parallelism divides evenly among ranks: dimensions by the name of their field."""
        return {}

    def build_layer_division(self, model: nn.Module, *, sequence_parallel: bool) -> LayerDivision:
        """How tensor parallelism divides the layers of a model whose blocks may have been wrapped already.

        Logits are divided over the vocabulary, hidden states between the layers over the sequence if
        `sequence_parallel` says so.
        """
        raise ImpossibleError(f"model.family={self.family} does not say how its layers are divided among ranks.")

    @property
    def num_blocks(self) -> int | None:
        """Blocks between which the model can be cut into stages; None where the family does not say how."""
        return None

    def build_stage(self, model: nn.Module, blocks: range) -> PipelineStageModule:
        """The part of the model that runs some of its blocks, counted over all lists in the order they run.

        It is made of the model's own blocks, and of modules over its own parameters.
        """
        raise ImpossibleError(f"model.family={self.family} does not say how it is cut into stages.")

    def find_stage_input_shapes(self, block: int, sequence_length: int) -> tuple[tuple[int, int], ...]:
        """Shape, per sequence, of each tensor that a stage which begins with a block takes from the one before it."""
        raise ImpossibleError(f"model.family={self.family} does not say what its stages take from one another.")

    def find_fp32_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        """Linear layers whose result overflows in fp16, and which fp16 runs therefore keep in fp32."""
        return ()


def list_dividing_families() -> list[str]:
    """Names of the families whose layers tensor parallelism can divide."""
    package = sys.modules[__package__]
    return [name for name in plugins.list_plugin_names(package, Family) if load_family(name).can_divide_layers]


def load_family(name: str) -> type[Family]:
    """The family class that ``bench/models/<name>.py``, or the module with that path, defines."""
    return plugins.find_plugin_class("model.family", name, sys.modules[__package__], Family)


# --- What is done to a model's blocks before a strategy wraps them: grouping, checkpointing, compiling.

CHECKPOINTING_MODES = ("none", "full", "selective")


def checkpoint_blocks(family: Family, model: nn.Module, mode: str) -> None:
    """Wrap each block so that backward computes its activations again.

    ``full`` keeps a block's inputs alone. ``selective`` keeps the results of matrix products with weights and
    computes the rest again, attention scores among it: what "Reducing Activation Recomputation in Large
    Transformer Models" (Korthikanti et al. 2022, arXiv:2205.05198) calls selective activation recomputation.
    """
    if mode == "none":
        return
    options: dict[str, Any] = {
        "checkpoint_impl": CheckpointImpl.NO_REENTRANT,
        "preserve_rng_state": _has_dropout(model),
    }
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _choose_checkpoint_policy)
    for blocks in family.find_block_lists(model):
        for index, block in enumerate(blocks):
            blocks[index] = checkpoint_wrapper(block, **options)


def compile_blocks(family: Family, model: nn.Module) -> None:
    """Compile each block in place, after it was checkpointed and before it is wrapped."""
    for blocks in family.find_block_lists(model):
        for block in blocks:
            block.compile()


class BlockGroup(nn.Module):
    """Several consecutive blocks that are called as one."""

    def __init__(self, family: Family, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.family = family
        self.blocks = nn.ModuleList(blocks)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the blocks in turn, with the call the model makes for one block."""
        return self.family.run_blocks(list(self.blocks), *args, **kwargs)


def group_blocks(family: Family, model: nn.Module, blocks_per_unit: int) -> list[nn.Module]:
    """Put every `blocks_per_unit` consecutive blocks into one `BlockGroup`, and return the units in running order.

    With one block per unit the model stays as it is. Groups never span two block lists (encoder and decoder).
    """
    units: list[nn.Module] = []
    for blocks in family.find_block_lists(model):
        if blocks_per_unit > 1:
            all_blocks = list(blocks)
            groups = [
                BlockGroup(family, all_blocks[start : start + blocks_per_unit])
                for start in range(0, len(all_blocks), blocks_per_unit)
            ]
            del blocks[:]
            blocks.extend(groups)
        units.extend(blocks)
    return units


def _choose_checkpoint_policy(_context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    matmul_operators = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operator in matmul_operators else CheckpointPolicy.PREFER_RECOMPUTE


def _has_dropout(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


# --- Give a model that was built on meta its weights: the same values however it is sharded.

DEFAULT_STD = 0.02
"""GPT-2's, for parameters that nobody draws at random otherwise."""

MAX_CPU_DRAWN_NUMEL = MIB
"""Up to this size parameters are drawn on the CPU: models of a few million parameters have equal losses on CPU and GPU
(`bench.check`). Larger ones are drawn where they go, which takes a GPU no time."""


class Materializer:
    """Fills the parameters of a model with random values that depend on their names and the seed alone.

    Each parameter is drawn whole from a generator of its own, and a sharded one then keeps its shard: one process,
    DDP and FSDP at every factor start from equal weights, and no rank ever holds more than one whole parameter
    besides its own. Tied parameters stay tied.

    Create it before the model is wrapped, since it remembers every parameter's name.

    Parameters
    ----------
    model: nn.Module
        On meta.
    family: Family
        Says how each parameter is distributed.
    device: torch.device
        Where the parameters go.
    seed: int
        Seed of all weights.
    """

    def __init__(self, model: nn.Module, family: Family, device: torch.device, seed: int) -> None:
        self._family = family
        self._device = device
        self._seed = seed
        first_name = {id(parameter): name for name, parameter in model.named_parameters()}
        self._name_of_parameter = {
            (id(module), name): first_name[id(parameter)]
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
        }
        self._parameters = {id(parameter): (parameter, name) for name, parameter in model.named_parameters()}
        self._filled_parameters: dict[str, nn.Parameter] = {}
        self._keep_on_cpu = False
        self.arrange_parameter: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, full_parameter: (
            full_parameter
        )
        """Puts a whole parameter, drawn by its name, into the order in which it is sharded."""

    def build_for_part(self, part: nn.Module) -> Materializer:
        """What fills a module that was made of the model's parameters: what it shares with others becomes its own."""
        part_materializer = copy.copy(self)
        part_materializer._name_of_parameter = {
            (id(module), name): self._parameters[id(parameter)][1]
            for module in part.modules()
            for name, parameter in module.named_parameters(recurse=False)
        }
        part_materializer._filled_parameters = {}
        return part_materializer

    def list_parameter_names(self, part: nn.Module) -> list[str]:
        """The names that the whole model has for a part's parameters, while they are still on meta."""
        return [self._parameters[id(parameter)][1] for parameter in part.parameters()]

    def fill_model(self, model: nn.Module, *, keep_on_cpu: bool = False) -> None:
        """Fill every parameter of `model` that is still on meta, whether whole or sharded (DTensor).

        With `keep_on_cpu` each is drawn and sharded on the device, then kept on the CPU.
        """
        self._keep_on_cpu = keep_on_cpu
        for module in model.modules():
            self.fill_module(module)

    def fill_module(self, module: nn.Module, *, constants: bool = True) -> None:
        """Fill the parameters that belong to `module` itself, not to its children.

        Without `constants` those that start as ones or zeros are drawn at random like the others.
        """
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                setattr(
                    module,
                    name,
                    self._fill_parameter(self._name_of_parameter[id(module), name], parameter, constants=constants),
                )
        fill_buffers(module, self._family, self._device)
        self._family.convert_drawn_parameters(module)

    def _fill_parameter(self, name: str, meta_parameter: nn.Parameter, *, constants: bool) -> nn.Parameter:
        if name not in self._filled_parameters:
            full_parameter = torch.empty(meta_parameter.shape, dtype=meta_parameter.dtype, device=self._device)
            std = self._family.find_init_std(name, full_parameter)
            if not constants:
                std = std or DEFAULT_STD
            if std is None:
                full_parameter.fill_(1.0)
            elif std == 0:
                full_parameter.zero_()
            else:
                self._draw_values(name, full_parameter, std)
            value = full_parameter
            if isinstance(meta_parameter, DTensor):
                arranged_parameter = self.arrange_parameter(name, full_parameter)
                value = distribute_tensor(
                    arranged_parameter, meta_parameter.device_mesh, meta_parameter.placements, src_data_rank=None
                )
            value = value.cpu() if self._keep_on_cpu else value
            self._filled_parameters[name] = nn.Parameter(value, requires_grad=meta_parameter.requires_grad)
        return self._filled_parameters[name]

    def _draw_values(self, name: str, full_parameter: torch.Tensor, std: float) -> None:
        """Fill a parameter at random: a small one on the CPU, so that it is the same on every kind of device."""
        digest = hashlib.sha256(f"{self._seed}:{self._family.find_seed_name(name)}".encode()).digest()
        device = torch.device("cpu") if full_parameter.numel() <= MAX_CPU_DRAWN_NUMEL else self._device
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))
        if device == self._device:
            full_parameter.normal_(std=std, generator=generator)
        else:
            full_parameter.copy_(
                torch.empty(full_parameter.shape, dtype=full_parameter.dtype).normal_(std=std, generator=generator)
            )


def fill_buffers(module: nn.Module, family: Family, device: torch.device) -> None:
    """Give a module its own buffers, not its children's, on a device: what is on meta gets what the family says.

    Raises
    ------
    ImpossibleError
        If the family does not say what a buffer holds.
    """
    for name, buffer in module.named_buffers(recurse=False):
        value = family.build_buffer(module, name, device) if buffer.is_meta else buffer.to(device)
        module.register_buffer(name, value, persistent=name not in module._non_persistent_buffers_set)


@functools.lru_cache(maxsize=64)
def count_buffer_bytes(family: Family) -> int:
    """Bytes of all buffers of a family's model, of which every device has a copy."""
    model = family.build_model()
    if not any(True for _ in model.buffers()):
        return 0
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in model.modules():
            fill_buffers(module, family, torch.device("cpu"))
    return sum({id(buffer): buffer.nbytes for buffer in model.buffers()}.values())
