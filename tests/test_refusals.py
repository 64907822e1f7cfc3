"""What cannot be measured is refused by name, before any forward pass, with the way out."""

import pytest
import tiny
import torch
import zoo

import tl_valuealign as va
from tl_valuealign import refusals
from tl_valuealign.adapter import ModelView

pytestmark = pytest.mark.any_bridge

needs_four = pytest.mark.bridge  # architectures and settings that only transformer-lens 4 boots


@pytest.fixture(autouse=True)
def no_forward_pass(monkeypatch):
    def forbidden(*args, **options):
        raise AssertionError("the model was run")

    monkeypatch.setattr(ModelView, "run", forbidden)


RUN = ModelView.run


def refused(model, match, **options):
    with pytest.raises(va.ModelError, match=match) as caught:
        tiny.analyze(model, zoo.ids(), **options)
    return str(caught.value)


def boot(monkeypatch, config, architecture, **options):
    """The bridge of an entry that is not in the zoo."""
    monkeypatch.setitem(zoo.ZOO, "extra", zoo.Entry(config, architecture, options))
    return zoo.bridge("extra")


# Kinds of models ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("bert", "attends in both directions"),
        ("t5", "encoder-decoders"),
        ("mamba", "offers no attention in any of its 3 blocks.*state-space"),
        ("deepseek_v2", "role Q, block 0: MLAAttentionBridge offers no W_Q.*MLA"),
    ],
)
def test_other_kinds_of_models(name, match):
    refused(zoo.bridge(name), match)


def test_every_refusal_of_the_zoo_is_tested_here():
    assert set(zoo.REFUSED) == {"bert", "t5", "mamba", "falcon_new"}


def test_a_post_norm_decoder(monkeypatch):
    options = zoo._gpt2_like(vocab_size=zoo.VOCAB)
    model = boot(monkeypatch, "OpenAIGPTConfig", "OpenAIGPTLMHeadModel", **options)
    refused(model, "OpenAIGPTLMHeadModel.* after each addition")


