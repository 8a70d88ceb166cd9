"""The notebooks: their form, their stored outputs, runs with other parameters, and the README."""

import ast
import functools
import json
import re
import shutil
import time
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib.image
import nbformat
import numpy as np
import pandas as pd
import pytest
import torch
import transformers

import bench
import families
import ggufs
import helpers
from checks import (
    code_cells,
    killed,
    last_line,
    results_of,
    run,
    run_cells,
    started,
    tagged,
    workflow,
)

NOTEBOOKS = sorted((helpers.ROOT / "notebooks").glob("*.ipynb"))
BY_NAME = {"argvalues": NOTEBOOKS, "ids": [path.stem for path in NOTEBOOKS]}
BENCH = helpers.ROOT / bench.RESULTS
WORDS = "the cat sat on the mat; the rat ate the hat -- " * 20  # the tests' tokenizer knows them


# ---- Form -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", **BY_NAME)
def test_committed_executed_from_top_to_bottom(path):
    notebook = nbformat.read(path, as_version=4)
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert notebook.metadata.kernelspec.name == "python3"
    assert "papermill" not in path.read_text("utf-8").split('"metadata"')[-1]
    assert not any({"papermill", "execution"} & cell.metadata.keys() for cell in notebook.cells)
    assert path.stat().st_size < 1_000_000
    errors = [out for cell in cells for out in cell.outputs if out.output_type == "error"]
    assert errors == []


@pytest.mark.parametrize("path", **BY_NAME)
def test_cells_are_short_and_outputs_compared(path):
    cells = code_cells(path)
    lines = [len([x for x in cell.source.splitlines() if x.strip()]) for cell in cells]
    assert max(lines) <= 25
    compared = tagged(cells, "nbval-check-output")
    assert len(compared) >= 5
    for cell in compared:
        # nbval compares text; a picture alone would compare nothing.
        assert any(out.output_type in ("stream", "execute_result") for out in cell.outputs)
    warned = [o for c in compared for o in c.outputs if o.get("name") == "stderr"]
    assert warned == []


@pytest.mark.parametrize("path", **BY_NAME)
def test_parameters_are_plain_literals(path):
    (parameters,) = tagged(code_cells(path), "parameters")
    for statement in ast.parse(parameters.source).body:
        assert isinstance(statement, ast.Assign)
        ast.literal_eval(statement.value)


@pytest.mark.parametrize("path", **BY_NAME)
def test_outputs_name_no_path_of_a_machine(path):
    outputs = json.dumps([cell.outputs for cell in code_cells(path)])
    assert str(helpers.ROOT) not in outputs
    assert re.search(r"/(home|root|tmp|Users)/", outputs) is None


# ---- Stored outputs against a new run ---------------------------------------------------------


RUNTIMES = helpers.load_table(helpers.ROOT / "data/results/runtimes.csv").set_index("notebook")
LONG = [path for path in NOTEBOOKS if RUNTIMES.seconds[path.stem] > 100]
SHORT = [path for path in NOTEBOOKS if path not in LONG]


# The long ones are left to `make soak`; the small run below has them all.
@pytest.fixture(
    scope="module",
    params=[SHORT, pytest.param(LONG, marks=pytest.mark.soak)],
    ids=["short", "long"],
)
def rerun(request, tmp_path_factory):
    """nbval over a copy of some notebooks, in order and outside the repository: results by name."""
    folder, notebooks = tmp_path_factory.mktemp("nbval"), request.param
    for path in notebooks:
        shutil.copy(path, folder)
    options = ["--nbval-lax", "--nbval-kernel-name=python3", "--junit-xml=report.xml"]
    options += ["-p", "no:cacheprovider"]
    done = run("pytest", *options, *(path.name for path in notebooks), cwd=folder)
    assert (folder / "report.xml").is_file(), done.stdout + done.stderr
    cases = ET.parse(folder / "report.xml").iter("testcase")
    results = {path: [] for path in notebooks}
    for case in cases:
        said = f"{case.get('classname')}{case.get('name')}"
        path = next(path for path in notebooks if path.stem in said)
        faults = [f.get("message") or f.text for f in [*case.iter("failure"), *case.iter("error")]]
        results[path].append((case.get("name"), faults))
    return folder, results


