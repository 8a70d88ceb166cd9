"""Models: the hub, local folders in one file or several; weights read layer by layer.

The hub is a server on this machine.
"""

import copy
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import families
import helpers
from checks import (
    assert_same_model,
    assert_same_weights,
    one_line,
    serving,
    sha256,
    truncate,
)

# The hub --------------------------------------------------------------------------------------

COMMIT, LATEST = "0123456789" * 4, "abcdef0123" * 4
NOT_FETCHED = ["consolidated.safetensors", "onnx/model.safetensors", "pytorch_model.bin"]


def answered(request, status, body=b"", **headers):
    request.send_response(status)
    for name, value in {**headers, "Content-Length": len(body)}.items():
        request.send_header(name.replace("_", "-"), str(value))
    request.end_headers()
    if request.command == "GET":
        request.wfile.write(body)


class Hub:
    """What the hub answers for one model, of tag v1 and a newer main; `trouble` comes first.

    `trouble` maps the part of an address to an answer, given instead of the ordinary one.
    """

    def __init__(self, folder):
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.files |= dict.fromkeys(NOT_FETCHED, b"not asked for")
        self.commits = {"v1": COMMIT, "main": LATEST}
        self.asked, self.trouble = [], {}

    def __call__(self, request):
        address = request.path.split("?")[0]
        self.asked.append(address)
        for part, answer in self.trouble.items():
            if part in address:
                return answer(request)
        kind, _, rest = address.partition("some/model/")[2].partition("/")
        commit = self.commits.get(rest)
        if kind == "revision" and commit:
            siblings = [{"rfilename": name} for name in self.files]
            info = {"id": "some/model", "sha": commit, "siblings": siblings}
            return answered(request, 200, json.dumps(info).encode())
        if kind == "tree":
            listed = [
                {"type": "file", "path": name, "size": len(content), "oid": sha256(content)[:40]}
                for name, content in self.files.items()
            ]
            return answered(request, 200, json.dumps(listed).encode())
        if kind == "resolve":
            commit, _, name = rest.partition("/")
            content = self.files[name]
            etag = f'"{sha256(content)[:40]}"'
            return answered(request, 200, content, ETag=etag, X_Repo_Commit=commit)
        code = "RevisionNotFound" if kind == "revision" else "RepoNotFound"
        return answered(request, 404, X_Error_Code=code)


@pytest.fixture
def hub(folder, tmp_path, monkeypatch):
    hub = Hub(folder)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with serving(hub) as address:
        away_from(monkeypatch, address)
        yield hub


def away_from(monkeypatch, address="http://127.0.0.1:9"):
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.mark.parametrize(
    ("name", "commit"),
    [
        ("some/model", LATEST),
        ("some/model@main", LATEST),
        ("some/model@v1", COMMIT),
        (f"some/model@{COMMIT}", COMMIT),
    ],
)
def test_a_hub_model_is_fetched_once_and_then_works_offline(
    hub, tiny_llama, tokenizer, monkeypatch, name, commit
):
    first = helpers.load_model(name)
    assert_same_model(first, tiny_llama, tokenizer)
    origin = {"model_origin": "some/model", "model_revision": commit}
    expected = {"model": helpers.results_name(name), **origin, "left_out": ["causal mask"]}
    assert first.provenance == expected
    fetched = {x.split("/", 5)[5] for x in hub.asked if "/resolve/" in x}
    assert fetched == hub.files.keys() - NOT_FETCHED
    away_from(monkeypatch)
    again = helpers.load_model(name)
    assert_same_model(again, tiny_llama, tokenizer)
    checkpoint = helpers.load_checkpoint(name)
    assert first.provenance == again.provenance == checkpoint.provenance
    assert_same_weights(helpers.head_weights(checkpoint), helpers.head_weights(tiny_llama))


def test_a_hub_model_moves_on_but_its_commits_stay(hub):
    def revision(name):
        return helpers.load_model(name).provenance["model_revision"]

    assert revision("some/model") == LATEST
    hub.commits["main"] = COMMIT
    assert revision("some/model") == COMMIT
    assert revision(f"some/model@{LATEST}") == LATEST


def refusal(status, **headers):
    return lambda request: answered(request, status, **headers)


def saying(body):
    return lambda request: answered(request, 200, body)


