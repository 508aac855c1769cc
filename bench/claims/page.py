"""The claims as Markdown: all verdicts in a table, then every claim with its evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bench.claims.capacity import CAPACITY_CLAIMS
from bench.claims.claim import VERDICTS, Assessment, PaperClaim, ReadStore, assess_claim
from bench.claims.large_runs import LARGE_RUN_CLAIMS
from bench.claims.quotations import QUOTATION_CLAIMS
from bench.claims.speed import SPEED_CLAIMS
from bench.claims.states import MEMORY_CLAIMS
from bench.claims.traffic import TRAFFIC_CLAIMS
from bench.claims.tree_leaves import TREE_CLAIMS

CLAIM_GROUPS: dict[str, tuple[PaperClaim, ...]] = {
    "Memory": MEMORY_CLAIMS,
    "Communication": TRAFFIC_CLAIMS,
    "Speed": SPEED_CLAIMS + LARGE_RUN_CLAIMS,
    "What fits": CAPACITY_CLAIMS,
    "The decision tree": TREE_CLAIMS,
    "Paper and notes": QUOTATION_CLAIMS,
}
"""All claims, by what they are about."""

SAME_SOURCE_NOTE = (
    "Predicted and claimed numbers are not independent: constants of the predictor were chosen with rows of this paper "
    "in sight. Where a prediction says so, they were chosen anew without."
)


def list_claims() -> list[PaperClaim]:
    return [claim for claims in CLAIM_GROUPS.values() for claim in claims]


def assess_all(read_store: ReadStore | None = None) -> dict[str, Assessment]:
    """Every claim's assessment, by its key."""
    return {claim.key: assess_claim(claim, read_store) for claim in list_claims()}


def render_summary(assessments: dict[str, Assessment]) -> str:
    """How many of each verdict, and a table of all claims."""
    counts = Counter(assessment.verdict for assessment in assessments.values())
    lines = [
        f"Of {len(assessments)} claims: " + ", ".join(f"{verdict} {counts[verdict]}" for verdict in VERDICTS) + ".",
        "",
        "| claim | verdict | evidence |",
        "|---|---|---|",
    ]
    for claim in list_claims():
        assessment = assessments[claim.key]
        lines.append(f"| [{claim.text}](#{_build_anchor(claim)}) | {assessment.verdict} | {_list_kinds(assessment)} |")
    return "\n".join(lines) + "\n"


def _list_kinds(assessment: Assessment) -> str:
    return ", ".join(dict.fromkeys(statement.kind for statement in assessment.evidence)) or "none"


def _build_anchor(claim: PaperClaim) -> str:
    return claim.key.replace("_", "-")


def render_claims(assessments: dict[str, Assessment]) -> str:
    """A section per group, an entry per claim."""
    parts = []
    for group, claims in CLAIM_GROUPS.items():
        parts += [f"## {group}\n", *(_render_claim(claim, assessments[claim.key]) for claim in claims)]
    return "\n".join(parts)


def _render_claim(claim: PaperClaim, assessment: Assessment) -> str:
    lines = [
        f"({_build_anchor(claim)})=",
        f"### {claim.text}\n",
        f"**{assessment.verdict.capitalize()}.** {assessment.reason}\n",
        *(f"* {statement.kind.capitalize()}: {statement.text}" for statement in assessment.evidence),
        f"* Source: {claim.source}.",
    ]
    has_predictions = any(statement.kind == "predicted" for statement in assessment.evidence)
    notes = [claim.caveat] if claim.caveat else []
    notes += [SAME_SOURCE_NOTE] if claim.is_from_same_source and has_predictions else []
    return "\n".join([*lines, *(["", " ".join(notes)] if notes else []), ""])


def render_terminal(assessments: dict[str, Assessment]) -> str:
    """A line per claim."""
    claims: Sequence[PaperClaim] = list_claims()
    width = max(len(assessment.verdict) for assessment in assessments.values())
    return "\n".join(f"{assessments[claim.key].verdict:<{width}}  {claim.text}" for claim in claims) + "\n"
