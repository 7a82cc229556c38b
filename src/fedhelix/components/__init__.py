"""The maths of the methods, usable alone."""
