"""Helpers of the tests: cases as data, how to run them on each side, and the error rule."""
