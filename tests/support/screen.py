"""What a user sees of an error on the screen of a plain script."""

import re
import traceback

HELP = "See https://elephant-spark.github.io/elephant/troubleshooting/#"
MOST_LINES = 12


def assert_brief(error, *, cause, remedy, topic, printed=""):
    """Holds an error, with what was printed before, to a dozen lines: the cause first, the remedy and its section last.

    What a worker printed last comes between these two.

    Args:
        error: As the user's code gets it.
        cause: How its message begins, as a regular expression.
        remedy: How its message ends, as one.
        topic: The section of docs/troubleshooting.md.
        printed: What the driver has printed besides.
    """
    shown = "".join(traceback.format_exception(error))
    lines = [*printed.splitlines(), *shown.splitlines()]
    assert len(lines) <= MOST_LINES, "\n".join(lines)
    message, _, section = str(error).rpartition("\n")
    assert section == HELP + topic, str(error)
    assert re.match(cause, message), message
    # Which rank has the row comes behind it.
    assert re.search(rf"(?:{remedy})( \(rank \d+\))?$", message.partition("\n\n")[0]), message
