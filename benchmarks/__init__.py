"""Benchmarks. ``cudatma bench NAME`` runs a script of this folder. docs/lab/method.md describes the method."""
