"""The way of q: what it is in each lane from Python to the GEMM that reads it, and back as a tile of O."""

from svg import LINE, WIDTH, Box, Drawing

LANES = (
    ("Python", "per call", "grey", "`attention", "a tensor of any strides"),
    ("host", "per call", "grey", "`make_attention_params", "a pointer and four strides"),
    ("plan", "per call", "purple", "`plan_forward_sm90", "sizes, strides; never what q holds"),
    ("launch", "per call", "purple", "`make_tma_descriptors", "a TMA descriptor: boxes of 64 rows"),
    ("producer", "per work tile", "green", "`load_q", "TMA loads into one stage of Q"),
    ("consumer", "per key tile", "blue", "`issue_qk_gemm", "wgmma's left operand, in shared memory"),
    ("consumer", "per work tile", "blue", "`tma_store_rows", "O takes its place; TMA stores O"),
)
LABEL = 84
HEIGHT = 44
STEP = 60


def draw() -> str:
    drawing = Drawing("The path of q from Python through host, plan and launch to producer and consumer")
    for i, (lane, often, colour, function, form) in enumerate(LANES):
        top = 6 + STEP * i
        box = Box(LABEL, top, WIDTH - LABEL - 6, HEIGHT)
        if i:
            drawing.arrow([(box.middle, top - STEP + HEIGHT), (box.middle, top)])
        drawing.text(4, top + 18, lane, "bold")
        drawing.text(4, top + 18 + LINE, often, "faint")
        drawing.block(box, colour, [function, form])
        if i + 1 < len(LANES) and LANES[i + 1][0] != lane:
            drawing.line([(0, top + (STEP + HEIGHT) / 2), (LABEL - 8, top + (STEP + HEIGHT) / 2)], dashed=True)
    drawing.height = STEP * len(LANES) - (STEP - HEIGHT) + 12
    return drawing.svg()
