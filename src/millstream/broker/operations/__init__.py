"""Every operation of the contract, one generator each: it yields commands, receives replies, returns typed values.

Arguments are checked before the first command leaves, so bad input never changes a stream. No I/O happens here.
What each one promises stands on the contract's page, ``broker.py``.
"""
