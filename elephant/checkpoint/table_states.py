"""Files in which ranks have written tables for states of a fit, and which go with the last state that needs them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from elephant.checkpoint.manager import CheckpointSink
from elephant.checkpoint.state import FitState
from elephant.storage.folder import Folder

logger = logging.getLogger(__name__)
# States that nobody has written yet, or that are in the driver's memory alone.
_RECENT = 4

# Of one state: the beginning of its files' names, and the URLs of their folders.
OfTables = tuple[str, tuple[str, ...]]


def tables_of(facts: Mapping[str, Any]) -> OfTables | None:
    """Returns which files a state needs, by its facts; None where it has all arrays itself."""
    tables = facts.get("tables")
    return None if not tables else (str(tables["name"]), tuple(map(str, tables["urls"])))


class TableFiles:
    """Removes the files of tables that no state of a fit needs any more.

    Args:
        folder_of: Opens the folder of a URL.
        checkpoints: Returns the facts of the checkpoints that there are now.
    """

    def __init__(
        self, folder_of: Callable[[str], Folder], checkpoints: Callable[[], Iterable[Mapping[str, Any]]]
    ) -> None:
        self._folder_of = folder_of
        self._checkpoints = checkpoints
        self._recent: list[OfTables] = []
        self._known: set[OfTables] = set()

    def watched(self, sink: CheckpointSink) -> TableStates:
        """Returns a receiver of states that hears of each."""
        return TableStates(sink, self)

    def begin(self) -> None:
        """Takes the states that the fit may go on from; before there is another one."""
        self._known |= self._needed()

    def add(self, of_tables: OfTables) -> None:
        """Takes a new state."""
        self._recent = [*self._recent, of_tables][-_RECENT:]
        self._known.add(of_tables)
        self._remove(self._known - self._needed() - {*self._recent})

    def close(self) -> None:
        """Removes what no checkpoint needs; when the fit has ended, and goes on from nothing else."""
        # What is not removed is in nobody's way.
        with contextlib.suppress(Exception):
            self._remove(self._known - self._needed())

    def _needed(self) -> set[OfTables]:
        return {of_tables for facts in self._checkpoints() if (of_tables := tables_of(facts)) is not None}

    def _remove(self, useless: Iterable[OfTables]) -> None:
        for name, urls in useless:
            try:
                for url in urls:
                    folder = self._folder_of(url)
                    for file in folder.names():
                        if file.startswith(f"{name}."):
                            folder.remove(file)
            except Exception as error:
                # What is needed is there: whatever this file system raises, no fit ends of it.
                logger.warning("Files of tables in %s could not be removed: %s", ", ".join(urls), error)
            self._known.discard((name, urls))


class TableStates:
    """Receiver of a fit's states, which tells of the files that each needs.

    Args:
        sink: Takes the states.
        table_files: Told of them.
    """

    def __init__(self, sink: CheckpointSink, table_files: TableFiles) -> None:
        self._sink, self._table_files = sink, table_files

    @property
    def is_wanted(self) -> bool:
        """True if somebody has asked for a state since this was read last."""
        return self._sink.is_wanted

    def keep(self, state: FitState) -> bool:
        """Takes a state; returns at once, with whether it is a checkpoint that users hear of."""
        is_shown = self._sink.keep(state)
        of_tables = tables_of(state.facts)
        if of_tables is not None:
            self._table_files.add(of_tables)
        return is_shown

    def check(self) -> None:
        """Raises CheckpointError when a state that was taken could not be kept."""
        self._sink.check()
