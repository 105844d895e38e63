"""Micro-benchmarks of single parts, each a ratio within one run: `mtserve bench`."""
