"""The append-only file: its frames, what it asks of a file system, and how it is rewritten."""
