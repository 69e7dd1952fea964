"""Trials of a model on a rank's rows, before any step and beside the steps: do N ranks give what one process does?"""
