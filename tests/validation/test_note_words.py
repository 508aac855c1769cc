"""Notes are read clause by clause, and what they deny or leave open is not taken for stated."""

from __future__ import annotations

import pytest

from bench.validation.metrics import ALLOCATED, SPEED
from bench.validation.note_words import denies, find_checkpointing, has_micro_batch_times, read_note, states
from bench.validation.overrides import NotExpressibleError
from bench.validation.sources import has_fused_attention

LORA = {"model": "llama3_8b", "finetune": "lora"}
FULL = {"model": "llama3_8b"}


def read(note: str, settings: dict[str, str] = FULL, kind: str = SPEED) -> dict[str, str]:
    return read_note(note, settings, kind).settings


@pytest.mark.parametrize(
    ("note", "is_compiled"),
    [
        ("torch.compile on (page); packed", True),
        ("compiled; clipping at 1", True),
        ("a batch without accumulation, torch.compile on", True),
        ("torch.compile not mentioned by the page (its guide advises against it)", False),
        ("precision, network, compile and attention kernel not stated", False),
        ("eager, no compile", False),
        ("config of that commit: AdamW, compile off", False),
        ("without torch.compile", False),
        ("", False),
    ],
)
def test_the_compiler_is_on_only_where_a_clause_says_so(note: str, is_compiled: bool) -> None:
    assert read(note) == ({"compile": "true"} if is_compiled else {})


def test_kernels_of_another_compiler_are_an_assumption() -> None:
    overrides = read_note("compiled with Lightning Thunder", FULL, SPEED)
    assert overrides.settings == {"compile": "true"}
    assert overrides.assumptions == ["another compiler's kernels are predicted as those of torch's"]


@pytest.mark.parametrize(
    ("note", "word"),
    [
        ("AdamW, activation checkpointing on", "full"),
        ("gradient checkpointing enabled", "full"),
        ("activation checkpointing of every block (script)", "full"),
        ("no activation checkpointing on one GPU (script)", "none"),
        ("activation checkpointing off; batch 4", "none"),
        ("activation checkpointing and accumulation not stated", ""),
        ("selective activation checkpointing", ""),
        ("activation checkpointing of 10 layers", ""),
        ("AdamW", ""),
    ],
)
def test_checkpointing_is_what_the_note_says_of_all_blocks(note: str, word: str) -> None:
    assert find_checkpointing(note) == word


@pytest.mark.parametrize(
    ("note", "expected"),
    [
        ("PagedAdamW8bit, batch 2", {"optimizer": "adamw_8bit"}),
        ("8-bit AdamW", {"optimizer": "adamw_8bit"}),
        ("without 8-bit AdamW", {}),
        ("the optimizer of the rows before 8-bit AdamW is not stated", {}),
        ("Adafactor", {"optimizer": "adafactor"}),
        ("fused AdamW, no clipping", {"optimizer.implementation": "fused"}),
    ],
)
def test_optimizers_are_found_by_their_names(note: str, expected: dict[str, str]) -> None:
    assert read(note) == expected


def test_adapters_have_the_rank_and_the_layers_that_are_stated() -> None:
    note = "LoRA rank 16 alpha 32 on q, k, v, output projection and MLP, fused AdamW"
    layers = "[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]"
    assert read(note, LORA) == {
        "finetune.rank": "16",
        "finetune.alpha": "32",
        "finetune.target_modules": layers,
        "optimizer.implementation": "fused",
    }
    assert read("LoRA rank 8 alpha 16 on query and value", LORA)["finetune.target_modules"] == "[q_proj,v_proj]"
    assert "finetune.target_modules" not in read(
        note, {**LORA, "model": "gpt_1b3"}
    )  # whose layers are called otherwise
    assert read("on queries of rank 0", FULL) == {}


