"""What several test files use: tiny random models, a small tokenizer, the default model."""

import matplotlib
import pytest
import torch
import transformers
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import helpers

matplotlib.use("agg")
transformers.utils.logging.set_verbosity_error()
torch.set_num_threads(1)  # on matrices this small, threads wait for each other more than they work
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")

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
GPT2 = {"vocab_size": 61, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 64}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
TINY = {
    "gpt2": {**GPT2, "scale_attn_by_inverse_layer_idx": True},
    "llama": {**GROUPED, "attention_bias": True},
    "mistral": {**GROUPED, "sliding_window": 16},
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "attention_bias": True},
    "gemma3_text": {
        **GROUPED,
        "query_pre_attn_scalar": 50,
        "sliding_window": 16,
        "layer_types": ALTERNATING,
    },
    "opt": {**WIDTHS, "ffn_dim": 32, "word_embed_proj_dim": 24},
    "bloom": {"vocab_size": 61, "hidden_size": 24, "n_layer": 2, "n_head": 4},
}


@pytest.fixture(scope="session")
def tiny_model():
    """tiny_model(family, implementation): random weights, biases and norm gains, none zero."""

    def make(family, implementation="eager", **changes):
        options = {**TINY[family], "bos_token_id": 0, "eos_token_id": 0, **changes}
        config = transformers.AutoConfig.for_model(family, **options)
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=implementation
        )
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
        return model.eval()

    return make


@pytest.fixture(scope="session")
def tokenizer():
    """A byte-level BPE tokenizer of some 300 tokens, which puts a BOS before what it is asked."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    words = "the cat sat on the mat; the rat ate the hat -- == \n\n incompressibilities"
    bpe.train_from_iterator([words] * 9, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bpe.token_to_id("<s>"))]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setattr(helpers, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def smollm2():
    """The default model itself, fetched if the cache has none."""
    return helpers.load_model("smollm2-135m")