HANGS_UP = lambda request: request.wfile.write(b"nonsense\r\n")  # noqa: E731
PUBLIC = r"the hub has no public model 'some/model': check the name, or run `hf auth login`"
GATED = r"model 'some/model' is gated: accept its terms on the hub, then run `hf auth login`"
UNREACHED = r"cannot reach model 'some/model' on the hub \(.*{}.*\): check the network, or give a"
TROUBLE = {
    "an unknown repository": ("/api/models", refusal(404, X_Error_Code="RepoNotFound"), PUBLIC),
    "a private repository": ("/api/models", refusal(401, X_Error_Code="RepoNotFound"), PUBLIC),
    "an unknown revision": (
        "/api/models",
        refusal(404, X_Error_Code="RevisionNotFound"),
        "model 'some/model' has no revision 'v1' on the hub",
    ),
    "a gate": ("/api/models", refusal(403, X_Error_Code="GatedRepo"), GATED),
    "a gate at the files": ("/resolve/", refusal(403, X_Error_Code="GatedRepo"), GATED),
    "a closed repository": (
        "/api/models",
        refusal(403, X_Error_Message="Access to this resource is disabled."),
        UNREACHED.format("403"),
    ),
    "an error of the server": ("/api/models", refusal(500), UNREACHED.format("500")),
    "too many requests": ("/api/models", refusal(429), UNREACHED.format("429")),
    "another page": ("/api/models", saying(b"<html>Sign in</html>"), UNREACHED.format("")),
    "JSON of another kind": ("/api/models", saying(b"[1]"), UNREACHED.format("")),
    "JSON without a commit": ("/api/models", saying(b'{"id": "x"}'), UNREACHED.format("sha")),
    "a list of other files": ("/tree/", saying(b'{"x": 1}'), UNREACHED.format("")),
    "files without a commit": ("/resolve/", saying(b""), UNREACHED.format("")),
    "no answer": ("/api/models", HANGS_UP, UNREACHED.format("")),
}


@pytest.mark.parametrize(("part", "answer", "message"), TROUBLE.values(), ids=TROUBLE)
@pytest.mark.parametrize("load", [helpers.load_model, helpers.load_checkpoint])
def test_a_hub_model_behind(hub, cache, monkeypatch, load, part, answer, message, fault):
    hub.trouble[part] = answer
    with fault.raises(RuntimeError, message, keeps=cache):
        load("some/model@v1")
    away_from(monkeypatch)  # what was fetched before is not taken for the model
    with pytest.raises(RuntimeError, match=UNREACHED.format("")) as raised:
        load("some/model@v1")
    one_line(raised)


@pytest.mark.parametrize("offline", [True, False])
def test_a_hub_model_without_the_network(hub, cache, monkeypatch, offline, fault):
    away_from(monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    with fault.raises(RuntimeError, UNREACHED.format(""), keeps=cache):
        helpers.load_model("some/model")
    assert hub.asked == []


# Local folders --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard", ["1GB", "20kB"])
def test_a_local_folder(folder, tiny_llama, tokenizer, dtype, shard):
    """In float32 whatever it was saved in."""
    rounded = copy.deepcopy(tiny_llama)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.to(dtype).float()
    (folder / "model.safetensors").unlink()
    copy.deepcopy(rounded).to(dtype).save_pretrained(folder, max_shard_size=shard)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard == "20kB")
    loaded = helpers.load_model(str(folder))
    assert_same_model(loaded, rounded, tokenizer)
    assert loaded.name == loaded.provenance["model"] == "my-model-v1-5"
    assert loaded.provenance["model_origin"] == "local folder"
    checkpoint = helpers.load_checkpoint(str(folder))
    assert (checkpoint.name, checkpoint.provenance) == (loaded.name, loaded.provenance)
    assert_same_weights(helpers.head_weights(checkpoint), helpers.head_weights(rounded))


def test_a_local_folder_is_known_by_its_weights(folder, tiny_model, tokenizer):
    first = helpers.load_model(str(folder)).provenance["model_sha256"]
    assert helpers.load_model(str(folder)).provenance["model_sha256"] == first
    tiny_model("llama", vocab_size=len(tokenizer), head_dim=6).save_pretrained(folder)
    assert helpers.load_model(str(folder)).provenance["model_sha256"] != first


