"""Benchmarks. ``cudatma bench NAME`` runs a script in this folder. docs/lab/method.md describes the method."""
