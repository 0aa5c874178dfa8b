"""Benchmarks. Each figure is a ratio measured in one run, or is given with its machine.

They are not tests: tests check what is correct, benchmarks print numbers. A benchmark prints no
number if the outputs of its run were wrong.
"""
