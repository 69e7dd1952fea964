"""Program: fuzzes the parsers by coverage, with Atheris: ``coverage_guided.py SECONDS [PROPERTY ...]``.

Each property of ``test_messages.py`` is tried for so many seconds, in a process of its own: Atheris looks which
branches of the package an input takes, and hypothesis makes an example of its bytes. One that fails is printed, and
belongs beside its property as an ``@example``. The program exits with 1 where one has failed. Without Atheris, which is
there for some versions of Python alone, it does nothing and says so.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "support")]
_LONGEST_INPUT_BYTES = 4096


def properties():
    """Returns the properties by name."""
    import test_messages

    return {name: test for name, test in vars(test_messages).items() if hasattr(test, "hypothesis")}


def fuzz(name, seconds):
    """Tries one property, and then ends this process."""
    import atheris

    with atheris.instrument_imports(include=["elephant"]):
        test = properties()[name]
    options = [f"-max_total_time={seconds}", f"-max_len={_LONGEST_INPUT_BYTES}", "-len_control=0"]
    atheris.Setup([sys.argv[0], *options], test.hypothesis.fuzz_one_input)
    atheris.Fuzz()


def main():
    """Runs the program, and returns its exit code."""
    if importlib.util.find_spec("atheris") is None:
        print("Atheris is not installed: pip install atheris, where there is one for this Python")
        return 0
    if sys.argv[1] == "--one":
        fuzz(*sys.argv[2:])
    seconds, *names = sys.argv[1:]
    if int(seconds) == 0:
        # Which is no limit to Atheris.
        return 0
    failed = []
    for name in names or properties():
        # What instruments the package does it while that is imported.
        command = [sys.executable, __file__, "--one", name, seconds]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        print(f"{name}: {done.stdout if done.returncode else 'held'}", flush=True)
        failed += [name] * bool(done.returncode)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
