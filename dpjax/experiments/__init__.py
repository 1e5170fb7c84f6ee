"""Experiments of the launchers: typed configs, one run, its kinds, sweeps and checks of runs.

All other packages of dpjax, except `serving`, can be imported without this one.

- `config`: typed configs, their fields and a user's own code by import path;
- `run`: ONE run, whatever it trains: the loop, checkpoints, writers, keys and the guarantee;
- `kinds`: every kind of run, such as central or federated: a config and a `build` each;
- `sweeps` and `plots`: grids of runs, private tuning, tables, curves and pictures;
- `checks`: `launch.check` of a user's own run;
- `catalogue`: what there is to choose from, for `launch.list`.
"""
