"""Benchmarks: ours and a peer in the same run, interleaved, several rounds, the median reported.

One file a suite, each with ``run(rounds, progress) -> list[Result]``. Nothing here is imported by another room.
"""
