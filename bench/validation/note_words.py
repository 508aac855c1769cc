"""What notes state of a run beside its columns: compiler, checkpointing, optimizer, adapters, loss.

A note is read clause by clause: one that denies something, or says that it is not stated, states nothing of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from bench.validation.metrics import SPEED
from bench.validation.overrides import NotExpressibleError, Overrides

CLAUSE_END_PATTERN = r"[;,()]|\.\s|\bbut\b"

DENIAL_PATTERN = (
    r"\b(?:no|not|non|without|never|off|disabled?|unknown|before|instead of|rather than|advises against|unstated)\b"
    r"|[=:] ?(?:0|false|none|off)\b"
)
"""In clauses that say that something is not so, or not said."""

UNSAID_PATTERN = r"\b(?:stated|mentioned|said|given|known|unknown|unstated)\b"
"""In those of them that leave open whether it is so."""

COMPILER_PATTERN = r"torch[. ]compile|\bcompiled?\b"
OTHER_COMPILER_PATTERN = r"\bthunder\b|\bnvfuser\b"
CHECKPOINTING_PATTERN = r"(?:activation|gradient) (?:checkpoint|recomput)\w*"
PARTIAL_CHECKPOINTING_PATTERN = r"selective|every \w+ (?:layer|block)|\d+ (?:layers|blocks)"
STEP_IN_BACKWARD_PATTERN = r"optimi[sz]er[ -](?:step )?(?:in|into|in the)[ -]backward"
PADDED_PATTERN = r"padded to the longest|not packed|real lengths|variable lengths"
MICRO_BATCH_TIME_PATTERN = (
    r"(?:iteration|time|step) (?:is|=|of|per) (?:one|a|each)? ?micro-?batch|per micro-?batch time"
)

FUSED_ATTENTION_PATTERN = r"flash[ -]?att\w*|\bxformers\b|\bsdpa\b|(?:fused|memory[ -]efficient|cudnn) attention"
EAGER_ATTENTION_PATTERN = (
    r"(?:eager|unfused|naive|vanilla|math) attention|attn_implementation\W*eager|attention\W{1,3}eager"
)

DEEPEP_PATTERN = r"\b(?:deep|hybrid)[ _-]?ep\b"
OVERLAPPED_TOKENS_PATTERN = (
    r"overlap_moe_expert_parallel_comm|1f1b overlap"
    r"|\b(?:all-?to-?all|a2a|ep|moe|expert[ -]parallel\w*)(?: comm\w*)? overlap"
)

OPTIMIZER_PATTERNS = {
    "adamw_8bit": r"(?:8[ -]?bit|int8) (?:paged )?adamw?\b|adamw?[ -]?8[ -]?bit",
    "adafactor": r"\badafactor\b",
    "lion": r"\blion\b",
    "muon": r"\bmuon\b",
    "sgd": r"\bsgd\b",
}
"""Options of conf/optimizer, but for the one that is taken where nothing is said."""

IMPLEMENTATION_PATTERNS = {"fused": r"\bfused adamw?\b|adamw? \(?fused", "foreach": r"\bforeach\b"}

RANK_PATTERN = r"\b(?:rank|r)[ =:]*(\d{1,4})\b"
ALPHA_PATTERN = r"\balpha[ =:]*(\d{1,4})\b"

TARGET_LAYERS = {
    **dict.fromkeys(("q", "query", "queries"), ("q_proj",)),
    **dict.fromkeys(("k", "key", "keys"), ("k_proj",)),
    **dict.fromkeys(("v", "value", "values"), ("v_proj",)),
    **dict.fromkeys(("o", "output", "output projection"), ("o_proj",)),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
"""Layers beside which adapters stand, and what they are called in Llama and its relatives."""
_TARGET_WORD = "|".join(sorted(TARGET_LAYERS, key=len, reverse=True))
TARGETS_PATTERN = rf"\bon ((?:(?:{_TARGET_WORD})(?:, and |, | and |/)?)+)(?![a-z])"

MODELS_WITH_NAMED_LAYERS = r"(?:llama|mistral|qwen[23]|gemma)"
"""Options of conf/model whose blocks have the layers of `TARGET_LAYERS`."""


def list_clauses(note: str) -> list[str]:
    """The parts of a note, in lower case."""
    return [clause.strip() for clause in re.split(CLAUSE_END_PATTERN, note.lower()) if clause.strip()]


def states(note: str, pattern: str) -> bool:
    """Whether some clause says something, and does not deny it."""
    return any(re.search(pattern, clause) and not re.search(DENIAL_PATTERN, clause) for clause in list_clauses(note))


def denies(note: str, pattern: str) -> bool:
    """Whether clauses that say something all deny it, and there is one."""
    clauses = [
        clause for clause in list_clauses(note) if re.search(pattern, clause) and not re.search(UNSAID_PATTERN, clause)
    ]
    return bool(clauses) and all(re.search(DENIAL_PATTERN, clause) for clause in clauses)


def find_checkpointing(note: str) -> str:
    """The word of the column of it that a note comes to; nothing where the note says nothing, or of some blocks."""
    if states(note, f"(?=.*{CHECKPOINTING_PATTERN})(?=.*(?:{PARTIAL_CHECKPOINTING_PATTERN}))"):
        return ""
    if states(note, CHECKPOINTING_PATTERN):
        return "full"
    return "none" if denies(note, CHECKPOINTING_PATTERN) else ""


def read_note(note: str, settings: Mapping[str, str], kind: str, *, has_fused_attention: bool = True) -> Overrides:
    """What a note adds to what the columns of a row came to.

    Parameters
    ----------
    note: str
    settings: Mapping
        What the columns came to, and what is known of the row's source.
    kind: str
        Of the row's metric (`bench.validation.metrics.KINDS`).
    has_fused_attention: bool
        Whether the row's torch brings fused kernels of attention along.

    Raises
    ------
    NotExpressibleError
        If the note says of the run what the suite does not have, or leaves open how many tokens a step has.
    """
    overrides = Overrides()
    if states(note, STEP_IN_BACKWARD_PATTERN):
        raise NotExpressibleError("the optimizer steps within backward, which the suite's do not")
    if re.search(PADDED_PATTERN, note.lower()):
        if kind == SPEED:
            raise NotExpressibleError("samples are not packed: how many tokens a step has is not stated")
        overrides.assumptions.append("the longest micro-batch is as long as the stated limit")
    if states(note, COMPILER_PATTERN):
        overrides.settings["compile"] = "true"
        if states(note, OTHER_COMPILER_PATTERN):
            overrides.assumptions.append("another compiler's kernels are predicted as those of torch's")
    overrides.add(_read_optimizer(note))
    overrides.settings |= _read_sent_tokens(note, settings)
    if "model.attention" not in settings:
        overrides.add(_read_attention(note, has_fused_attention=has_fused_attention))
    if "loss" not in settings:
        overrides.add(_read_loss(note))
    if "finetune" in settings:
        overrides.add(_read_adapters(note, settings["model"]))
    return overrides


def has_micro_batch_times(note: str) -> bool:
    """Whether what is called an iteration is one micro-batch, however many make a step."""
    return states(note, MICRO_BATCH_TIME_PATTERN)


def _read_optimizer(note: str) -> Overrides:
    overrides = Overrides()
    for option, pattern in OPTIMIZER_PATTERNS.items():
        if states(note, pattern):
            overrides.settings["optimizer"] = option
            return overrides
    for implementation, pattern in IMPLEMENTATION_PATTERNS.items():
        if states(note, pattern):
            overrides.settings["optimizer.implementation"] = implementation
            return overrides
    return overrides


def _read_attention(note: str, *, has_fused_attention: bool) -> Overrides:
    """Where it is not said, torch's kernels, which runs without the package flash_attn have, too, if torch has any."""
    if states(note, EAGER_ATTENTION_PATTERN):
        return Overrides({"model.attention": "eager"})
    if has_fused_attention or states(note, FUSED_ATTENTION_PATTERN):
        return Overrides()
    return Overrides({"model.attention": "eager"}, ["fused kernels of attention are not in torch before 2.0"])


