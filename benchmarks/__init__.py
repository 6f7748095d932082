"""Measurements of a checkout: each script is ``cudatma bench NAME``. docs/performance/method.md says how."""
