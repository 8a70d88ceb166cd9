"""GGUF files: converted once and faithfully, or refused."""

import math
import re

import gguf
import numpy as np
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

import ggufs
import helpers
from checks import (
    assert_same_logits,
    assert_same_model,
    assert_same_weights,
    files_in,
    sha256,
    truncate,
)


def test_a_local_gguf_file(cache, tiny_gguf, tiny_llama, tokenizer):
    loaded = helpers.load_model(str(tiny_gguf))
    assert_same_model(loaded, tiny_llama, tokenizer)
    assert loaded.name == loaded.provenance["model"] == "tiny-v1"
    assert loaded.provenance["model_sha256"] == sha256(tiny_gguf.read_bytes())


def test_a_conversion_that_fails_leaves_nothing(cache, tiny_gguf, monkeypatch):
    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(KeyboardInterrupt):
        helpers.load_model(str(tiny_gguf))
    assert files_in(cache) == []
    assert [p.name for p in cache.iterdir()] == ["models"]


CORRUPT = {
    "weights truncated": lambda made: truncate(made / "model.safetensors"),
    "weights missing": lambda made: (made / "model.safetensors").unlink(),
    "config empty": lambda made: (made / "config.json").write_text(""),
    "tokenizer changed": lambda made: truncate(made / "tokenizer.json"),
    "no manifest": lambda made: (made / "manifest.json").unlink(),
    "manifest truncated": lambda made: truncate(made / "manifest.json"),
    "manifest of nothing": lambda made: (made / "manifest.json").write_text("{}"),
    "manifest of another kind": lambda made: (made / "manifest.json").write_text("[]"),
    "manifest of another file": lambda made: (made / "manifest.json").write_text(
        '{"gguf_sha256": "0", "files": {}}'
    ),
}


@pytest.mark.parametrize("damage", CORRUPT.values(), ids=CORRUPT)
def test_a_damaged_conversion_in_the_cache(cache, tiny_gguf, damage, fault):
    helpers.load_model(str(tiny_gguf))
    [made] = (cache / "models").iterdir()
    damage(made)
    with fault.raises(RuntimeError, "is corrupt or outdated: delete it and run", keeps=cache):
        helpers.load_model(str(tiny_gguf))
    assert str(made) in fault.message


@pytest.mark.parametrize("keep", [0, 3, 100, 0.5, 0.99])
def test_a_gguf_file_cut_short(cache, tmp_path, tiny_gguf, keep, fault):
    content = tiny_gguf.read_bytes()
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content[: keep if isinstance(keep, int) else int(keep * len(content))])
    with fault.raises((ValueError, RuntimeError), r"damaged\.gguf", keeps=cache):
        helpers.load_model(str(path))


# What a file says of itself ---------------------------------------------------------------------


def u32(number):
    return number.to_bytes(4, "little")


def u64(number):
    return number.to_bytes(8, "little")


def string(text):
    return u64(len(text)) + text.encode()


STRING, ARRAY, BYTE, WORD = u32(8), u32(9), u32(0), u32(4)
NAME = string("general.architecture") + STRING + string("llama")


def head(*fields, tensors=0, count=None):
    count = len(fields) if count is None else count
    return b"GGUF" + u32(3) + u64(tensors) + u64(count) + b"".join(fields)


def tensor(name, *dims, at=0, kind=0):
    sizes = b"".join(map(u64, dims))
    return string(name) + u32(len(dims)) + sizes + u32(kind) + u64(at)


def array(*parts):
    return string("tokenizer.ggml.tokens") + ARRAY + b"".join(parts)


