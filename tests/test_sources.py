"""Sources: names, archives by pip, local texts, Project Gutenberg, token windows.

pip is the real one, offline, with a local folder for an index.
"""

import concurrent.futures
import contextlib
import io
import itertools
import os
import re
import subprocess
import sys
import tarfile
import threading
import time
import zipfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import helpers
from checks import assert_same_model, files_in, serving, sha256, truncate

# Archives of a package index ------------------------------------------------------------------

POEM = (
    b"Preface\r\n THE POEM \r\nA line\xc3\xa9.\rLast line.\r\n"
    b"*End of the poem, by hand\r\nFooter\r\n"
)
VERSES = b'{"text": "In the beginning"}\n{"text": "And the earth"}\n'

# pip asks a source archive for its metadata: with a build backend of its own it needs no index.
BACKEND = b"""
import pathlib

def prepare_metadata_for_build_wheel(folder, settings=None):
    info = pathlib.Path(folder, "sample-1.0.dist-info")
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\\nName: sample\\nVersion: 1.0\\n")
    return info.name
"""
PROJECT = b'[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
METADATA = b"Metadata-Version: 2.1\nName: sample\nVersion: 1.0\n"


def source_archive(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"sample-1.0/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def wheel(path, files, name="sample"):
    about = {
        "METADATA": METADATA.replace(b"sample", name.encode()),
        "WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-any\n",
        "RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for part, content in files.items():
            archive.writestr(part, content)
        for part, content in about.items():
            archive.writestr(f"{name}-1.0.dist-info/{part}", content)


@pytest.fixture
def sources(tmp_path, monkeypatch, cache, tiny_gguf):
    """sources.toml with a text, verses and a model, in archives of a local index; empty cache."""
    index = tmp_path / "index"
    index.mkdir()
    code = {"pyproject.toml": PROJECT, "backend.py": BACKEND, "PKG-INFO": METADATA}
    source_archive(index / "sample-1.0.tar.gz", {**code, "poem.txt": POEM, "verses.jsonl": VERSES})
    wheel(index / "sample-1.0-py3-none-any.whl", {"sample/tiny.gguf": tiny_gguf.read_bytes()})

    def source(archive, member, content, **more):
        return {
            "origin": "a test",
            "package": "sample==1.0",
            "archive": archive,
            "archive_sha256": sha256((index / archive).read_bytes()),
            "member": member,
            "sha256": sha256(content),
            **more,
        }

    def cut_up(content, cuts):
        """A file in one wheel for each piece between the cuts."""
        parts = []
        for number, (start, end) in enumerate(itertools.pairwise([0, *cuts, len(content)]), 1):
            archive = f"sample{number}-1.0-py3-none-any.whl"
            wheel(index / archive, {"sample/part": content[start:end]}, f"sample{number}")
            part = source(archive, "sample/part", b"")
            keys = ("archive", "archive_sha256", "member")
            parts.append({"package": f"sample{number}==1.0", **{key: part[key] for key in keys}})
        return {"origin": "a test", "sha256": sha256(content), "parts": parts}

    texts, models = "sample-1.0.tar.gz", "sample-1.0-py3-none-any.whl"
    cut = {"first_line": "THE POEM", "end_marker": "*End of the poem"}
    made = {
        "texts": {
            "poem": source(texts, "sample-1.0/poem.txt", POEM, **cut),
            "whole-poem": source(texts, "sample-1.0/poem.txt", POEM),
            "verses": source(texts, "sample-1.0/verses.jsonl", VERSES),
        },
        "models": {
            "tiny": source(models, "sample/tiny.gguf", tiny_gguf.read_bytes()),
            "tiny-cut-up": cut_up(tiny_gguf.read_bytes(), [7, 20_000]),
        },
    }
    monkeypatch.setattr(helpers, "_sources", made.get)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return made


@pytest.fixture
def cached(sources, cache, tmp_path, monkeypatch):
    """The same with both archives in the cache, and no index any more: offline."""
    cache.mkdir()
    (tmp_path / "index").rename(cache / "archives")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    return sources


TEXT_ARCHIVE, MODEL_ARCHIVE = "sample-1.0.tar.gz", "sample-1.0-py3-none-any.whl"


def test_a_text_is_fetched_once_and_then_works_offline(sources, cache, monkeypatch):
    text = helpers.load_text("poem")
    assert text.text == " THE POEM \nA lineé.\nLast line."
    assert files_in(cache) == [f"archives/{TEXT_ARCHIVE}"]
    monkeypatch.setenv("PIP_FIND_LINKS", os.devnull)
    assert helpers.load_text("poem") == text


def test_texts_of_an_archive(cached):
    whole = helpers.load_text("whole-poem")
    assert whole.text.startswith("Preface\n THE POEM \n")
    assert whole.text.endswith("Footer\n")
    assert helpers.load_text("verses").text == "In the beginning\nAnd the earth"
    expected = {"text": "whole-poem", "text_origin": "a test"}
    assert whole.provenance == {**expected, "text_sha256": sha256(whole.text.encode())}


def test_a_fetched_archive_with_another_checksum(sources, cache, fault):
    sources["texts"]["poem"]["archive_sha256"] = "0" * 64
    with fault.raises(RuntimeError, r"cannot fetch sample==1.0 .*HASHES", keeps=cache):
        helpers.load_text("poem")


def test_no_network_and_nothing_cached(sources, cache, monkeypatch, fault):
    monkeypatch.setenv("PIP_FIND_LINKS", os.devnull)
    with fault.raises(RuntimeError, r"cannot fetch sample==1.0 .*check the network", keeps=cache):
        helpers.load_text("poem")
    assert TEXT_ARCHIVE in fault.message


DAMAGE = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[:-100],
    "one bit": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "another file": lambda content: b"<html>Sign in</html>",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("archive", [TEXT_ARCHIVE, MODEL_ARCHIVE])
def test_a_damaged_archive_in_the_cache(cached, cache, archive, damage, fault):
    path = cache / "archives" / archive
    path.write_bytes(damage(path.read_bytes()))
    load, name = {
        TEXT_ARCHIVE: (helpers.load_text, "poem"),
        MODEL_ARCHIVE: (helpers.load_model, "tiny"),
    }[archive]
    with fault.raises(RuntimeError, r"corrupt: sha256 .* delete it and run again", keeps=cache):
        load(name)
    assert str(path) in fault.message


@pytest.mark.parametrize(("kind", "name"), [("texts", "poem"), ("models", "tiny")])
def test_a_member_with_another_checksum(cached, cache, kind, name, fault):
    cached[kind][name]["sha256"] = "0" * 64
    load = {"texts": helpers.load_text, "models": helpers.load_model}[kind]
    with fault.raises(RuntimeError, r"has sha256 .*, expected 000000000000", keeps=cache):
        load(name)
    assert cached[kind][name]["member"] in fault.message


def test_a_model_from_an_archive_is_converted_once(
    sources, cache, tiny_llama, tokenizer, monkeypatch
):
    first = helpers.load_model("tiny")
    assert_same_model(first, tiny_llama, tokenizer)
    assert first.name == "tiny"
    origin = {"model_origin": "a test", "model_sha256": sources["models"]["tiny"]["sha256"]}
    assert first.provenance == {"model": "tiny", **origin, "left_out": ["causal mask"]}
    (cache / "archives" / MODEL_ARCHIVE).unlink()
    monkeypatch.setenv("PIP_FIND_LINKS", os.devnull)
    assert_same_model(helpers.load_model("tiny"), tiny_llama, tokenizer)
    assert {file.split("/")[1] for file in files_in(cache)} == {"tiny"}
    assert sorted(p.name for p in cache.iterdir()) == ["archives", "models"]


@pytest.fixture
def python(tmp_path, monkeypatch):
    """python(script): sys.executable is a shell script; None: a Python without pip."""

    def replaced(script):
        path = tmp_path / "python"
        if script is None:
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", path], check=True)
            path = path / "bin" / "python"
        else:
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return replaced


HALF_AN_ARCHIVE = f"for last; do :; done; echo half > $last/{TEXT_ARCHIVE}; "
PIP = {
    "missing": (None, "No module named pip"),
    "killed half-way": (HALF_AN_ARCHIVE + "kill -9 $$", "pip was ended by SIGKILL"),
    "stopped half-way": (HALF_AN_ARCHIVE + "exit 3", "pip ended with code 3"),
    "content with what it has": (HALF_AN_ARCHIVE, "cannot fetch .*sha256 .*, expected"),
    "content with nothing": ("true", "pip ended with code 0"),
}


@pytest.mark.parametrize(("script", "message"), PIP.values(), ids=PIP)
def test_a_pip_that_is(sources, cache, python, script, message, fault):
    python(script)
    with fault.raises(RuntimeError, message, keeps=cache):
        helpers.load_text("poem")


@pytest.fixture
def index(sources, tmp_path, monkeypatch):
    """index(answer): pip asks a server on this machine, where answer(request) gives a file."""
    link = f'<a href="{TEXT_ARCHIVE}">{TEXT_ARCHIVE}</a>'.encode()
    content = (tmp_path / "index" / TEXT_ARCHIVE).read_bytes()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    for name, value in {"TIMEOUT": "0.5", "RETRIES": "0", "NO_CACHE_DIR": "1"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)

    @contextlib.contextmanager
    def answering(answer):
        def answered(request):
            is_page = request.path.endswith("/")
            request.send_response(200)
            request.send_header("Content-Type", "text/html" if is_page else "application/gzip")
            body = link if is_page else content
            request.send_header("Content-Length", str(len(body)))
            request.end_headers()
            if is_page:
                request.wfile.write(body)
            else:
                answer(request.wfile, body)

        with serving(answered) as address:
            monkeypatch.setenv("PIP_INDEX_URL", f"{address}/simple")
            yield

    return answering


def drop_by_drop(file, body):
    for start in range(0, len(body), 50):
        file.write(body[start : start + 50])
        file.flush()
        time.sleep(0.02)


def half_and_then_nothing(file, body):
    file.write(body[: len(body) // 2])
    file.flush()
    time.sleep(1.5)


CONNECTIONS = {
    "stops half-way": half_and_then_nothing,
    "breaks half-way": lambda file, body: file.write(body[: len(body) // 2]),
    "gives other bytes": lambda file, body: file.write(body[::-1]),
}


@pytest.mark.parametrize("answer", CONNECTIONS.values(), ids=CONNECTIONS)
def test_a_download_that(index, cache, answer, fault):
    with (
        index(answer),
        fault.raises(RuntimeError, "cannot fetch sample==1.0 .*check the network", keeps=cache),
    ):
        helpers.load_text("poem")


def test_a_slow_download_is_waited_for(index, cache):
    with index(drop_by_drop):
        assert helpers.load_text("whole-poem").text.startswith("Preface")


def test_a_package_without_the_file_that_it_should_have(cached, cache, fault):
    cached["texts"]["poem"]["member"] = "sample-1.0/prose.txt"
    with fault.raises(RuntimeError, "has no file sample-1.0/prose.txt", keeps=cache):
        helpers.load_text("poem")


LINKS = {"a link": tarfile.SYMTYPE, "a folder": tarfile.DIRTYPE, "a device": tarfile.CHRTYPE}


@pytest.mark.parametrize("kind", LINKS.values(), ids=LINKS)
def test_a_member_of_an_archive_that_is(cached, cache, kind, fault):
    """A link is followed inside its archive only."""
    archive = cache / "archives" / TEXT_ARCHIVE
    member = tarfile.TarInfo("../../poem.txt")
    member.type, member.linkname = kind, "/etc/passwd"
    with tarfile.open(archive, "w:gz") as made:
        made.addfile(member)
    cached["texts"]["poem"] |= {
        "member": member.name,
        "archive_sha256": sha256(archive.read_bytes()),
    }
    with fault.raises(RuntimeError, "has no file", keeps=cache.parent):
        helpers.load_text("poem")


def test_a_member_that_climbs_out_is_read_and_not_unpacked(cached, cache):
    archive = cache / "archives" / TEXT_ARCHIVE
    source_archive(archive, {"../../../poem.txt": POEM})
    cached["texts"]["poem"] |= {
        "member": "sample-1.0/../../../poem.txt",
        "archive_sha256": sha256(archive.read_bytes()),
    }
    before = files_in(cache.parent)
    assert "A line" in helpers.load_text("poem").text
    assert files_in(cache.parent) == before


@pytest.mark.parametrize("load", ["a text", "a model"])
def test_two_runs_that_fetch_at_once(sources, cache, load, monkeypatch, tiny_llama, fault):
    """Both get it, whoever is first, and what was begun is not in the other's way."""
    task = {
        "a text": lambda: helpers.load_text("poem").text,
        "a model": lambda: helpers.load_checkpoint("tiny").provenance,
    }[load]
    meet = threading.Barrier(2)
    replace = os.rename if load == "a model" else os.replace

    def together(*paths):
        if "archives" in str(paths[0]) or load == "a model":
            meet.wait(60)
        replace(*paths)

    monkeypatch.setattr(os, replace.__name__, together)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: task(), range(2)))
    assert found[0] == found[1]
    assert not list(cache.rglob(".part-*"))
    fault.saw("(nothing: both runs have it)", "one file, whole")


# The cache folder -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["64k", "1m"])
def test_a_cache_on_a_disk_of(sources, small_disk, monkeypatch, size, fault):
    """At 64 KiB there is room for the archive, and not for the model in it."""
    disk = small_disk(size)
    monkeypatch.setattr(helpers, "CACHE", disk / "cache")
    (disk / "filled").write_bytes(bytes(2**10 * (1000 if size == "1m" else 0)))
    message = "cannot write into|cannot fetch|cannot convert"
    with fault.raises((OSError, RuntimeError), message, keeps=disk / "cache" / "models"):
        helpers.load_model("tiny")
    assert "space" in fault.message


def test_a_cache_that_cannot_be_written(sources, small_disk, monkeypatch, fault):
    disk = small_disk("1m", "ro")
    monkeypatch.setattr(helpers, "CACHE", disk / "cache")
    with fault.raises(OSError, "cannot write into .*Read-only file system", keeps=disk):
        helpers.load_text("poem")


def test_a_full_cache_that_cannot_be_written_is_read(sources, small_disk, monkeypatch):
    disk = small_disk("8m")
    monkeypatch.setattr(helpers, "CACHE", disk / "cache")
    text, model = helpers.load_text("poem"), helpers.load_model("tiny").provenance
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert helpers.load_text("poem") == text
    assert helpers.load_model("tiny").provenance == model


def test_a_file_in_the_place_of_the_cache(sources, cache, fault):
    cache.write_text("")
    with fault.raises(OSError, "cannot write into", keeps=cache.parent):
        helpers.load_text("poem")


def test_a_cache_of_another_layout(sources, cache, fault):
    (cache / "archives" / TEXT_ARCHIVE / "unpacked").mkdir(parents=True)
    with fault.raises(RuntimeError, "cannot read .*: delete it and run again", keeps=cache):
        helpers.load_text("poem")


HOLD = """
import sys, time, pathlib, helpers
with helpers._scratch(pathlib.Path(sys.argv[1])) as folder:
    (folder / "half").write_text("half")
    print("ready", flush=True)
    time.sleep(600)
"""


def test_what_a_killed_run_left(cache, tmp_path, fault):
    """It is removed by the next that writes there; what a living run writes is not."""
    runs = [
        subprocess.Popen([sys.executable, "-c", HOLD, str(cache)], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        for run in runs:
            assert run.stdout.readline() == b"ready\n"
        assert len(list(cache.glob(".part-*/half"))) == 2
        runs[0].kill()
        runs[0].wait()
        helpers._write(cache / "whole", lambda part: part.write_text("whole"))
        assert len(list(cache.glob(".part-*/half"))) == 1
    finally:
        for run in runs:
            run.kill()
            run.communicate()
    helpers._write(cache / "whole", lambda part: part.write_text("whole"))
    assert files_in(cache) == ["whole"]
    fault.saw("(nothing: the next run removes it)", "what a living run is writing")


def test_a_file_cut_into_several_packages_is_joined_in_order(
    sources, cache, tiny_llama, tokenizer, monkeypatch
):
    whole = sources["models"]["tiny-cut-up"]
    loaded = helpers.load_model("tiny-cut-up")
    assert_same_model(loaded, tiny_llama, tokenizer)
    assert loaded.provenance["model_sha256"] == whole["sha256"]
    archives = sorted(path.name for path in (cache / "archives").iterdir())
    assert archives == [part["archive"] for part in whole["parts"]]
    assert len(archives) == 3


def in_another_order(parts, archives):
    parts.reverse()


def without_a_part(parts, archives):
    parts.pop()


def with_a_part_of_other_bytes(parts, archives):
    """As it was published anew, and with the new checksum: only the whole tells."""
    archive = archives / parts[1]["archive"]
    wheel(archive, {"sample/part": b"other"}, "sample2")
    parts[1]["archive_sha256"] = sha256(archive.read_bytes())


def with_a_damaged_part(parts, archives):
    truncate(archives / parts[1]["archive"])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (in_another_order, "has sha256 .*, expected"),
        (without_a_part, "has sha256 .*, expected"),
        (with_a_part_of_other_bytes, "has sha256 .*, expected"),
        (with_a_damaged_part, r"sample2-1.0-py3-none-any.whl is corrupt: .* delete it"),
    ],
)
def test_a_file_that_is_not_joined_to_itself(cached, cache, damage, message, fault):
    damage(cached["models"]["tiny-cut-up"]["parts"], cache / "archives")
    with fault.raises(RuntimeError, message, keeps=cache):
        helpers.load_model("tiny-cut-up")


def test_every_source_of_a_model_says_all_that_it_needs():
    said = {"title", "origin", "licence", "sha256"}
    where = {"package", "archive", "archive_sha256", "member"}
    models = helpers._sources("models")
    assert {"smollm2-135m", "gemma-3-270m"} <= models.keys()
    for name, source in models.items():
        parts = source.get("parts", [source])
        assert source.keys() == said | ({"parts"} if "parts" in source else where), name
        for part in parts:
            assert source is part or part.keys() == where
            package, version = part["package"].split("==")
            stem = f"{package.replace('-', '_')}-{version}"
            assert part["archive"] == f"{stem}-py3-none-any.whl"
            assert part["member"].startswith(f"{package.replace('-', '_')}/")
        digests = [source["sha256"], *(part["archive_sha256"] for part in parts)]
        assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)
        assert len(set(digests)) == len({part["member"] for part in parts}) + 1


# Names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "name", "near"),
    [
        (helpers.load_text, "alcie", "alice"),
        (helpers.load_text, "paradise_lost", "paradise-lost"),
        (helpers.load_text, "Kingjames", "king-james"),
        (helpers.load_model, "smollm2-135", "smollm2-135m"),
        (helpers.load_model, "SmolLM2-135M", "smollm2-135m"),
    ],
)
def test_an_unknown_name(load, name, near, fault):
    with fault.raises(ValueError, f"unknown .*'{name}': did you mean '{near}'"):
        load(name)


@pytest.mark.parametrize(
    ("load", "name", "message"),
    [
        (helpers.load_text, "zzz", "unknown text 'zzz': known: alice, as-you-like-it"),
        (helpers.load_text, "missing.txt", "text file 'missing.txt' not found from"),
        (helpers.load_text, "no/where", "text file 'no/where' not found from"),
        (helpers.load_text, "gutenberg:", "unknown text|not found"),
        (helpers.load_text, "gutenberg:1/2", "not found"),
        (helpers.load_model, "zzz", "unknown model 'zzz': known: smollm2-135m"),
        (helpers.load_model, "missing.gguf", "model 'missing.gguf' not found from"),
        (helpers.load_model, "./missing", "model './missing' not found from"),
        (helpers.load_model, "/no/where", "model '/no/where' not found from"),
        (helpers.load_model, "a/b/c", "unknown model 'a/b/c'"),
        (helpers.load_model, "zzz.bin", "unknown model 'zzz.bin'"),
    ],
)
def test_a_name_that_leads_nowhere(load, name, message, tmp_path, monkeypatch, fault):
    monkeypatch.chdir(tmp_path)
    with fault.raises(ValueError, message):
        load(name)


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("alice", "alice"),
        ("gutenberg:11", "gutenberg-11"),
        ("openai-community/gpt2", "openai-community--gpt2"),
        ("openai-community/gpt2@v1.0", "openai-community--gpt2-v1.0"),
        ("there/my text.v2.txt", "my-text-v2-txt"),
        ("there/my model v1.5.gguf", "my-model-v1-5"),
        ("there", "there"),
        ("there/", "there"),
        ("there/..", "here"),
        ("there/---", "unnamed"),
    ],
)
def test_results_are_kept_under_a_safe_name(name, safe, tmp_path, monkeypatch):
    there = tmp_path / "here" / "there"
    there.mkdir(parents=True)
    for file in ("my text.v2.txt", "my model v1.5.gguf", "---"):
        (there / file).touch()
    monkeypatch.chdir(there.parent)
    assert helpers.results_name(name) == safe


