"""What `benchmarks/kills.py` kills: commands in forked processes, and deployments of real ones."""
