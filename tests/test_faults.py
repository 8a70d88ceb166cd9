"""The table of faults in tests/README.md: nothing in it is written by hand."""

import pytest

import faults


@pytest.mark.table
def test_the_table_of_faults_is_what_the_tests_saw(faults_seen, request):
    """Each row that this run saw, and a row for every fault, those of `soak` excepted: they are
    there once they were seen. With --write-faults the table is written."""
    seen, caused = faults_seen
    if request.config.getoption("--write-faults"):
        faults.write(seen, caused)
    published, collected = faults.rows(), {subject for subject, *_ in caused}
    assert {name: published.get(name) for name in seen} == seen
    assert {name for name, soak in caused.items() if not soak} <= published.keys()
    assert {name for name in published if name[0] in collected} <= caused.keys()
    readme = (faults.README / "README.md").read_text("utf-8")
    assert f"<!-- faults -->\n{faults.table(published)}\n<!-- /faults -->" in readme


def test_a_message_is_told_without_its_machine():
    said = (
        "/tmp/pytest-of-me/pytest-7/test_x0/cache/a.txt is corrupt: sha256 0123456789ab…, expected"
    )
    assert faults.without_places(said) == "…/cache/a.txt is corrupt: sha256 …, expected"
    rows = {("Tests", "a text", case): ("a | b", "nothing") for case in ("short", "long")}
    assert "| a text: short, long | `` a \\| b `` | nothing |" in faults.table(rows)
