"""Attacks on a federation, and defences against them."""