NOT_WHOLE = r"hostile\.gguf is not a whole GGUF file \(.+\): get it again"
LESS = r"it holds less than it says at byte \d+"
HOSTILE = {
    "2^60 fields": (head(NAME, count=2**60), LESS),
    "2^60 tensors": (head(NAME, tensors=2**60), LESS),
    "a name of 2^60 letters": (head(u64(2**60) + b"x"), LESS),
    "an array of 2^60 bytes": (head(NAME, array(BYTE, u64(2**60))) + bytes(999), LESS),
    "an array of 2^60 strings": (head(NAME, array(STRING, u64(2**60))) + bytes(999), LESS),
    "arrays in arrays": (head(NAME, array(*[ARRAY + u64(1)] * 5000)), "recursion"),
    "a type of no kind": (head(NAME, string("x") + u32(99)), "not a valid GGUFValueType"),
    "2^32 dimensions": (
        head(NAME, tensors=1) + string("output.weight") + u32(2**32 - 1) + bytes(99),
        LESS,
    ),
    "a tensor of 2^62 numbers": (
        head(NAME, tensors=1) + tensor("output.weight", 2**31, 2**31) + bytes(999),
        "less than it says|cannot reshape",
    ),
    "a tensor whose size overflows": (
        head(NAME, tensors=1) + tensor("output.weight", 2**32, 2**32) + bytes(999),
        "less than it says|cannot reshape|overflow",
    ),
    "a tensor of no kind": (head(NAME, tensors=1) + tensor("x", 4, kind=99) + bytes(99), "99"),
    "tensors that share their bytes": (
        head(NAME, tensors=9) + b"".join(tensor(f"x{i}", 100) for i in range(9)) + bytes(999),
        "its tensors overlap",
    ),
    "10^9 layers": (
        head(NAME, string("llama.block_count") + WORD + u32(10**9)),
        "llama.block_count 1000000000",
    ),
    "10^9 heads": (
        head(NAME, string("llama.attention.head_count") + WORD + u32(10**9)),
        "llama.attention.head_count 1000000000",
    ),
    "no architecture": (head(string("x") + WORD + u32(1)), "general.architecture"),
    "a pickle": (b"\x80\x04cpathlib\nPath\n", "GGUF magic invalid"),
}


@pytest.mark.parametrize(("content", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_gguf_file_with(cache, tmp_path, content, message, fault, little_memory):
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with fault.raises(RuntimeError, NOT_WHOLE, keeps=cache), little_memory():
        helpers.load_model(str(path))
    assert re.search(message, fault.message), fault.message


def test_a_gguf_file_with_more_in_it_than_is_read(cache, tmp_path, monkeypatch, fault):
    """Each entry of an array takes the library a hundred times its size in memory."""
    monkeypatch.setattr(helpers._BoundedReader, "limit", 10_000)
    path = tmp_path / "hostile.gguf"
    path.write_bytes(head(NAME, array(BYTE, u64(20_000))) + bytes(20_000))
    with fault.raises(RuntimeError, LESS, keeps=cache):
        helpers.load_model(str(path))


SIZES = ["llama.embedding_length", "llama.feed_forward_length"]


@pytest.mark.parametrize("field", SIZES)
def test_a_gguf_file_of_absurd(cache, tmp_path, tiny_gguf, field, fault, little_memory):
    """As large as a 32-bit number can tell."""
    content = tiny_gguf.read_bytes()
    at = content.index(field.encode()) + len(field) + 4
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content[:at] + u32(2**31 - 1) + content[at + 4 :])
    with fault.raises(RuntimeError, "cannot convert", keeps=cache), little_memory():
        helpers.load_model(str(path))


@given(st.data())
def test_a_gguf_file_with_other_bytes_is_read_or_ends_in_one_line(
    tmp_path_factory, tiny_gguf, data
):
    """Where its facts stand: what it holds of weights is anything."""
    content = bytearray(tiny_gguf.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 20_000))
        other = data.draw(st.binary(min_size=1, max_size=8))
        content[at : at + len(other)] = other
    path = tmp_path_factory.getbasetemp() / "other.gguf"
    path.write_bytes(content)
    try:
        fields, shapes = helpers._gguf_contents(path, "other.gguf")
    except (RuntimeError, ValueError) as error:
        assert "\n" not in str(error)
    else:
        assert fields
        assert sum(map(math.prod, shapes)) <= 8 * len(content)


# Faithful, or refused -------------------------------------------------------------------------

# What a file does not say, or transformers does not read from it, has to be what it takes instead:
# a head dimension, a scale of the logits, a soft cap, the positions, no window, no biases.
PLAIN = {"head_dim": 6, "sliding_window": None, "rope_parameters": None}
GEMMA = {"head_dim": 256, "query_pre_attn_scalar": 256, "layer_types": None}
READ = {
    "gemma2": {**GEMMA, "attn_logit_softcapping": 50.0, "num_hidden_layers": 4},
    "gemma3_text": {**GEMMA, "num_hidden_layers": 7},  # every sixth layer sees all tokens
    "gpt2": {"n_positions": 1024, "scale_attn_by_inverse_layer_idx": False},
    "llama": {"attention_bias": False},
    "phi3": PLAIN,
    "qwen2": {"head_dim": 6},
    "qwen3": {"head_dim": 128, "attention_bias": False},
    "starcoder2": PLAIN,
}


