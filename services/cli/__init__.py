"""The command line `aijobs`."""
