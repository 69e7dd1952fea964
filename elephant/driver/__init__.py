"""A run as the driver sees it, or who stands in for it beside rank 0: its ranks, servers, coordinator and callbacks."""
