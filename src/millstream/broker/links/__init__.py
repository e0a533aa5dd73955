"""The narrow waist: everything that differs between the embedded engine and Redis.

In: commands and batches. Out: replies, or typed errors. Foreign exceptions are wrapped here, once, and go no further.
"""
