"""What the tests of sources and of checkpoints ask: files, messages, models, a server."""

import contextlib
import hashlib
import http.server
import io
import os
import signal
import subprocess
import sys
import threading
import warnings

import matplotlib.pyplot as plt
import nbformat
import torch
from torch.testing import assert_close

import helpers


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def files_in(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def one_line(raised):
    message = str(raised.value)
    assert message
    assert "\n" not in message
    return message


def truncate(file):
    file.write_bytes(file.read_bytes()[:-1])


def assert_same_logits(loaded, model, **tolerance):
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        assert_close(loaded.model(tokens).logits, model(tokens).logits, **tolerance)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    assert not loaded.model.training


def assert_same_model(loaded, model, tokenizer):
    assert_same_logits(loaded, model)
    sentence = "the cat sat on a naïve mat"
    ids = [
        t(sentence, add_special_tokens=False)["input_ids"] for t in (loaded.tokenizer, tokenizer)
    ]
    assert ids[0] == ids[1]


def assert_same_weights(found, expected, rtol=0):
    found, expected = list(found), list(expected)
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.layer == theirs.layer
        for part, other in zip(ours[1:], theirs[1:], strict=True):
            assert (part is None) == (other is None)
            if part is not None:
                assert_close(part, other, rtol=rtol, atol=rtol)


@contextlib.contextmanager
def serving(answer):
    """A server on this machine: `answer(request)` is called for every GET and HEAD."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            answer(self)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def code_cells(path):
    cells = nbformat.read(path, as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code"]


def tagged(cells, tag):
    return [cell for cell in cells if tag in cell.metadata.get("tags", [])]


def run_cells(notebook, folder, /, **parameters):
    """Run a notebook's cells here, as in `folder`, with parameters: what it printed.

    A second or two instead of the ten that a kernel takes to start; its errors are raised.
    """
    path = helpers.ROOT / "notebooks" / f"{notebook}.ipynb"
    space, printed = {"__name__": "__main__"}, io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(printed),
        plt.rc_context(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", DeprecationWarning)  # as in a kernel
        for number, cell in enumerate(code_cells(path), 1):
            exec(compile(cell.source, f"{notebook}, cell {number}", "exec"), space)
            if "parameters" in cell.metadata.get("tags", []):
                assert parameters.keys() <= space.keys()
                space |= parameters
    plt.close("all")
    return printed.getvalue()


# A tiny run of the workflow: one text, short windows.
SMALL = {"texts": "alice", "context": 128, "stability_context": 96, "windows": 2}
SMALL["lengths"] = "[32, 128]"


def run(*command, cwd, **options):
    """Run a Python module as a user would, from `cwd`; returns the finished process."""
    return subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=cwd,
        capture_output=True,
        text=True,
        **options,
    )


def last_line(process):
    return process.stderr.strip().splitlines()[-1]


def workflow(output, *targets, **changes):
    """The command of a small run into a folder of its own, with changes of its settings."""
    settings = {**SMALL, "output": output, "build": f"{output}/build", **changes}
    settings = [f"{name}={value}" for name, value in settings.items()]
    return ["snakemake", "--cores", "1", "--nolock", "--rerun-incomplete", "--force-use-threads",
            "--snakefile", helpers.ROOT / "Snakefile", *targets, "--config", *settings]  # fmt: skip


def started(output, *targets, **changes):
    """A small run that goes on by itself, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", *map(str, workflow(output, *targets, **changes))],
        cwd=helpers.ROOT,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def killed(process):
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def results_of(folder):
    """Every result file of a run with its bytes."""
    files = [path for path in sorted(folder.rglob("*.*")) if path.is_file()]
    results = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    return {name: content for name, content in results.items() if not name.startswith("build/")}
