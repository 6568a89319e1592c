"""Mutation testing: changes of the package that its tests should see. Needs the extra "mutants".

A mutant is a function with one change. One session of pytest collects the tests; a child of a fork for each mutant
gives the function its other code and runs tests that call it, until one fails. What survives is tried on devices of
the fake CUDA runtime (``tests.tools.mutants.devices``), and read: ``explained.txt`` says why no test has to see it.
"""
