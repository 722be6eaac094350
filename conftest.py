"""Loads the suite's own pytest plugins; at the root so that it counts for every way of calling pytest."""

pytest_plugins = ["tests.plugins.minutes_per_group", "tests.plugins.shuffled"]
