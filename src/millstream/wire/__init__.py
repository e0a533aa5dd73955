"""Commands and replies as values, and how they look as bytes. In: arguments or bytes. Out: bytes or values.

Nothing here opens a socket, waits, or knows what a command means.
"""