def theta(base):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base}}


@pytest.fixture
def written(tmp_path, tiny_model, tokenizer, cache):
    """written(family, changes, …): a tiny model, and its GGUF file."""

    def write(family, changes=(), **more):
        options = {**READ.get(family, {}), **dict(changes)}
        model = tiny_model(family, vocab_size=len(tokenizer), **options)
        return model, str(ggufs.write(tmp_path / "other.gguf", model, tokenizer, **more))

    return write


FAITHFUL = {family: (family, {}) for family in READ} | {
    "llama with another base": ("llama", theta(5e5)),
    "qwen2 with another base": ("qwen2", theta(5e5)),
    "gemma3 with another window": ("gemma3_text", {"sliding_window": 8}),
    "gemma3 with its output apart": ("gemma3_text", {"tie_word_embeddings": False}),
    "llama with its output tied": ("llama", {"tie_word_embeddings": True}),
    "llama with a key head for each": ("llama", {"num_key_value_heads": 4}),
}


@pytest.mark.parametrize(("family", "changes"), FAITHFUL.values(), ids=FAITHFUL)
def test_a_gguf_file_is_the_model_that_it_was_written_from(written, family, changes):
    """Save that Gemma's norms are stored as 1 + gain, in float32."""
    model, path = written(family, changes)
    loaded = helpers.load_model(path)
    assert_same_logits(loaded, model, rtol=1e-4, atol=1e-4)
    assert loaded.model.config.model_type == family
    assert loaded.provenance["left_out"] == helpers.left_out(model.config, model.state_dict())
    checkpoint = helpers.load_checkpoint(path)
    assert_same_weights(helpers.head_weights(checkpoint), helpers.head_weights(loaded.model))
    assert_same_weights(helpers.head_weights(loaded.model), helpers.head_weights(model), rtol=1e-6)


@pytest.mark.parametrize(
    "fields",
    [
        {"attention.key_length": None, "attention.value_length": None},
        {"attention.sliding_window": None, "rope.freq_base_swa": 10000.0},
        {"rope.dimension_count": None},
    ],
)
def test_metadata_that_a_gguf_file_may_hold_or_lack(written, fields):
    model, path = written("gemma3_text", {"sliding_window": 4096}, fields=fields)
    assert_same_logits(helpers.load_model(path), model, rtol=1e-4, atol=1e-4)


def ones(name, *shape):
    return {"tensors": {name: np.ones(shape, "f4")}}


def having(**fields):
    """Fields whose names have a dot are written with two underscores for it."""
    return {"fields": {name.replace("__", "."): value for name, value in fields.items()}}


