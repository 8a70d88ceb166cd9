"""The benchmark: what it times and compares, its arithmetic, and the published run."""

import time

import pandas as pd
import pytest
import torch

import bench
import helpers

CASES = [(T, d, keys) for T in (1024, 4096) for d in (64, 128) for keys in (32, 8)]
CONTEXTS = [4096, 8192, 16384, 32768, 65536]


@pytest.mark.parametrize("way", [way for way in bench.WAYS if way != "FactoredMatrix"])
@pytest.mark.parametrize("key_heads", [bench.HEADS, 8])
def test_every_way_gives_the_same_singular_values(way, key_heads):
    left, right = bench.factors(tokens=40, head_dim=8, key_heads=key_heads)
    assert left.shape[:2].numel() == bench.HEADS
    found = bench.WAYS[way](left, right)
    expected = torch.linalg.svdvals(left.double() @ right.double().mT)[..., :8]
    tolerance = 1e-5 if way == "dense float32" else 1e-10
    assert ((found - expected).abs() <= tolerance * expected[..., :1]).all()


def test_the_factors_have_spectra_like_those_of_real_heads():
    left, right = bench.factors(tokens=1024, head_dim=64, key_heads=bench.HEADS)
    assert left.dtype == right.dtype == torch.float32
    ranks = helpers.threshold_rank(helpers.product_singular_values(left, right))
    assert ranks.median() == 13
    assert len(ranks.unique()) > 1  # heads differ


def test_milliseconds_are_milliseconds():
    assert 20 <= bench.milliseconds(time.sleep, 0.02) < 200


def test_the_rate_counts_two_operations_a_term(monkeypatch):
    monkeypatch.setattr(bench, "milliseconds", lambda function, a, b: len(a) / 256)
    assert bench.gemm_rate() == 2 * 1024**3 / 4


def test_a_comparison_counts_time_a_head_and_errors_in_the_largest_value(monkeypatch, capsys):
    def flattened(left, right):
        sigma = helpers.product_singular_values(left, right)
        return sigma + 0.5 * sigma[..., :1]

    ways = {"dense float64": bench.dense_float64, "ours": helpers.product_singular_values}
    monkeypatch.setattr(bench, "WAYS", {**ways, "flattened": flattened})
    monkeypatch.setattr(bench, "milliseconds", lambda *_: 64.0)
    monkeypatch.setattr(bench, "gemm_rate", lambda: 1000.0)
    table = bench.compare(tokens=40, head_dim=8, key_heads=8, checked=4).set_index("method")
    floor = 2 * 40 * 8**2 * (32 + 8) / 32 / 1000  # the keys' Gram matrices: one for four heads
    assert table.ms.to_dict() == {"dense float64": 64, "ours": 2, "flattened": 2, "floor": floor}
    assert table.sigma_error["ours"] < 1e-13
    assert table.sigma_error["flattened"] == pytest.approx(0.5)
    assert table.wrong_r90.dropna().to_dict() == {"dense float64": 0, "ours": 0, "flattened": 4}
    assert set(table.heads_checked) == {4}


def test_peak_memory_is_that_of_the_command_in_megabytes():
    printed, peak = bench.run("-c", "held = bytearray(200 * 2**20); print('hello')")
    assert printed == "hello"
    assert 200 < peak < 260


def test_growth_takes_medians_and_what_the_libraries_hold_off(monkeypatch, capsys):
    runs = []

    def run(path, name, tokens):
        runs.append((name, tokens))
        outlier = 1000 * (runs.count((name, tokens)) == 2)
        return str(tokens / 4096 + outlier), 400 + tokens / 1024 + outlier

    monkeypatch.setattr(bench, "run", run)
    table = bench.growth().set_index(["method", "tokens"])
    for method in ("direct", "accumulated"):
        assert table.ms[method].to_dict() == {tokens: tokens / 4096 for tokens in CONTEXTS}
        assert table.memory_mb[method].to_dict() == {tokens: tokens / 1024 for tokens in CONTEXTS}


def by_hand():
    """A run whose measures can be worked out on paper."""
    values = {
        "dense float64": [1000, 2000, 1, 1, 70000, 50000, 1, 1],
        "dense float32": [1] * 8,
        "FactoredMatrix": [50, 60, 70, 80, 90, 100, 40, 110],
        "QR": [1] * 8,
        "ours": [10] * 8,
        "floor": [1, 2, 4, 8, 2, 4, 8, 5],
    }
    rows = []
    for method, times in values.items():
        for index, (tokens, head_dim, key_heads) in enumerate(CASES):
            wrong = index in (2, 5) if method == "ours" else 9
            error = 3e-12 * index if method == "ours" else 1
            sizes = {"tokens": tokens, "head_dim": head_dim, "key_heads": key_heads}
            facts = {"part": "size", "method": method, **sizes, "ms": times[index]}
            rows.append({**facts, "sigma_error": error, "wrong_r90": int(wrong)})
    for tokens, twice, memory in zip(CONTEXTS, [1, 1, 1, 1, 2], [10, 9, 9, 9, 25], strict=True):
        growth = {"part": "growth", "tokens": tokens}
        rows.append({**growth, "method": "direct", "ms": tokens * twice, "memory_mb": 1})
        rows.append({**growth, "method": "accumulated", "ms": 4, "memory_mb": memory})
    short, long = {"part": "model", "tokens": 1024}, {"part": "model", "tokens": 8192}
    rows.append({**short, "method": "forward pass", "ms": 2000})
    rows.append({**short, "method": "with every head analysed", "ms": 2100})
    rows.append({**long, "method": "forward pass", "memory_mb": 2600})
    rows.append({**long, "method": "notebook 04", "memory_mb": 3000})
    return pd.DataFrame(rows)


def test_measures_worked_by_hand():
    found = bench.measures(by_hand())
    values = [10, 5, 100, 5000, 4, 2.1e-11, 2, 0.05, 2, 4096 / 65536, 15, 400]
    bounds = [3, 2, 400, 2500, 4, 1e-10, 0, 0.1, 1.25, 1.25, 10, 1000]
    met = [False, False, False, True, True, True, False, True, False, True, False, True]
    assert found.value.tolist() == pytest.approx(values)
    assert found.bound.tolist() == bounds
    assert found.met.tolist() == met
    assert found.sign.tolist() == list("≤≤≥≥≥≤≤≤≤≤≤≤")


def test_tables_for_the_readme():
    tables = bench.readme_tables(by_hand())
    times, measures = (tables[name].splitlines() for name in ("benchmark", "measures"))
    first = [cell.strip() for cell in times[2].strip("|").split("|")]
    assert first == ["1024", "64", "32", "1,000", "1", "50", "1", "10", "1"]
    assert len(times) == 2 + len(CASES)
    assert [line.split("|")[-2].strip() for line in measures[2:5]] == ["**no**"] * 3
    assert "5,000" in measures[5]
    assert measures[5].split("|")[-2].strip() == "yes"


def test_the_published_run_is_complete_and_exact():
    table = helpers.load_table(helpers.ROOT / bench.RESULTS)
    sizes = bench.sizes(table, "ms")
    assert sizes.index.tolist() == CASES
    assert not sizes.isna().any(axis=None)
    assert bench.long_contexts(table, "ms").index.tolist() == CONTEXTS
    measures = bench.measures(table).set_index("measure")
    assert measures.met["error of ours, in σ₁, largest"]
    assert measures.met["heads where the r90 of ours is wrong"]
