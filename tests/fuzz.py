"""Fuzz the readers that are ours: python tests/fuzz.py -max_total_time=60

Each must end in a result, or in one line: anything else is a crash, and so is a gigabyte of memory.
"""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["gguf.gguf_reader"]):
    import gguf.gguf_reader  # noqa: F401
import helpers

FOLDER = Path(tempfile.mkdtemp())


def gguf_file(content):
    (FOLDER / "any.gguf").write_bytes(content)
    helpers._gguf_contents(FOLDER / "any.gguf", "any.gguf")


def table(content):
    (FOLDER / "any.csv").write_bytes(content)
    helpers.load_table(FOLDER / "any.csv")


def spectra(content):
    (FOLDER / "any.safetensors").write_bytes(content)
    helpers.load_spectra(FOLDER / "any.safetensors")


def weights(content):
    (FOLDER / "config.json").write_text("{}")
    (FOLDER / "model.safetensors").write_bytes(content)
    helpers._weight_files(FOLDER)


def index(content):
    (FOLDER / "sharded").mkdir(exist_ok=True)
    (FOLDER / "sharded" / "config.json").write_text("{}")
    (FOLDER / "sharded" / "model.safetensors.index.json").write_bytes(content)
    helpers._weight_files(FOLDER / "sharded")


def text(content):
    (FOLDER / "any.txt").write_bytes(content)
    helpers.load_text(str(FOLDER / "any.txt"))


READERS = [gguf_file, table, spectra, weights, index, text]
for part in ("_gguf_contents", "load_table", "load_spectra", "_weight_files", "load_text"):
    setattr(helpers, part, atheris.instrument_func(getattr(helpers, part)))


def one_input(content):
    """The first byte chooses the reader."""
    if not content:
        return
    try:
        READERS[content[0] % len(READERS)](content[1:])
    except (ValueError, RuntimeError) as error:
        if "\n" in str(error) or not str(error):
            raise AssertionError(f"not one line: {error!r}") from error


atheris.Setup(sys.argv, one_input)
atheris.Fuzz()
