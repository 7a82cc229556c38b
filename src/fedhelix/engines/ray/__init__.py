"""Clients on the machines of a Ray cluster.

Values travel between the processes of one run through Ray's own transport and object store, which
pickle them; like the pipes of the parallel engine, that serves processes of one program and one
user. Nothing of ours is pickled to disk or sent to anybody else. A Ray cluster runs whatever a
process that reaches it sends, so it belongs into a network of its own.
"""
