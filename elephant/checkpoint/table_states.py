"""Files in which ranks have written tables for states of a fit, and which go with the last state that needs them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from elephant.checkpoint.manager import CheckpointSink
from elephant.checkpoint.state import FitState
from elephant.storage.folder import folder_at
from elephant.tables.stored import StoredTable

# Of one state: the beginning of its files' names, and the URLs of their folders.
OfTables = tuple[str, tuple[str, ...]]


def tables_of(facts: Mapping[str, Any]) -> OfTables | None:
    """Returns which files a state needs, by its facts; None where it has all arrays itself."""
    tables = facts.get("tables")
    return None if not tables else (str(tables["name"]), tuple(map(str, tables["urls"])))


class HoldsStates(Protocol):
    """Receiver of states that says which of them a fit may still go on from, or are still to be written."""

    @property
    def held(self) -> list[FitState]: ...


class TableFiles:
    """Removes the files of tables that no state of a fit needs any more.

    Args:
        checkpoints: Returns the facts of the checkpoints that there are now.
    """

    def __init__(self, checkpoints: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        self._checkpoints = checkpoints
        self._known: set[OfTables] = set()
        # Of the attempts of this fit.
        self._fits: set[OfTables] = set()
        self._result_names: set[str] = set()

    def watched(self, sink: CheckpointSink, holder: HoldsStates) -> TableStates:
        """Returns a receiver of states that has files removed when a new one has come.

        Args:
            holder: Of the states.
        """
        return TableStates(sink, holder, self)

    def begin(self) -> None:
        """Takes the states that the fit may go on from; before there is another one."""
        self._known |= self._needed_by(())

    def add(self, of_tables: OfTables, states: Iterable[FitState]) -> None:
        """Takes a new state.

        Args:
            states: Those that are not only in the fit's folder.
        """
        self._known.add(of_tables)
        self._fits.add((of_tables[0].split(".")[0], of_tables[1]))
        self._remove_useless(states)

    def keep_result(self, variables: Iterable[np.ndarray]) -> None:
        """Takes the result of the fit, whose files stay."""
        stored_tables = filter(None, map(StoredTable.from_array, variables))
        self._result_names |= {".".join(stored.name.split(".")[:2]) for stored in stored_tables}

    def close(self) -> None:
        """Removes what neither the result nor a checkpoint needs; when the fit goes on from nothing else.

        Attempts of this fit that have failed may have left parts of states, or a result, of which nobody was told.
        """
        self._remove_useless(())
        with contextlib.suppress(Exception):
            needed = {name for name, _ in self._needed_by(())} | self._result_names
            for name, urls in self._fits:
                remove_files([name], urls, needed=needed)

    def _remove_useless(self, states: Iterable[FitState]) -> None:
        # What is needed is there: whatever a file system raises, no fit ends of it.
        with contextlib.suppress(Exception):
            for name, urls in self._known - self._needed_by(states):
                remove_files([name], urls)
                self._known.discard((name, urls))

    def _needed_by(self, states: Iterable[FitState]) -> set[OfTables]:
        # First those that are on their way to the folder: they may arrive meanwhile.
        held_facts = [state.facts for state in states]
        return {found for facts in (*held_facts, *self._checkpoints()) if (found := tables_of(facts)) is not None}


def remove_files(names: Iterable[str], urls: Iterable[str], *, needed: Iterable[str] = ()) -> None:
    """Removes files by the beginnings of their names; may raise whatever a file system raises.

    Args:
        names: Of fits, or of states.
        urls: Of folders, as workers write to them.
        needed: Beginnings of names of files that stay.
    """
    going, staying = (tuple(f"{name}." for name in given) for given in (names, needed))
    for url in urls:
        folder = folder_at(url)
        for file in folder.names():
            if file.startswith(going) and not file.startswith(staying):
                folder.remove(file)


class TableStates:
    """Receiver of a fit's states, which tells of the files that each needs.

    Args:
        sink: Takes the states.
        holder: Of the states.
        table_files: Told of them.
    """

    def __init__(self, sink: CheckpointSink, holder: HoldsStates, table_files: TableFiles) -> None:
        self._sink, self._holder, self._table_files = sink, holder, table_files

    @property
    def is_wanted(self) -> bool:
        """True if somebody has asked for a state since this was read last."""
        return self._sink.is_wanted

    def keep(self, state: FitState) -> bool:
        """Takes a state; returns whether it is a checkpoint that users hear of."""
        is_shown = self._sink.keep(state)
        of_tables = tables_of(state.facts)
        if of_tables is not None:
            self._table_files.add(of_tables, self._holder.held)
        return is_shown

    def check(self) -> None:
        """Raises CheckpointError when a state that was taken could not be kept."""
        self._sink.check()
