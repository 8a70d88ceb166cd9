"""GGUF files as llama.cpp's converter writes them, of the tiny models."""

import json

import gguf
import numpy as np

# model type → architecture of the file, where the two differ
ARCHITECTURES = {"gemma3_text": "gemma3"}


def _stored(name, tensor, config):
    """A tensor as the file has it: each family's own changes to the model's."""
    family = config.model_type
    if (family == "llama" and "attn_q." in name) or (family == "llama" and "attn_k." in name):
        # the pairs that rotate together stand side by side
        halves = tensor.unflatten(0, (-1, 2, config.head_dim // 2))
        tensor = halves.transpose(1, 2).flatten(0, 2)
    if family.startswith("gemma") and name.endswith("norm.weight"):
        tensor = tensor + 1
    if family == "gpt2" and tensor.ndim == 2 and name.startswith("blk."):
        tensor = tensor.T
    return tensor.contiguous().numpy()


def fields_of(config):
    """The metadata without the architecture's name; transformers ignores some of it."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    found = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": getattr(config, "intermediate_size", 4 * config.hidden_size),
        "attention.head_count": heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", heads),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.sliding_window": getattr(config, "sliding_window", None),
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
    }
    for ours, theirs in {
        "rms_norm_eps": "layer_norm_rms_epsilon",
        "norm_epsilon": "layer_norm_epsilon",
        "layer_norm_epsilon": "layer_norm_epsilon",
    }.items():
        found[f"attention.{theirs}"] = getattr(config, ours, found.get(f"attention.{theirs}"))
    if rope:
        found["rope.freq_base"] = rope["rope_theta"]
        found["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1))
    return found


def write(path, model, tokenizer, name="tiny", fields=(), tensors=()):
    """`fields` and `tensors` replace or add to what belongs to the model; None leaves one out."""
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(name)
    for key, value in {**fields_of(config), **dict(fields)}.items():
        if value is not None:
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add[type(value)](f"{architecture}.{key}", value)
    bpe = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(list(bpe["vocab"]))
    writer.add_token_types(
        [gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(tokenizer) - 1)
    )
    writer.add_token_merges([" ".join(merge) for merge in bpe["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    known = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[architecture], config.num_hidden_layers)
    stored = {}
    for full, tensor in model.state_dict().items():
        stem, suffix = full.rsplit(".", 1)
        if not (config.tie_word_embeddings and stem == "lm_head"):
            part = f"{names.get_name(stem)}.{suffix}"
            stored[part] = _stored(part, tensor, config)
    for part, tensor in {**stored, **dict(tensors)}.items():
        if tensor is not None:
            writer.add_tensor(part, np.asarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