@pytest.mark.parametrize(
    ("value", "items"),
    [
        (["alice", "king-james"], ["alice", "king-james"]),
        ("alice", ["alice"]),
        ('["my.txt", "alice"]', ["my.txt", "alice"]),
        ("[8, 16]", [8, 16]),
    ],
)
def test_a_list_parameter_in_either_form(value, items):
    assert helpers.as_list("texts", value) == items


@pytest.mark.parametrize("value", [[], "[]", "[8, 16", 5, None, [8, 16, 8]], ids=repr)
def test_a_list_parameter(value, fault):
    with fault.raises(ValueError, "texts must be (a list that is not empty|different), found"):
        helpers.as_list("texts", value)


# Local texts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"a\nb\n", "a\nb\n"),
        (b"a\r\nb\r\n", "a\nb\n"),
        (b"a\rb\r", "a\nb\n"),
        (b"a\r\r\nb", "a\n\nb"),
        (b"\xef\xbb\xbfa\n", "a\n"),
        ("naïve – 文\n".encode(), "naïve – 文\n"),
        (b"  a", "  a"),
    ],
)
def test_a_local_text_is_normalised(tmp_path, content, text):
    path = tmp_path / "my text.v2.txt"
    path.write_bytes(content)
    loaded = helpers.load_text(str(path))
    assert (loaded.name, loaded.text) == ("my-text-v2-txt", text)
    expected = {"text": "my-text-v2-txt", "text_origin": "local file"}
    assert loaded.provenance == {**expected, "text_sha256": sha256(text.encode())}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \r\n\t\n", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"caf\xe9\n", r"is not UTF-8 \(byte 0xe9 at 3\)"),
        (bytes(range(256)), r"is not UTF-8 \(byte 0x80 at 128\)"),
        ("wide".encode("utf-16"), r"is not UTF-8 \(byte 0xff at 0\)"),
    ],
    ids=["zero-length", "blanks", "a mark of UTF-8", "Latin-1", "binary", "UTF-16"],
)
def test_a_text_that_is_none(tmp_path, content, message, fault):
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with fault.raises(ValueError, message):
        helpers.load_text(str(path))
    assert str(path) in fault.message


