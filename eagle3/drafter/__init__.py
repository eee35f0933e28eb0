"""The drafter: its model and checkpoint (speculators'), its vocabulary, and our TTT forward. The only package that imports speculators."""
