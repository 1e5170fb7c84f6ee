"""Configs of `launch.pate`: MNIST as published, and a quickstart."""