def test_a_text_that_is_too_large(tmp_path, monkeypatch, fault):
    monkeypatch.setattr(helpers, "TEXT_LIMIT", 10**6)
    (tmp_path / "large.txt").write_bytes(b"a" * (10**6 + 1))
    with fault.raises(ValueError, "is above 1 MB: cut it"):
        helpers.load_text(str(tmp_path / "large.txt"))


def test_a_line_of_100_megabytes_is_a_text(tmp_path, source):
    line = b"the cat sat on the mat; " * (10**8 // 24)
    (tmp_path / "line.txt").write_bytes(line)
    text = helpers.load_text(str(tmp_path / "line.txt"))
    assert len(text.text) == len(line)
    window = helpers.token_window(source, text, 40)
    assert torch.equal(window, helpers.token_window(source, text_of(text.text[:9000]), 40))


NAMES = {
    "a number": 5,
    "nothing": None,
    "a list": ["alice"],
    "a zero byte": "a\0b",
    "5,000 letters": "a" * 5000,
    "a folder": "/",
    "a path upwards": "../../../etc",
    "an unknown name in another script": "алиса",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("load", [helpers.load_text, helpers.load_model])
def test_a_name_that_is(load, name, tmp_path, monkeypatch, fault):
    monkeypatch.chdir(tmp_path)
    with fault.raises((ValueError, RuntimeError), "unknown|not found|must be a string|needs conf"):
        load(name)


@pytest.mark.parametrize("name", ["my text", "my/text", "märchen", "文", "a.b.c", "-p", "%s{}$(x)"])
def test_a_text_of_any_name_is_kept_under_a_safe_one(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("words")
    kept = helpers.load_text(name).name
    assert re.fullmatch(r"[\w-]+", kept)


def test_two_texts_whose_results_would_have_one_name(tmp_path, monkeypatch, fault):
    monkeypatch.chdir(tmp_path)
    names = ["a b.txt", "a.b.txt"]
    for name in names:
        (tmp_path / name).write_text(name)
    with fault.raises(ValueError, "'a b.txt' and 'a.b.txt' would both be named 'a-b-txt': rename"):
        helpers.named_results("texts", ["alice", *names])
    assert helpers.named_results("texts", ["alice", names[0]]) == ["alice", "a-b-txt"]


@given(st.text(max_size=40))
def test_any_name_is_kept_in_one_folder(name):
    kept = helpers.results_name(name)
    assert "/" not in kept
    assert kept not in ("..", ".") or name == kept


# Project Gutenberg ----------------------------------------------------------------------------

BOOK = (
    "\ufeffThe Project Gutenberg eBook of Small\r\n\r\n"
    "*** START OF THE PROJECT GUTENBERG EBOOK SMALL ***\r\n\r\n\r\n"
    "  CHAPTER I\r\n\r\nA small booké.\r\n\r\n"
    "*** END OF THE PROJECT GUTENBERG EBOOK SMALL ***\r\n\r\nUpdated editions\r\n"
)


@pytest.fixture
def gutenberg(cache, monkeypatch):
    """A server on this machine: `books` are what it has, `asked` the numbers it was asked for."""
    books, asked = {}, []

    def answer(request):
        number = int(request.path.split("/")[-1].removeprefix("pg").removesuffix(".txt"))
        asked.append(number)
        body = books.get(number)
        request.send_response(404 if body is None else 200)
        body = body or b"not found"
        cut = number == 500  # a connection that breaks: fewer bytes than were announced
        request.send_header("Content-Length", str(len(body) + (100 if cut else 0)))
        request.end_headers()
        request.wfile.write(body)

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving(answer) as address:
        monkeypatch.setattr(helpers, "GUTENBERG", address + "/cache/epub/{id}/pg{id}.txt")
        yield books, asked


def test_a_gutenberg_book_loses_header_and_footer(gutenberg):
    gutenberg[0][7] = BOOK.encode()
    book = helpers.load_text("gutenberg:7")
    assert book.text == "CHAPTER I\n\nA small booké.\n"
    assert book.name == book.provenance["text"] == "gutenberg-7"
    assert book.provenance["text_origin"] == "Project Gutenberg #7"
    assert book.provenance["text_sha256"] == sha256(book.text.encode())


@pytest.mark.parametrize(
    "mark",
    [
        "*** {} OF THE PROJECT GUTENBERG EBOOK SMALL ***",
        "*** {} OF THIS PROJECT GUTENBERG EBOOK SMALL ***",
        "***{} OF THE PROJECT GUTENBERG EBOOK SMALL***",
        "*** {} of the Project Gutenberg eBook Small ***",
    ],
)
@pytest.mark.parametrize("case", [str.upper, str.title])
def test_gutenberg_marks_of_every_age(gutenberg, mark, case):
    start, end = (mark.format(case(word)) for word in ("start", "end"))
    gutenberg[0][7] = f"Header\n{start}\nA book.\n{end}\nFooter\n".encode()
    assert helpers.load_text("gutenberg:7").text == "A book.\n"


def test_a_gutenberg_book_is_fetched_once_and_then_works_offline(gutenberg, cache, monkeypatch):
    books, asked = gutenberg
    books[7], books[71] = BOOK.encode(), BOOK.replace("small", "another").encode()
    helpers.load_text("gutenberg:71")
    first = helpers.load_text("gutenberg:7")
    monkeypatch.setattr(helpers, "GUTENBERG", "http://127.0.0.1:9/{id}")
    assert helpers.load_text("gutenberg:7") == first
    assert asked == [71, 7]
    assert len(files_in(cache)) == 2


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_book_in_the_cache(gutenberg, cache, damage, fault):
    gutenberg[0][7] = BOOK.encode()
    helpers.load_text("gutenberg:7")
    [path] = (cache / "gutenberg").iterdir()
    path.write_bytes(damage(path.read_bytes()))
    with fault.raises(RuntimeError, "is corrupt: delete it and run again", keeps=cache):
        helpers.load_text("gutenberg:7")
    assert str(path) in fault.message


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (404, "cannot fetch Project Gutenberg #404 from http.*404"),
        (500, "cannot fetch Project Gutenberg #500"),
        (8, "#8 has no START and END lines"),
        (9, "#9 has no START and END lines"),
    ],
)
def test_a_gutenberg_book_that_is_none(gutenberg, cache, number, message, fault):
    gutenberg[0][500] = BOOK.encode()
    gutenberg[0][8] = b"<html>not a book</html>"
    gutenberg[0][9] = BOOK.split("*** END")[0].encode()
    with fault.raises(RuntimeError, message, keeps=cache):
        helpers.load_text(f"gutenberg:{number}")


def test_a_gutenberg_book_without_the_network(cache, monkeypatch, fault):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(helpers, "GUTENBERG", "http://127.0.0.1:9/{id}")
    with fault.raises(
        RuntimeError, r"cannot fetch Project Gutenberg #7 .*the network", keeps=cache
    ):
        helpers.load_text("gutenberg:7")


# Windows of tokens ----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def source(tiny_llama, tokenizer):
    return helpers.LoadedModel("tiny", tiny_llama, tokenizer, {})


def text_of(words):
    return helpers.LoadedText("words", words, {})


def all_tokens(tokenizer, words):
    return tokenizer(words, add_special_tokens=False)["input_ids"]


LONG = "the cat sat on the mat; the rat -- naïve == ate\n\n\nthe hat   and 17 more.  " * 200


@pytest.mark.parametrize(("context", "offset"), [(1, 0), (5, 0), (64, 0), (64, 200), (10, 3000)])
def test_a_window_is_cut_from_the_tokens_of_the_whole_text(source, context, offset):
    window = helpers.token_window(source, text_of(LONG), context, offset)
    whole = all_tokens(source.tokenizer, LONG)
    assert len(whole) > 4000
    assert window.dtype == torch.int64
    assert window.tolist() == whole[offset : offset + context]


def test_a_window_is_not_cut_where_a_prefix_of_the_text_ends(source):
    """A token of 20 letters is several tokens when the prefix stops inside it."""
    words = "incompressibilities " * 300
    whole = all_tokens(source.tokenizer, words)
    for context in range(1, 40):
        window = helpers.token_window(source, text_of(words), context, 0)
        assert window.tolist() == whole[:context]


def test_a_window_starts_at_token_200_by_default(source):
    window = helpers.token_window(source, text_of(LONG), 10)
    assert window.tolist() == all_tokens(source.tokenizer, LONG)[200:210]


@given(st.text(" ab\n-=é文the", min_size=50, max_size=600), st.integers(1, 20), st.integers(0, 20))
def test_a_window_of_any_text(source, words, context, offset):
    whole = all_tokens(source.tokenizer, words)
    if len(whole) < offset + context:
        with pytest.raises(ValueError, match="tokens, the window needs"):
            helpers.token_window(source, text_of(words), context, offset)
    else:
        window = helpers.token_window(source, text_of(words), context, offset)
        assert window.tolist() == whole[offset : offset + context]


def test_a_text_shorter_than_the_window_by_one_token(source, fault):
    words = LONG[:300]
    count = len(all_tokens(source.tokenizer, words))
    assert len(helpers.token_window(source, text_of(words), 50, count - 50)) == 50
    message = f"'words' has {count} tokens, the window needs {count + 1} .offset {count - 49} "
    with fault.raises(ValueError, message):
        helpers.token_window(source, text_of(words), 50, count - 49)


@pytest.mark.parametrize(
    ("context", "offset", "message"),
    [
        (65, 0, "context 65 is beyond the 64 positions of tiny"),
        (0, 0, "context must be a whole number of at least 1, found 0"),
        (-1, 0, "context must be a whole number of at least 1, found -1"),
        (2.0, 0, "context must be a whole number of at least 1, found 2.0"),
        ("64", 0, "context must be a whole number of at least 1, found '64'"),
        (True, 0, "context must be a whole number of at least 1, found True"),
        (5, -1, "offset must be a whole number of at least 0, found -1"),
    ],
)
def test_a_window_that_cannot_be(source, context, offset, message, fault):
    with fault.raises(ValueError, message):
        helpers.token_window(source, text_of(LONG), context, offset)


def test_a_window_knows_the_limit_of_gpt2(tiny_model, tokenizer):
    source = helpers.LoadedModel("gpt2", tiny_model("gpt2"), tokenizer, {})
    with pytest.raises(ValueError, match="context 65 is beyond the 64 positions of gpt2"):
        helpers.token_window(source, text_of(LONG), 65)


# The real texts -------------------------------------------------------------------------------

TEXTS = {
    "alice": ("ALICE'S ADVENTURES IN WONDERLAND", "THE END"),
    "as-you-like-it": ("AS YOU LIKE IT", "[Exeunt]"),
    "paradise-lost": ("Book I", "[The End]"),
    "etext-workshop": ("WORKSHOP ON ELECTRONIC TEXTS", "replaced by CAPS mh]"),
    "king-james": ("In the beginning God created", "Amen."),
}


def test_every_named_text_is_tested():
    assert list(TEXTS) == list(helpers._sources("texts"))


@pytest.mark.parametrize("name", TEXTS)
def test_the_real_texts(name):
    text = helpers.load_text(name)
    start, end = TEXTS[name]
    assert text.name == name
    assert text.text.lstrip().startswith(start)
    assert text.text.rstrip("\n\x1a").endswith(end)  # two files end as DOS ended files
    assert len(text.text) > 100_000
    assert "\r" not in text.text
    assert not re.search("Project Gutenberg|Small Print", text.text, re.IGNORECASE)
