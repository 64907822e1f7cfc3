"""Results in words, for a terminal and a notebook."""

from html import escape
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tl_valuealign.result import ValueAlignmentResult
from tl_valuealign.role_result import RoleResult

METRIC_WORDS = {
    "norm": "mean share of a token's norm, mean ‖Uᵀx̄‖ / ‖x̄‖",
    "energy": "mean share of a token's squared norm, mean ‖Uᵀx̄‖² / ‖x̄‖²",
    "pooled": "share of all squared norm, Σ‖Uᵀx̄‖² / Σ‖x̄‖²",
}


def mean(values: Tensor) -> float:
    """Mean over what is not NaN; NaN where nothing is."""
    known = values[~values.isnan()]
    return float(known.double().mean()) if known.numel() else float("nan")


def model_line(result: "ValueAlignmentResult") -> str:
    p = result.provenance
    return (
        f"{p['model_name']}: {len(result.layers)} attention blocks × {p['n_heads']} query and "
        f"{p['n_key_value_heads']} key/value heads, d_model {p['d_model']}"
    )


def text_line(result: "ValueAlignmentResult") -> str:
    p = result.provenance
    cut = p.get("n_items_split_into_windows", 0)
    windows = f", windows of {p['n_texts']:,} texts" if cut else ""
    text = ", ".join(p["text"])
    return f"{p['n_tokens']:,} tokens in {p['n_sequences']:,} sequences of {text}{windows}"


def role_line(name: str, values: "RoleResult", d_head: int) -> str:
    """Averages of one role over layers and heads, at the first threshold."""
    return (
        f"{name}: embedding {mean(values.by_source[0, 0]):.3f}, full stream "
        f"{mean(values.full[0]):.3f}, chance {mean(values.chance[0]):.3f} "
        f"({mean(values.n_directions[0]):.1f} of {d_head} directions)"
    )


def boxes_line(result: "ValueAlignmentResult") -> str:
    if "V" not in result.roles:
        return "V was not measured"
    boxes = result.boxes()
    return f"full stream above embedding in {int(boxes.sum())} of {boxes.numel()} V heads"


def checks_line(result: "ValueAlignmentResult") -> str:
    checks = result.checks
    read_in = max(float(error.max()) for error in checks.read_in.values())
    return (
        f"self-checks: streams add up to {float(checks.decomposition.max()):.1e}, "
        f"read-in matrices reproduce q, k, v to {read_in:.1e}"
    )


def summary(result: "ValueAlignmentResult") -> str:
    """Five lines: model, text, measure, what each role shows beside chance, boxes and checks."""
    roles = "; ".join(
        role_line(name, values, values.singular_values.shape[-1])
        for name, values in result.roles.items()
    )
    share = f"{result.thresholds[0]:.0%}"
    return "\n".join(
        (
            model_line(result),
            text_line(result),
            f"alignment with the input directions carrying {share} of squared singular values "
            f"({METRIC_WORDS[result.metric]}), averaged over layers and heads:",
            roles,
            f"{boxes_line(result)}; {checks_line(result)}",
        )
    )


def text(result: "ValueAlignmentResult") -> str:
    return f"ValueAlignmentResult\n{summary(result)}"


def html(result: "ValueAlignmentResult") -> str:
    """A table for notebooks: one row a role, chance beside every figure."""
    rows = "".join(
        "<tr>"
        f"<th>{escape(name)}</th>"
        f"<td>{mean(values.by_source[0, 0]):.3f}</td>"
        f"<td>{mean(values.full[0]):.3f}</td>"
        f"<td>{mean(values.chance[0]):.3f}</td>"
        f"<td>{mean(values.n_directions[0]):.1f} of {values.singular_values.shape[-1]}</td>"
        f"<td>{mean(values.numerical_rank.to(torch.float64)):.1f}</td>"
        "</tr>"
        for name, values in result.roles.items()
    )
    share = f"{result.thresholds[0]:.0%}"
    return (
        f"<p><b>{escape(model_line(result))}</b><br>{escape(text_line(result))}</p>"
        f"<table><caption>Alignment with the input directions carrying {share} of squared "
        f"singular values, averaged over layers and heads</caption>"
        "<thead><tr><th>role</th><th>embedding</th><th>full stream</th><th>chance</th>"
        "<th>directions</th><th>numerical rank</th></tr></thead>"
        f"<tbody>{rows}</tbody></table>"
        f"<p>{escape(boxes_line(result))}; {escape(checks_line(result))}</p>"
    )
