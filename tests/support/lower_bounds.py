"""Prints what the package needs at the least: each dependency at its lower bound, for `make audit`.

Of those of the tests, of pages and of a release nothing is printed: who installs the package does not get them.
"""

import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import requires

from packaging.requirements import Requirement
from packaging.version import Version

_OF_DEVELOPERS = ("test", "dev", "docs", "release")


def lower_bounds(requirements: Iterable[str]) -> Iterator[str]:
    """Yields each requirement at its lower bound, once, in the order of names; those without one not.

    Args:
        requirements: As metadata has them; see `importlib.metadata.requires`.

    >>> list(lower_bounds(["b>=2,<3", "a>=1.0; extra == 'tls'", "c>=1; extra == 'test'", "d", "b>=1"]))
    ['a==1.0', 'b==1']
    """
    found: dict[str, Version] = {}
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and any(
            requirement.marker.evaluate({"extra": extra}) and not requirement.marker.evaluate({"extra": ""})
            for extra in _OF_DEVELOPERS
        ):
            continue
        for bound in requirement.specifier:
            if bound.operator in (">=", "=="):
                version = Version(bound.version)
                found[requirement.name] = min(version, found.get(requirement.name, version))
    for name in sorted(found):
        yield f"{name}=={found[name]}"


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in lower_bounds(requires("elephant-spark") or ()))
