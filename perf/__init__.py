"""Benchmarks: shapes and recipes, the streaming floor, the peers, and the tables that compare them."""