def test_a_hybrid_whose_attention_is_not_exposed(monkeypatch):
    model = boot(
        monkeypatch,
        "NemotronHConfig",
        "NemotronHForCausalLM",
        vocab_size=zoo.VOCAB,
        hidden_size=zoo.D,
        layers_block_type=["mamba", "attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        mamba_head_dim=16,
        mamba_num_heads=4,
        ssm_state_size=4,
        n_groups=1,
        chunk_size=8,
    )
    refused(model, "a hybrid whose attention transformer-lens does not expose")


@pytest.mark.parametrize(
    "model",
    [None, "gpt2", 3, torch.nn.Linear(2, 2), object(), type("Fake", (), {"cfg": None})],
    ids=["None", "a name", "a number", "a module", "an object", "a class"],
)
def test_what_is_no_model(model):
    refused(model, "expected a HookedTransformer or TransformerBridge")


def test_a_transformers_model_is_told_how_to_become_a_bridge():
    refused(zoo.build("gpt2"), r"GPT2LMHeadModel; .*boot_transformers\(name, hf_model=model\)")


# Layouts -----------------------------------------------------------------------------------------

FALCON = zoo.ZOO["falcon"].options


def test_falcons_new_layout():
    """Tiny ones do not even boot; the configuration is what tells."""
    model = zoo.bridge("falcon")
    model.original_model.config.new_decoder_architecture = True
    refused(model, "new decoder layout")


def gemma4(monkeypatch, **options):
    options = {"layer_types": ["sliding_attention", "full_attention"] * 2} | options
    options |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": zoo.VOCAB}
    base = zoo._rope_like(num_hidden_layers=4, head_dim=12, sliding_window=6)
    return boot(monkeypatch, "Gemma4TextConfig", "Gemma4ForCausalLM", **base | options)


@needs_four
def test_blocks_with_other_head_sizes(monkeypatch):
    message = refused(gemma4(monkeypatch, global_head_dim=24), "block 1: AttentionBridge offers")
    assert "choose other layers=..." in message


@needs_four
@pytest.mark.parametrize("options", [{"num_kv_shared_layers": 2}, {"attention_k_eq_v": True}])
def test_blocks_that_share_keys_and_values(monkeypatch, options):
    model = gemma4(monkeypatch, global_head_dim=12, **options)
    refused(model, r"role [KV], block [12]: .*shared or missing key/value")


def test_blocks_of_two_shapes_are_never_stacked(monkeypatch):
    model, good = zoo.bridge("llama"), ModelView.weight
    monkeypatch.setattr(
        ModelView,
        "weight",
        lambda view, layer, role: good(view, layer, role)[..., : 12 - 4 * (layer == 1)],
    )
    refused(model, r"block 0 has \(heads, d_head\) = \(4, 12\) but block 1 has \(4, 8\)")
    with pytest.raises(AssertionError, match="the model was run"):  # blocks of one shape pass
        tiny.analyze(model, zoo.ids(), layers=[0, 2])


# Weights -----------------------------------------------------------------------------------------


def test_meta_weights():
    model = zoo.bridge("llama")
    layer = model.original_model.model.layers[1].mlp.down_proj
    layer = getattr(layer, "original_component", layer)
    layer.weight = torch.nn.Parameter(layer.weight.to("meta"))
    refused(model, r"parameter .*mlp.*weight is on the meta device.*offloading")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_packed_weights(dtype):
    model = zoo.bridge("llama")
    value = model.blocks[1].attn.v.original_component
    value.weight = torch.nn.Parameter(value.weight.detach().to(dtype), requires_grad=False)
    refused(model, r"role V, block 1: .*W_V .*quanti[sz]")


def test_packed_weights_of_another_shape():
    """bitsandbytes keeps 4-bit weights as one column of bytes."""
    model = zoo.bridge("llama")
    value = model.blocks[2].attn.k.original_component
    packed = torch.zeros(value.weight.numel() // 2, 1, dtype=torch.uint8)
    value.weight = torch.nn.Parameter(packed, requires_grad=False)
    refused(model, "role K, block 2: .*quantised")


def test_a_model_that_says_it_is_in_four_bits():
    model = zoo.bridge("llama")
    model.cfg.load_in_4bit = True
    refused(model, "quantised to 4 bits.*bfloat16")


def test_a_model_without_weights_here(monkeypatch):
    model = zoo.bridge("llama")
    monkeypatch.setattr(type(model), "named_parameters", lambda *args, **options: iter(()))
    refused(model, "holds no weights here")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_not_a_number_in_the_weights(value):
    """Found before the forward pass would turn every stream into nothing."""
    hf = zoo.build("llama")
    with torch.no_grad():
        hf.model.layers[1].self_attn.v_proj.weight[12 + 3, 5] = value  # the second value head
    message = refused(zoo.bridge("llama", hf=hf), "role V: the read-in matrix of L1H1 has NaN")
    assert "L1H0" not in message


# Known faults ------------------------------------------------------------------------------------


def test_value_biases_folded_under_attention_sinks():
    model = zoo.bridge("gpt_oss", compat=True, fold_value_biases=True)
    refused(model, "block 0 .*attention sinks.*fold_value_biases=False")


def test_attention_that_is_not_scaled(monkeypatch):
    options = zoo.ZOO["gpt2"].options | {"scale_attn_weights": False}
    refused(boot(monkeypatch, "GPT2Config", "GPT2LMHeadModel", **options), "scale_attn_weights")


def test_a_projected_embedding_in_compatibility_mode(monkeypatch):
    options = zoo.ZOO["opt"].options | {"word_embed_proj_dim": 16}
    entry = zoo.Entry("OPTConfig", "OPTForCausalLM", options)
    monkeypatch.setitem(zoo.ZOO, "projected", entry)
    refused(zoo.bridge("projected", compat=True), "projects its embedding from 16 to 32")
    with pytest.raises(AssertionError, match="the model was run"):  # raw it is right
        tiny.analyze(zoo.bridge("projected"), zoo.ids())


@pytest.mark.parametrize(
    ("name", "release", "match"),
    [
        ("cohere", "4.1.0", "4.1.0 computes wrong attention for CohereForCausalLM.* 4.2.0"),
        ("cohere", "3.9.0", "3.9.0 computes wrong attention for CohereForCausalLM.* 4.2.0"),
        ("gpt_oss", "3.6.0", "3.6.0 computes wrong attention for GptOssForCausalLM.* 3.7.0"),
        ("llama", "3.5.1", "3.5.1 wraps several architectures wrongly.*HookedTransformer"),
    ],
)
def test_releases_that_compute_another_model(monkeypatch, name, release, match):
    monkeypatch.setattr(refusals, "version", lambda package: release)
    refused(zoo.bridge(name), match)


@pytest.mark.parametrize(("name", "release"), [("cohere", "4.2.0"), ("llama", "3.6.0")])
def test_releases_that_are_right_are_let_through(monkeypatch, name, release):
    monkeypatch.setattr(refusals, "version", lambda package: release)
    refusals.refuse_unreadable(zoo.bridge(name))


# Models that cannot run --------------------------------------------------------------------------


def test_a_model_that_cannot_run_says_what_it_ran_into(monkeypatch):
    """OLMo 2's bridge mixes float32 into bfloat16; the figures are not to blame."""
    monkeypatch.setattr(ModelView, "run", RUN)
    model = zoo.bridge("olmo2", dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="same dtype"), torch.no_grad():
        model(zoo.ids())
    message = refused(model, r"the model itself fails on ids of shape \(1, 11\), in torch.bfloat16")
    assert "same dtype" in message and "Does model(ids) run?" in message
