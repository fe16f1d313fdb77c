"""Ways to use this attention in code that was written for another one."""
