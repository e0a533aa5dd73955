"""The journal: an append-only file of RESP commands, written as effects, so that a real Redis can be fed with it.

In: units of effects. Out: the same state after any crash, or an error that names the byte. Nothing is ever read over.
"""
