"""Runs: settings as files and flags, and the jobs that turn them into run folders."""
