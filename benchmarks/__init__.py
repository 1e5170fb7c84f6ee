"""What `python -m benchmarks` measures.

A package with a file of its own: Opacus installs another `benchmarks`, and Python would prefer that
to a folder without one.
"""
