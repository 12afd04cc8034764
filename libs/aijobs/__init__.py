"""aijobs: the contract, the client and the SDK for authors of job types.

Import what you need from its modules; this package imports nothing by itself.
"""
