# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The documentation site: make docs."""

import re

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


def setup(app):
    app.connect("autodoc-skip-member", without_inherited_texts)
    app.connect("autodoc-process-docstring", formulas_in_lines)


html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
html_title = "pyro-nmm"
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
