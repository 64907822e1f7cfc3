"""The README's support table, made from what the tests reported and from nothing else.

    pytest tests/test_every_model.py tests/test_native.py tests/test_hooked.py \
        tests/test_refusals.py --junitxml=four.xml           # once per transformer-lens release
    python tests/support_table.py four.xml three.xml two.xml             # prints the table
    python tests/support_table.py four.xml three.xml two.xml --into README.md
    python tests/support_table.py four.xml three.xml two.xml --into README.md --check

``--into`` puts it between ``<!-- support:begin -->`` and ``<!-- support:end -->``; ``--check`` only
compares, and fails if the file says something else. A failed or missing test is an error: then
there is no table.
"""

import argparse
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

import zoo

BEGIN, END = "<!-- support:begin -->", "<!-- support:end -->"
TITLES = {
    "gpt2": "GPT-2",
    "gpt_neo": "GPT-Neo",
    "opt": "OPT",
    "bigcode": "GPT-BigCode (multi-query)",
    "bloom": "BLOOM (ALiBi, norm after the embedding)",
    "mpt": "MPT (ALiBi)",
    "neox": "GPT-NeoX, sequential",
    "neox_parallel": "GPT-NeoX, parallel",
    "gptj": "GPT-J",
    "falcon": "Falcon (multi-query, parallel)",
    "phi": "Phi",
    "stablelm": "StableLM",
    "starcoder2": "Starcoder2",
    "olmo": "OLMo",
    "nemotron": "Nemotron (1 + w)",
    "cohere": "Cohere",
    "llama": "Llama (grouped heads)",
    "mistral": "Mistral",
    "qwen2": "Qwen2 (QKV bias)",
    "qwen3": "Qwen3 (QK-norm)",
    "phi3": "Phi-3",
    "olmo2": "OLMo 2 (post-norm)",
    "granite": "Granite (multipliers)",
    "nanochat": "NanoChat (norm after the embedding)",
    "gemma": "Gemma (1 + w)",
    "gemma2": "Gemma 2 (post-norms)",
    "gemma3": "Gemma 3 (post-norms)",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3-MoE",
    "olmoe": "OLMoE",
    "gpt_oss": "gpt-oss (attention sinks)",
    "jamba": "Jamba (hybrid)",
    "qwen3_next": "Qwen3-Next (hybrid)",
}
LAYOUTS = {
    "LN": "LayerNorm",
    "LNPre": "LayerNorm, folded",
    "RMS": "RMSNorm",
    "RMSPre": "RMSNorm, folded",
    "none": "no norm",
    "attn_only": "attention only",
    "rotary": "rotary positions",
    "grouped": "grouped heads",
    "gated": "gated MLP",
    "alibi": "ALiBi",
    "parallel": "parallel blocks",
    "moe": "mixture of experts",
    "shortformer": "shortformer positions",
    "grouped_rotary": "grouped heads, rotary",
}
REFUSED = {
    "BERT and other encoders": "test_other_kinds_of_models[bert-",
    "T5 and other encoder-decoders": "test_other_kinds_of_models[t5-",
    "Mamba and other state-space models without attention": "test_other_kinds_of_models[mamba-",
    "DeepSeek V2 and V3 (latent attention)": "test_latent_attention_is_refused_by_name[deepseek",
    "Falcon's new decoder layout": "test_falcons_new_layout",
    "post-norm decoders (the first GPT)": "test_a_post_norm_decoder",
    "blocks of different head shapes, unless chosen apart": "test_blocks_of_two_shapes",
    "blocks that share keys and values (Gemma 4)": "test_blocks_that_share_keys_and_values",
    "hybrids whose attention is not exposed (Nemotron-H)": "test_a_hybrid_whose_attention",
    "packed quantised weights": "test_packed_weights",
    "weights on the meta device (offloaded)": "test_meta_weights",
    "gpt-oss with folded value biases": "test_value_biases_folded_under_attention_sinks",
}


