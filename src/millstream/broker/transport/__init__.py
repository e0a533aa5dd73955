"""Transports: how commands reach the embedded engine or Redis.

A transport receives commands and batches and returns replies, or raises typed errors. Exceptions of redis-py and of
sockets are converted here and go no further.
"""
