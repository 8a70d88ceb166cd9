"""Check the installed packages against the exact pins of requirements.txt and constraints.txt.

python tests/pins.py            one line for each that differs, and exit status 1
python tests/pins.py --names    the packages of requirements.txt, for an installation of the newest
python tests/pins.py --write    constraints.txt anew: what this environment holds besides
"""

import importlib.metadata
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_OURS = {"pip", "setuptools", "wheel", "attention-spectra-companion", "atheris"}


def plain(name):
    """A package's name as all spellings of it are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path):
    """{package: version} of a file of requirements; ValueError for a line that is no exact pin."""
    found = {}
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        line = line.split("#")[0].strip()
        pin = re.fullmatch(r"([\w.-]+)==([\w.]+)", line)
        if line and not pin:
            raise ValueError(f"{path.name}:{number}: {line!r} is no exact pin: name==version")
        if pin and plain(pin[1]) in found:
            raise ValueError(f"{path.name}:{number}: {pin[1]} is pinned twice")
        if pin:
            found[plain(pin[1])] = pin[2]
    return found


def installed():
    """{package: version} of this environment, without the build's own mark (2.13.0+cpu)."""
    packages = importlib.metadata.distributions()
    return {plain(package.name): package.version.split("+")[0] for package in packages}


def differences(required, constrained, found):
    """What is not as pinned, a line each. Systems differ in what the pins bring with them: a
    constraint may be without its package, and a package without a constraint."""
    for name, version in {**constrained, **required}.items():
        if name in found and found[name] != version:
            yield f"{name} {found[name]} is installed, the pin is {version}"
        if name in required and name not in found:
            yield f"{name} is not installed, the pin is {version}"


def main(arguments):
    required, constraints = pins(ROOT / "requirements.txt"), ROOT / "constraints.txt"
    if arguments == ["--names"]:
        print(*required)
    elif arguments == ["--write"]:
        besides = installed().items() - required.items()
        lines = [f"{n}=={v}" for n, v in sorted(besides) if n not in required.keys() | NOT_OURS]
        head = "# Exact pins of what requirements.txt brings with it: tests/pins.py --write"
        constraints.write_text("\n".join([head, *lines, ""]), "utf-8")
    elif lines := list(differences(required, pins(constraints), installed())):
        sys.exit("\n".join([*lines, "not as pinned: rm -rf .venv, and make it anew"]))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(str(error))
