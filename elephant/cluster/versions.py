"""Version numbers of packages and of Spark, to compare."""

import re

from packaging.version import Version

# The newest Java that a Spark version runs on, where there is a limit: PySpark 3.5 breaks wherever Arrow is used.
NEWEST_JAVA = {"3.5": 17}


def release(version: str) -> Version:
    """Returns a version without its suffix, such as a platform's or that of a development version; 0 for none.

    >>> release("4.0.1-amzn-0"), release("4.0.0.dev1") >= Version("4"), release("none")
    (<Version('4.0.1')>, True, <Version('0')>)
    """
    numbers = re.match(r"\d+(\.\d+)*", version)
    return Version(numbers[0] if numbers else "0")


def minor(version: str) -> str:
    """Returns the first two numbers of a version, such as ``3.11``."""
    return ".".join(version.split(".")[:2])
