"""The smallest useful run: any model that TransformerLens boots, or the bundled one.

python examples/quickstart.py            # the bundled pocket model, no network
python examples/quickstart.py gpt2       # a model by its Hugging Face name
"""

import sys

import tl_valuealign as va


def load(name):
    if name is None:
        return va.pocket_model()
    from transformer_lens.model_bridge import TransformerBridge

    return TransformerBridge.boot_transformers(name)


model = load(sys.argv[1] if len(sys.argv) > 1 else None)
result = va.analyze_value_alignment(model, max_tokens=2000)

print(result.summary())
embed = result.to_dataframe().query("source == 'embed'")
print(embed.groupby("role")[["alignment", "chance"]].mean())

figure = va.plot_full_stream(result)  # in a notebook, its last line shows it
figure.write_html("full_stream.html")
