"""The verdict: the post's five statements, where each holds, how much, and chance beside it."""

import math
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from tl_valuealign import arguments
from tl_valuealign.chance import random_matrix_directions
from tl_valuealign.contributions import ContributionResult
from tl_valuealign.intervals import half_width, withheld
from tl_valuealign.result import ValueAlignmentResult
from tl_valuealign.shapes import typed

STATEMENTS = {
    "embedding over attention, V": "V prefers the embedding to every attention output",
    "embedding over attention, Q and K": "Q and K do not prefer it to every attention output",
    "embedding over full stream, V": "the embedding beats the full stream on V",
    "concentrated spectra, V": "V spectra are concentrated",
    "negligible share, V": "the embedding's share of the value is negligible",
}
# Within this factor of chance a figure is said to lie at it.
AT_CHANCE = 1.05
# Less than this share of a value is called negligible.
NEGLIGIBLE = 0.05


@dataclass(frozen=True)
class Claim:
    """One row of the table.

    heads, of: where it holds, and where it could be asked. clear: in how many of those the 95%
    interval leaves no doubt (NA where intervals are withheld). effect: mean over heads of
    ``measure``; low and high limit its 95% interval (NaN where withheld). chance: what ``heads``
    would be if nothing but luck were at work (NaN where luck says nothing).
    """

    claim: str
    statement: str
    verdict: str
    heads: int
    of: int
    clear: int | None
    chance: float
    measure: str
    effect: float
    low: float
    high: float
    words: str


@typed
def claims_table(
    result: ValueAlignmentResult, contributions: ContributionResult | None = None
) -> pd.DataFrame:
    """The post's five statements asked of one result, at its first threshold; one row each.

    Columns are the fields of :class:`Claim`. A statement that the result cannot speak to (a role
    or component that was not measured, no block with attention before it) has the verdict "not
    measured". Intervals of means over heads are exact for the third statement (paired bootstrap
    of the mean) and cautious for the others (as if all heads erred together). With
    ``contributions`` of the same model the fifth is answered by exact signed shares, else by the
    post's projected squared norms, which have no interval. Raises ``InputError`` if they are of
    another model.
    """
    if contributions is not None:
        arguments.same_model("contributions", result.provenance, contributions.provenance)
    rows = [
        _over_attention(result, ("V",), "embedding over attention, V"),
        _over_attention(result, ("Q", "K"), "embedding over attention, Q and K"),
        _over_full(result),
        _concentrated(result),
        _negligible(result, contributions),
    ]
    table = pd.DataFrame([asdict(row) for row in rows])
    return table.astype({"heads": "Int64", "of": "Int64", "clear": "Int64"})


def _verdict(heads: int, of: int) -> str:
    if of == 0:
        return "not measured"
    share = heads / of
    if share >= 0.9:
        return "holds"
    if share >= 0.5:
        return "holds in most heads"
    return "fails in most heads" if share > 0.1 else "fails"


def _not_measured(claim: str, why: str) -> Claim:
    nan = float("nan")
    return Claim(claim, STATEMENTS[claim], "not measured", 0, 0, None, nan, "", nan, nan, nan, why)


def _mean(values: Tensor) -> float:
    known = values[~values.isnan()]
    return float(known.mean()) if known.numel() else float("nan")


def _beside_chance(ratio: float) -> str:
    """ "at 0.93 of chance, below it"; what a mean alignment over mean chance amounts to."""
    if np.isnan(ratio):
        return "without a chance level"
    place = "above it" if ratio > AT_CHANCE else "below it" if ratio < 1 / AT_CHANCE else "at it"
    return f"{ratio:.2f} × chance, {place}"


def _limits(effect: float, width: float) -> str:
    if np.isnan(width):
        return ""
    return f" (95% interval {effect - width:+.3f} to {effect + width:+.3f})"


def _why_no_interval(result: ValueAlignmentResult, width: float) -> str:
    if not np.isnan(width):
        return ""
    why = withheld(result.sums.n_sequences) or "no intervals: this run kept nothing per sequence"
    return f" {why[0].upper()}{why[1:]}."