def test_stored_outputs_are_reproduced(rerun):
    for path, cells in rerun[1].items():
        assert len(cells) == len(code_cells(path)), path.stem
        assert [(path.stem, name, faults) for name, faults in cells if faults] == []


def test_rerun_leaves_the_published_numbers(rerun):
    """The run's tables equal the committed ones: the integers exactly, the floats to 1e-3."""
    results = rerun[0] / "data" / "results"
    again = sorted(results.rglob("*.csv"))
    assert len(again) >= 7
    for path in again:
        published = helpers.ROOT / path.relative_to(rerun[0])
        pd.testing.assert_frame_equal(
            helpers.load_table(path), helpers.load_table(published), rtol=1e-3, atol=1e-6
        )


def test_a_changed_stored_output_is_noticed(tmp_path):
    """The tag is the one that nbval reads: in capitals it would be ignored without a word."""
    notebook = nbformat.read(
        helpers.ROOT / "notebooks" / "02_two_token_control.ipynb", as_version=4
    )
    cell = tagged(notebook.cells, "nbval-check-output")[1]
    cell.outputs[0].text = cell.outputs[0].text.replace("1.0", "1.1")
    nbformat.write(notebook, tmp_path / "changed.ipynb")
    options = ["--nbval-lax", "--nbval-kernel-name=python3", "-p", "no:cacheprovider"]
    done = run("pytest", *options, "changed.ipynb", cwd=tmp_path)
    assert done.returncode == 1
    assert "1 failed" in done.stdout


def defined_in(notebook, *names):
    """Functions and constants of a notebook, as its own cells define them."""
    tree = ast.parse("\n".join(c.source for c in code_cells(notebook) if c.source[:1] != "%"))
    wanted = [
        statement
        for statement in tree.body
        if getattr(statement, "name", None) in names
        or any(getattr(t, "id", None) in names for t in getattr(statement, "targets", []))
    ]
    assert len(wanted) == len(names)
    space = {"np": np}
    exec(compile(ast.Module(wanted, []), str(notebook), "exec"), space)
    return [space[name] for name in names]


@pytest.fixture(scope="module")
def controls():
    """The rule for P8 as notebook 07 has it, and the ranks that it is applied to, by kind."""
    *_, kinds, rule = defined_in(
        helpers.ROOT / "notebooks" / "07_controls.ipynb",
        "seed", "logs", "resampled", "NO_LANGUAGE", "verdict_on",
    )  # fmt: skip
    table = helpers.load_table(
        helpers.ROOT / "data" / "results" / "smollm2-135m" / "alice_controls.csv"
    )
    shape = [table[index].nunique() for index in ("window", "layer", "head")]
    names = ["text", *kinds, "no structure"]
    return rule, {name: table[name].to_numpy().reshape(shape) for name in names}


def test_verdict_on_p8_is_that_of_the_table(controls):
    rule, ranks = controls
    claims = helpers.claim_table(helpers.ROOT).set_index("id")
    assert rule(ranks) == claims.verdict["P8"] == "not reproduced"


def test_verdict_on_p8_turns_if_the_kinds_are_swapped(controls):
    rule, ranks = controls
    text, random, noise = (ranks[name] for name in ("text", "random tokens", "no structure"))
    assert rule({**ranks, "text": random, "random tokens": text}) == "partly"
    as_noise = dict.fromkeys(("shuffled", "unigram", "random tokens"), noise)
    assert rule({**ranks, **as_noise}) == "reproduced"
    assert rule({**ranks, **as_noise, "shuffled": text}) == "partly"
    # Where noise needs no more than text, nothing is left to explain.
    assert rule({**ranks, **as_noise, "no structure": text}) == "not reproduced"
    assert rule({**ranks, **as_noise, "no structure": noise, "text": noise}) == "not reproduced"


# ---- Runs with other parameters ---------------------------------------------------------------


def test_workflow_writes_tables_figures_and_verdicts(small_run):
    folder, done, _ = small_run
    assert done.returncode == 0, done.stderr
    model = folder / "data" / "results" / "tiny-model"
    table = helpers.load_table(model / "alice_logit_heads.csv", context=128, mask="full")
    assert len(table) == 3 * 4
    for name in ("weight_heads.csv", "alice_logit_heads.safetensors", "alice_stability.csv"):
        assert (model / name).is_file()
    claims = helpers.claim_table(folder)
    assert set(claims.verdict) <= set(helpers.VERDICTS)
    for claim in helpers.load_claims():
        assert claim in done.stdout
    assert list(folder.rglob(".part-*")) == []


