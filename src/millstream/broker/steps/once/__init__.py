"""Appending once: rows and the writer's marker are one step, so that repeating it changes nothing."""
