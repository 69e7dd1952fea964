"""Program: loads the kernels of an installed wheel, and exits with 1 where one is missing or does not load.

It needs nothing but the wheel's own requirements, so that it runs in the containers of cibuildwheel.
"""

import ctypes
import importlib.util
import sys
from pathlib import Path

# Of a library, a function that it exports.
KERNELS = {
    "backends/native/exchange.abi3.so": "elephant_exchange_version",
    "parameter_server/optimizers/native/adam.abi3.so": "elephant_adam",
}


def main():
    """Runs the program, and returns its exit code."""
    found = importlib.util.find_spec("elephant")
    if found is None or found.origin is None:
        print("elephant is not installed")
        return 1
    folder = Path(found.origin).parent
    missing = [name for name in KERNELS if not (folder / name).is_file()]
    for name, symbol in KERNELS.items():
        if name not in missing and not hasattr(ctypes.CDLL(str(folder / name)), symbol):
            missing.append(f"{name}: {symbol}")
    print("\n".join(f"missing: {name}" for name in missing) or f"{len(KERNELS)} kernels load")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
