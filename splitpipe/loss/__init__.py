"""What the loss of a batch is: microbatches' losses are traced while they are computed, then combined.

    each torch function   trace ──> rules ──> ledger: what its result is
    the loss              numbers: sums over rows, and what is computed of them
    that of the batch     numbers.Reducer; with a schedule, objective

So a loss that is silently wrong comes from a rule that claims too much, or from numbers of Python (ledger).
"""
