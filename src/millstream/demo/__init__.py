"""The demonstration: a broker, a pipeline on Spark, three workers of which one is killed, and a ledger that is counted.

Nothing here is believed: every number on the screen is read from the streams and from what the workers wrote down.
"""