class Reports:
    """Outcomes of every test case, by test and release: passed, failed, or what was refused."""

    def __init__(self, paths: list[Path]) -> None:
        self.outcomes: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
        self.releases: list[str] = []
        for path in paths:
            self._read(path)
        self.releases.sort(key=lambda release: [int(n) for n in release.split(".")], reverse=True)

    def _read(self, path: Path) -> None:
        cases = list(ElementTree.parse(path).getroot().iter("testcase"))
        said = [self._property(case, "transformer_lens") for case in cases]
        releases = {release for release in said if release}
        if len(releases) != 1:
            raise SystemExit(f"{path}: reports of one release are needed, found {releases}")
        (release,) = releases
        self.releases.append(release)
        for case in cases:
            module = (case.get("classname") or "").rpartition(".")[2]
            bad = [tag for tag in ("failure", "error", "skipped") if case.find(tag) is not None]
            outcome = self._property(case, "refused") or "passed"
            key = (module, case.get("name") or "")
            self.outcomes[key][release] = f"failed ({bad[0]})" if bad else outcome

    @staticmethod
    def _property(case: ElementTree.Element, name: str) -> str:
        found = [p.get("value", "") for p in case.iter("property") if p.get("name") == name]
        return found[0] if found else ""

    def of(self, module: str, test: str) -> dict[str, str]:
        """Outcomes by release. Exits if there is none, or one that failed."""
        matching = [v for (m, name), v in self.outcomes.items() if m == module and test in name]
        if not matching:
            raise SystemExit(f"no report of {module}::{test}")
        merged = {release: outcome for each in matching for release, outcome in each.items()}
        failed = {r: o for each in matching for r, o in each.items() if o.startswith("failed")}
        if failed:
            raise SystemExit(f"{module}::{test} {failed}")
        return merged


def cell(outcomes: dict[str, dict[str, str]], release: str) -> str:
    """ "raw, compat" for the modes that passed, or the refusal."""
    modes = [mode for mode, found in outcomes.items() if found.get(release) == "passed"]
    if modes:
        return ", ".join(modes)
    reasons = {found[release] for found in outcomes.values() if release in found}
    return f"refused: {reasons.pop()}" if reasons else "–"


def table(head: list[str], lines: list[list[str]]) -> list[str]:
    made = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return made + ["| " + " | ".join(line) + " |" for line in lines]


def render(reports: Reports) -> str:
    """Everything between the markers."""
    bridges = [r for r in reports.releases if int(r.split(".")[0]) >= 3]
    hooked = [r for r in reports.releases if int(r.split(".")[0]) <= 3]
    lines = []
    for name in zoo.DECODERS:
        if name not in TITLES:
            continue  # refused: below
        test = f"test_agrees_with_the_oracle[{name}-"
        modes = {m: reports.of("test_every_model", f"{test}{m}]") for m in ("raw", "compat")}
        lines.append([TITLES[name], *(cell(modes, release) for release in bridges)])
    parts = [
        "Every row is a tiny random model of the family whose figures (alignments of every role, "
        "source and threshold, direction counts, ranks, norms) agree with an independent oracle, "
        "in the mode named: `raw`, or `compat` for `enable_compatibility_mode()`.",
        "",
        *table(["transformers family", *(f"TransformerBridge {r}" for r in bridges)], lines),
        "",
    ]
    lines = []
    for name, title in LAYOUTS.items():
        test, row = f"test_agrees_with_the_oracle[{name}-", [title]
        for release in bridges:
            found = name in zoo.NATIVE
            modes = {
                m: reports.of("test_native", f"{test}{m}]") for m in ("raw", "compat") if found
            }
            row.append(cell(modes, release))
        for release in hooked:
            found = name in zoo.HOOKED
            modes = {
                m: reports.of("test_hooked", f"{test}{m}]") for m in ("raw", "processed") if found
            }
            row.append(cell(modes, release))
        lines.append(row)
    head = [f"native bridge {r}" for r in bridges] + [f"HookedTransformer {r}" for r in hooked]
    parts += [*table(["TransformerLens's own models", *head], lines), ""]
    for test in REFUSED.values():
        module = "test_every_model" if test.startswith("test_latent") else "test_refusals"
        reports.of(module, test)
    parts += ["Refused by name, before any forward pass: " + "; ".join(REFUSED) + "."]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reports", nargs="+", type=Path, help="junit XML, one per release")
    parser.add_argument("--into", type=Path, help="a file with the two markers")
    parser.add_argument("--check", action="store_true", help="compare only")
    options = parser.parse_args()
    made = render(Reports(options.reports))
    if options.into is None:
        sys.stdout.write(made + "\n")
        return
    before = options.into.read_text(encoding="utf-8")
    pattern = re.compile(f"{BEGIN}\n.*?{END}", re.DOTALL)
    if not pattern.search(before):
        raise SystemExit(f"{options.into} has no {BEGIN} … {END}")
    after = pattern.sub(lambda _: f"{BEGIN}\n{made}\n{END}", before)
    if options.check and after != before:
        raise SystemExit(f"the support table in {options.into} is not what the tests report")
    options.into.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
