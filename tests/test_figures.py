"""Figures: three files each, whose numbers are the drawn ones."""

import xml.etree.ElementTree as ElementTree

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from numpy.testing import assert_allclose

import helpers

SIGMA = torch.rand(30, 8, generator=torch.Generator().manual_seed(0)).sort(descending=True).values
RANKS = torch.arange(12).reshape(3, 4) ** 2


@pytest.fixture(autouse=True)
def style():
    """The house style for one test."""
    with plt.rc_context():
        helpers.figure_style()
        yield
    plt.close("all")


def draw():
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3))
    curve = helpers.plot_cumulative(left, SIGMA, "heads")
    helpers.plot_head_map(right, RANKS, "r90")
    left.set_title("Share of variance")
    return figure, curve


def save(folder):
    figure, curve = draw()
    helpers.save_figure(figure, "09_test", curve, folder)
    return curve


def test_a_figure_is_two_pictures_and_its_numbers(tmp_path):
    curve = save(tmp_path)
    found = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert found == ["data/figures/09_test.csv", "figures/09_test.png", "figures/09_test.svg"]
    table = helpers.load_table(tmp_path / "data" / "figures" / "09_test.csv", figure="09_test")
    pd.testing.assert_frame_equal(table, curve, check_exact=False, rtol=1e-5)
    pixels = plt.imread(tmp_path / "figures" / "09_test.png")
    assert pixels.shape[1] > 1000
    assert pixels[..., :3].std() > 0.05
    drawing = ElementTree.parse(tmp_path / "figures" / "09_test.svg").getroot()
    assert len(list(drawing.iter("{http://www.w3.org/2000/svg}path"))) > 20


def test_a_figure_saved_twice_is_the_same_file(tmp_path):
    save(tmp_path / "one")
    save(tmp_path / "two")
    for kind in ("figures/09_test.svg", "figures/09_test.png", "data/figures/09_test.csv"):
        assert (tmp_path / "one" / kind).read_bytes() == (tmp_path / "two" / kind).read_bytes()


def test_a_figure_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    save(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    def half(figure, path, **_):
        path.write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(plt.Figure, "savefig", half)
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_cumulative_curves_return_what_they_draw():
    ax = plt.subplots()[1]
    table = helpers.plot_cumulative(ax, SIGMA, "heads", linestyle="--")
    squares = SIGMA.double().numpy() ** 2
    held = squares.cumsum(1) / squares.sum(1, keepdims=True)
    for column, percent in (("p5", 5), ("median", 50), ("p95", 95)):
        assert_allclose(table[column], np.percentile(held, percent, axis=0), rtol=1e-12)
    assert table["components"].tolist() == list(range(1, 9))
    assert set(table["curve"]) == {"heads"}
    [line], [band] = ax.lines, ax.collections
    assert (line.get_label(), line.get_linestyle()) == ("heads", "--")
    assert_allclose(line.get_xdata(), table["components"])
    assert_allclose(line.get_ydata(), table["median"])
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices}
    assert corners >= set(zip(table["components"], table["p5"], strict=True))
    assert corners >= set(zip(table["components"], table["p95"], strict=True))
    assert ax.get_xlabel()
    assert ax.get_ylabel()


def test_head_map_returns_what_it_draws():
    ax = plt.subplots()[1]
    table = helpers.plot_head_map(ax, RANKS, "r90", vmin=0, vmax=200)
    assert len(table) == 12
    assert all(RANKS[row.layer, row.head] == row.r90 for row in table.itertuples())
    [mesh] = ax.collections
    assert_allclose(np.asarray(mesh.get_array()).reshape(3, 4), RANKS)
    assert mesh.get_clim() == (0, 200)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("query head", "layer")
    [scale] = [other for other in ax.figure.axes if other is not ax]
    assert scale.get_ylabel() == "r90"
