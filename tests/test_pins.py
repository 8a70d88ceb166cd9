"""The pins: exact, and what is installed is compared with them."""

import os
import subprocess
import sys

import pytest

import helpers
import pins

PINS = {
    "a range": ("numpy>=2", r"requirements.txt:2: 'numpy>=2' is no exact pin: name==version"),
    "no version": ("numpy", r"requirements.txt:2: 'numpy' is no exact pin"),
    "a wildcard": ("numpy==2.*", r"is no exact pin"),
    "an address": ("numpy @ https://example.org/numpy.whl", r"is no exact pin"),
    "a pin twice": ("numpy==2.0\nNumPy==2.1", r"requirements.txt:3: NumPy is pinned twice"),
}


@pytest.mark.parametrize(("line", "message"), PINS.values(), ids=PINS)
def test_requirements_with(tmp_path, line, message, fault):
    path = tmp_path / "requirements.txt"
    path.write_text(f"# pins\n{line}\n")
    with fault.raises(ValueError, message):
        pins.pins(path)


FOUND = {"numpy": "2.0", "torch": "2.13.0", "six": "1.0", "pip": "23"}
ENVIRONMENTS = {
    "another version": ({"numpy": "2.1", "torch": "2.13.0"}, {"six": "1.0"}, "numpy 2.0 is inst"),
    "another version of what a pin brings": (
        {"numpy": "2.0", "torch": "2.13.0"},
        {"six": "2"},
        "six",
    ),
    "a package missing": (FOUND | {"pandas": "3.1"}, {}, "pandas is not installed, the pin is 3.1"),
}


@pytest.mark.parametrize(
    ("required", "constrained", "message"), ENVIRONMENTS.values(), ids=ENVIRONMENTS
)
def test_an_environment_with(required, constrained, message, fault):
    (line,) = pins.differences(required, constrained, FOUND)
    assert message in line
    fault.saw(line, "nothing was run")


def test_an_environment_as_pinned():
    """On another system than that of the constraints, too."""
    required, constrained = {"numpy": "2.0", "torch": "2.13.0"}, {"six": "1.0", "elsewhere": "1"}
    assert list(pins.differences(required, constrained, {**FOUND, "triton": "3"})) == []


def test_the_script_ends_with_what_differs(tmp_path, monkeypatch):
    """In an environment that has nothing."""
    done = subprocess.run(
        [sys.executable, "-S", str(helpers.ROOT / "tests" / "pins.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert done.returncode == 1
    assert "torch is not installed, the pin is " in done.stderr
    names = subprocess.run(
        [sys.executable, "-S", str(helpers.ROOT / "tests" / "pins.py"), "--names"],
        capture_output=True,
        text=True,
    ).stdout.split()
    assert names == list(pins.pins(helpers.ROOT / "requirements.txt"))


def test_every_pin_of_the_project_is_exact():
    for path in ("requirements.txt", "constraints.txt", "tests/requirements-soak.txt"):
        assert pins.pins(helpers.ROOT / path)