def _over_attention(result: ValueAlignmentResult, roles: tuple[str, ...], claim: str) -> Claim:
    """Whether the embedding stands out among attention outputs (roles V), or does not (Q, K)."""
    attention = [n for n, source in enumerate(result.sources) if source.endswith("attn_out")]
    present = [role for role in roles if role in result.roles]
    if not present or not attention:
        lacks = "attention outputs" if present else f"role {' or '.join(roles)}"
        return _not_measured(claim, f"{lacks} not in this result")
    margins, doubts, ratios, lucky = [], [], [], []
    for role in present:
        values = result.role(role)
        outputs = values.by_source[0, attention]
        counts = (~outputs.isnan()).sum(0)
        best, which = outputs.nan_to_num(-1).max(0)
        embed = values.by_source[0, 0]
        asked = (counts > 0) & ~embed.isnan()
        width = _widths(result, role)
        best_width = width[attention].gather(0, which[None])[0]
        margins.append((embed - best)[asked])
        doubts.append((width[0] + best_width)[asked])
        ratios.append(torch.stack([embed, best, values.chance[0]], -1)[asked])
        lucky.append((1 / (counts + 1).double())[asked])
    margin, doubt, lucky_all = torch.cat(margins), torch.cat(doubts), torch.cat(lucky)
    if not margin.numel():
        return _not_measured(claim, "no block has an attention output before it")
    seeks = roles == ("V",)
    holds = margin > 0 if seeks else margin <= 0
    sure = margin - doubt > 0 if seeks else margin + doubt < 0
    luck = float(lucky_all.sum()) if seeks else float((1 - lucky_all).sum())
    effect, width_all = _mean(margin), float(doubt.mean())
    embed, best, chance = torch.cat(ratios).mean(0).tolist()
    names = " and ".join(present)
    words = (
        f"In {int(holds.sum())} of {len(margin)} {names} heads the embedding aligns "
        f"{'more than every' if seeks else 'no more than the best'} attention output; on average "
        f"it leads the best one by {effect:+.3f}{_limits(effect, width_all)}. Embedding "
        f"{_beside_chance(embed / chance)}; best attention output {_beside_chance(best / chance)}."
    )
    if seeks and embed / chance <= AT_CHANCE and effect > 0:
        words += " So these heads avoid attention outputs rather than seek the embedding."
    return Claim(
        claim,
        STATEMENTS[claim],
        _verdict(int(holds.sum()), len(margin)),
        int(holds.sum()),
        len(margin),
        None if np.isnan(width_all) else int(sure.sum()),
        luck,
        "embedding minus best attention output, alignment",
        effect,
        effect - width_all,
        effect + width_all,
        words + _why_no_interval(result, width_all),
    )


def _widths(result: ValueAlignmentResult, role: str) -> Tensor:
    """Half widths of the 95% intervals of all sources, [source, layer, head]."""
    effective = result.sums.effective_sequences(result.metric)[:-1, :, None]
    return half_width(result.role(role).by_source_stderr[0], effective)


def _over_full(result: ValueAlignmentResult) -> Claim:
    claim = "embedding over full stream, V"
    if "V" not in result.roles:
        return _not_measured(claim, "role V not in this result")
    values, sums = result.V, result.sums
    excess = values.excess[0]
    # Where nothing but the embedding is in the stream the two are the same vector.
    asked = ~excess.isnan() & (excess.abs() > 1e-9)
    if not bool(asked.any()):
        return _not_measured(claim, "the stream is the embedding in every block that was asked")
    effective = sums.effective_sequences(result.metric)[-1, :, None]
    width = half_width(values.excess_stderr[0], effective)
    lead = -excess[asked]
    holds = lead > 0
    replicates = sums.excess_replicates("V", result.metric)[:, 0][:, asked].mean(-1)
    spread = replicates.std(correction=1) * sums.bootstrap_factor
    if bool(values.excess_stderr[0].isnan().all()):
        spread = torch.tensor(torch.nan)
    effect = float(lead.mean())
    doubt = float(half_width(spread, float(effective.min())))
    known = (values.by_source[:, 0], values.full, values.chance)
    embed, full, chance = (float(part[0][asked].mean()) for part in known)
    words = (
        f"In {int(holds.sum())} of {len(lead)} V heads the embedding aligns more than the full "
        f"stream, by {effect:+.3f} on average{_limits(effect, doubt)}. Embedding "
        f"{_beside_chance(embed / chance)}; full stream {_beside_chance(full / chance)}."
    )
    if embed / chance <= AT_CHANCE and effect > 0:
        words += (
            " So these heads avoid what the stream is made of, more than they seek the embedding."
        )
    return Claim(
        claim,
        STATEMENTS[claim],
        _verdict(int(holds.sum()), len(lead)),
        int(holds.sum()),
        len(lead),
        None if np.isnan(doubt) else int((excess + width < 0)[asked].sum()),
        len(lead) / 2,
        "embedding minus full stream, alignment",
        effect,
        effect - doubt,
        effect + doubt,
        words + _why_no_interval(result, doubt),
    )


