"""What several test files use: tiny random models, a small tokenizer, the default model."""

import matplotlib
import pytest
import torch
import transformers
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import families
import ggufs
import helpers

matplotlib.use("agg")
transformers.utils.logging.set_verbosity_error()
torch.set_num_threads(1)  # on matrices this small, threads wait for each other more than they work
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def tiny_model():
    """tiny_model(family, implementation): random weights, biases and norm gains, none zero."""
    return families.tiny


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
def tiny_llama(tiny_model, tokenizer):
    return tiny_model("llama", "sdpa", vocab_size=len(tokenizer), attention_bias=False)


@pytest.fixture
def folder(tmp_path, tiny_llama, tokenizer):
    """A local folder with a model and its tokenizer."""
    path = tmp_path / "my model v1.5"
    tiny_llama.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory, tiny_llama, tokenizer):
    path = tmp_path_factory.mktemp("gguf") / "tiny v1.gguf"
    return ggufs.write(path, tiny_llama, tokenizer)


@pytest.fixture(scope="session")
def smollm2():
    """The default model itself, fetched if the cache has none."""
    return helpers.load_model("smollm2-135m")
