"""Experiments of the launchers: typed configs, one run, its kinds, sweeps and checks of runs.

The library of differential privacy stands below this package and imports nothing of it.

- `config`: typed configs, their fields and a user's own code by import path;
- `run`: ONE run, whatever it trains: the loop, checkpoints, writers, keys and the guarantee;
- `kinds`: central, federated, relevance, attack and secure runs, a config and a `build` each;
- `sweeps`: grids of runs, private tuning, tables and curves;
- `checks`: `launch.check` of a user's own run;
- `catalogue`: what there is to choose from, for `launch.list`.
"""
