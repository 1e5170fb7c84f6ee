"""Configs of `launch.relevance`: the five tests of Kang and Wang 2024, and a quickstart."""
