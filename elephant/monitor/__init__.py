"""The driver's view of a fit: events from the ranks, their channel, the history and its display."""
