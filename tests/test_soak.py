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


def assert_done(process, folder, small_run):
    """A finished run's results are those of the undisturbed one, byte for byte."""
    assert process.returncode == 0, process.stderr
    assert results_of(folder) == results_of(small_run[0])


@pytest.mark.parametrize("number", range(20))
def test_a_run_killed_at_a_random_moment(tiny_workflow, small_run, tmp_path, number, fault):
    moment = random.Random(number).uniform(0, small_run[2])
    process = started(tmp_path, "results", **tiny_workflow)
    time.sleep(moment)
    if process.poll() is None:
        killed(process)
    for path in tmp_path.rglob("data/**/*.csv"):
        if ".part-" not in str(path):
            helpers.load_table(path)  # whole, or not there
    done = run(*workflow(tmp_path, "results", **tiny_workflow), cwd=helpers.ROOT)
    assert_done(done, tmp_path, small_run)
    fault.saw("(nothing: the next run goes on from there)", "what was finished, nothing half")


def test_two_runs_at_once(tiny_workflow, small_run, tmp_path, fault):
    other = started(tmp_path, "results", **tiny_workflow)
    while not (tmp_path / "build" / ".lock").exists():
        time.sleep(0.1)
    time.sleep(5)
    done = run(*workflow(tmp_path, "results", **tiny_workflow), cwd=helpers.ROOT)
    assert other.wait(60) == 0
    assert_done(done, tmp_path, small_run)
    waiting = f"Waiting for another run in {tmp_path / 'build'} to end ..."
    assert waiting in done.stderr.splitlines()
    fault.saw(waiting, "one set of results")


def test_two_runs_into_one_folder(tiny_workflow, small_run, tmp_path, fault):
    """With executed notebooks in folders of their own, so that neither waits for the other."""
    other = started(tmp_path, "results", **tiny_workflow)
    second = {**tiny_workflow, "build": f"{tmp_path}/build/second"}
    done = run(*workflow(tmp_path, "results", **second), cwd=helpers.ROOT)
    assert other.wait(600) == 0
    assert_done(done, tmp_path, small_run)
    fault.saw("(nothing: each result is renamed into place)", "one set of results")


def test_a_disk_that_fills_half_way(tiny_workflow, small_run, small_disk, fault):
    whole = results_of(small_run[0])
    size = sum(map(len, whole.values()))
    disk = small_disk("64m")
    filling = disk / "filling.up"
    filling.write_bytes(bytes(64 * 2**20 - size // 2 - 2**20))
    done = run(*workflow(disk, "results", **tiny_workflow), cwd=helpers.ROOT)
    assert done.returncode != 0
    message = last_line(done)
    assert "No space left on device" in message
    filling.unlink()
    finished = results_of(disk)
    assert 0 < len(finished) < len(whole)
    assert finished.items() <= whole.items()
    done = run(*workflow(disk, "results", **tiny_workflow), cwd=helpers.ROOT)
    assert_done(done, disk, small_run)
    fault.saw(message, "what was finished; the next run goes on from there")


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The results of the small run on the default model, with a thread for each core."""
    folder = tmp_path_factory.mktemp("first")
    done = run(*workflow(folder, "results"), cwd=helpers.ROOT)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("threads", ["1", "2"])
def test_runs_with_any_number_of_threads_agree(first, tmp_path, monkeypatch, threads):
    """Integers are the same, and so are the verdicts and the rounded numbers in them."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, threads)
    done = run(*workflow(tmp_path, "results"), cwd=helpers.ROOT)
    assert done.returncode == 0, done.stderr
    tables = [path for path in first.rglob("*.csv") if path.parent.name != "figures"]
    assert len(tables) > 15
    for path in tables:
        ours, theirs = (
            helpers.load_table(folder / path.relative_to(first)) for folder in (tmp_path, first)
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
