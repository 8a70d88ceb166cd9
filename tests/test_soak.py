"""Runs of the workflow that are killed, starved and doubled, and readers that are fuzzed."""

import random
import subprocess
import sys
import time

import pandas as pd
import pytest

import helpers
from checks import killed, last_line, results_of, run, started, workflow

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, tiny_model, tokenizer):
    """A model for which a run is little but the starting of notebooks and the writing of results:
    more of the moments are those at which a file could be left half-written."""
    folder = tmp_path_factory.mktemp("tiny") / "tiny-model"
    model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=512, head_dim=16)
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    return {"models": folder}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, tiny):
    """The results of a run that ends, and its seconds."""
    folder, start = tmp_path_factory.mktemp("undisturbed"), time.monotonic()
    done = run(*workflow(folder, "results", **tiny), cwd=helpers.ROOT)
    assert done.returncode == 0, done.stderr
    return results_of(folder), time.monotonic() - start


def assert_done(process, folder, undisturbed):
    """A finished run's results are those of the undisturbed one, byte for byte."""
    assert process.returncode == 0, process.stderr
    assert results_of(folder) == undisturbed[0]


@pytest.mark.parametrize("number", range(20))
def test_a_run_killed_at_a_random_moment(tiny, undisturbed, tmp_path, number, fault):
    moment = random.Random(number).uniform(0, undisturbed[1])
    process = started(tmp_path, "results", **tiny)
    time.sleep(moment)
    if process.poll() is None:
        killed(process)
    for path in tmp_path.rglob("data/**/*.csv"):
        if ".part-" not in str(path):
            helpers.load_table(path)  # whole, or not there
    done = run(*workflow(tmp_path, "results", **tiny), cwd=helpers.ROOT)
    assert_done(done, tmp_path, undisturbed)
    fault.saw("(nothing: the next run goes on from there)", "what was finished, nothing half")


def test_two_runs_at_once(tiny, undisturbed, tmp_path, fault):
    other = started(tmp_path, "results", **tiny)
    while not (tmp_path / "build" / ".lock").exists():
        time.sleep(0.1)
    time.sleep(5)
    done = run(*workflow(tmp_path, "results", **tiny), cwd=helpers.ROOT)
    assert other.wait(60) == 0
    assert_done(done, tmp_path, undisturbed)
    waiting = f"Waiting for another run in {tmp_path / 'build'} to end ..."
    assert waiting in done.stderr.splitlines()
    fault.saw(waiting, "one set of results")


def test_two_runs_into_one_folder(tiny, undisturbed, tmp_path, fault):
    """With executed notebooks in folders of their own, so that neither waits for the other."""
    other = started(tmp_path, "results", **tiny)
    second = {**tiny, "build": f"{tmp_path}/build/second"}
    done = run(*workflow(tmp_path, "results", **second), cwd=helpers.ROOT)
    assert other.wait(600) == 0
    assert_done(done, tmp_path, undisturbed)
    fault.saw("(nothing: each result is renamed into place)", "one set of results")


def test_a_disk_that_fills_half_way(tiny, undisturbed, small_disk, fault):
    size = sum(map(len, undisturbed[0].values()))
    disk = small_disk("64m")
    filling = disk / "filling.up"
    filling.write_bytes(bytes(64 * 2**20 - size // 2 - 2**20))
    done = run(*workflow(disk, "results", **tiny), cwd=helpers.ROOT)
    assert done.returncode != 0
    message = last_line(done)
    assert "No space left on device" in message
    filling.unlink()
    finished = results_of(disk)
    assert 0 < len(finished) < len(undisturbed[0])
    assert finished.items() <= undisturbed[0].items()
    done = run(*workflow(disk, "results", **tiny), cwd=helpers.ROOT)
    assert_done(done, disk, undisturbed)
    fault.saw(message, "what was finished; the next run goes on from there")


@pytest.mark.parametrize("threads", ["1", "2"])
def test_runs_with_any_number_of_threads_agree(small_run, tmp_path, monkeypatch, threads):
    """Integers are the same, and so are the verdicts and the rounded numbers in them."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, threads)
    done = run(*workflow(tmp_path, "results"), cwd=helpers.ROOT)
    assert done.returncode == 0, done.stderr
    tables = [p for p in small_run[0].rglob("*.csv") if p.parent.name != "figures"]
    assert len(tables) > 15
    for path in tables:
        ours, theirs = (
            helpers.load_table(folder / path.relative_to(small_run[0]))
            for folder in (tmp_path, small_run[0])
        )
        floats = ours.select_dtypes("float").columns
        assert ours.drop(columns=floats).equals(theirs.drop(columns=floats)), path.name
        pd.testing.assert_frame_equal(ours[floats], theirs[floats], rtol=1e-3, atol=1e-6)


def test_fuzzed_readers(tmp_path, tiny_gguf):
    """For three minutes, from what each of them reads; no input takes a gigabyte more."""
    pytest.importorskip("atheris", reason="make soak installs it")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    helpers.save_table(pd.DataFrame({"x": [1, 2]}), tmp_path / "x.csv", {"model": "tiny"})
    seeds = [
        tiny_gguf.read_bytes()[:30_000],
        (tmp_path / "x.csv").read_bytes(),
        *(path.read_bytes() for path in (helpers.ROOT / "data").rglob("weight_heads.safetensors")),
        b'{"weight_map": {"a": "a.safetensors"}}',
        "naïve text".encode(),
    ]
    for number, seed in zip((0, 1, 2, 4, 5), seeds, strict=True):
        (corpus / str(number)).write_bytes(bytes([number]) + seed)
    options = ["-max_total_time=180", "-rss_limit_mb=3000", "-timeout=20", "-max_len=40000"]
    done = subprocess.run(
        [sys.executable, str(helpers.ROOT / "tests" / "fuzz.py"), *options, str(corpus)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stderr.rsplit("Done ", 1)[1].split()[0]) > 1000
