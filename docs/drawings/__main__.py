"""Writes the drawings of docs/hopper.md, each from the module of its name, and those of docs/which_mask.md:

python docs/drawings
"""

from pathlib import Path

import backward_roles
import decisions
import loop_order
import mask_families
import ping_pong
import query_path
import shared_memory

DRAWINGS = {
    "query_path.svg": query_path.draw,
    "ping_pong.svg": ping_pong.draw,
    "shared_memory.svg": shared_memory.draw,
    "backward_roles.svg": backward_roles.draw,
    "loop_order.svg": loop_order.draw,
    "decisions.svg": decisions.draw,
    **mask_families.drawings(),
}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        Path(__file__).with_name(name).write_text(draw(), encoding="utf-8")