def tensors_of(folder):
    return safetensors.torch.load_file(folder / "model.safetensors")


def put(folder, tensors):
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("family", families.KNOWN)
@pytest.mark.parametrize("prefixed", [True, False])
def test_a_checkpoint_holds_the_weights_of_its_model(tmp_path, tiny_model, family, prefixed):
    """Whether or not its names begin with the model's: some are saved by the inner model."""
    model = tiny_model(family)
    if prefixed:
        model.save_pretrained(tmp_path, max_shard_size="20kB")
    else:
        model.base_model.save_pretrained(tmp_path)
        assert not any(
            name.startswith(model.base_model_prefix + ".") for name in tensors_of(tmp_path)
        )
    checkpoint = helpers.load_checkpoint(str(tmp_path))
    assert checkpoint.provenance["left_out"] == helpers.left_out(model.config, model.state_dict())
    assert_same_weights(helpers.head_weights(checkpoint), helpers.head_weights(model))


def test_a_checkpoint_needs_no_tokenizer_and_reads_a_tensor_when_it_is_asked(tmp_path, tiny_model):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="20kB")
    checkpoint = helpers.load_checkpoint(str(tmp_path))
    layers = helpers.head_weights(checkpoint)
    next(layers)
    for shard in tmp_path.glob("*.safetensors"):
        shard.unlink()
    with pytest.raises(FileNotFoundError):
        next(layers)


QUERY, KEY = (f"model.layers.1.self_attn.{x}_proj.weight" for x in "qk")


def changed(**changes):
    """A change of tensors by name; None takes one out."""

    def change(folder):
        tensors = {**tensors_of(folder), **changes}
        put(folder, {name: tensor for name, tensor in tensors.items() if tensor is not None})

    return change


