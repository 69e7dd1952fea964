"""Framed, authenticated streams between the processes of one fit; every wait has a deadline."""

from __future__ import annotations

from elephant.net.deadline import Deadline
from elephant.net.frames import Limits, Message
from elephant.net.server import Server
from elephant.net.stream import Listener, Stream, connect

__all__ = ["Deadline", "Limits", "Listener", "Message", "Server", "Stream", "connect"]
