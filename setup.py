"""Lets pip build and install the package; everything else that it is stands in setup.cfg."""
import re
from pathlib import Path

from setuptools import setup

# Where README is a package's description, links to files of the repository lead nowhere: only their words stay. Once
# the repository has an address, they can lead there.
README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")

setup(long_description=re.sub(r"\[([^]]+)\]\((?!https?:)[^)\s]*\)", r"\1", README))
