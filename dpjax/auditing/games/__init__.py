"""Distinguishing games: every guarantee of the library, attacked on its worst neighbours.

`registry` finds what can be attacked, and the games that attack it; `game.play` plays one game. The
tests play all of them in a minute. `python -m launch.audit --all` plays them for as long as you
like.
"""