def configured(**changes):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def sharded(index=None, **files):
    """In shards, with another index, or other files for tensors by name."""

    def change(folder):
        safetensors.torch.save_file(tensors_of(folder), folder / "a.safetensors")
        weight_map = dict.fromkeys(tensors_of(folder), "a.safetensors")
        (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
        text = (
            json.dumps({"metadata": {}, "weight_map": {**weight_map, **files}})
            if index is None
            else index
        )
        (folder / "model.safetensors.index.json").write_text(text, errors="surrogateescape")

    return change


def with_pickles(name):
    def change(folder):
        torch.save(tensors_of(folder), folder / "pytorch_model.bin")
        (folder / "model.safetensors").rename(folder / name)

    return change


def with_a_truncated_shard(folder):
    sharded()(folder)
    truncate(folder / "a.safetensors")


LACKS, BESIDE = "needs config.json and model.safetensors", "not a safetensors file beside it"
INDEX = "index.json is not an index of shards: get it again"


def with_a_header(change):
    """Another header of model.safetensors: change(its length, its JSON) → (length, JSON)."""

    def changed(folder):
        path = folder / "model.safetensors"
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        length, header = change(length, json.loads(content[8 : 8 + length]))
        if not isinstance(header, bytes):
            header = json.dumps(header).encode()
            length = len(header) if length is None else length
        path.write_bytes(length.to_bytes(8, "little") + header + content[8 + length :])

    return changed


def moved(header, **changes):
    """The header with other facts of one tensor."""
    return {**header, KEY: {**header[KEY], **changes}}


class Code:
    """What would run if a pickle of it were loaded."""

    def __reduce__(self):
        return (Path.touch, (Path("run"),))


def code_in(name, as_pickle):
    def change(folder):
        content = (
            pickle.dumps(Code()) if as_pickle else b"from pathlib import Path; Path('run').touch()"
        )
        (folder / name).write_bytes(content)
        if name.endswith(".bin"):
            (folder / "model.safetensors").unlink()

    return change


def with_code_of_its_own(file, key):
    """A Python file beside the weights, and a setting that names it."""

    def change(folder):
        code_in("own.py", False)(folder)
        path = folder / file
        settings = json.loads(path.read_text()) | {"auto_map": {key: "own.Own"}}
        path.write_text(json.dumps(settings | {"model_type": "own", "tokenizer_class": "Own"}))

    return change


DAMAGED = "safetensors is damaged"
HOSTILE = {
    "a header of 2^60 bytes": (with_a_header(lambda _, header: (2**60, header)), DAMAGED),
    "a header beyond the file": (with_a_header(lambda _, header: (10**8, header)), DAMAGED),
    "a header that is not JSON": (with_a_header(lambda n, _: (n, b"{" * n)), DAMAGED),
    "a tensor beyond the file": (
        with_a_header(lambda _, h: (None, moved(h, data_offsets=[0, 2**50]))),
        DAMAGED,
    ),
    "a tensor over another": (
        with_a_header(lambda _, h: (None, moved(h, data_offsets=h[QUERY]["data_offsets"]))),
        DAMAGED,
    ),
    "a shape of 2^60 numbers": (
        with_a_header(lambda _, h: (None, moved(h, shape=[2**30, 2**30]))),
        DAMAGED,
    ),
    "a pickle called safetensors": (code_in("model.safetensors", True), DAMAGED),
    "a pickle with code": (code_in("pytorch_model.bin", True), LACKS),
    "10^9 layers": (
        configured(num_hidden_layers=10**9),
        "num_hidden_layers 1000000000, its weights",
    ),
    "10^9 heads": (
        configured(num_attention_heads=10**9),
        "num_attention_heads 1000000000, its weights",
    ),
    "10^9 experts": (
        configured(model_type="mixtral", num_local_experts=10**9),
        "num_local_experts 1000000000, its weights",
    ),
    "10^9 layers of a part": (
        configured(text_config={"n_layer": 10**9}),
        "n_layer 1000000000, its weights",
    ),
    "code for its configuration": (
        with_code_of_its_own("config.json", "AutoConfig"),
        "custom code",
    ),
    "a million brackets": (
        lambda folder: (folder / "config.json").write_text("[" * 10**6),
        "config.json is not a JSON object",
    ),
}
# What neither load_model nor load_checkpoint takes.
DEFECTS = {
    **HOSTILE,
    "no config": (lambda folder: (folder / "config.json").unlink(), LACKS),
    "config damaged": (lambda folder: (folder / "config.json").write_text("{"), "config"),
    "config of a list": (
        lambda folder: (folder / "config.json").write_text("[]"),
        "config.json is not a JSON object",
    ),
    "config of words": (configured(hidden_size="x"), "'hidden_size' expected int, got str"),
    "config of no known model": (configured(model_type="nonsense"), "model type `nonsense`"),
    "config of another's code": (
        configured(model_type="own", auto_map={"AutoConfig": "own.Own"}),
        "contains custom code",
    ),
    "weights truncated": (
        lambda folder: truncate(folder / "model.safetensors"),
        "safetensors is damaged .*: get it again",
    ),
    "weights empty": (
        lambda folder: (folder / "model.safetensors").write_bytes(b""),
        "safetensors is damaged",
    ),
    "only a pickle": (with_pickles("elsewhere"), LACKS),
    "a pickle and an adapter": (with_pickles("adapter.safetensors"), LACKS),
    "a shard outside": (sharded(**{KEY: "../outside.safetensors"}), BESIDE),
    "a shard of a folder": (sharded(**{KEY: "/outside.safetensors"}), BESIDE),
    "a shard that is a pickle": (sharded(**{KEY: "pytorch_model.bin"}), BESIDE),
    "a shard of no name": (sharded(**{KEY: 7}), BESIDE),
    "a shard missing": (sharded(**{KEY: "b.safetensors"}), "b.safetensors.* is missing: get it"),
    "a shard truncated": (with_a_truncated_shard, "safetensors is damaged .*: get it again"),
    "an index that is not JSON": (sharded("{"), INDEX),
    "an index that is not text": (sharded("\udcff"), INDEX),
    "an index that is a list": (sharded("[]"), INDEX),
    "an index of nothing": (sharded("{}"), INDEX),
    "an index of a list": (sharded('{"weight_map": ["a.safetensors"]}'), INDEX),
}


@pytest.mark.parametrize("load", [helpers.load_model, helpers.load_checkpoint])
@pytest.mark.parametrize(("defect", "message"), DEFECTS.values(), ids=DEFECTS)
def test_a_folder_with(folder, load, defect, message, fault, little_memory, monkeypatch):
    """None of its code runs, and what it says of itself takes no memory."""
    monkeypatch.chdir(folder)
    defect(folder)
    with fault.raises(RuntimeError, message, keeps=folder), little_memory():
        load(str(folder))
    assert fault.message.startswith(f"cannot load model '{folder}': ")


ANOTHER, OTHER_SHAPES = "belong together", "not of its configuration's shapes"
PLAIN = "without quantisation"
# What load_model does not take, and head_weights not from a checkpoint:
# the defect → what the first says, and the second.
UNFIT = {
    "more query heads": (configured(num_attention_heads=8), ANOTHER, OTHER_SHAPES),
    "fewer key heads": (configured(num_key_value_heads=1), ANOTHER, OTHER_SHAPES),
    "no key heads": (configured(num_key_value_heads=0), "by zero", "cannot build a model"),
    "smaller heads": (configured(head_dim=4), ANOTHER, OTHER_SHAPES),
    "wider": (configured(hidden_size=48), ANOTHER, OTHER_SHAPES),
    "more layers": (
        configured(num_hidden_layers=4),
        "lack model.layers.3.",
        "layer 3 of llama lacks",
    ),
    "fewer layers": (
        configured(num_hidden_layers=2),
        "have model.layers.2.",
        "layer 2 of llama has",
    ),
    "no keys": (changed(**{KEY: None}), f"lack {KEY}", "layer 1 of llama lacks k_proj.weight"),
    "misshapen": (changed(**{KEY: torch.zeros(3, 3)}), rf"{KEY} is \[3, 3\]", OTHER_SHAPES),
    "a scalar": (changed(**{KEY: torch.ones(())}), ANOTHER, OTHER_SHAPES),
    "biases the configuration lacks": (
        changed(**{QUERY.replace("weight", "bias"): torch.ones(32)}),
        "have .*q_proj.bias",
        "layer 1 of llama has q_proj.bias",
    ),
    "biases the weights lack": (
        configured(attention_bias=True),
        "lack .*layers.0.*_proj.bias",
        "layer 0 of llama lacks k_proj.bias",
    ),
    "a query norm of its own": (
        changed(**{QUERY.replace("proj", "norm"): torch.ones(8)}),
        "have .*q_norm",
        "layer 1 of llama has q_norm",
    ),
    "as GPTQ stores it": (
        changed(**{QUERY: None, QUERY.replace("weight", "qweight"): torch.ones(3, 32).int()}),
        f"lack {QUERY}",
        f"q_proj.qweight is not known .*{PLAIN}",
    ),
    "as bitsandbytes stores it": (
        changed(**{QUERY: torch.zeros(384, 1, dtype=torch.uint8)}),
        ANOTHER,
        f"q_proj.weight in layer 1 of llama is torch.uint8: .*{PLAIN}",
    ),
    "in eight bits with scales": (
        changed(
            **{
                QUERY: torch.ones(32, 24).to(torch.float8_e4m3fn),
                QUERY + "_scale_inv": torch.ones(1, 1),
            }
        ),
        "have .*weight_scale_inv",
        f"q_proj.weight_scale_inv is not known .*{PLAIN}",
    ),
    "with an adapter": (
        changed(**{QUERY.replace("weight", "lora_A.weight"): torch.ones(2, 24)}),
        "have .*lora_A",
        f"q_proj.lora_A.weight is not known .*{PLAIN}",
    ),
}


@pytest.mark.parametrize(("defect", "message", "_"), UNFIT.values(), ids=UNFIT)
def test_weights_that_are_not_of_their_configuration(folder, defect, message, _, fault):
    """transformers would leave a tensor out without a word, or fill one with random numbers."""
    defect(folder)
    with fault.raises(RuntimeError, message, keeps=folder):
        helpers.load_model(str(folder))
    assert fault.message.startswith(f"cannot load model '{folder}': ")


WIDE = {
    "10^12 words": (
        configured(vocab_size=10**12),
        "its configuration is of [0-9,]+ numbers, the fil",
    ),
    "10^12 inner": (configured(intermediate_size=10**12), "is of [0-9,]+ numbers, the files hold"),
    "a tokenizer with code": (
        with_code_of_its_own("tokenizer_config.json", "AutoTokenizer"),
        "custom code|does not exist|Own",
    ),
}


@pytest.mark.parametrize(("defect", "message"), WIDE.values(), ids=WIDE)
def test_a_model_to_run_with(folder, defect, message, fault, little_memory, monkeypatch):
    monkeypatch.chdir(folder)
    defect(folder)
    with fault.raises(RuntimeError, message, keeps=folder), little_memory():
        helpers.load_model(str(folder))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_with_a(folder, value, fault):
    spoilt = tensors_of(folder)[KEY].clone()
    spoilt[2, 3] = value
    changed(**{KEY: spoilt})(folder)
    with fault.raises(RuntimeError, "k_proj.weight has NaN or infinite entries", keeps=folder):
        helpers.load_model(str(folder))
    with fault.raises(ValueError, "k_proj.weight in layer 1 of llama has NaN or inf", keeps=folder):
        list(helpers.head_weights(helpers.load_checkpoint(str(folder))))


def test_a_model_in_memory_with_a_nan(tiny_model, fault):
    model = copy.deepcopy(tiny_model("llama"))
    model.model.layers[1].self_attn.q_proj.weight.data[0, 0] = math.nan
    with fault.raises(RuntimeError, "llama: its logits are NaN or infinite"):
        helpers.record_attention(model, torch.arange(9), lambda *_: None)


SMALLEST = [
    ("llama", {"num_hidden_layers": 1}),
    ("llama", {"num_attention_heads": 1, "num_key_value_heads": 1}),
    ("llama", {"head_dim": 2}),
    ("gpt2", {"n_layer": 1, "n_head": 1, "n_embd": 7}),
    ("gpt2", {"n_embd": 20, "n_head": 4}),
]


@pytest.mark.parametrize(("family", "changes"), SMALLEST, ids=str)
def test_the_smallest_models_are_models(tmp_path, family, changes, tokenizer):
    """One layer, one head, heads of two dimensions, of an odd number of them."""
    model = families.tiny(family, vocab_size=len(tokenizer), **changes)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    source = helpers.load_model(str(tmp_path))
    layers = list(helpers.head_weights(helpers.load_checkpoint(str(tmp_path))))
    seen = []
    helpers.record_attention(source.model, torch.arange(9), lambda *shown: seen.append(shown))
    assert len(seen) == len(layers) == model.config.num_hidden_layers
    for (_, queries, keys, scale), weights in zip(seen, layers, strict=True):
        sigma = helpers.logit_singular_values(queries, keys, scale)
        assert helpers.threshold_rank(sigma).shape == weights.W_Q.shape[:1] == queries.shape[:1]
        assert weights.W_K.shape[:2] == (len(keys), keys.shape[-1])


def test_heads_of_an_odd_dimension_in_a_rotary_embedding(folder, fault):
    configured(head_dim=7)(folder)
    with fault.raises(RuntimeError, "RoPE requires an even rotary dimension", keeps=folder):
        helpers.load_model(str(folder))


def test_a_model_that_does_not_run(tiny_model, fault):
    with fault.raises(RuntimeError, "llama: the model itself does not run: IndexError: index out"):
        helpers.record_attention(tiny_model("llama"), torch.tensor([1, 10**6]), lambda *_: None)


INDEXES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(INDEXES | st.fixed_dictionaries({"weight_map": INDEXES}))
def test_any_index_of_shards_ends_in_one_line(tmp_path_factory, index):
    folder = tmp_path_factory.getbasetemp() / "any index"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), errors="replace")
    with pytest.raises(RuntimeError, match="cannot load model") as raised:
        helpers.load_checkpoint(str(folder))
    one_line(raised)