def test_a_workflow_that_is_killed(tiny_workflow, small_run, tmp_path, fault):
    """In its second notebook; `make soak` kills whole runs at twenty random moments."""
    (third,) = small_run[0].rglob("notebooks/*/03_*.ipynb")
    second = small_run[0] / "build/notebooks/02_two_token_control.ipynb"
    targets = [tmp_path / path.relative_to(small_run[0]) for path in (second, third)]
    process = started(tmp_path, *targets, **tiny_workflow)
    while not any(target.exists() for target in targets) and process.poll() is None:
        time.sleep(0.05)
    time.sleep(3)  # into the next notebook
    killed(process)
    finished = {path: path.stat().st_mtime_ns for path in targets if path.exists()}
    assert len(finished) == 1
    done = run(*workflow(tmp_path, *targets, **tiny_workflow), cwd=helpers.ROOT)
    assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    again, whole = results_of(tmp_path), results_of(small_run[0])
    assert len(again) > 10
    assert again == {name: whole[name] for name in again}
    fault.saw(
        "(nothing: the next run goes on where it was)", "what was finished; no result is half"
    )


def papermill(notebook, cwd, /, *options):
    path = helpers.ROOT / "notebooks" / f"{notebook}.ipynb"
    return run(
        "papermill", path, "out.ipynb", "-k", "python3", "--no-progress-bar", *options, cwd=cwd
    )


def papermill_parameters(notebook):
    (cell,) = tagged(code_cells(helpers.ROOT / "notebooks" / f"{notebook}.ipynb"), "parameters")
    return {statement.targets[0].id for statement in ast.parse(cell.source).body}


def test_own_text_from_another_folder(tmp_path):
    words = helpers.load_text("paradise-lost").text[:6000]
    (tmp_path / "my text.txt").write_text(words, "utf-8")
    done = papermill(
        "04_logit_spectra", tmp_path, "-p", "context", 256, "-y", 'texts: ["my text.txt"]'
    )
    assert done.returncode == 0, done.stderr
    (table,) = tmp_path.rglob("my-text-txt_logit_heads.csv")
    assert len(helpers.load_table(table, context=256)) == 270
    assert table.is_relative_to(tmp_path / "data" / "results" / "smollm2-135m")


@pytest.mark.parametrize(
    ("conventions", "fields"),
    [
        ({"unit": "key head", "with_bias": True, "row_centred": False, "mask": "causal"}, 6),
        ({"position": "content"}, 12),
    ],
    ids=["all others", "content"],
)
def test_conventions_are_parameters_of_three_notebooks(conventions, fields, tokenizer, tmp_path):
    for part in (families.tiny("qwen2", vocab_size=len(tokenizer)), tokenizer):
        part.save_pretrained(tmp_path / "tiny")
    (tmp_path / "words.txt").write_text(WORDS)
    window = {"texts": ["words.txt"], "context": 48, "offset": 4}
    taken = {
        "03_weight_spectra": {"model": "tiny"},
        "04_logit_spectra": {"model": "tiny", **window},
        "05_gap_statistics": {"models": ["tiny"], **window},
    }
    for notebook, parameters in taken.items():
        known = papermill_parameters(notebook)
        ours = {name: value for name, value in conventions.items() if name in known}
        run_cells(notebook, tmp_path, **parameters, **ours)
    results = tmp_path / "data" / "results"
    for table in ("weight_heads", "words-txt_logit_heads"):
        assert len(helpers.load_table(results / "tiny" / f"{table}.csv")) == fields
    # The claims of 03 know no position; none is answered under another convention than its own.
    saved = ["claims_03.csv"] if "position" in conventions else []
    assert [path.name for path in results.rglob("claims_*.csv")] == saved
    with pytest.raises(ValueError, match=r"was made with \w+ .+, expected .+: run the notebook"):
        run_cells("05_gap_statistics", tmp_path, models=["tiny"], **window)


PAPER = tomllib.loads((helpers.ROOT / "data/paper_models.toml").read_text("utf-8"))["model"]