UNREAD = "{} there, which transformers does not read"
FEWER = r"transformers reads [\d,]+ of its [\d,]+ weights"
ELSEWHERE = r"'{}', which transformers does not read from GGUF: give the .* folder or hub id"
SHAPES = r"is \[{}.*\], its configuration expects \[{}"
UNFAITHFUL = {
    "phi3 with a window": ("phi3", {"sliding_window": 16}, {}, UNREAD.format("window is 16")),
    "phi3, rotating half": (
        "phi3",
        {"rope_parameters": {**theta(1e4)["rope_parameters"], "partial_rotary_factor": 0.5}},
        {},
        UNREAD.format("rope.dimension_count is 3"),
    ),
    "starcoder2 with a window": (
        "starcoder2",
        {"sliding_window": 16},
        {},
        UNREAD.format("window is 16"),
    ),
    "starcoder2 with another base": (
        "starcoder2",
        theta(1e5),
        {},
        UNREAD.format("rope.freq_base is 100000.0"),
    ),
    "qwen2 with a window": (
        "qwen2",
        {},
        having(attention__sliding_window=16),
        UNREAD.format("attention.sliding_window is 16"),
    ),
    "qwen2 with larger heads": ("qwen2", {"head_dim": 8}, {}, SHAPES.format(16, 12)),
    "qwen3 with smaller heads": ("qwen3", {"head_dim": 8}, {}, SHAPES.format(8, 128)),
    "gemma2 with another cap": (
        "gemma2",
        {"attn_logit_softcapping": 30.0},
        {},
        UNREAD.format("attn_logit_softcapping is 30.0"),
    ),
    "gemma2 with another last cap": (
        "gemma2",
        {},
        having(final_logit_softcapping=5.0),
        UNREAD.format("final_logit_softcapping is 5.0"),
    ),
    "gemma3 with smaller heads": (
        "gemma3_text",
        {"head_dim": 8},
        {},
        r"its logits would be scaled by 256\^-1/2, its heads have 8",
    ),
    "gemma3 with another base in its windows": (
        "gemma3_text",
        {},
        having(rope__freq_base_swa=5e5),
        UNREAD.format("rope.freq_base_swa is 500000.0"),
    ),
    "gpt2 with fewer positions": ("gpt2", {"n_positions": 64}, {}, SHAPES.format(64, 1024)),
    "llama with biases": ("llama", {"attention_bias": True}, {}, FEWER),
    "llama with one bias": ("llama", {}, ones("blk.1.attn_q.bias", 32), FEWER),
    "llama with a bias elsewhere": ("llama", {}, ones("blk.1.ffn_up.bias", 32), FEWER),
    "llama with a query norm": ("llama", {}, ones("blk.1.attn_q_norm.weight", 8), FEWER),
    "llama with fewer layers": ("llama", {}, having(block_count=2), FEWER),
    "llama with more layers": ("llama", {}, having(block_count=4), "lack model.layers.3."),
    "llama without keys": (
        "llama",
        {},
        {"tensors": {"blk.1.attn_k.weight": None}},
        "its weights lack model.layers.1.self_attn.k_proj.weight",
    ),
    "llama with fewer keys": (
        "llama",
        {},
        ones("blk.1.attn_k.weight", 8, 24),
        SHAPES.format(8, 16),
    ),
    "llama with another scale": (
        "llama",
        {},
        having(attention__scale=0.5),
        UNREAD.format("attention.scale is 0.5"),
    ),
    "llama that scales its output": (
        "llama",
        {},
        having(logit_scale=0.5),
        UNREAD.format("logit_scale is 0.5"),
    ),
    "llama with heads of two lengths": (
        "llama",
        {},
        having(attention__key_length=16),
        UNREAD.format("attention.key_length is 16"),
    ),
    "llama that does not count its key heads": (
        "llama",
        {"num_key_value_heads": 4},
        having(attention__head_count_kv=None),
        "lacks attention.head_count_kv",
    ),
    "llama that stretches its positions": (
        "llama",
        {},
        having(rope__scaling__factor=4.0),
        ELSEWHERE.format("llama.rope.scaling.factor"),
    ),
    "llama that stretches each frequency": (
        "llama",
        {},
        ones("rope_freqs.weight", 4),
        ELSEWHERE.format("rope_freqs.weight"),
    ),
    "mistral, called a llama": (
        "llama",
        {},
        {"name": "Mistral 7B v0.1"},
        ELSEWHERE.format("Mistral 7B v0.1"),
    ),
    "an architecture transformers does not know": (
        "olmo2",
        {},
        {},
        "GGUF model with architecture olmo2 is not supported",
    ),
    "a number that is a word": (
        "llama",
        {},
        having(attention__head_count="four"),
        "'num_attention_heads' expected int, got str",
    ),
}


@pytest.mark.parametrize(
    ("family", "changes", "more", "message"), UNFAITHFUL.values(), ids=UNFAITHFUL
)
def test_a_gguf_file_that_would_load_as_another_model(
    written, cache, family, changes, more, message, fault
):
    _, path = written(family, changes, **more)
    for load in (helpers.load_model, helpers.load_checkpoint):
        with fault.raises((ValueError, RuntimeError), message, keeps=cache):
            load(path)
        assert "other.gguf" in fault.message


def test_a_gguf_file_whose_tokenizer_is_unknown(written, cache, monkeypatch, fault):
    monkeypatch.setattr(gguf.GGUFWriter, "add_token_merges", lambda *_: None)
    _, path = written("llama")
    with fault.raises(RuntimeError, r"cannot convert .*other\.gguf: ", keeps=cache):
        helpers.load_model(path)