@given(st.binary(max_size=200))
def test_any_bytes_as_weights_end_in_one_line(tmp_path_factory, content):
    folder = tmp_path_factory.getbasetemp() / "any weights"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(RuntimeError, match="cannot load model") as raised:
        helpers.load_checkpoint(str(folder))
    one_line(raised)


REVISIONS = ["../../../etc/hostname", "a/../../b", "..", "/etc", "-x/./y"]


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_revision_that_climbs(hub, cache, revision, fault):
    with fault.raises((ValueError, RuntimeError), "unknown model", keeps=cache.parent):
        helpers.load_model(f"some/model@{revision}")
    assert hub.asked == []


@pytest.mark.parametrize(("defect", "_", "message"), UNFIT.values(), ids=UNFIT)
def test_heads_of_a_checkpoint_not_of_its_configuration(folder, defect, _, message, fault):
    defect(folder)
    with fault.raises((ValueError, RuntimeError), message, keeps=folder):
        list(helpers.head_weights(helpers.load_checkpoint(str(folder))))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_heads_of_a_checkpoint_in_eight_bits(folder, dtype, fault):
    changed(**{QUERY: torch.ones(32, 24).to(dtype)})(folder)
    with fault.raises(ValueError, f"q_proj.weight in layer 1 .* is {dtype}: ", keeps=folder):
        list(helpers.head_weights(helpers.load_checkpoint(str(folder))))


