"""Converts YAML to a validated ``Pipeline``, or raises one error with all problems. Does not use Spark."""
