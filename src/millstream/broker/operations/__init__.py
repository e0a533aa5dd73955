"""The operations of the contract: generators that yield commands, receive replies, and return typed values.

Arguments are checked before the first command is sent, so that invalid input never changes a stream. No I/O happens
here. ``broker.py`` documents what each operation promises.
"""
