"""Training of one worker against parameter servers."""
