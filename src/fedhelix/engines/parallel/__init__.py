"""Clients in worker processes on a CPU."""
