"""What the driver sees of a fit: events from the ranks, their channel, the history and how it is shown."""
