"""Attacks on a federation, and defences against them."""

from fedhelix.robust import defences as defences  # which registers them
