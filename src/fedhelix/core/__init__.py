"""What everything stands on: errors, options, random draws, trees of tensors, and
what a method is.
"""