def test_the_loss_is_chunked_where_that_is_said_and_nothing_is_known_of_it() -> None:
    assert read("chunked cross entropy")["loss"] == "chunked"
    assert read_note("Liger kernels", FULL, SPEED).assumptions == [
        "a loss fused with the head is predicted as a chunked one"
    ]
    assert "loss" not in read("chunked cross entropy", {**FULL, "loss": "compiled"})


def test_what_a_step_has_of_tokens_is_open_where_samples_are_not_packed() -> None:
    note = "samples padded to the longest of the micro-batch"
    with pytest.raises(NotExpressibleError, match="how many tokens a step has is not stated"):
        read_note(note, FULL, SPEED)
    assert read_note(note, FULL, ALLOCATED).assumptions == ["the longest micro-batch is as long as the stated limit"]


@pytest.mark.parametrize(
    "note", ["optimizer step in backward", "fuse optimizer step into backward", "optimizer-in-backward"]
)
def test_an_optimizer_within_backward_is_none_of_the_suite_s(note: str) -> None:
    with pytest.raises(NotExpressibleError, match="the optimizer steps within backward"):
        read(note)
    assert read(f"without {note}") == {}


def test_a_time_of_one_micro_batch_is_told_from_that_of_a_step() -> None:
    assert has_micro_batch_times("the printed time is one iteration = one micro-batch")
    assert not has_micro_batch_times("8 micro-batches per step")


def test_a_clause_that_denies_says_nothing_of_the_next() -> None:
    assert states("no clipping, torch.compile", r"torch\.compile")
    assert not denies("no compile; later compiled", r"compil")
    assert denies("no compile", r"compil")
    assert not denies("", r"compil")


@pytest.mark.parametrize(
    ("note", "expected"),
    [
        ("eager attention", {"model.attention": "eager"}),
        ("attn_implementation: eager; GBS 8", {"model.attention": "eager"}),
        ("no eager attention", {}),
        ("FlashAttention off", {}),  # torch's own kernels, then
        ("FlashAttention 2", {}),
    ],
)
def test_attention_is_eager_where_that_is_said(note: str, expected: dict[str, str]) -> None:
    assert read(note) == expected


def test_torch_had_no_fused_attention_before_2_0() -> None:
    assert not has_fused_attention("1.13.1")
    assert has_fused_attention("2.0")
    assert has_fused_attention("unknown, before 2.1")
    assert has_fused_attention("unknown")
    overrides = read_note("GBS 8", FULL, SPEED, has_fused_attention=False)
    assert overrides.settings == {"model.attention": "eager"}
    assert overrides.assumptions == ["fused kernels of attention are not in torch before 2.0"]
    assert not read_note("xformers", FULL, SPEED, has_fused_attention=False).settings
    assert not read_note("GBS 8", {**FULL, "model.attention": "sdpa"}, SPEED, has_fused_attention=False).settings


EXPERTS = {**FULL, "strategy": "mesh", "strategy.expert": "8", "strategy.pipeline": "2"}
MERGED, OVERLAPPED = {"strategy.token_dispatcher": "deepep"}, {"strategy.overlap_experts": "true"}


@pytest.mark.parametrize(
    ("note", "settings", "expected"),
    [
        ("TE + DeepEP", EXPERTS, MERGED),
        ("HybridEP dispatcher, all-to-all overlap", EXPERTS, MERGED | OVERLAPPED),
        ("overlap_moe_expert_parallel_comm=True", EXPERTS, OVERLAPPED),
        ("no DeepEP; expert parallel comm overlap not stated", EXPERTS, {}),
        ("overlap_moe_expert_parallel_comm=false", EXPERTS, {}),
        ("EP overlap", {**EXPERTS, "strategy.pipeline": "1"}, {}),  # there is no other micro-batch beside it
        ("TE + DeepEP", FULL, {}),
        ("overlap of gradient reduce and parameter gather", EXPERTS, {}),
    ],
)
def test_how_tokens_are_sent_is_read_where_they_are(
    note: str, settings: dict[str, str], expected: dict[str, str]
) -> None:
    assert read(note, settings) == expected
