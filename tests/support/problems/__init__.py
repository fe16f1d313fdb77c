"""Random problems, drawn by number, and how they are checked."""