def in_small(shape, tokenizer):
    """A model of the paper at the true layout of its heads: two layers, random weights."""
    options = {
        "vocab_size": len(tokenizer),
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "hidden_size": shape["width"],
        "num_attention_heads": shape["query_heads"],
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if shape["model_type"] == "gpt2":
        options["n_inner"] = options.pop("intermediate_size")
    else:
        options |= {"num_key_value_heads": shape["kv_heads"], "head_dim": shape["head_dim"]}
    if shape["model_type"] == "mistral":
        options["sliding_window"] = shape["window"]
    config = transformers.AutoConfig.for_model(shape["model_type"], **options)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("shape", PAPER, ids=[shape["name"] for shape in PAPER])
def test_the_papers_models_at_their_true_head_layout(shape, tokenizer, tmp_path):
    model = in_small(shape, tokenizer)
    biases = [p for name, p in model.named_parameters() if "bias" in name and "attn" in name]
    assert bool(biases) == shape["biases"]
    for bias in biases:
        torch.nn.init.normal_(bias, std=0.02)  # a new model's are zero, which hides what they do
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "words.txt").write_text(WORDS)
    for notebook, parameters in (
        ("03_weight_spectra", {}),
        ("04_logit_spectra", {"texts": ["words.txt"], "context": 80, "offset": 4}),
    ):
        run_cells(notebook, tmp_path, model="model", **parameters)
    results = tmp_path / "data" / "results" / "model"
    for name in ("weight_heads", "words-txt_logit_heads"):
        table = helpers.load_table(results / f"{name}.csv")
        assert len(table) == 2 * shape["query_heads"]
        assert table.kv_head.nunique() == shape["kv_heads"]
        assert (table.head_dim == shape["head_dim"]).all()
    readings = helpers.load_table(results / "weight_conventions.csv")
    assert len(readings) == (4 if shape["biases"] else 2)
    left_out = ["causal mask"]
    if shape["window"]:
        left_out.append(f"sliding window of {shape['window']} tokens in 2 of 2 layers")
    assert table.attrs["left_out"] == left_out
    conventions = helpers.load_table(results / "logit_conventions.csv").convention
    assert ("content position" in set(conventions)) == shape["position"].startswith("rotary")


def test_a_gguf_file_of_another_family_runs_through_the_notebooks(tokenizer, cache, tmp_path):
    # Such a file stores no head dimension: it is the width over the number of heads.
    model = families.tiny("qwen2", vocab_size=len(tokenizer), head_dim=6)
    ggufs.write(tmp_path / "tiny.gguf", model, tokenizer)
    (tmp_path / "words.txt").write_text(WORDS)
    window = {"texts": ["words.txt"], "context": 48, "offset": 4}
    for notebook, parameters in (("03_weight_spectra", {}), ("04_logit_spectra", window)):
        run_cells(notebook, tmp_path, model="tiny.gguf", **parameters)
    for table in ("weight_heads", "words-txt_logit_heads"):
        table = helpers.load_table(tmp_path / "data" / "results" / "tiny" / f"{table}.csv")
        assert len(table) == 12
        assert table.attrs["model_origin"] == "local GGUF file"


def with_a_head_of_zeros(**changes):
    """A gpt2 in which one head of each layer has keys, and so a field, that are zero."""
    model = families.tiny("gpt2", **changes)
    for layer in range(3):
        for parameter in helpers.attention_module(model, layer).c_attn.parameters():
            parameter.data[..., 24:30] = 0
    return model


def run_tiny(notebook, family, tokenizer, folder, **parameters):
    """Run a notebook on a tiny model and a few words: what it printed, and its results."""
    build = with_a_head_of_zeros if family == "gpt2" else functools.partial(families.tiny, family)
    model = build(vocab_size=len(tokenizer))
    for part in (model, tokenizer):
        part.save_pretrained(folder / "tiny")
    (folder / "words.txt").write_text(3 * WORDS)
    printed = run_cells(notebook, folder, model="tiny", context=48, offset=4, **parameters)
    assert "nan" not in printed
    return printed, folder / "data" / "results" / "tiny"


LEAST = {
    "a head of zeros": with_a_head_of_zeros,
    "one layer and one head": lambda **changes: families.tiny(
        "gpt2", n_layer=1, n_head=1, n_embd=7, **changes
    ),
}


