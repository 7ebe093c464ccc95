"""Metrics of runs and of single evaluations; docs/reference/metrics.md has the formulas."""
