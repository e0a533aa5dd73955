"""Dropping what nobody needs any more."""