@pytest.mark.parametrize("build", LEAST.values(), ids=LEAST)
def test_notebooks_on_the_least_of_models(build, tokenizer, tmp_path):
    """In fewer tokens than a head has dimensions, too."""
    for part in (build(vocab_size=len(tokenizer)), tokenizer):
        part.save_pretrained(tmp_path / "tiny")
    (tmp_path / "words.txt").write_text(WORDS)
    window = {"context": 5, "offset": 4}
    run_cells("03_weight_spectra", tmp_path, model="tiny")
    run_cells("04_logit_spectra", tmp_path, model="tiny", texts=["words.txt"], **window)
    run_cells("05_gap_statistics", tmp_path, models=["tiny"], texts=["words.txt"], **window)
    printed = run_cells(
        "06_stability_bound", tmp_path, model="tiny", text="words.txt", ranks=[1, 9], **window
    )
    assert "ranks left out: [9]" in printed
    claims = helpers.claim_table(tmp_path).set_index("id")
    answered = claims.verdict[claims.model == "tiny"]
    assert {"P2-heads", "P3-heads", "P4-heads", "P7-bound"} <= set(answered.index)


@pytest.mark.parametrize(
    ("family", "models", "left_out"),
    [
        ("gpt2", 5, ["before RoPE left out: gpt2 has no rotary embedding"]),
        ("cohere2", 3, ["shuffled left out: weights of model type 'cohere2'", "before RoPE left"]),
    ],
)
def test_controls_leave_out_what_a_model_has_not(family, models, left_out, tokenizer, tmp_path):
    parameters = {"text": "words.txt", "other_text": "", "windows": 2}
    parameters |= {"contexts": [16, 48, 64, 5000]}
    printed, results = run_tiny("07_controls", family, tokenizer, tmp_path, **parameters)
    for line in [*left_out, "contexts: 5000 left out: "]:
        assert line in printed
    controls = helpers.load_table(results / "words-txt_controls.csv", windows=2)
    assert len(controls) == 2 * 3 * 4
    effects = helpers.load_table(results / "words-txt_controls_effects.csv")
    assert (effects.changed == "model").sum() == models - 1
    assert "before RoPE" not in set(effects.to)
    combined = helpers.load_table(results / "words-txt_controls_combined.csv")
    assert len(combined) == 2**3 - 1
    assert combined["of variance"].sum() == pytest.approx(1)
    zero = controls[controls["head"] == 0]["text"]
    assert (zero == 0).all() == (family == "gpt2")


@pytest.mark.parametrize(
    ("family", "left_out", "baselines"),
    [
        ("gpt2", ["before RoPE left out: gpt2 has no rotary embedding"], 5),
        ("cohere2", ["weights left out: weights of model type 'cohere2'", "before RoPE left"], 4),
        ("gemma3_text", [], 8),
    ],
)
def test_function_leaves_out_what_a_model_has_not(family, left_out, baselines, tokenizer, tmp_path):
    parameters = {"calibration_text": "words.txt", "texts": ["words.txt"]}
    parameters |= {"ranks": [1, 2, 99], "budgets": [2, 4, 99]}
    printed, results = run_tiny("08_function", family, tokenizer, tmp_path, **parameters)
    for line in [*left_out, "left out, above d: [99]"]:
        assert line in printed
    steps = 6 if left_out else 7
    compared = helpers.load_table(results / "words-txt_compression.csv", budgets=[2, 4])
    assert compared.method.nunique() == steps + baselines
    assert len(compared) == 2 * (steps + baselines) + 2  # the method at two further budgets
    assert len(helpers.load_table(results / "words-txt_function.csv")) == 2 + 4
    assert len(helpers.load_table(results / "words-txt_function_layers.csv")) == 3
    assert set(helpers.load_table(results / "claims_08.csv").id) == {"L3", "S1"}


