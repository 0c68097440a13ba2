# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The documentation site: make docs."""

import re
from pathlib import Path

import pyro_nmm

project = "pyro-nmm"
author = "The pyro-nmm contributors"
project_copyright = author
release = pyro_nmm.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "**.ipynb_checkpoints", "gallery/*/README.md"]
nitpicky = False

# Pages: GitHub shows the same ones, with its own anchors and mathematics.
myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath"]
myst_heading_anchors = 4

# The site needs no other host: sphinx-mathjax-offline copies MathJax into _static.
mathjax_path = "mathjax/tex-chtml.js"

# Tutorials run when the site is built, and again when their text changes.
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True
nb_code_prompt_show = "Code of the picture"  # cells with the tag hide-input
nb_code_prompt_hide = "Hide the code"

templates_path = ["_templates"]
autosummary_generate = True
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"members": True, "undoc-members": False}


def without_inherited_texts(app, what, name, member, skip, options):
    """Inherited texts of scikit-learn, torch and Python, which say nothing about this package."""
    requests = name.startswith("set_") and name.endswith("_request")
    return True if requests or name in ("extra_repr", "progress") else None


def formulas_in_lines(app, what, name, member, options, lines):
    """Several formulas in a row of a docstring: one in a line, for phones."""
    text = "\n".join(lines)
    for block in re.findall(r"(?<=\.\. math::\n\n)(?: {4,}.*\n?)+", text):
        rows = re.split(r"\s*\\q?quad\s+", block.strip())
        if len(rows) > 1 and r"\\" not in block:
            aligned = r"\begin{aligned} &" + r" \\ &".join(rows) + r" \end{aligned}"
            indent = block[: len(block) - len(block.lstrip())]
            text = text.replace(block, indent + " ".join(aligned.split()) + "\n", 1)
    lines[:] = text.split("\n")


CELL = re.compile(r"```\{code-cell\}[^\n]*\n(?:---\n(.*?)---\n)?(.*)^```", re.DOTALL | re.MULTILINE)


def notebook(path):
    """
    Cells of a tutorial, without outputs: the kind and the text of each. Cells that assert what the
    page says of its output stay out. The style of the pictures stands in the first cell.
    """
    text = re.sub(r"\A---\n.*?\n---\n", "", path.read_text(), flags=re.DOTALL)
    if style := re.search(r'plt\.style\.use\("(.*)"\)', text):
        lines = (path.parent / style[1]).read_text().splitlines()
        settings = dict(line.split(": ", 1) for line in lines if not line.startswith("#"))
        text = text.replace(style[0], f"plt.rcParams.update({settings})")
    for part in re.split(r"^(```\{code-cell\}.*?^```)$", text, flags=re.DOTALL | re.MULTILINE):
        code = CELL.match(part)
        if not code and part.strip():
            yield "markdown", part.strip()
        elif code and "remove-cell" not in (code[1] or ""):
            yield "code", code[2].strip()


def with_notebook(app, page, template, context, doctree):
    """Write a tutorial as a notebook beside its page, with a link to it below the heading."""
    if page.startswith(("tutorials/", "gallery/")) and doctree is not None:
        import nbformat  # of the extra docs

        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        book = nbformat.v4.new_notebook(metadata={"kernelspec": kernel})
        for number, (kind, text) in enumerate(notebook(Path(app.srcdir, f"{page}.md"))):
            new = getattr(nbformat.v4, f"new_{kind}_cell")
            book.cells.append(new(text, id=f"cell-{number}"))
        target = Path(app.outdir, f"{page}.ipynb")
        target.parent.mkdir(exist_ok=True)
        nbformat.write(book, target)
        link = f'<a href="{target.name}" download>Download as a notebook</a>'
        heading = f'</h1><p class="notebook">{link}</p>'
        context["body"] = context["body"].replace("</h1>", heading, 1)


def setup(app):
    app.connect("autodoc-skip-member", without_inherited_texts)
    app.connect("autodoc-process-docstring", formulas_in_lines)
    app.connect("html-page-context", with_notebook)


html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
html_title = "pyro-nmm"
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
