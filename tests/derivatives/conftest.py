from support.derivatives.second_order import tiny_tiles

__all__ = ["tiny_tiles"]
