"""The figures of a report, each with its title and one sentence on how to read it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import plotly.graph_objects as go

from tl_valuealign import arguments
from tl_valuealign.causal import SubstitutionResult
from tl_valuealign.contributions import ContributionResult
from tl_valuealign.identity import IdentityResult
from tl_valuealign.nulls import NullResult
from tl_valuealign.plots import common
from tl_valuealign.plots.canvas import Look
from tl_valuealign.plots.contributions import draw_contributions
from tl_valuealign.plots.directions import draw_directions
from tl_valuealign.plots.effect import draw_effect, given_words
from tl_valuealign.plots.full_stream import draw_full_stream
from tl_valuealign.plots.identity import draw_identity
from tl_valuealign.plots.norms import draw_norms
from tl_valuealign.plots.nulls import NULL_WORDS, draw_null
from tl_valuealign.plots.projected import draw_projected_norms
from tl_valuealign.plots.rows import layer_rows
from tl_valuealign.plots.sources import draw_sources
from tl_valuealign.result import ValueAlignmentResult

Further = ContributionResult | IdentityResult | NullResult | SubstitutionResult


@dataclass(frozen=True)
class Plate:
    """One figure of the page: its title, one sentence on how to read it, how to draw it, which
    of the result's thresholds it shows, and whether its cells are heads."""

    name: str
    title: str
    reading: str
    draw: Callable[[Look], go.Figure]
    threshold: int = 0
    heads: bool = True


def plates(result: ValueAlignmentResult) -> list[Plate]:
    """The post's seven figures in its order, as far as the result has their roles."""
    rows = layer_rows(result, None)

    def sources(role: str, index: int) -> Callable[[Look], go.Figure]:
        return partial(draw_sources, result, role, rows, index, False)

    first = common.share(result.thresholds[0])
    found = []
    if "V" in result.roles:
        found.append(
            Plate(
                "sources-V",
                "Which earlier output do value heads look for?",
                "Each small grid is one block. Rows are what was written before it, the token "
                "embedding first; columns are its heads. A row brighter than the rest is a source "
                "that points into the heads’ input directions more than the others do; the bar "
                "marks what a random direction would give.",
                sources("V", 0),
            )
        )
    if "K" in result.roles:
        found.append(
            Plate(
                "sources-K",
                "And key heads?",
                "The same for keys, on the same colour scale: if the embedding row stands out "
                "above but not here, looking for the embedding is particular to values.",
                sources("K", 0),
            )
        )
    found.append(
        Plate(
            "norms",
            "Is the embedding simply large?",
            "Lines are mean lengths of what each block writes, the dashed level is the embedding. "
            "A source that is not long but stood out above did so by its direction.",
            partial(draw_norms, result),
            heads=False,
        )
    )
    if "V" in result.roles:
        found += [
            Plate(
                "directions-V",
                "How choosy are value heads?",
                f"Left, how many directions carry {first} of a head’s squared singular values; "
                "right, how many it has at all. The fewer on the left, the more an alignment "
                "says; near the maximum, almost any stream would fit.",
                partial(draw_directions, result, "V", 0),
            )
        ]
    found.append(
        Plate(
            "full-stream",
            "How much of the whole stream do the heads see?",
            "One cell a head, layers downwards. Outlined value heads see more of the full stream "
            "than of the embedding alone. The strips below show layer means beside chance.",
            partial(draw_full_stream, result, 0, False),
        )
    )
    if "V" in result.roles:
        found.append(
            Plate(
                "projected-V",
                "How much does each output add to the values?",
                "The same grids, now coloured by the squared length of what a source alone would "
                "put into the value vector, on a log scale, with the full stream’s on top. A "
                "source can point well and still add little, if it is short.",
                partial(draw_projected_norms, result, "V", rows),
            )
        )
        if 0.5 in result.thresholds:
            half = result.threshold_index(0.5)
            found.append(
                Plate(
                    "sources-V-50",
                    "Does it hold for the strongest directions alone?",
                    "The first figure again, with only as many directions as carry half of the "
                    "squared singular values: the pattern should stay if it is not an artefact "
                    "of counting many weak directions.",
                    sources("V", half),
                    half,
                )
            )
    return found


def further_plates(result: ValueAlignmentResult, further: Sequence[Further]) -> list[Plate]:
    """Figures of the further questions, in the order given.

    Raises ``InputError`` for an answer about another model, or about one whole set of heads.
    """
    found: list[Plate] = []
    for number, answer in enumerate(further):
        arguments.same_model("further", result.provenance, answer.provenance)
        if isinstance(answer, ContributionResult):
            plates = [_contributions(answer)]
        elif isinstance(answer, IdentityResult):
            plates = [_identity(answer)]
        elif isinstance(answer, NullResult):
            plates = [_null(answer, source) for source in answer.sources]
        else:
            plates = [_effect(result, answer)]
        for plate in plates:
            taken = any(other.name == plate.name for other in found)
            found.append(replace(plate, name=f"{plate.name}-{number}") if taken else plate)
    return found


def _contributions(answer: ContributionResult) -> Plate:
    return Plate(
        "contributions",
        "What are the vectors made of?",
        "Bars are exact signed shares of each kind of source in what a block’s heads compute, mean "
        "over heads; above zero minus below is 1. The strips show whether the rest of the stream "
        f"points along the embedding, and how much of the embedding there is. {_text(answer)}",
        partial(draw_contributions, answer),
        heads=False,
    )


def _identity(answer: IdentityResult) -> Plate:
    return Plate(
        "identity",
        "Is a vector a lookup by token?",
        "The share of a head’s variance that lies between tokens: 1 would be a table with one row "
        f"a token, 0 a vector that owes the token nothing. {answer.n_tokens:,} vectors of "
        f"{answer.n_distinct:,} distinct tokens{', shuffled' if answer.shuffled else ''}.",
        partial(draw_identity, answer),
    )


def _null(answer: NullResult, source: str) -> Plate:
    against = {"covariance": "its covariance", "second-moment": "its second moment"}
    part = common.share(answer.thresholds[0])
    return Plate(
        f"null-{answer.null}-{source}",
        f"Compared with what? The {common.source_words(source)} against "
        f"{against.get(answer.null, 'the other heads')}",
        f"Alignment divided by what the null expects: {NULL_WORDS[answer.null]}. White is the null "
        "itself; chance on the other figures supposes that all directions are alike. "
        f"{answer.n_tokens:,} sampled tokens, directions carrying {part}.",
        partial(draw_null, answer, source, 0),
    )


def _effect(result: ValueAlignmentResult, answer: SubstitutionResult) -> Plate:
    given = given_words(answer)
    roles = "/".join(answer.roles)
    by_head = any(head is not None for head in answer.unit_heads)
    return Plate(
        f"effect-{roles}-{answer.source}".replace("/", "-"),
        f"Does it matter? {roles} heads given {given}, {'head by head' if by_head else 'by block'}",
        "Each point is what the next-token loss pays when a block’s or head’s input is replaced, "
        "against how well those heads line up with the embedding. Bars are 95% intervals. "
        f"{_text(answer)} Without substitution the loss is {answer.base_loss:.3f} nats.",
        lambda look: draw_effect(answer, result, None, "embed", None, look),
        heads=False,
    )


def _text(answer: ContributionResult | SubstitutionResult) -> str:
    p = answer.provenance
    return f"Measured on {p['n_tokens']:,} tokens in {p['n_sequences']:,} sequences."
