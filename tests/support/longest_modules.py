"""Prints the longest modules of the package, as a question: a module holds one idea, whatever its lines."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent.parent / "elephant"
SHOWN = 3

if __name__ == "__main__":
    lines = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    longest = sorted(lines, key=lambda path: -lines[path])[:SHOWN]
    named = ", ".join(f"{path.relative_to(PACKAGE.parent)} ({lines[path]} lines)" for path in longest)
    print(f"The longest modules are {named}. Does each hold one idea?")
