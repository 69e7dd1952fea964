"""``python -m elephant`` is the program ``elephant``."""

import sys

from elephant.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
