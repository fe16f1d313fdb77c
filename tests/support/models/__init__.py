"""Tiny models of transformers, and how they are compared."""
