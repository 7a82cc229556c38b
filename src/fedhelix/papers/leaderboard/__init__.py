"""The leaderboard: methods that search alike on validation samples, and their ranks."""

from __future__ import annotations

from fedhelix.papers.leaderboard.board import run_leaderboard
from fedhelix.papers.leaderboard.figures import draw
from fedhelix.papers.leaderboard.settings import SEEDS

__all__ = ["SEEDS", "draw", "run_leaderboard"]
