"""What must be atomic and no single command does: one folder for each noun, with its scripts, their twins, their calls.

``<name>.lua`` is what a Redis runs, the function ``<name>`` in ``twin.py`` what the embedded engine runs in its place,
and ``call.py`` how the rest of the house asks for it: ``broker.run(settle.ack_held, ...)``. They are fuzzed against
each other. A script touches only the keys in KEYS, takes everything else from ARGV, and checks before its
first write: neither a script nor its twin rolls back.
"""