BAD = [
    ("03_weight_spectra", {"model": "smollm2"}, r"unknown model 'smollm2': did you mean 'smol"),
    ("03_weight_spectra", {"with_bias": "yes"}, r"with_bias must be True or False.*'yes'"),
    ("03_weight_spectra", {"share": 0}, r"share must be a number above 0 .*, found 0$"),
    ("03_weight_spectra", {"share": "0.9"}, r"share must be a number above 0 .*, found '0.9'$"),
    ("04_logit_spectra", {"texts": ["alicia"]}, r"unknown text 'alicia': did you mean 'alice'"),
    ("04_logit_spectra", {"texts": ["no.txt"]}, r"text file 'no.txt' not found from"),
    ("04_logit_spectra", {"texts": ["short.txt"]}, r"has 2 tokens, the window needs 1224"),
    ("04_logit_spectra", {"texts": [["alice"]]}, r"name of a model or text must be a str"),
    ("04_logit_spectra", {"texts": ["alice", "alice"]}, r"texts must be different, found 'al"),
    ("04_logit_spectra", {"model": ["smollm2-135m"]}, r"name of a model must be a string"),
    ("04_logit_spectra", {"context": 9000}, r"context 9000 is beyond the 8192 positions"),
    ("04_logit_spectra", {"context": "64"}, r"context must be a whole number .*, found '64'$"),
    ("04_logit_spectra", {"context": 1}, r"context must be a whole number .* 2, found 1$"),
    ("04_logit_spectra", {"offset": -1}, r"offset must be a whole number .* 0, found -1$"),
    ("04_logit_spectra", {"share": -0.5}, r"share must be a number above 0 .*, found -0.5$"),
    ("04_logit_spectra", {"position": "sideways"}, r"position must be .*'sideways'"),
    ("04_logit_spectra", {"mask": "half"}, r"mask must be .*'half'"),
    ("04_logit_spectra", {"row_centred": "false"}, r"row_centred must be True or False.*'fal"),
    ("05_gap_statistics", {"share": 1.5}, r"share must be a number above 0 .*, found 1.5$"),
    ("05_gap_statistics", {"bootstrap": 5}, r"bootstrap must be a whole .* 100, found 5$"),
    ("05_gap_statistics", {"models": ["absent"]}, r"weight_heads.csv is missing: run"),
    ("06_stability_bound", {"ranks": [65]}, r"ranks need a number of at most 64 .*\[65\]$"),
    ("06_stability_bound", {"ranks": [0]}, r"each of ranks must be a whole .* 1, found 0$"),
    ("06_stability_bound", {"ranks": "[11"}, r"ranks must be a list that is not empty"),
    ("06_stability_bound", {"context": 0}, r"context must be a whole .* 2, found 0$"),
    ("06_stability_bound", {"seed": "x"}, r"seed must be a whole number .*, found 'x'$"),
    ("07_controls", {"windows": 1}, r"windows must be a whole number of at least 2, found 1$"),
    ("07_controls", {"contexts": [64.5]}, r"each of contexts must be a whole .* found 64.5$"),
    ("07_controls", {"seed": -1}, r"seed must be a whole number of at least 0, found -1$"),
    ("07_controls", {"contexts": [8200]}, r"none of the contexts \[8200\] fits"),
    ("07_controls", {"windows": 99}, r"text 'alice' has \d+ tokens, the window needs \d+"),
    ("08_function", {"ranks": [0]}, r"each of ranks must be a whole .* at least 1, found 0$"),
    ("08_function", {"budgets": [65, 99]}, r"number of at most d = 64, found \[65, 99\]$"),
    ("08_function", {"shares": [1.1]}, r"share must be a number above 0 .*, found 1.1$"),
    ("08_function", {"texts": ["short.txt"]}, r"has 2 tokens, the window needs 1224"),
    ("08_function", {"context": 2}, r"context must be a whole number of at least 3, found 2$"),
    ("01_theory", {"layer": 30}, r"has layers 0 to 29 and heads 0 to 8, found layer 30"),
    ("01_theory", {"share": 1.5}, r"share must be a number above 0 .*, found 1.5$"),
    ("01_theory", {"context": 7}, r"context must be a whole number of at least 8, found 7$"),
]


@pytest.mark.parametrize(
    ("notebook", "parameters", "message"),
    BAD,
    ids=[f"{name[:2]}, {json.dumps(parameters)[1:-1]}" for name, parameters, _ in BAD],
)
def test_a_notebook_with(notebook, parameters, message, tmp_path, fault):
    (tmp_path / "short.txt").write_text("Hello there")
    with fault.raises((ValueError, FileNotFoundError), message):
        run_cells(notebook, tmp_path, **parameters)


CODE = "\"\"\"\n'); import pathlib; pathlib.Path('run').touch() #"


