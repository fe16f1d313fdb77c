"""The site, for Sphinx: made of the repository's own Markdown files, where they are. `make docs` builds it."""

import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx.pycode import ModuleAnalyzer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

project = "flash_attn_ext"
release = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE).group(1)
version = release
html_title = f"{project} {release}"

# The menu: titles of its parts, and the pages of each. What is not here is no page of the site.
MENU = {
    "Start": ("docs/install", "docs/quickstart", "docs/performance"),
    "Use it": (
        "docs/recipes",
        "docs/which_mask",
        "docs/many_gpus",
        "docs/migrating",
        "docs/faq",
        "docs/environment",
        "docs/tools",
    ),
    "Reference": ("docs/semantics", "docs/numerics", "docs/api"),
    "Ways in": ("docs/torch_backend", "docs/flash_attn", "docs/transformers"),
    "Figures": ("benchmarks/results/README",),
    "Inside": ("docs/architecture", "docs/hopper", "csrc/README", "docs/kernels/README"),
    "The project": ("CONTRIBUTING", "tests/README", "CHANGELOG", "SECURITY"),
}
# A page for each kernel. Some have a log, which is no reading for users: it lies below its kernel's page, and no search
# finds it.
KERNEL_PAGES, KERNEL_LOGS = (
    tuple(
        path.relative_to(ROOT).with_suffix("").as_posix()
        for path in sorted((ROOT / folder).glob("*.md"))
        if path.name != "README.md"
    )
    for folder in ("docs/kernels", "docs/kernels/log")
)

root_doc = "README"
include_patterns = [
    f"{page}.md" for page in (root_doc, *KERNEL_PAGES, *KERNEL_LOGS, *(page for part in MENU.values() for page in part))
]
# Folders in which Sphinx need not look for pages.
exclude_patterns = ["build", "dist", "demo", ".*", "flash_attn_ext", "build_support", "examples", "*.egg-info"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_heading_anchors = 4  # with the names that GitHub gives them
highlight_language = "text"
nitpicky = True
# A type in signatures that has no page here.
nitpick_ignore_regex = [("py:.*", r"(.*\.)?SdpaReplacement")]
# Types of others. Their addresses are here, so that a build needs no inventory from the network.
OF_OTHERS = {
    "Tensor": "https://docs.pytorch.org/docs/stable/tensors.html#torch.Tensor",
    "device": "https://docs.pytorch.org/docs/stable/tensor_attributes.html#torch.device",
    "Callable": "https://docs.python.org/3/library/collections.abc.html#collections.abc.Callable",
}

OVERLOADED_NAMES = [f"integrations.flash_attn.{name}" for name in ("functions", "packed_tensors", "kvcache")]

add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False

html_theme = "furo"
templates_path = ["."]
html_additional_pages = {"index": "redirect.html"}  # the first page is README's
html_copy_source = False
html_static_path = ["static"]
html_js_files = ["copy.js"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_copyright = False


def toctree(pages: tuple[str, ...], title: str = "") -> str:
    caption = f":caption: {title}\n" if title else ""
    return f"\n\n```{{toctree}}\n:hidden:\n{caption}\n" + "\n".join(pages) + "\n```\n"


def add_menu(app, page: str, source: list[str]) -> None:
    """To the first page, to that of the kernels, and to each kernel's: on GitHub a menu would be noise."""
    if page == root_doc:
        source[0] += toctree(("Home <self>",))
        source[0] += "".join(toctree(tuple(f"/{entry}" for entry in pages), title) for title, pages in MENU.items())
    elif page == "docs/kernels/README":
        source[0] += toctree(tuple(f"/{entry}" for entry in KERNEL_PAGES))
    elif (log := page.replace("docs/kernels/", "docs/kernels/log/")) in KERNEL_LOGS and page in KERNEL_PAGES:
        source[0] += toctree((f"/{log}",))
    elif page in KERNEL_LOGS:
        source[0] = "---\nnosearch: true\n---\n" + source[0]


def name_pages_by_titles(app, page: str, source: list[str]) -> None:
    """A link whose text is a file's name, as is usual on GitHub, gets the title of the page or of the heading."""
    source[0] = re.sub(r"(?<!!)\[`?[\w./-]*\.md`?\]\((?!http)", "[](", source[0])


def link_types(app, environment, node, content):
    """A reference to a type of PyTorch or Python leads to its documentation."""
    name = node.get("reftarget", "").rpartition(".")[2]
    if node.get("refdomain") == "py" and name in OF_OTHERS:
        return nodes.reference("", "", content, internal=False, refuri=OF_OTHERS[name])
    return None


def show_signatures_of_implementations(app) -> None:
    """Not those of overloads, which have no defaults and differ in the type of the result alone."""
    for name in ("reference", "functional", "varlen", "kv_cache", *OVERLOADED_NAMES):
        analyzer = ModuleAnalyzer.for_module(f"flash_attn_ext.{name}")
        analyzer.analyze()
        analyzer.overloads.clear()


def setup(app) -> None:
    app.connect("builder-inited", show_signatures_of_implementations)
    app.connect("source-read", add_menu)
    app.connect("source-read", name_pages_by_titles)
    app.connect("missing-reference", link_types)
