"""The same analysis on a HookedTransformer (transformer-lens 2.18 to 3.x).

python examples/hooked_transformer.py            # a small random model, no network
python examples/hooked_transformer.py gpt2       # from_pretrained by name
"""

import sys

from transformer_lens import HookedTransformer, HookedTransformerConfig

import tl_valuealign as va

if len(sys.argv) > 1:
    model = HookedTransformer.from_pretrained(sys.argv[1])
else:
    model = HookedTransformer(
        HookedTransformerConfig(
            n_layers=4,
            d_model=64,
            n_heads=4,
            d_head=16,
            d_mlp=128,
            d_vocab=200,
            n_ctx=128,
            act_fn="gelu",
            normalization_type="LN",
            seed=0,
        )
    )
    print("The weights are random: expect every figure near chance.")

result = va.analyze_value_alignment(model)
print(result.summary())
va.plot_full_stream(result).write_html("hooked_transformer.html")