def _concentrated(result: ValueAlignmentResult) -> Claim:
    claim = "concentrated spectra, V"
    if "V" not in result.roles:
        return _not_measured(claim, "role V not in this result")
    counts = result.V.n_directions[0]
    asked = counts > 0
    if not bool(asked.any()):
        return _not_measured(claim, "every V matrix is zero")
    d_head, threshold = result.V.singular_values.shape[-1], result.thresholds[0]
    random = random_matrix_directions(result.provenance["readable_dim"], d_head, threshold)
    # A count is a whole number: a random matrix is allowed to round down.
    holds = counts[asked] < np.floor(random)
    effect = float(counts[asked].double().mean()) / d_head
    words = (
        f"On average {effect * d_head:.1f} of {d_head} directions carry {threshold:.0%} of the "
        f"squared singular values of a V matrix ({effect:.0%}); a Gaussian matrix of its shape "
        f"needs {random:.1f} ({random / d_head:.0%}). {int(holds.sum())} of {int(asked.sum())} "
        f"heads need fewer. Read from the weights, so without sampling error."
    )
    return Claim(
        claim,
        STATEMENTS[claim],
        _verdict(int(holds.sum()), int(asked.sum())),
        int(holds.sum()),
        int(asked.sum()),
        int(holds.sum()),
        float("nan"),
        "share of directions needed",
        effect,
        effect,
        effect,
        words,
    )


def _negligible(result: ValueAlignmentResult, contributions: ContributionResult | None) -> Claim:
    """By exact signed shares where they are given, else by projected squared norms."""
    claim = "negligible share, V"
    attention = [n for n, source in enumerate(result.sources) if source.endswith("attn_out")]
    if "V" not in result.roles or not attention:
        return _not_measured(claim, "role V or attention outputs not in this result")
    projected = result.V.projected_sq_norm
    others = projected[attention]
    asked = (~others.isnan()).any(0) & ~projected[0].isnan() & (result.V.projected_sq_norm_full > 0)
    if not bool(asked.any()):
        return _not_measured(claim, "no block has an attention output before it")
    smallest = (projected[0] < others.nan_to_num(torch.inf).min(0).values)[asked]
    ratio = (projected[0] / result.V.projected_sq_norm_full)[asked]
    share, width = ratio, torch.full_like(ratio, torch.nan)
    measure = "squared norm of the embedding's value over that of the whole"
    if contributions is not None and "V" in contributions.roles:
        outputs = [source for source in contributions.sources if source.endswith("_attn_out")]
        first = min((int(source.partition("_")[0]) for source in outputs), default=math.inf)
        later = (torch.tensor(contributions.layers) > first)[:, None] & ~contributions.V[0].isnan()
        if not bool(later.any()):
            return _not_measured(claim, "the contributions have no block after an attention output")
        share = contributions.V[0][later]
        width = contributions.role("V").half_width[0][later]
        measure = "exact signed share of the value"
    holds = share.abs() < NEGLIGIBLE
    effect, doubt = float(share.mean()), float(width.mean())
    words = (
        f"In {int(holds.sum())} of {len(share)} V heads the {measure} is under {NEGLIGIBLE:.0%}; "
        f"on average it is {effect:.2g}{_limits(effect, doubt)}. In {int(smallest.sum())} of "
        f"{len(smallest)} heads the embedding alone gives a smaller value than any attention "
        f"output alone (squared norm {float(ratio.mean()):.2g} of the whole value's)."
    )
    if contributions is None:
        words += " Signed shares, which count what cancels, are in contribution_shares()."
    return Claim(
        claim,
        STATEMENTS[claim],
        _verdict(int(holds.sum()), len(share)),
        int(holds.sum()),
        len(share),
        None if np.isnan(doubt) else int((share.abs() + width < NEGLIGIBLE).sum()),
        float("nan"),
        measure,
        effect,
        effect - doubt,
        effect + doubt,
        words,
    )
