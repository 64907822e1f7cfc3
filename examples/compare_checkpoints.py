"""Does the value heads' preference for the embedding emerge in training?

    python examples/train_pocket.py --out pocket --checkpoints checkpoints
    python examples/compare_checkpoints.py checkpoints [comparison.html]

Analyses every checkpoint that train_pocket.py saved along its run, on the same bundled passages,
and prints, step by step, how embedding, attention outputs and full stream stand against chance. At
step 0 the weights are random and everything lies at chance (1.00).
"""

import sys
from pathlib import Path

import tl_valuealign as va
from tl_valuealign.pocket import load_nanochat

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "checkpoints")
out = Path(sys.argv[2] if len(sys.argv) > 2 else "comparison.html")
checkpoints = sorted(path for path in folder.glob("step_*") if (path / "config.json").is_file())
if len(checkpoints) < 2:
    sys.exit(f"{folder} holds {len(checkpoints)} checkpoints named step_*, two or more are needed")

results = {}
for path in checkpoints:
    label = f"step {int(path.name.removeprefix('step_')):,}"
    results[label] = va.analyze_value_alignment(load_nanochat(path), progress=False)
    print(f"analysed {label}")

frame, figure = va.compare(results, relative=True)
figure.write_html(out)

means = frame.query("threshold == 0.9").groupby(["role", "model", "source"], sort=False)
table = means["relative"].mean().unstack("source")[["embed", "attn_out", "full"]]
heads = frame.query("threshold == 0.9 and source == 'full'")
counts = heads.groupby(["role", "model"], sort=False)[["boxed", "n_heads"]].sum()
table["full above embed"] = counts["boxed"].astype(str) + " of " + counts["n_heads"].astype(str)
print("\nAlignment over chance, mean over layers and heads:")
print(table.to_string(float_format="{:.2f}".format))
print(f"\nOpen {out.resolve()} in a browser.")
