"""DHEN: a recommendation model of sharded embedding tables and a dense part of layers that are ensembles of interaction
modules ("DHEN: A Deep and Hierarchical Ensemble Network for Large-Scale Click-Through Rate Prediction", Zhang et al.
2022, arXiv:2203.11014).

A sample is one sequence of one token: ``tokens_per_second_per_gpu`` of its rows are samples per second and GPU.
Tables are divided among all ranks (`bench.models.embedding_tables`); the strategy wraps the dense part.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import nn

from bench.core.errors import ImpossibleError, invalid_value_error
from bench.core.precision import Precision
from bench.core.typed_config import OneOf, Within
from bench.models.base import Batch, BlockCount, Family, FlopCount, HeadCount, LayerWidth
from bench.models.embedding_tables import TABLE_FORMATS, EmbeddingTables, build_table_buffer, compute_table_bytes

CLICK_RATE = 0.25
"""Share of synthetic samples whose label is 1."""


@dataclass(frozen=True)
class DHENFamily(Family):
    num_tables: Annotated[int, Within(1, 2**17)]
    """Sparse features, each with a table of its own."""
    rows_per_table: Annotated[int, Within(1, 2**40)]
    ids_per_table: Annotated[int, Within(1, 4096)]
    """Rows of each table that a sample names; they are added up."""
    table_format: Annotated[str, OneOf(*TABLE_FORMATS)]
    table_learning_rate: Annotated[float, Within(0, 1e3, exclusive_minimum=True)]
    """Of the tables' row-wise Adagrad."""
    num_dense_features: LayerWidth
    """Numbers that a sample has beside its ids."""
    num_embeddings: LayerWidth
    """Embeddings that each layer takes and gives: m in the paper."""
    width: LayerWidth
    """Of an embedding, in tables and layers: d in the paper."""
    num_layers: BlockCount
    num_heads: HeadCount
    attention_hidden: LayerWidth
    """Width of the feed-forward layer of the self-attention module."""
    dot_product_hidden: LayerWidth
    """Width between the dot products of all pairs and the embeddings that are made of them."""
    head_hidden: LayerWidth
    """Hidden width of the perceptrons of the dense features and of the prediction."""

    communicates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise invalid_value_error("model.num_heads", self.num_heads, f"a divisor of model.width={self.width}")

    def build_model(self) -> nn.Module:
        with torch.device("meta"):
            return DHENModel(self)

    def count_parameters(self, model: nn.Module) -> int:
        """With the tables."""
        return super().count_parameters(model) + self.num_tables * self.rows_per_table * self.width

    @functools.cached_property
    def num_active_parameters(self) -> int:
        """Of the tables, the rows that a sample names."""
        return self.num_parameters - self.num_tables * (self.rows_per_table - self.ids_per_table) * self.width

    def find_init_std(self, name: str, parameter: torch.Tensor) -> float | None:
        """1 / sqrt(inputs) for weights, ones and zeros for layer norms."""
        if name.endswith("bias"):
            return 0.0
        return None if parameter.dim() == 1 else parameter.shape[1] ** -0.5

    def build_batch(self, num_sequences: int, sequence_length: int, generator: torch.Generator) -> Batch:
        """Ids, all equally likely, normally distributed dense features, and labels 0 or 1 of shape (samples, 1)."""
        ids_shape = (num_sequences, self.num_tables, self.ids_per_table)
        ids = torch.randint(0, self.rows_per_table, ids_shape, generator=generator)
        dense = torch.randn(num_sequences, self.num_dense_features, generator=generator)
        labels = (torch.rand(num_sequences, 1, generator=generator) < CLICK_RATE).float()
        return Batch({"ids": ids, "dense": dense}, labels)

    def compute_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean binary cross entropy."""
        return nn.functional.binary_cross_entropy_with_logits(logits.float(), labels)

    def limit_blocks(self, max_blocks: int) -> DHENFamily:
        return dataclasses.replace(self, num_layers=min(max_blocks, self.num_layers))

    def find_block_lists(self, model: nn.Module) -> Sequence[nn.ModuleList]:
        return [model.get_submodule("layers")]  # type: ignore[list-item]

    def count_flops_per_sequence(self, sequence_length: int) -> FlopCount:
        """With m embeddings of width d, hidden widths a (attention), p (dot products) and h (perceptrons): per layer
        ``4 m^2 d`` for the linear module and the mix behind attention, ``2 p (m^2 + m d)`` for the dot products'
        perceptron, ``m (8 d^2 + 4 d a)`` for attention's layers; ``2 m^2 d`` for dot products and ``4 m^2 d`` for
        scores. Outside: ``2 d m (tables + 1)`` to mix features, and the perceptrons. Looking up is no product.
        """
        m, d = self.num_embeddings, self.width
        linear = 4 * m * m * d + 2 * self.dot_product_hidden * (m * m + m * d)
        linear += m * (8 * d * d + 4 * d * self.attention_hidden)
        attention = 6 * m * m * d
        outside = 2 * d * m * (self.num_tables + 1)
        outside += 2 * self.head_hidden * (self.num_dense_features + d + m * d + 1)
        return FlopCount(
            blocks_linear=self.num_layers * linear,
            blocks_attention=self.num_layers * attention,
            blocks_last_linear=0,
            outside_blocks=outside,
            recomputed_by_block=((linear + attention,) * self.num_layers,),
        )

    def count_tokens_per_sequence(self, sequence_length: int) -> int:
        """A sample."""
        return 1

    def check_sequence_length(self, sequence_length: int) -> None:
        if sequence_length != 1:
            raise invalid_value_error(
                "sequence_length",
                sequence_length,
                f"1, since a sample of model={self.name} is one token",
                ImpossibleError,
            )

    def check_run(self, precision: Precision, num_ranks: int) -> None:
        """Every rank has as many tables; fp16's gradients are scaled, and tables are updated before anybody knows
        whether they overflowed."""
        if self.num_tables % num_ranks:
            raise ImpossibleError(
                f"gpus={num_ranks} is not valid for model={self.name}, whose tables are divided evenly among ranks: "
                f"choose a divisor of model.num_tables={self.num_tables}."
            )
        if precision.scales_loss:
            raise ImpossibleError(
                f"precision={precision.name} is not valid for model={self.name}, whose tables are updated before "
                "gradients are unscaled: choose bf16 or fp32."
            )

    def build_buffer(self, module: nn.Module, name: str, device: torch.device) -> torch.Tensor:
        """This rank's tables and their optimizer's state."""
        assert isinstance(module, EmbeddingTables)
        return build_table_buffer(module, name, device)

    def count_divided_buffer_bytes(self, num_ranks: int) -> int:
        return compute_table_bytes(self._build_tables(), num_ranks)

    def _build_tables(self) -> EmbeddingTables:
        return EmbeddingTables(
            self.num_tables, self.rows_per_table, self.width, self.table_format, self.table_learning_rate
        )


class DHENModel(nn.Module):
    """Tables and dense features, mixed into m embeddings; layers; a perceptron over all embeddings."""

    def __init__(self, family: DHENFamily) -> None:
        super().__init__()
        m, d = family.num_embeddings, family.width
        self.tables = family._build_tables()
        self.dense = nn.Sequential(
            nn.Linear(family.num_dense_features, family.head_hidden), nn.ReLU(), nn.Linear(family.head_hidden, d)
        )
        self.mix = nn.Linear(family.num_tables + 1, m, bias=False)
        self.layers = nn.ModuleList(DHENLayer(family) for _ in range(family.num_layers))
        self.head = nn.Sequential(nn.Linear(m * d, family.head_hidden), nn.ReLU(), nn.Linear(family.head_hidden, 1))

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> dict[str, torch.Tensor]:
        """Logits of shape (samples, 1)."""
        dense_embedding = self.dense(dense.to(next(self.dense.parameters()).dtype))
        sparse_embeddings = self.tables(ids, dense_embedding.dtype)
        hidden = mix_embeddings(self.mix, torch.cat([sparse_embeddings, dense_embedding[:, None]], dim=1))
        for layer in self.layers:
            hidden = layer(hidden)
        return {"logits": self.head(hidden.flatten(1))}


class DHENLayer(nn.Module):
    """``Norm(Ensemble(X) + X)``, equation 1 of the paper, with the sum of three modules for the ensemble: linear, dot
    products of all pairs (as in DLRM), and self-attention."""

    def __init__(self, family: DHENFamily) -> None:
        super().__init__()
        m, d, hidden = family.num_embeddings, family.width, family.dot_product_hidden
        self.linear = nn.Linear(m, m, bias=False)
        self.dot_product = nn.Sequential(nn.Linear(m * m, hidden), nn.ReLU(), nn.Linear(hidden, m * d))
        self.attention = SelfAttention(family)
        self.mix = nn.Linear(m, m, bias=False)
        self.norm = nn.LayerNorm(d)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of shape (samples, m, d), and so the result."""
        products = torch.bmm(hidden, hidden.transpose(1, 2)).flatten(1)
        ensemble = mix_embeddings(self.linear, hidden)
        ensemble = ensemble + self.dot_product(products).view_as(hidden)
        ensemble = ensemble + mix_embeddings(self.mix, self.attention(hidden))
        return self.norm(ensemble + hidden)  # type: ignore[no-any-return]


