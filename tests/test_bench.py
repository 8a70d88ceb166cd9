"""The benchmark: its ways agree, its measures can fail, and the published run met its bounds."""

import pytest
import torch

import bench
import helpers

TABLE = helpers.load_table(helpers.ROOT / bench.RESULTS)


@pytest.mark.parametrize("way", [way for way in bench.WAYS if way != "FactoredMatrix"])
@pytest.mark.parametrize("key_heads", [bench.HEADS, 8])
def test_every_way_gives_the_same_singular_values(way, key_heads):
    left, right = bench.factors(tokens=40, head_dim=8, key_heads=key_heads)
    assert left.shape[:2].numel() == bench.HEADS
    found = bench.WAYS[way](left, right)
    expected = torch.linalg.svdvals(left.double() @ right.double().mT)[..., :8]
    tolerance = 1e-5 if way == "dense float32" else 1e-10
    assert ((found - expected).abs() <= tolerance * expected[..., :1]).all()


def test_the_published_run_is_exact_and_complete():
    sizes = bench.sizes(TABLE, "ms")
    assert sizes.index.tolist() == [
        (tokens, head_dim, key_heads)
        for tokens in (1024, 4096)
        for head_dim in (64, 128)
        for key_heads in (32, 8)
    ]
    assert not sizes.isna().any(axis=None)
    assert bench.long_contexts(TABLE, "ms").index.tolist() == [4096, 8192, 16384, 32768, 65536]
    measures = bench.measures(TABLE).set_index("measure")
    assert measures.loc[
        ["error of ours, in σ₁, largest", "heads where the r90 of ours is wrong"], "met"
    ].all()


@pytest.mark.parametrize(
    ("part", "method", "column", "factor", "measure"),
    [
        ("size", "ours", "ms", 10, "ours / floor, largest"),
        ("size", "ours", "ms", 10, "ours / floor at T = 4096, largest"),
        ("size", "dense float64", "ms", 0.1, "dense float64 / ours, T = 1024, d = 64"),
        ("size", "dense float64", "ms", 0.1, "dense float64 / ours, T = 4096, d = 64"),
        ("size", "FactoredMatrix", "ms", 0.1, "FactoredMatrix / ours, smallest"),
        ("size", "ours", "sigma_error", 1e6, "error of ours, in σ₁, largest"),
        (
            "model",
            "with every head analysed",
            "ms",
            1.5,
            "time that all heads of the default model add",
        ),
        ("growth", "direct", "ms", "tokens", "time a token, T = 65536 / 4096, direct"),
        ("growth", "accumulated", "ms", "tokens", "time a token, T = 65536 / 4096, accumulated"),
        ("growth", "accumulated", "memory_mb", "tokens", "memory at T = 65536"),
        ("model", "notebook 04", "memory_mb", 2, "notebook 04 at T = 8192"),
    ],
)
def test_every_measure_can_fail(part, method, column, factor, measure):
    worse = TABLE.copy()
    rows = (worse.part == part) & (worse.method == method)
    worse.loc[rows, column] *= worse.tokens[rows] if factor == "tokens" else factor
    table = bench.measures(worse)
    (found,) = table.measure.str.startswith(measure).to_numpy().nonzero()[0]
    assert not table.met[found]


def test_a_wrong_rank_is_counted():
    worse = TABLE.copy()
    worse.loc[(worse.part == "size") & (worse.method == "ours"), "wrong_r90"] = 1
    table = bench.measures(worse).set_index("measure")
    assert not table.met["heads where the r90 of ours is wrong"]
