"""Messages that are published later: kept beside their stream, and moved into it when they are due."""