class SelfAttention(nn.Module):
    """A transformer's encoder layer over the embeddings, with norms behind its two parts."""

    def __init__(self, family: DHENFamily) -> None:
        super().__init__()
        d = family.width
        self._num_heads, self._is_fused = family.num_heads, family.attention == "sdpa"
        self.query_key_value, self.output = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.feed_forward = nn.Sequential(
            nn.Linear(d, family.attention_hidden), nn.ReLU(), nn.Linear(family.attention_hidden, d)
        )
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(2, (self._num_heads, -1)).transpose(1, 2)
            for part in self.query_key_value(hidden).chunk(3, dim=2)
        )
        if self._is_fused:
            attended = nn.functional.scaled_dot_product_attention(query, key, value)
        else:
            scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
            attended = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype) @ value
        hidden = self.attention_norm(hidden + self.output(attended.transpose(1, 2).flatten(2)))
        return self.feed_forward_norm(hidden + self.feed_forward(hidden))  # type: ignore[no-any-return]


def mix_embeddings(layer: nn.Module, embeddings: torch.Tensor) -> torch.Tensor:
    """A linear layer along the embeddings: from (samples, n, d) to (samples, m, d), laid out as layer norms need it."""
    return layer(embeddings.transpose(1, 2)).transpose(1, 2).contiguous()  # type: ignore[no-any-return]
