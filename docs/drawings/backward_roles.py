"""Two iterations of the key-stationary backward pass at head dim 128, role by role: the form that pre-signals dQ."""

from svg import MINUS, Box, Drawing

# Columns of the roles: where each begins and its width.
COLUMNS = {"producer": (2, 74), "key": (88, 90), "dq": (190, 78), "reducers": (280, 78)}
HEADINGS = {
    "producer": ("producer",),
    "key": ("key", "warpgroups"),
    "dq": ("dQ", "warpgroup"),
    "reducers": ("reducers",),
}
TOP = 40
STEPS = {"exponent": 38, "both": 52, "difference": 38, "last": 66}  # of an iteration of the key warpgroups
ITERATION = sum(STEPS.values()) + 16


def draw() -> str:
    drawing = Drawing("The backward pass: producer, key warpgroups, dQ warpgroup and reducers in two iterations")
    for role, lines in HEADINGS.items():
        x, width = COLUMNS[role]
        for i, line in enumerate(lines):
            drawing.text(x + width / 2, 15 + 15 * i, line, "bold", "middle")
    for i in range(2):
        iteration(drawing, i, TOP + ITERATION * i)
    drawing.height = TOP + 2 * ITERATION + 4
    return drawing.svg()


def name(i: int) -> str:
    """Of an iteration."""
    return "i" if i == 0 else f"i{'+' if i > 0 else MINUS}{abs(i)}"


def box(role: str, y: float, height: float) -> Box:
    x, width = COLUMNS[role]
    return Box(x, y, width, height)


def iteration(drawing: Drawing, i: int, top: float) -> None:
    at, before, after = name(i), name(i - 1), name(i + 1)
    y = top
    steps = {}
    for step, height in STEPS.items():
        steps[step] = box("key", y, height)
        y += height
    drawing.block(steps["exponent"], "orange", [f"P({at})", "= exp2(…)"])
    drawing.block(steps["both"], "blue", [f"dP({at}),", "dV += Pᵀ·dO"])
    drawing.block(steps["difference"], "orange", [f"dS({at}) =", f"P·(dP {MINUS} δ)"])
    drawing.block(steps["last"], "blue", ["dK += dSᵀ·Q,", f"S({after});", f"store dS({at})"])
    drawing.block(box("producer", top, 58), "green", ["TMA loads", f"Q({after}),", f"dO({after})"])
    drawing.block(box("dq", top, 62), "purple", [f"dQ({before})", "= dS·K,", "two slices"])
    drawing.block(box("reducers", top, 48), "grey", ["wait for the", f"rank of {before}"])
    drawing.block(
        box("reducers", top + 52, 66), "purple", [f"add dQ({before})", "in memory,", "raise the", "semaphore"]
    )
    from_dq = COLUMNS["dq"][0] + COLUMNS["dq"][1]
    for y in (top + 24, top + 57):
        drawing.arrow([(from_dq, y), (COLUMNS["reducers"][0], y)])
    last = steps["last"]
    y = last.y + last.height / 2
    key, key_width = COLUMNS["key"]
    producer, dq = box("producer", top, 0).middle, box("dq", top, 0).middle
    drawing.arrow([(key, y), (producer, y), (producer, top + ITERATION)])
    drawing.text(producer, y - 5, "stage free", "faint", "middle")
    drawing.arrow([(key + key_width, y), (dq, y), (dq, top + ITERATION)])
    drawing.text(dq, y - 5, f"dS({at})", "faint", "middle")
