"""Benchmarks of a checkout: each script is ``cudatma bench NAME``. docs/lab/method.md describes the method."""
