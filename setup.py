"""Lets pip build and install the package; everything that it is stands in setup.cfg."""
from setuptools import setup

setup()
