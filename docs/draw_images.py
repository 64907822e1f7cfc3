"""Draw the images of docs/images from the bundled model; needs kaleido and a Chromium.

    python docs/draw_images.py [CHECKPOINTS]

CHECKPOINTS is the folder that examples/train_pocket.py --checkpoints wrote; without it compare.webp
is left as it is.
"""

import os
import shutil
import sys
from pathlib import Path

import tl_valuealign as va
from tl_valuealign.plots.gallery import post_figures
from tl_valuealign.pocket import load_nanochat

IMAGES = Path(__file__).parent / "images"
SHOWN = ("full_stream", "v_sources", "norms", "v_directions", "v_projected_norms", "v_sources_50")
STEPS = (0, 32, 64, 128, 256, 512, 1024, 2000)

os.environ.setdefault("BROWSER_PATH", shutil.which("chromium") or "")
IMAGES.mkdir(exist_ok=True)

pocket = va.pocket_model()
result = va.analyze_value_alignment(pocket, keep_moments=True, progress=False)
figures = {name: figure for name, figure in post_figures(result).items() if name in SHOWN}
figures["explorer"] = va.plot_explorer(result.with_metric("energy"))
figures["contributions"] = va.plot_contributions(va.contribution_shares(pocket, progress=False))
figures["identity"] = va.plot_identity(va.token_identity(pocket, progress=False))
figures["null"] = va.plot_null(va.null_alignment(pocket, progress=False), "embed")
figures["effect"] = va.plot_effect(va.substitute_input(pocket, progress=False), result)
if len(sys.argv) > 1:
    results = {}
    for step in STEPS:
        folder = Path(sys.argv[1]) / f"step_{step:06d}"
        if folder.is_dir():
            model = load_nanochat(folder)
            results[f"step {step:,}"] = va.analyze_value_alignment(model, progress=False)
    figures["compare"] = va.compare(results, relative=True).figure
for name, figure in figures.items():
    figure.update_layout(paper_bgcolor="white").write_image(IMAGES / f"{name}.webp", scale=1.25)
