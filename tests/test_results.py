"""Results: tables and spectra with their provenance, written whole or not at all; claims."""

import json
import math
import tomllib

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st
from pandas.testing import assert_frame_equal

import helpers

PROVENANCE = {"model": "tiny", "text": "poème", "window": [200, 1224], "loss": 3.165, "seed": None}
TABLE = pd.DataFrame(
    {"layer": [0, 0, 1], "head": [0, 1, 0], "r90": [12, 7, 31], "mean": [0.5, 1 / 3, 1e-9]}
)
SPECTRA = torch.rand(3, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def files_in(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def test_a_table_comes_back_with_its_provenance(tmp_path):
    path = tmp_path / "tiny" / "heads.csv"
    helpers.save_table(TABLE, path, PROVENANCE)
    loaded = helpers.load_table(path)
    expected = TABLE.assign(mean=[0.5, 0.333333, 1e-9])  # six digits
    assert_frame_equal(loaded, expected, check_exact=True)
    assert PROVENANCE.items() <= loaded.attrs.items()
    assert loaded.attrs["torch"] == torch.__version__
    assert {"transformers", "numpy"} <= loaded.attrs.keys()
    assert files_in(tmp_path) == ["tiny", "tiny/heads.csv"]


def test_a_table_is_a_plain_csv_file_under_its_comments(tmp_path):
    helpers.save_table(TABLE, tmp_path / "heads.csv", PROVENANCE)
    lines = (tmp_path / "heads.csv").read_text("utf-8").splitlines()
    assert lines[:3] == ['# model: "tiny"', '# text: "poème"', "# window: [200, 1224]"]
    assert lines[-4:] == [
        "layer,head,r90,mean",
        "0,0,12,0.5",
        "0,1,7,0.333333",
        "1,0,31,1e-09",
    ]
    plain = pd.read_csv(tmp_path / "heads.csv", comment="#")
    assert_frame_equal(plain, helpers.load_table(tmp_path / "heads.csv"))


def test_cells_that_look_like_comments_are_cells(tmp_path):
    table = pd.DataFrame({"curve": ["# heads", "a: b"], "value": [1, 2]})
    helpers.save_table(table, tmp_path / "t.csv", PROVENANCE)
    assert_frame_equal(helpers.load_table(tmp_path / "t.csv"), table)


def test_spectra_come_back_as_float32_with_their_provenance(tmp_path):
    path = tmp_path / "tiny" / "heads.safetensors"
    helpers.save_spectra(SPECTRA.transpose(0, 1), path, PROVENANCE)
    loaded = helpers.load_spectra(path, **PROVENANCE)
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded, SPECTRA.transpose(0, 1).float())
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = json.loads(file.metadata()["provenance"])
    assert PROVENANCE.items() <= metadata.items()
    assert metadata["torch"] == torch.__version__
    assert files_in(tmp_path) == ["tiny", "tiny/heads.safetensors"]


SAVED = [
    (helpers.save_table, helpers.load_table, TABLE),
    (helpers.save_spectra, helpers.load_spectra, SPECTRA),
]


@pytest.mark.parametrize(("save", "load", "content"), SAVED, ids=["table", "spectra"])
@pytest.mark.parametrize(
    ("key", "value"), [("model", "other"), ("window", [0, 1024]), ("context", 512), ("text", None)]
)
def test_results_made_otherwise(tmp_path, save, load, content, key, value, fault):
    save(content, tmp_path / "results", PROVENANCE)
    load(tmp_path / "results", model="tiny", window=[200, 1224])
    found = PROVENANCE.get(key)
    with fault.raises(ValueError, f"made with {key} "):
        load(tmp_path / "results", **{"model": "tiny", key: value})
    assert f"made with {key} {found!r}, expected {value!r}" in fault.message


@pytest.mark.parametrize(("save", "load", "content"), SAVED, ids=["table", "spectra"])
def test_a_missing_result(tmp_path, save, load, content, fault):
    with fault.raises(FileNotFoundError, r"nothing is missing: run the notebook that"):
        load(tmp_path / "nothing")


def edited(change):
    """A change of a table's text."""
    return lambda path: path.write_text(change(path.read_text("utf-8")), "utf-8")


def without_a_column(text):
    *facts, header, first, second, third, _ = text.split("\n")
    return "\n".join([*facts, *(line.rsplit(",", 1)[0] for line in (header, first, second, third))])


EDITS = {
    "a column missing": edited(without_a_column),
    "a number changed": edited(lambda text: text.replace("0,1,7", "0,1,8")),
    "a NaN": edited(lambda text: text.replace("0,1,7", "0,1,NaN")),
    "a head twice": edited(lambda text: text + "1,0,31,1e-09\n"),
    "a head missing": edited(lambda text: text.replace("0,1,7,0.333333\n", "")),
    "another model": edited(lambda text: text.replace('"tiny"', '"tinier"')),
    "a fact missing": edited(lambda text: text.replace('# text: "poème"\n', "")),
    "a fact that is not JSON": edited(lambda text: text.replace('"tiny"', "tiny")),
    "no facts": edited(lambda text: text[text.index("layer") :]),
    "an end half-way": edited(lambda text: text[: len(text) // 2]),
    "no lines": lambda path: path.write_bytes(b""),
    "bytes that are no text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_a_table_that_was_given(tmp_path, edit, fault):
    path = tmp_path / "heads.csv"
    helpers.save_table(TABLE, path, PROVENANCE)
    before = path.read_bytes()
    edit(path)
    assert path.read_bytes() != before
    with fault.raises(ValueError, r"heads\.csv is not as it was written: run the notebook that"):
        helpers.load_table(path)


def test_a_table_whose_line_ends_were_converted_is_the_same(tmp_path):
    """As git does on some systems."""
    path = tmp_path / "heads.csv"
    helpers.save_table(TABLE, path, PROVENANCE)
    before = helpers.load_table(path)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert_frame_equal(helpers.load_table(path), before)


def other_spectra(path, sigma=SPECTRA, **metadata):
    safetensors.torch.save_file({"sigma": sigma.float().contiguous()}, path, metadata)


DAMAGE = {
    "its end": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "one bit": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x99"),
    "everything": lambda path: path.write_bytes(b""),
    "its provenance": other_spectra,
    "the form of its provenance": lambda path: other_spectra(path, provenance="[]"),
    "its checksum": lambda path: other_spectra(path, provenance='{"sha256": 0}'),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_spectra_that_lost(tmp_path, damage, fault):
    path = tmp_path / "heads.safetensors"
    helpers.save_spectra(SPECTRA, path, PROVENANCE)
    damage(path)
    with fault.raises(ValueError, r"heads\.safetensors is not as it was written: run the"):
        helpers.load_spectra(path)


@given(st.text(max_size=200))
def test_any_text_is_no_table_of_ours(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_text(text, "utf-8", errors="surrogatepass")
    with pytest.raises(ValueError, match="is not as it was written"):
        helpers.load_table(path)


def a_table(disk):
    helpers.save_table(pd.DataFrame({"x": range(50_000)}), disk / "x.csv", {})


def spectra(disk):
    helpers.save_spectra(torch.rand(3, 4, 9000), disk / "x.safetensors", {})


def a_figure(disk):
    helpers.save_figure(plt.figure(), "01_x", pd.DataFrame({"x": range(50_000)}), disk)


@pytest.mark.parametrize("write", [a_table, spectra, a_figure])
def test_a_full_disk_below(small_disk, write, fault):
    disk = small_disk("100k")
    (disk / "old").write_bytes(bytes(95 * 1024))
    with fault.raises(OSError, "cannot write into .*No space left on device.*: free space", disk):
        write(disk)
    plt.close("all")


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_writer_that_fails_leaves_the_old_file_alone(tmp_path, error):
    path = tmp_path / "table.csv"
    path.write_text("old")

    def half(part):
        part.write_text("half")
        raise error

    with pytest.raises(type(error)):
        helpers._write(path, half)
    assert path.read_text() == "old"
    assert files_in(tmp_path) == ["table.csv"]


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "table.csv"

    def slowly(part):
        part.write_text("half")
        assert not path.exists()
        part.write_text("whole")

    helpers._write(path, slowly)
    assert path.read_text() == "whole"
    assert files_in(tmp_path) == ["new", "new/table.csv"]


def test_results_go_to_the_repository_only_from_inside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(helpers.ROOT / "tests")
    assert helpers.output_folder() == helpers.ROOT
    monkeypatch.chdir(tmp_path)
    assert helpers.output_folder() == tmp_path
    assert helpers.output_folder("mine") == tmp_path / "mine"


# Claims ---------------------------------------------------------------------------------------


def test_every_claim_is_complete_and_named_once():
    entries = tomllib.loads((helpers.ROOT / "data" / "claims.toml").read_text("utf-8"))["claim"]
    claims = helpers.load_claims()
    assert list(claims) == [entry["id"] for entry in entries]  # no id twice, in the file's order
    for claim in claims.values():
        assert {"statement", "paper", "reading", "notebook"} <= claim.keys()
        assert claim.get("low", 0) < claim.get("high", 1)
        assert ("low" in claim) == ("high" in claim)


@pytest.mark.parametrize(
    ("claim_id", "low", "high"), [("P2-heads", 2, 11), ("P3-means", 38, 75), ("P4-heads", 5, 25)]
)
def test_ranges_are_the_papers(claim_id, low, high):
    claim = helpers.load_claims()[claim_id]
    assert (claim["low"], claim["high"], claim["paper"]) == (low, high, f"{low}-{high}")


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([2, 5, 11], "reproduced"),
        ([2.0], "reproduced"),
        (7, "reproduced"),
        ([1, 5], "partly"),
        ([11, 11.001], "partly"),
        ([5, math.nan], "partly"),
        ([1.999, 12], "not reproduced"),
        ([math.nan], "not reproduced"),
        (torch.tensor([[3, 12], [4, 5]]), "partly"),
    ],
)
def test_verdict_of_a_range(values, verdict):
    assert helpers.range_verdict(values, 2, 11) == verdict


def test_no_values_are_no_verdict():
    with pytest.raises(ValueError, match="value"):
        helpers.range_verdict([], 2, 11)


def test_an_answer_is_a_line_and_a_row(capsys):
    row = helpers.answer("P2-heads", "13 of 64", "partly", "tiny")
    assert capsys.readouterr().out == "P2-heads  paper: 2-11  measured: 13 of 64  -> partly\n"
    assert row == {"id": "P2-heads", "model": "tiny", "measured": "13 of 64", "verdict": "partly"}


@pytest.mark.parametrize("verdict", ["true", "Reproduced", ""])
def test_an_answer_in_other_words(verdict, fault):
    with fault.raises(ValueError, "verdict must be one of reproduced, partly"):
        helpers.answer("P2-heads", "13", verdict)


def test_an_answer_to_no_claim(fault):
    with fault.raises(ValueError, "data/claims.toml has no claim 'P99'"):
        helpers.answer("P99", "13", "partly")


def save_answers(path, *rows):
    helpers.save_table(pd.DataFrame(rows), path, {})


def test_claim_table_joins_every_answer(tmp_path, capsys):
    results = tmp_path / "data" / "results"
    save_answers(results / "claims_02.csv", helpers.answer("T1", "within 2e-16", "reproduced"))
    for model in ("a", "b"):
        row = helpers.answer("P3-heads", "4-47", "partly", model)
        save_answers(results / model / "claims_03.csv", row)
    table = helpers.claim_table(tmp_path)
    claims = helpers.load_claims()
    assert list(dict.fromkeys(table["id"])) == list(claims)  # every claim, in order
    assert len(table) == len(claims) + 1
    assert table.columns.tolist() == [
        *("id", "statement", "paper", "reading", "model", "measured", "verdict", "notebook")
    ]
    answers = table.set_index("id")[["model", "measured", "verdict"]]
    assert answers.loc["T1"].tolist() == ["", "within 2e-16", "reproduced"]
    assert answers.loc["P3-heads"].values.tolist() == [
        ["a", "4-47", "partly"],
        ["b", "4-47", "partly"],
    ]
    assert answers.loc["P6"].tolist() == ["", "", "not measured yet"]
    assert table.set_index("id").loc["P6", "statement"] == claims["P6"]["statement"]


def test_claim_table_without_any_result(tmp_path):
    table = helpers.claim_table(tmp_path)
    assert len(table) == len(helpers.load_claims())
    assert set(table["verdict"]) == {"not measured yet"}


@pytest.mark.parametrize("measured", ["0.90", "34.50", "1e3", "5"])
def test_claim_table_shows_the_words_of_the_answer(tmp_path, measured, capsys):
    results = tmp_path / "data" / "results"
    save_answers(results / "claims_02.csv", helpers.answer("T1", measured, "partly", "tiny"))
    found = helpers.claim_table(tmp_path).set_index("id").loc["T1"]
    assert (found["measured"], found["model"]) == (measured, "tiny")


# README ---------------------------------------------------------------------------------------

README = """# Title

<!-- verdicts -->
old
<!-- /verdicts -->
Between.
<!-- second -->
<!-- /second -->
<!-- notebooks -->
<!-- /notebooks -->
Last line.
"""


@pytest.fixture
def repository(tmp_path, capsys):
    """A small repository: one notebook with a figure, its runtime, one answer, a README."""
    results = tmp_path / "data" / "results"
    save_answers(results / "claims_02.csv", helpers.answer("T1", "0.90", "partly"))
    times = {"notebook": ["02_two_token_control"], "seconds": [12]}
    helpers.save_table(pd.DataFrame(times), results / "runtimes.csv", {})
    second = {"id": "P3-means", "model": "other", "measured": "5 of 8", "verdict": "partly"}
    helpers.save_table(pd.DataFrame([second]), results / "second_model.csv", {})
    for name in ("notebooks/02_two_token_control.ipynb", "figures/02_softmax_bound.svg"):
        path = tmp_path / name
        path.parent.mkdir()
        path.touch()
    (tmp_path / "README.md").write_text(README)
    return tmp_path


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_readme_takes_in_the_computed_tables(repository):
    helpers.update_readme(repository, helpers.readme_tables(repository))
    text = (repository / "README.md").read_text("utf-8")
    outside = [line for line in text.splitlines() if not line.startswith("|")]
    assert outside == [line for line in README.splitlines() if line != "old"]
    rows = {cells(line)[0]: cells(line) for line in text.splitlines() if line.startswith("|")}
    claims = helpers.load_claims()
    claim = claims["T1"]
    assert claims.keys() <= rows.keys()
    assert rows["T1"] == [
        *("T1", f"{claim['statement']}; *{claim['reading']}*", claim["paper"], "0.90", "**partly**")
    ]
    assert rows["P6"][-2:] == ["", "**not measured yet**"]
    assert rows["P3-means"] == ["P3-means", claims["P3-means"]["paper"], "5 of 8", "**partly**"]
    assert rows["[02_two_token_control](notebooks/02_two_token_control.ipynb)"] == [
        "[02_two_token_control](notebooks/02_two_token_control.ipynb)",
        "T1",
        "[1](figures/02_softmax_bound.svg)",
        "12",
    ]


def test_readme_updated_twice_is_the_same(repository):
    helpers.update_readme(repository, helpers.readme_tables(repository))
    once = (repository / "README.md").read_text("utf-8")
    helpers.update_readme(repository, helpers.readme_tables(repository))
    assert (repository / "README.md").read_text("utf-8") == once


@pytest.mark.parametrize("mark", ["<!-- second -->", "<!-- /second -->"])
def test_a_readme_without_a_mark(repository, mark, fault):
    path = repository / "README.md"
    path.write_text(README.replace(mark, ""))
    with fault.raises(ValueError, "README.md needs <!-- second --> and then <!-- /second -->"):
        helpers.update_readme(repository, helpers.readme_tables(repository))
