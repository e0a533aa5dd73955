"""Lua scripts for atomic operations that no single Redis command offers: one folder for each subject.

Redis runs ``<name>.lua``. The embedded engine runs the function ``<name>`` in ``emulation.py`` instead. ``call.py``
has the operations that call the scripts, for example ``broker.run(settle.ack_held, ...)``. Tests fuzz each script
against its emulation. A script uses only the keys in KEYS and the arguments in ARGV, and makes all checks
before its first write, because neither Redis nor the emulation rolls back.
"""
