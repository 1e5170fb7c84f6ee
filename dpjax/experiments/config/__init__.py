"""Typed configurations: fields that hold the library's own values, and a user's own code."""
