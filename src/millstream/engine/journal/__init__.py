"""The append-only journal: its frames, its interface to the file system, and its rewrite."""
