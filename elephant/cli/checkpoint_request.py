"""``elephant checkpoint``: asks the fit that writes its checkpoints to a folder for one now, and waits for it.

A file in the folder asks: whoever may write there, from whatever host, may ask; nothing listens. So a hook of a cloud
that is about to take machines away can call it.
"""

from __future__ import annotations

import argparse
import sys
import time

from elephant.errors import ElephantError, shown_text

NAME = "elephant checkpoint"
_POLL_S = 0.1


def request_checkpoint(given: argparse.Namespace) -> int:
    """Asks for a checkpoint and waits until it is written; returns the exit code."""
    from elephant.checkpoint.manager import CheckpointManager
    from elephant.checkpoint.state import place_in_words, place_of
    from elephant.storage.folder import folder_at

    try:
        manager = CheckpointManager(folder_at(given.path), option="PATH", again="ask again")
        before, deadline = manager.wish(), time.monotonic() + given.timeout
        while time.monotonic() < deadline:
            time.sleep(_POLL_S)
            if found := manager.names_of_manifests() - before:
                newest = max(found, key=place_of)
                sys.stdout.write(f"{newest}: after {place_in_words(*place_of(newest))}\n")
                return 0
        taken = not manager.take_wish()
    except (ElephantError, OSError) as error:
        sys.stderr.write(f"{NAME}: {shown_text(error)}\n")
        return 1
    why = "a fit has taken the wish, and has written none yet" if taken else "no fit that trains has read the wish"
    sys.stderr.write(
        f"{NAME}: PATH: expected a fit that writes its checkpoints to {given.path} now. Received: none within "
        f"{given.timeout:g} s: {why}. Give the checkpointPath of a fit that runs, or a longer --timeout.\n"
    )
    return 1