def _read_sent_tokens(note: str, settings: Mapping[str, str]) -> dict[str, str]:
    """How tokens go to the experts of other ranks."""
    if int(settings.get("strategy.expert", 1)) == 1:
        return {}
    sent = {"strategy.token_dispatcher": "deepep"} if states(note, DEEPEP_PATTERN) else {}
    is_overlapped = states(note, OVERLAPPED_TOKENS_PATTERN) and int(settings.get("strategy.pipeline", 1)) > 1
    return sent | ({"strategy.overlap_experts": "true"} if is_overlapped else {})


def _read_loss(note: str) -> Overrides:
    if states(note, r"chunked cross[ -]entropy"):
        return Overrides({"loss": "chunked"})
    if states(note, r"\bliger\b|fused linear cross[ -]entropy"):
        return Overrides({"loss": "chunked"}, ["a loss fused with the head is predicted as a chunked one"])
    return Overrides()


def _read_adapters(note: str, model: str) -> Overrides:
    overrides = Overrides()
    for field, pattern in (("rank", RANK_PATTERN), ("alpha", ALPHA_PATTERN)):
        if match := re.search(pattern, note.lower()):
            overrides.settings[f"finetune.{field}"] = match[1]
    match = re.search(TARGETS_PATTERN, note.lower())
    if match and re.match(MODELS_WITH_NAMED_LAYERS, model):
        layers = [layer for word in re.findall(rf"\b(?:{_TARGET_WORD})\b", match[1]) for layer in TARGET_LAYERS[word]]
        overrides.settings["finetune.target_modules"] = f"[{','.join(dict.fromkeys(layers))}]"
    return overrides
