"""Sizing: what a cache needs for given users and memory, and what it would find (`mtserve plan`)."""
