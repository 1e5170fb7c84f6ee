"""Models of a user's own, written with any library, in one form for the launchers.

`by_path` describes the form and lists the libraries. Each library has one file here.
"""
