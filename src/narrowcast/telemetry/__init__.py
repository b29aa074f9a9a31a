"""What is counted: the ledger, change rates, collectives of torch itself."""
