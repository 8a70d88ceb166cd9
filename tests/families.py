"""The families of models that the tests build, record and refuse; the README's tables of them.

python tests/families.py     writes both tables into README.md
"""

import pandas as pd
import torch
import transformers

import helpers

WIDTHS = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
# Two query heads to a key head; a head dimension that is not 24 / 4; windows below 24 tokens.
GROUPED = {**WIDTHS, "num_key_value_heads": 2, "head_dim": 8}
SLIDING = {**GROUPED, "sliding_window": 16}
ALTERNATING = {
    **SLIDING,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
GEMMA = {**ALTERNATING, "query_pre_attn_scalar": 50}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
PARTLY_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
GPT2 = {"vocab_size": 61, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 64}

# One tiny model of every family in helpers.FAMILIES, with what is particular to the family.
KNOWN = {
    "gemma": GROUPED,
    "gemma2": {**GEMMA, "attn_logit_softcapping": 3.0},
    "gemma3_text": GEMMA,
    "gpt2": {**GPT2, "scale_attn_by_inverse_layer_idx": True},
    "gpt_neox": {**WIDTHS, "hidden_size": 32, "rope_parameters": PARTLY_ROTARY},
    "gpt_oss": {**ALTERNATING, **EXPERTS},
    "granite": {**GROUPED, "attention_multiplier": 0.3},
    "llama": {**GROUPED, "attention_bias": True},
    "mistral": SLIDING,
    "mixtral": {**SLIDING, **EXPERTS},
    "olmo2": GROUPED,
    "olmo3": ALTERNATING,
    "opt": {**WIDTHS, "ffn_dim": 32, "word_embed_proj_dim": 24},
    "phi3": {**SLIDING, "rope_parameters": PARTLY_ROTARY},
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "attention_bias": True},
    "qwen3_moe": {**GROUPED, **EXPERTS, "moe_intermediate_size": 16},
    "smollm3": {**GROUPED, "no_rope_layers": [1, 0, 1]},
    "starcoder2": {**SLIDING, "use_bias": True},
}

# What cannot be recorded, or not truly: model type → (configuration, what the refusal must say).
ALIBI = "called in layers [], expected each of 2 once: it adds ALiBi to its logits"
SILENT = "called in layers [], expected each of 3 once: its attention is of another kind"
HYBRID = ["linear_attention", "full_attention", "linear_attention"]
PARTLY = "called in layers [1], expected each of 3 once: its attention is of another kind"
OTHER = "its attention is not the softmax of the recorded logits over earlier tokens"
HEADS = {"vocab_size": 61, "hidden_size": 24, "n_layer": 2, "n_head": 4}
REFUSED = {
    "bloom": (HEADS, ALIBI),
    "mpt": ({"vocab_size": 61, "d_model": 32, "n_layers": 2, "n_heads": 4}, ALIBI),
    "xglm": ({**WIDTHS, "d_model": 24, "num_layers": 2, "attention_heads": 4}, SILENT),
    "mamba": ({**WIDTHS, "state_size": 4}, SILENT),
    "qwen3_next": ({**GROUPED, **EXPERTS, "layer_types": HYBRID}, PARTLY),
    "diffllama": (GROUPED, "called in layers [0, 0, 1, 1, 2, 2], expected each of 3 once"),
    "doge": (GROUPED, "its mask adds to the logits what the field does not show"),
    "bert": (WIDTHS, OTHER),
}
# Recorded as softmax sees them, but not before the rotary embedding: a layer without one that does
# not say so, an embedding of a part of each head outside its function, a norm after it.
ROTARY_ONLY = {
    "cohere2": ALTERNATING,
    "phi": {**WIDTHS, "hidden_size": 32},
    "hunyuan_v1_dense": GROUPED,
}


def tiny(family: str, implementation: str = "eager", **changes):
    """A model of a family with random weights, biases and norm gains, none zero."""
    refused = {name: options for name, (options, _) in REFUSED.items()}
    options = {**KNOWN, **refused, **ROTARY_ONLY}[family]
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(family, **{**options, **ids, **changes})
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=implementation
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def implementations(family: str) -> list[str]:
    """The attention of the library that a family can be run with: eager, and most SDPA too."""
    config = transformers.AutoConfig.for_model(family)
    sdpa = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_sdpa
    return ["eager", "sdpa"] if sdpa else ["eager"]


PROVEN = [(family, way) for family in KNOWN for way in implementations(family)]


def is_rotary(family: str) -> bool:
    return "rope_parameters" in tiny(family).config.to_dict()


def is_normalised(model) -> bool:
    """Whether queries and keys have norms of their own."""
    return any("q_norm" in name for name in model.state_dict())


def readme_tables() -> dict[str, str]:
    """The README's tables in Markdown: `families` and `refused`."""
    known = []
    for family in KNOWN:
        model = tiny(family)
        state, config = model.state_dict(), model.config
        scales = []
        helpers.record_attention(
            model, torch.arange(9), lambda *shown, kept=scales: kept.append(shown[3])
        )
        weights = next(helpers.head_weights(model))
        ordinary = all(abs(s * weights.W_Q.shape[1] ** 0.5 - 1) < 1e-6 for s in scales)
        parts = ["W_Q, W_K"] + ["biases"] * (weights.b_Q is not None)
        parts += ["gains of the query and key norms"] * is_normalised(model)
        beyond = helpers.left_out(config, state)[1:]
        beyond = [text.split(" of ")[0].split(" at ")[0] for text in beyond]
        beyond += ["the norm itself"] * is_normalised(model)
        rotary = is_rotary(family)
        if rotary and 0 in getattr(config, "no_rope_layers", []):
            rotary = "in some layers"
        elif rotary and config.rope_parameters.get("partial_rotary_factor", 1) < 1:
            rotary = "part of each head"
        known.append(
            {
                "model type": f"`{family}`",
                "weights read": ", ".join(parts),
                "scale": "1/√d" if ordinary else "its own",
                "rotary": {True: "yes", False: "no"}.get(rotary, rotary),
                "left out besides the mask": ", ".join(beyond),
                "proven with": " and ".join(implementations(family)),
                "W x + b": "every position, before RoPE" if rotary else "every position",
            }
        )
    reasons = {family: reason for family, (_, reason) in REFUSED.items()}
    handed = 'does not hand whole queries and keys to a rotary embedding (position "content" only)'
    reasons |= dict.fromkeys(ROTARY_ONLY, handed)
    refused = [{"model type": f"`{x}`", "because": reason} for x, reason in reasons.items()]
    return helpers.as_markdown(families=pd.DataFrame(known), refused=pd.DataFrame(refused))


if __name__ == "__main__":
    helpers.update_readme(helpers.ROOT, readme_tables())
