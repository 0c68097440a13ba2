# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What pyproject.toml cannot state: URLs of the repository, and the README with absolute links."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyro-nmm"]["repository"]
#: Targets in the repository of links and pictures, in Markdown and in HTML.
TARGET = re.compile(r'(\]\(|^\[[^]]+]: |\b(?:href|src|srcset)=")(?!\w+:)([^)"\s]+)', re.MULTILINE)
CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`)", re.MULTILINE | re.DOTALL)


def absolute(match: re.Match) -> str:
    """A target as PyPI needs it: pages on the site of the repository, pictures as files."""
    before, target = match.groups()
    if target.startswith("#"):
        return f"{before}{REPOSITORY}{target}"
    picture = target.endswith((".gif", ".jpg", ".png", ".svg", ".webp"))
    return f"{before}{REPOSITORY}/{'raw' if picture else 'blob'}/main/{target}"


def long_description() -> str:
    """The README without HTML comments and without relative links."""
    parts = CODE.split((ROOT / "README.md").read_text(encoding="utf-8"))
    for number in range(0, len(parts), 2):  # every other part is code
        text = re.sub(r"<!--.*?-->\n?", "", parts[number], flags=re.DOTALL)
        parts[number] = TARGET.sub(absolute, text)
    return "".join(parts)


setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    project_urls={
        "Documentation": f"{REPOSITORY}/blob/main/docs/index.md",
        "Source": REPOSITORY,
        "Issues": f"{REPOSITORY}/issues",
        "Contact": f"{REPOSITORY}/issues/new",
        "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
        "Paper": "https://arxiv.org/abs/2103.15966",
    },
)
