"""Consumer groups that move: forward with a reader, back after a loss, and a consumer that leaves."""
