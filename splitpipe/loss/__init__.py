"""What the loss of a batch is: microbatches' losses are traced while they are computed, then combined.

    each torch function   trace, function_call ──> rules ──> ledger: what its result is
    the loss              numbers: sums over rows, and what is computed of them
    that of the batch     reduction; with a schedule, from objective

So a loss that is silently wrong comes from a rule that claims too much, or from numbers of Python (ledger).
"""