def test_heads_of_a_checkpoint_that_names_a_tensor_twice(folder, fault):
    changed(**{QUERY.removeprefix("model."): torch.ones(32, 24)})(folder)
    with fault.raises(ValueError, r"tensor \S*q_proj.weight is not known", keeps=folder):
        list(helpers.head_weights(helpers.load_checkpoint(str(folder))))


def test_the_constants_of_old_checkpoints_are_no_weights(tmp_path, tiny_model):
    model = tiny_model("gpt2")
    model.save_pretrained(tmp_path)
    constants = {f"transformer.h.1.attn.{x}bias": torch.ones(1) for x in ("", "masked_")}
    changed(**constants)(tmp_path)
    checkpoint = helpers.load_checkpoint(str(tmp_path))
    assert constants.keys() <= checkpoint.tensors.keys()
    assert_same_weights(helpers.head_weights(checkpoint), helpers.head_weights(model))


# A checkpoint that is larger than the memory that reading it may take ---------------------------

LAYERS, SHARDS, WIDTH = 32, 4, 4096
READ = r"""
import re, sys
import helpers, torch
torch.set_num_threads(1)
status = lambda field: int(re.search(field + r":\s+(\d+) kB", open("/proc/self/status").read())[1])
before = status("VmRSS")
sigma = []
for layer in helpers.head_weights(helpers.load_checkpoint(sys.argv[1])):
    sigma.append(helpers.weight_singular_values(layer))
torch.save(torch.stack(sigma), sys.argv[2])
print(status("VmHWM") - before)
"""


