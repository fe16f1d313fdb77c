"""From a call to its kernel: the questions in the order in which the host and csrc/kernels/plan/ ask them.

A question names its function. An answer names the plan function that goes on, or the folder of the kernel that runs,
under csrc/kernels/.
"""

from svg import LINE, WIDTH, Box, Drawing

BACKENDS = (
    (("`backends", "are the tensors", "on a GPU?"), "no", ("`plan_forward_cpu", "`plan_backward_cpu")),
    (
        ("`sm90_reasons", "compute capability 9.x,", "16 bits, strides for TMA?"),
        "no",
        ("`plan_forward_sm80", "`plan_backward_sm80"),
    ),
)
SHORT_BIAS = ("`takes_short_bias", "short heads with a bias,", "head dims to 32?")
FORWARD = (
    (SHORT_BIAS, "yes", ("`sm80/forward/", "`forward_short_bias")),
    (
        ("`is_for_portable_kernels", "a cache, nearly empty tiles,", "few queries of many keys?"),
        "yes",
        ("`plan_forward_sm80",),
    ),
    (
        ("`takes_single_tile", "scale, key bias or ALiBi,", "all keys in one tile?"),
        "yes",
        ("`sm90/forward/", "`single_tile"),
    ),
    (
        ("`splits_keys", "scale only, and too few", "query tiles for the SMs?"),
        "yes",
        ("`sm90/forward", "in split-KV"),
    ),
    (("`choose_row", "a kernel for head dims,", "scores and shape?"), "no", ("`plan_forward_sm80",)),
)
BACKWARD = (
    (SHORT_BIAS, "yes", ("`sm80/backward/", "`backward_short_bias")),
    (
        ("`is_for_portable_kernels", "a short call, or a gradient", "only sm80 computes?"),
        "yes",
        ("`plan_backward_sm80",),
    ),
    (
        ("`takes_query_stationary", "few queries of many keys,", "hidden by a mask at most?"),
        "yes",
        ("`sm90/backward/", "`query_stationary"),
    ),
    (
        ("`takes_key_stationary", "head dims to 128, gradients", "and scores it can do?"),
        "yes",
        ("`sm90/backward/", "`key_stationary"),
    ),
    (
        ("`plan_backward_two_pass", "a kernel, and memory", "for P and dS?"),
        "yes",
        ("`sm90/backward/", "`two_pass"),
    ),
)
QUESTION = 188
ANSWER = 138
HEIGHT = 54
STEP = 68


def draw() -> str:
    drawing = Drawing("From a call to its kernel: what the host and the functions of plan/ ask, in order")
    y = questions(drawing, BACKENDS, 6)
    y = heading(drawing, y, "forward:", "`plan_forward_sm90")
    y = questions(drawing, FORWARD, y)
    y = end(drawing, y, ["`sm90/forward", "the row for head dims,", "scores and shape"])
    y = heading(drawing, y + 10, "backward:", "`plan_backward_sm90")
    y = questions(drawing, BACKWARD, y)
    y = end(drawing, y, ["`plan_backward_sm80"])
    drawing.height = y + 4
    return drawing.svg()


def questions(drawing: Drawing, asked: tuple, y: float) -> float:
    for lines, answer, outcome in asked:
        box = Box(4, y, QUESTION, HEIGHT)
        target = Box(WIDTH - ANSWER - 4, y + 8, ANSWER, HEIGHT - 16)
        drawing.block(box, "grey", list(lines))
        drawing.block(target, "blue", list(outcome))
        middle = y + HEIGHT / 2
        drawing.arrow([(box.x + QUESTION, middle), (target.x, middle)])
        drawing.text((box.x + QUESTION + target.x) / 2 - 2, middle - 5, answer, "", "middle")
        drawing.arrow([(box.middle, box.end), (box.middle, y + STEP)])
        drawing.text(box.middle + 6, box.end + 12, "no" if answer == "yes" else "yes", "")
        y += STEP
    return y


def heading(drawing: Drawing, y: float, name: str, function: str) -> float:
    drawing.block(Box(4, y, QUESTION, 2 * LINE + 8), "purple", [name, function], "bold")
    bottom = y + 2 * LINE + 8
    drawing.arrow([(4 + QUESTION / 2, bottom), (4 + QUESTION / 2, bottom + 14)])
    return bottom + 14


def end(drawing: Drawing, y: float, lines: list[str]) -> float:
    drawing.block(Box(4, y, QUESTION, LINE * len(lines) + 12), "blue", lines)
    return y + LINE * len(lines) + 12
