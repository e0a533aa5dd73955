"""Leases over streams: who is alive, who owns what, and writes that only the owner can make."""
