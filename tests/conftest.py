"""What several test files use: tiny random models, a small tokenizer, the default model."""

import contextlib
import re
import resource
import subprocess
import time
from pathlib import Path

import matplotlib
import pytest
import torch
import transformers
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import checks
import families
import faults
import ggufs
import helpers

matplotlib.use("agg")
transformers.utils.logging.set_verbosity_error()
torch.set_num_threads(1)  # on matrices this small, threads wait for each other more than they work
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")


SEEN, CAUSED = pytest.StashKey(), pytest.StashKey()


def pytest_addoption(parser):
    parser.addoption(
        "--write-faults", action="store_true", help="cause every fault, write tests/README.md"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Before any is deselected: who causes a fault. Whoever looks at what all saw comes last."""
    items.sort(key=lambda item: "faults_seen" in item.fixturenames)
    config.stash[CAUSED] = {
        faults.name_of(item): item.get_closest_marker("soak") is not None
        for item in items
        if "fault" in item.fixturenames
    }
    config.stash[SEEN] = {}
    if config.getoption("--write-faults"):
        items[:] = [item for item in items if {"fault", "faults_seen"} & {*item.fixturenames}]


@pytest.fixture
def fault(request, tmp_path):
    """The fault that this test causes: a row of the table in tests/README.md."""
    name = faults.name_of(request.node)
    found = faults.Fault(request.config.stash[SEEN], name, tmp_path)
    yield found
    assert found.message, "this test saw no fault"


@pytest.fixture
def faults_seen(request):
    """(what the tests of this run saw of their faults; every fault that one can cause, and whether
    only `make soak` does)"""
    return request.config.stash[SEEN], request.config.stash[CAUSED]


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


@pytest.fixture
def little_memory():
    """with little_memory(): no more than 500 MB can be taken."""

    @contextlib.contextmanager
    def bounded():
        data = int(re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (data * 1024 + 500 * 10**6, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    return bounded if Path("/proc/self/status").exists() else contextlib.nullcontext


@pytest.fixture
def small_disk(tmp_path):
    """small_disk(size, *options): the folder of a file system in memory, of that size."""
    mounted = []

    def mount(size, *options):
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", ",".join([f"size={size}", *options]), "tmpfs"]
        if subprocess.run([*command, folder], capture_output=True).returncode:
            pytest.skip("only root may mount a file system")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", folder], check=True)


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
def tiny_workflow(tmp_path_factory, tiny_model, tokenizer):
    """A model for which a run is little but the starting of notebooks and the writing of results:
    most moments of it are those at which a file could be left half-written."""
    folder = tmp_path_factory.mktemp("tiny") / "tiny-model"
    changes = {"max_position_embeddings": 512, "head_dim": 16}
    for part in (tiny_model("llama", vocab_size=len(tokenizer), **changes), tokenizer):
        part.save_pretrained(folder)
    return {"models": folder}


@pytest.fixture(scope="session")
def small_run(tmp_path_factory, tiny_workflow):
    """The whole workflow on that model: its folder, the process, its seconds."""
    folder, start = tmp_path_factory.mktemp("small"), time.monotonic()
    done = checks.run(*checks.workflow(folder, "results", **tiny_workflow), cwd=helpers.ROOT)
    return folder, done, time.monotonic() - start


@pytest.fixture(scope="session")
def smollm2():
    """The default model itself, fetched if the cache has none."""
    return helpers.load_model("smollm2-135m")