@pytest.fixture
def large(tmp_path):
    """The attention of Mistral-7B, 1.4 GB: each layer's rows are the first's, moved on."""
    config = transformers.MistralConfig(num_hidden_layers=LAYERS, hidden_size=WIDTH, head_dim=128)
    path = tmp_path / "large"
    config.save_pretrained(path)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5 * 1024 + LAYERS, WIDTH, generator=generator).bfloat16()
    weight_map = {}
    for shard in range(SHARDS):
        tensors = {f"model.layers.{shard}.input_layernorm.weight": torch.ones(WIDTH)}
        for layer in range(shard * LAYERS // SHARDS, (shard + 1) * LAYERS // SHARDS):
            place = f"model.layers.{layer}.self_attn"
            tensors[f"{place}.q_proj.weight"] = rows[layer:][:4096].clone()
            tensors[f"{place}.k_proj.weight"] = rows[layer + 4096 :][:1024].clone()
            for part in "vo":
                tensors[f"{place}.{part}_proj.weight"] = torch.zeros(8, 8)
        file = f"model-{shard}.safetensors"
        safetensors.torch.save_file(tensors, path / file)
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    yield path, rows.double()
    shutil.rmtree(path)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells the peak")
def test_a_large_checkpoint_is_read_layer_by_layer(large, tmp_path):
    path, rows = large
    assert sum(shard.stat().st_size for shard in path.glob("*.safetensors")) > 1.3e9
    done = subprocess.run(
        [sys.executable, "-c", READ, str(path), str(tmp_path / "sigma.pt")],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(helpers.ROOT)},
    )
    assert not done.returncode, done.stderr
    assert 1e5 < int(done.stdout) < 1e6  # kB
    sigma = torch.load(tmp_path / "sigma.pt")
    assert sigma.shape == (LAYERS, 32, 128)
    for layer, head in [(0, 0), (17, 13), (31, 31)]:
        query = rows[layer + 128 * head :][:128]
        key = rows[layer + 4096 + 128 * (head // 4) :][:128]
        core = torch.linalg.qr(query.T).R @ torch.linalg.qr(key.T).R.T
        assert_close(sigma[layer, head], torch.linalg.svdvals(core))
