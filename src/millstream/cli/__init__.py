"""The command line. Each command parses its arguments, calls the library and prints the result.

A command's module is imported only when the command is used, so that ``millstream --help`` stays fast.
"""
