"""Clients stacked into one program on a GPU."""
