"""Appending unless the event id was seen before, for rows that have no stable order."""
