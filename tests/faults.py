"""The table of faults in tests/README.md: what the tests caused, and what they saw."""

import contextlib
import re

import pandas as pd
import pytest

import helpers
from checks import one_line, sha256

README = helpers.ROOT / "tests"


def contents(folder):
    """Every file in a folder by its checksum, and what a run left that was stopped."""
    paths = sorted(folder.rglob("*")) if folder.exists() else []
    left = {str(path.relative_to(folder)): "left" for path in paths if ".part-" in path.name}
    files = [path for path in paths if path.is_file() and not path.is_symlink()]
    return left | {str(path.relative_to(folder)): sha256(path.read_bytes()) for path in files}


def kept(before):
    """What is there after a fault that changed nothing."""
    if not before:
        return "nothing was there, nothing is"
    return "the file there" if len(before) == 1 else f"the {len(before)} files there"


class Fault:
    """A fault that a test causes. What it saw of it becomes a row of the table."""

    def __init__(self, seen, name, folder):
        self.seen, self.name, self.folder = seen, name, folder
        self.message = None

    @contextlib.contextmanager
    def raises(self, kind, match, keeps=None):
        """An error of one line; the files in `keeps` (the test's folder) stay as they were."""
        folder = self.folder if keeps is None else keeps
        before = contents(folder)
        with pytest.raises(kind, match=match) as raised:
            yield
        assert contents(folder) == before
        self.saw(one_line(raised), kept(before))

    def saw(self, message, kept):
        self.message = message
        self.seen[self.name] = (without_places(message), kept)


def without_places(message):
    """A message without what differs from machine to machine and from run to run."""
    message = re.sub(r"(/[^\s/':]+)*/pytest-of-[^/]+/pytest-\d+/[^/\s':]+", "…", message)
    message = message.replace(str(helpers.ROOT), "…")
    message = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1", message)
    message = re.sub(r"(recursion depth exceeded)[^)]*", r"\1", message)
    message = re.sub(r"\(ERROR: [^)]*\)", "(ERROR: …)", message)  # pip, of which any version serves
    message = re.sub(r"on the hub \((Server dis|.*reset|illegal)[^)]*\)", "on the hub (…)", message)
    message = re.sub(r"\b[0-9a-f]{12}(…|[0-9a-f]*)", "…", message)
    return re.sub(r"(/resolve/…/)[\w.]+", r"\1…", message)  # files are fetched in any order


def name_of(item):
    """The fault that a test causes: the subject of its file, its own name, the case."""
    subject = item.module.__doc__.split("\n")[0].rstrip(".")
    words = item.function.__name__.removeprefix("test_").replace("_", " ")
    return subject, words, item.callspec.id if hasattr(item, "callspec") else ""


def table(rows):
    """Markdown: one section for each file of tests; cases that end alike share a row."""
    sections = {}
    for (subject, words, case), end in rows.items():
        sections.setdefault(subject, {}).setdefault((words, *end), []).append(case)
    lines = []
    for subject, merged in sections.items():
        lines += ["", f"### {subject}", "", "| fault | what the user sees | what is kept |"]
        lines += ["|:--|:--|:--|"]
        for (words, message, kept), cases in merged.items():
            fault = f"{words}: {', '.join(cases)}" if any(cases) else words
            cells = [cell.replace("|", r"\|") for cell in (fault, f"`` {message} ``", kept)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def rows():
    """The published rows: (subject, fault, case) → (message, what is kept), in order."""
    lines = pd.read_csv(README / "faults.csv", dtype=str, keep_default_na=False)
    return {tuple(row[:3]): tuple(row[3:]) for row in lines.itertuples(index=False)}


def write(seen, caused):
    """Publish what was seen, beside the rows of the tests that did not run; the README follows."""
    known = {**(rows() if (README / "faults.csv").exists() else {}), **seen}
    collected = {name[0] for name in caused}
    names = [*caused, *(name for name in known if name[0] not in collected)]
    names.sort(key=lambda name: name[0])  # in the same order, whichever tests ran
    lines = [(*name, *known[name]) for name in names if name in known]
    columns = ["tests", "fault", "case", "the user sees", "kept"]
    pd.DataFrame(lines, columns=columns).to_csv(README / "faults.csv", index=False)
    helpers.update_readme(README, {"faults": table(rows())})