def test_a_parameter_that_carries_code(tmp_path, fault):
    """Neither its quotes nor YAML's own objects are anything but a name."""
    done = papermill("03_weight_spectra", tmp_path, "-p", "model", CODE)
    assert done.returncode == 1
    assert re.search("^ValueError: unknown model .*: known: smollm2-135m", last_line(done))
    fault.saw(last_line(done), "nothing, but the notebook with the error in it")
    tagged = '!!python/object/apply:pathlib.Path.touch ["run"]'
    assert papermill("03_weight_spectra", tmp_path, "-y", f"model: {tagged}").returncode == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out.ipynb"]


SETTINGS = {
    "contxt=64": "no key 'contxt'",
    "lengths=long": "lengths must be whole numbers, found 'long'",
    "models=a/b a_b": "two models would share a folder: a/b, a_b",
    "models=smollm2": "unknown model 'smollm2': did you mean 'smollm2-135m'",
    "texts=alice no.txt": "text file 'no.txt' not found from",
    "context=half": "context must be a whole number of at least 4, found 'half'",
}


@pytest.mark.parametrize(("setting", "message"), SETTINGS.items(), ids=SETTINGS)
def test_a_workflow_with(setting, message, tmp_path, fault):
    name, value = setting.split("=")
    done = run(*workflow(tmp_path, "results", **{name: value}), cwd=helpers.ROOT)
    assert done.returncode != 0
    assert message in last_line(done)
    assert not [path for path in tmp_path.rglob("*") if path.suffix]
    fault.saw(last_line(done), "nothing was begun")


def test_workflow_knows_its_files_by_full_paths(tmp_path):
    """While a notebook runs, papermill has changed the working folder of the whole process."""
    command = ["snakemake", "--summary", "--snakefile", helpers.ROOT / "Snakefile"]
    done = run(*command, "results", "--config", "build=build", cwd=tmp_path)
    rows = done.stdout.splitlines()[1:]
    assert len(rows) == len(NOTEBOOKS), done.stderr
    assert all(row.startswith(f"{tmp_path.resolve()}/build/notebooks/") for row in rows)


def test_a_workflow_whose_notebook_fails(tmp_path, fault):
    target = tmp_path / "build/notebooks/smollm2-135m/06_stability_bound.ipynb"
    done = run(*workflow(tmp_path, target, stability_context=9000), cwd=helpers.ROOT)
    assert done.returncode != 0
    assert re.search(r"context 9000 is beyond the 8192 positions", last_line(done)), done.stderr
    assert results_of(tmp_path) == {}
    fault.saw(last_line(done), "nothing, but the notebook with the error in it")


# ---- What is published ------------------------------------------------------------------------


def figure_slugs():
    return sorted(path.stem for path in (helpers.ROOT / "figures").glob("*.png"))


@pytest.mark.parametrize("slug", figure_slugs())
def test_figures_are_drawn_and_have_their_numbers(slug):
    picture = matplotlib.image.imread(helpers.ROOT / "figures" / f"{slug}.png")
    assert min(picture.shape[:2]) > 300
    assert picture[..., :3].std() > 0.02
    assert (helpers.ROOT / "figures" / f"{slug}.svg").stat().st_size > 2000
    numbers = helpers.load_table(helpers.ROOT / "data" / "figures" / f"{slug}.csv", figure=slug)
    assert len(numbers) >= 2
    assert np.isfinite(numbers.select_dtypes("number").to_numpy()).any()


def test_every_figure_belongs_to_a_notebook_or_the_benchmark():
    sources = {
        path.stem[:2]: path.read_text("utf-8") for path in [*NOTEBOOKS, Path(bench.__file__)]
    }
    for slug in figure_slugs():
        assert re.sub(r"_smollm2-135m$", "", slug) in sources[slug[:2]]


def test_readme_tables_are_the_computed_ones():
    readme = (helpers.ROOT / "README.md").read_text("utf-8")
    computed = helpers.readme_tables(helpers.ROOT) | families.readme_tables()
    computed |= bench.readme_tables(helpers.load_table(BENCH))
    for name, table in computed.items():
        assert f"<!-- {name} -->\n{table}\n<!-- /{name} -->" in readme


def test_every_claim_is_answered_once_per_model():
    claims = helpers.claim_table(helpers.ROOT)
    assert set(claims.verdict) <= set(helpers.VERDICTS)
    assert not claims.duplicated(["id", "model"]).any()
