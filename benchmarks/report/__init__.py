"""Fills the page's tables from the results, and draws the pictures."""
