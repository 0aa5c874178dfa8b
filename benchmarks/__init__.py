"""Measurements. Every figure is a ratio of one run or comes with the machine it was taken on.

Nothing here is a test: tests decide right or wrong, benchmarks print numbers, and refuse to print a
number whose outputs were wrong.
"""
